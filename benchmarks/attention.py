"""Our context-parallel attention against diffusers' own, where both are right; and what two ranks gain.

`python -m benchmarks.attention [--rounds N] [--ranks 2 4]`. A Flux transformer on gloo ranks of one thread, float32, no
ComfyUI: even lengths, so that diffusers' own path can take part. Every round runs both in turn; medians of the rounds'
ratios are printed. diffusers has no ring on CPU (its native kernel returns no log-sum-exp): it gets the CPU kernel that
ours uses. `--scaling` compares two ranks with one instead, with uneven lengths too. Needs as many free cores as ranks.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import setup

COMPARED = (128, (32, 32))
SCALED = {"even": (128, (56, 56)), "uneven": (77, (57, 55))}
"""Text tokens, and height and width of the picture in tokens."""


def inputs(text: int, size: tuple[int, int]) -> dict[str, Any]:
    """The arguments of the transformer's `forward`."""
    import torch

    config = setup.COMPUTE_BOUND
    generator = torch.Generator().manual_seed(0)
    height, width = size
    rows, columns = torch.meshgrid(torch.arange(float(height)), torch.arange(float(width)), indexing="ij")
    return {
        "hidden_states": torch.randn(1, height * width, 64, generator=generator),
        "encoder_hidden_states": torch.randn(1, text, config["joint_attention_dim"], generator=generator),
        "pooled_projections": torch.randn(1, config["pooled_projection_dim"], generator=generator),
        "timestep": torch.full((1,), 0.7),
        "guidance": torch.full((1,), 3.5),
        "img_ids": torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).flatten(0, 1),
        "txt_ids": torch.zeros(text, 3),
        "return_dict": False,
    }


@contextmanager
def stock(model: Any, mesh: Any, degrees: dict[str, int]) -> Any:
    """diffusers' own context parallelism on `model`, over the axes of our mesh."""
    import torch
    from diffusers import ContextParallelConfig
    from diffusers.hooks.context_parallel import apply_context_parallel, remove_context_parallel
    from diffusers.models import attention_dispatch as dispatch
    from diffusers.models._modeling_parallel import ParallelConfig

    config = ContextParallelConfig(ring_degree=degrees["ring"], ulysses_degree=degrees["ulysses"])
    config.setup(torch.distributed.get_rank(), torch.distributed.get_world_size(), torch.device("cpu"), mesh)
    parallel = ParallelConfig(context_parallel_config=config)
    original = dispatch._native_attention_forward_op

    def with_lse(
        ctx: Any, query: Any, key: Any, value: Any, *args: Any, return_lse: bool = False, **kwargs: Any
    ) -> Any:
        if not (return_lse or (len(args) > 5 and args[5])):
            return original(ctx, query, key, value, *args, **kwargs)
        operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = operator(*(tensor.transpose(1, 2) for tensor in (query, key, value)))
        return out.transpose(1, 2), lse.transpose(1, 2)

    processors = [module.processor for module in model.modules() if hasattr(module, "processor")]
    for processor in processors:
        processor._parallel_config = parallel
    apply_context_parallel(model, config, model._cp_plan)
    dispatch._native_attention_forward_op = with_lse
    try:
        yield
    finally:
        dispatch._native_attention_forward_op = original
        remove_context_parallel(model, model._cp_plan)
        for processor in processors:
            del processor._parallel_config


def seconds(model: Any, arguments: dict[str, Any]) -> float:
    """Of one forward, from a moment when all ranks are there."""
    import torch

    torch.distributed.barrier()
    started = time.perf_counter()
    with torch.inference_mode():
        model(**arguments)
    return time.perf_counter() - started


def compare(rank: int, world: int, folder: str, rounds: int) -> list[str]:
    """Lines about ours against diffusers' own."""
    import torch

    from parallel_core.families.flux import FAMILY
    from parallel_core.model_file import ModelSource
    from parallel_core.parallelize import apply_plan
    from parallel_core.plan import RunMode
    from parallel_core.storage import Storage
    from parallel_core.worker.loading import load_transformer
    from parallel_core.worker.meshes import MeshCache

    model = load_transformer(ModelSource(Path(folder)), FAMILY, Storage("float32"), torch.device("cpu")).model
    arguments, meshes, lines = inputs(*COMPARED), MeshCache("cpu"), []
    shapes = [{"ring": 1, "ulysses": world}, {"ring": world, "ulysses": 1}]
    if world == 4:
        shapes.append({"ring": 2, "ulysses": 2})
    for degrees in shapes:
        mesh = meshes.get(RunMode(**degrees).shape)
        ratios = []
        for index in range(rounds + 1):
            applied = apply_plan(model, FAMILY, {}, mesh, RunMode(**degrees))
            ours = seconds(model, arguments)
            applied.remove()
            with stock(model, mesh["ring", "ulysses"], degrees):
                theirs = seconds(model, arguments)
            ratios += [ours / theirs] if index else []
        name = " x ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1)
        lines.append(f"{name}: ours takes {statistics.median(ratios):.3f} x diffusers' time")
    return lines


def scale(rank: int, world: int, folder: str, rounds: int) -> list[str]:
    """Lines about `world` ranks against one."""
    import torch

    from parallel_core.families.flux import FAMILY
    from parallel_core.model_file import ModelSource
    from parallel_core.parallelize import apply_plan
    from parallel_core.plan import RunMode
    from parallel_core.storage import Storage
    from parallel_core.worker.loading import Part, load_transformer
    from parallel_core.worker.meshes import MeshCache

    cpu = torch.device("cpu")
    alone = load_transformer(ModelSource(Path(folder)), FAMILY, Storage("float32"), cpu).model
    meshes, lines = MeshCache("cpu"), []
    for axis in ("ulysses", "ring", "tensor"):
        run = RunMode(**{axis: world})
        part = Part(tensor_rank=rank, tensor_degree=world) if axis == "tensor" else Part()
        loaded = load_transformer(ModelSource(Path(folder)), FAMILY, Storage("float32"), cpu, part)
        applied = apply_plan(loaded.model, FAMILY, loaded.shards, meshes.get(run.shape), run)
        for name, tokens in SCALED.items():
            arguments = inputs(*tokens)
            ratios = []
            for index in range(rounds + 1):
                together = seconds(loaded.model, arguments)
                torch.distributed.barrier()
                single = seconds_alone(alone, arguments, rank)
                ratios += [single / together] if index and rank == 0 else []
            if rank == 0:
                lines.append(f"{axis} {world}, {name} lengths: {statistics.median(ratios):.3f} x the speed of one rank")
        applied.remove()
    return lines


def seconds_alone(model: Any, arguments: dict[str, Any], rank: int) -> float:
    """Of one forward on the first rank while the others wait."""
    import torch

    started = time.perf_counter()
    if rank == 0:
        with torch.inference_mode():
            model(**arguments)
    elapsed = time.perf_counter() - started
    torch.distributed.barrier()
    return elapsed


def work(rank: int, world: int, folder: str, rounds: int, what: Callable[..., list[str]]) -> None:
    """A rank: joins the others, measures; the first one prints."""
    import torch

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store{world}", rank=rank, world_size=world
    )
    for line in what(rank, world, folder, rounds):
        if rank == 0:
            setup.say(f"{world} ranks, {line}")
    torch.distributed.destroy_process_group()


def main() -> None:
    """Runs all of it."""
    import torch.multiprocessing

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--scaling", action="store_true")
    options = parser.parse_args()
    setup.one_thread()
    with tempfile.TemporaryDirectory() as folder:
        path = str(setup.write_flux(Path(folder), **setup.COMPUTE_BOUND))
        for world in [2] if options.scaling else options.ranks:
            what = scale if options.scaling else compare
            torch.multiprocessing.spawn(work, args=(world, path, options.rounds, what), nprocs=world)


if __name__ == "__main__":
    main()
