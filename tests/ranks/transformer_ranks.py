"""What the ranks of `test_parallelize`, `test_loading` and `test_meshes` run: a tiny model alone and under a plan.

A mode has the fields of `plan.RunMode`, a case those of `tiny_models.Case`; both come as json.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel_core import attention, upstream
from parallel_core.errors import UserError
from parallel_core.model_file import ModelSource
from parallel_core.parallelize import apply_context, apply_plan
from parallel_core.plan import RunMode
from parallel_core.storage import Storage
from parallel_core.worker import meshes as meshes_module
from parallel_core.worker.loading import WHOLE, LoadedTransformer, Part, load_transformer
from parallel_core.worker.meshes import MeshCache
from parallel_core.worker.placed_transformer import place_transformer
from parallel_core.worker.redivide import from_ranks
from parallel_core.worker.shared_weights import let_go
from tests.tiny_models import TINY_MODELS, Case, family_of

CPU = torch.device("cpu")
CASE = {"batch": 2, "text": 77, "size": [5, 5]}


def write_models(rank: int, world_size: int, name: str, models: dict[str, dict[str, Any]]) -> None:
    """Writes one transformer folder per path."""
    for folder, config in models.items():
        TINY_MODELS[name].write(Path(folder), **config)


def load(name: str, folder: str, dtype: str = "float32", part: Part = WHOLE) -> LoadedTransformer:
    return load_transformer(ModelSource(Path(folder)), family_of(name), Storage(dtype), CPU, part)


Forward = Callable[[dict[str, Any]], Tensor]
"""The arguments of a transformer's `forward` -> its output."""


def load_ranked(
    name: str,
    folder: str,
    mode: dict[str, Any],
    dtype: str = "float32",
    *,
    shard_weights: bool = False,
    offload: bool = False,
) -> Forward:
    """This rank's part of the model, with `mode` applied."""
    run, meshes = RunMode(**mode), MeshCache("cpu")
    mesh = meshes.get(run.shape)
    part = Part(
        tensor_rank=mesh.get_local_rank("tensor"),
        tensor_degree=run.tensor,
        shared_over=meshes.sharing(run.context, run.tensor) if shard_weights else None,
        offload=offload,
    )
    loaded = load(name, folder, dtype, part)
    apply_plan(loaded.model, family_of(name), loaded.shards, mesh, run)

    def forward(inputs: dict[str, Any]) -> Tensor:
        output: Tensor = loaded.model(**inputs)[0]
        let_go(loaded.model)
        return output

    return forward


def load_placed(name: str, folder: str, dtype: str, size: int) -> Forward:
    """A model of `size` bytes, for lack of room on its "devices" in part in the host's memory or the files."""
    for percent in range(65, 30, -5):
        limits = {"cpu:0": size * percent // 100, "cpu:1": size * percent // 100, "cpu": size // 5, "disk": 2 * size}
        placed = place_transformer(
            ModelSource(Path(folder)), family_of(name), Storage(dtype), ("cpu:0", "cpu:1"), limits
        )
        if {"cpu", "disk"} & set(placed.plan.devices):
            return lambda inputs, model=placed.model: model(**inputs)[0]  # type: ignore[misc]
    raise AssertionError("no limits make some layers lie elsewhere")


def make_inputs(name: str, model: Any, case: dict[str, Any], dtype: str = "float32") -> dict[str, Any]:
    """The arguments of `forward`, the same on every rank."""
    settings = {**case, "size": tuple(case.get("size", (4, 4)))}
    return TINY_MODELS[name].inputs(Case(**settings, dtype=getattr(torch, dtype)), dict(model.config))


def distance(output: Tensor, reference: Tensor) -> float:
    """Relative L2."""
    return float((output.double() - reference.double()).norm() / reference.double().norm())


@torch.inference_mode()
def compare(
    rank: int,
    world_size: int,
    name: str,
    folder: str,
    mode: dict[str, Any],
    cases: list[dict[str, Any]],
    dtype: str,
    device_map: bool = False,
    **sharing: bool,
) -> list[list[Any]]:
    """Per case: the plan's distance from one rank, bit-equality, and one rank's own distance from float32."""
    exact, alone = load(name, folder).model, load(name, folder, dtype).model
    if device_map:
        together = load_placed(name, folder, dtype, parameter_bytes(alone))
    else:
        together = load_ranked(name, folder, mode, dtype, **sharing)
    results = []
    for case in cases:
        inputs = make_inputs(name, alone, case, dtype)
        output, reference = together(inputs), alone(**inputs)[0]
        rounding = distance(reference, exact(**make_inputs(name, exact, case))[0])
        results.append([distance(output, reference), torch.equal(output, reference), rounding])
    return results


# ----- taking plans off again -----


def traces_of_plans(model: nn.Module) -> list[str]:
    """Whatever a removed plan may have left on a model."""
    traces = []
    for name, module in model.named_modules():
        for kind in ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs"):
            traces += [f"{name} {kind}" for _ in getattr(module, kind)]
        settings = vars(module.processor) if hasattr(module, "processor") else {}
        traces += [f"{name} {attribute}" for attribute in settings if attribute.startswith("_")]
    return traces


@torch.inference_mode()
def switch(
    rank: int, world_size: int, name: str, folder: str, tensor: int, modes: list[dict[str, Any]]
) -> dict[str, Any]:
    """One set of weights under one mode after another."""
    cache = MeshCache("cpu")
    alone = load(name, folder).model
    inputs = make_inputs(name, alone, CASE)
    reference = alone(**inputs)[0]
    tensor_rank = cache.get(RunMode(**modes[0]).shape).get_local_rank("tensor")
    loaded = load(name, folder, part=Part(tensor_rank=tensor_rank, tensor_degree=tensor))
    before = traces_of_plans(loaded.model)
    errors, seconds = [], []
    for mode in modes:
        run = RunMode(**mode)
        mesh = cache.get(run.shape)
        start = time.process_time()  # of this process alone: other work on the machine does not count
        applied = apply_plan(loaded.model, family_of(name), loaded.shards, mesh, run)
        seconds.append(time.process_time() - start)
        errors.append(distance(loaded.model(**inputs)[0], reference))
        start = time.process_time()
        applied.remove()
        seconds.append(time.process_time() - start)
    same = torch.equal(loaded.model(**inputs)[0], reference) if tensor == 1 else None
    return {
        "errors": errors,
        "slowest": max(seconds),
        "left": [trace for trace in traces_of_plans(loaded.model) if trace not in before],
        "patched": upstream.attention_dispatch._templated_context_parallel_attention
        is attention.context_parallel_attention,
        "alone": same,
    }


# ----- negative controls -----


@contextmanager
def switched_off(name: str, replacement: Callable[..., None]) -> Iterator[None]:
    real = getattr(dist, name)
    setattr(dist, name, replacement)
    try:
        yield
    finally:
        setattr(dist, name, real)


@torch.inference_mode()
def without_exchange(
    rank: int,
    world_size: int,
    name: str,
    folder: str,
    mode: dict[str, Any],
    cases: list[dict[str, Any]],
    **sharing: bool,
) -> list[float]:
    """How far the results are off when the ranks' exchange is replaced by what a rank has itself."""
    alone = load(name, folder).model
    together = load_ranked(name, folder, mode, **sharing)
    errors = []
    with (
        switched_off("all_to_all_single", lambda output, given, *sizes, group: output.zero_()),
        switched_off("batch_isend_irecv", lambda operations: [_keep_own(operations)]),
        switched_off("all_reduce", lambda tensor, group: None),
    ):
        for case in cases:
            inputs = make_inputs(name, alone, case)
            errors.append(distance(together(inputs), alone(**inputs)[0]))
    return errors


def _keep_own(operations: list[Any]) -> Any:
    """A transfer that has happened, in which nothing arrived."""
    for operation in operations:
        if operation.op is dist.irecv:
            operation.tensor.zero_()
    return type("Done", (), {"wait": staticmethod(lambda: None)})


# ----- refusals -----


def refusal(function: Callable[[], Any]) -> str:
    try:
        function()
    except (UserError, ValueError) as error:
        return str(error)
    return "nothing was refused"


@torch.inference_mode()
def refusals(rank: int, world_size: int, folder: str) -> dict[str, str]:
    """Error texts for what context parallelism does not do."""
    model, family = load("flux", folder).model, family_of("flux")
    inputs = make_inputs("flux", model, {})
    mask = {"joint_attention_kwargs": {"attention_mask": torch.ones(1, 16, dtype=torch.bool)}}
    with_batch = {"img_ids": inputs["img_ids"][None]}
    run = RunMode(ulysses=world_size)
    mesh = MeshCache("cpu").get(run.shape)
    applied = apply_context(model, family, mesh, run)
    texts = {
        "mask": refusal(lambda: model(**inputs, **mask)),
        "ids with a batch": refusal(lambda: model(**{**inputs, **with_batch})),
    }
    processor = model.transformer_blocks[0].attn.processor
    processor._parallel_config = object()
    texts["a configuration of diffusers"] = refusal(lambda: model(**inputs))
    applied.remove()
    model.transformer_blocks[0].attn.processor = lambda *args: None
    texts["a foreign processor"] = refusal(lambda: apply_context(model, family, mesh, run))
    texts["left"] = ", ".join(trace for trace in traces_of_plans(model) if "processor" in trace)
    return texts


# ----- meshes -----


def cycle_meshes(rank: int, world_size: int, shapes: list[list[int]], rounds: int, most: int) -> dict[str, Any]:
    """Threads and open files after every round of asking for all shapes with room for `most`; sums over every axis."""
    meshes_module.MAX_MESHES = most
    cache = MeshCache("cpu")
    sizes, sums = [], []
    for _ in range(rounds):
        for shape in shapes:
            mesh = cache.get(tuple(shape))
            for axis in mesh.mesh_dim_names or ():
                value = torch.ones(())
                dist.all_reduce(value, group=mesh.get_group(axis))
                sums.append(int(value) == mesh[axis].size())
        sizes.append([len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))])
    same = cache.get(tuple(shapes[-1])) is cache.get(tuple(shapes[-1]))
    cache.close()
    value = torch.ones(())
    dist.all_reduce(value)  # the world's own group must have survived
    return {"sizes": sizes, "right": all(sums), "same": same, "world": int(value)}


# ----- loading -----


@contextmanager
def anonymous_peak() -> Iterator[list[int]]:
    """Samples this process's anonymous memory; the list gets the growth of its peak, in bytes."""

    def read() -> int:
        with open("/proc/self/status", encoding="ascii") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon:"))

    start, samples, done, growth = read(), [0], threading.Event(), []

    def sample() -> None:
        while not done.wait(0.001):
            samples.append(read())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield growth
    finally:
        done.set()
        thread.join()
        growth.append(max(samples) - start)


def parameter_bytes(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def mapped_lines(folder: str) -> list[str]:
    """What this process maps of the files in `folder`."""
    with open("/proc/self/maps", encoding="ascii") as maps:
        return [line for line in maps if folder in line]


@torch.inference_mode()
def compare_placed(
    rank: int, world_size: int, name: str, folder: str, case: dict[str, Any], dtype: str, shares: dict[str, float]
) -> dict[str, Any]:
    """Places a model by limits that are `shares` of its bytes: bit-equality with one rank, and what lies where."""
    whole, devices = load(name, folder, dtype).model, ("cpu:0", "cpu:1")
    size = parameter_bytes(whole) + sum(buffer.nbytes for buffer in whole.buffers())
    limits = {home: int(share * size) for home, share in shares.items()}
    placed = place_transformer(ModelSource(Path(folder)), family_of(name), Storage(dtype), devices, limits)
    outputs = [model(**make_inputs(name, whole, case, dtype))[0] for model in (whole, placed.model)]
    return {"equal": torch.equal(*outputs), "homes": sorted(placed.plan.bytes_per_device)}


@torch.inference_mode()
def place(rank: int, world_size: int, folder: str, dtype: str, limits: dict[str, int]) -> dict[str, Any]:
    """Places a Flux over two "devices" and evaluates it: what it holds and what both need at most."""
    devices = ("cpu:0", "cpu:1")
    family = family_of("flux")
    with anonymous_peak() as loading:
        placed = place_transformer(ModelSource(Path(folder)), family, Storage(dtype), devices, limits)
    inputs = make_inputs("flux", placed.model, {"text": 4, "size": [2, 2]}, dtype)
    with anonymous_peak() as evaluating:
        family.finish(placed.model(**inputs))
    return {
        "planned": placed.plan.bytes_per_device,
        "host": placed.outside.host_bytes,
        "loading": loading[0],
        "evaluating": evaluating[0],
        "mapped": mapped_lines(folder),
    }


def load_slices(rank: int, world_size: int, folder: str, dtype: str) -> dict[str, Any]:
    """Loads this rank's slices: bytes held, read and needed on the way, and what maps the files afterwards."""
    with anonymous_peak() as growth:
        loaded = load("flux", folder, dtype, Part(tensor_rank=rank, tensor_degree=world_size))
    return {
        "bytes": parameter_bytes(loaded.model),
        "read": loaded.bytes_read,
        "peak": growth[0],
        "mapped": mapped_lines(folder),
        "largest": max(parameter.nbytes for parameter in loaded.model.parameters()),
        "training": loaded.model.training,
        "requires_grad": any(parameter.requires_grad for parameter in loaded.model.parameters()),
    }


def divide_anew(rank: int, world_size: int, name: str, folder: str, dtype: str) -> list[str]:
    """The weights that are not the file's after the ranks' tensor slices were put together again."""
    mesh = MeshCache("cpu").get(RunMode(tensor=world_size).shape)
    sliced = load(name, folder, dtype, Part(tensor_rank=rank, tensor_degree=world_size))
    weights = from_ranks(sliced, mesh.get_group("tensor"))
    whole = load_transformer(ModelSource(Path(folder)), family_of(name), Storage(dtype), CPU, WHOLE, weights).model
    expected = load(name, folder, dtype).model.state_dict()
    found = whole.state_dict()
    return [key for key, tensor in expected.items() if found[key].dtype != tensor.dtype or not found[key].equal(tensor)]
