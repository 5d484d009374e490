"""What going through ranks costs: an empty operation, a KSampler run on one rank, and what two ranks gain.

`python -m benchmarks.overhead [--rounds N]`. Everything is measured in turn in one run, one thread per rank; the
medians of paired rounds are compared. Two ranks need two free cores.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import setup

STEPS = 2
SIZE = 512


def empty_operations(engine: Any, group_key: Any, ping: Any, count: int = 3000) -> None:
    """Prints the time of an operation that computes nothing, to 2 and to 4 ranks."""
    for num_ranks in (2, 4):
        key = group_key(devices=tuple(f"cpu:{rank}" for rank in range(num_ranks)))
        engine.request(key, ping())
        group = engine.group(key)
        times = []
        for _ in range(count):
            started = time.perf_counter()
            engine.request_group(group, ping())
            times.append(time.perf_counter() - started)
        times.sort()
        p50, p95 = times[count // 2] * 1e3, times[int(count * 0.95)] * 1e3
        setup.say(f"empty operation to {num_ranks} ranks: p50 {p50:.3f} ms, p95 {p95:.3f} ms")


def sampler(model: Any) -> Callable[[], Any]:
    """A KSampler run over `model`."""
    import torch

    import nodes

    config = setup.COMPUTE_BOUND
    positive = setup.conditioning(128, config["joint_attention_dim"], config["pooled_projection_dim"])
    latent = {"samples": torch.zeros(1, 16, SIZE // 8, SIZE // 8)}

    def run() -> Any:
        with torch.inference_mode():
            return nodes.common_ksampler(model, 1, STEPS, 1.0, "euler", "simple", positive, positive, latent)[0]

    return run


class InProcess:
    """Stands in for the ranks: the same diffusers transformer, called in this process."""

    def __init__(self, folder: Path, family: Any) -> None:
        from diffusers import FluxTransformer2DModel

        self._model = FluxTransformer2DModel.from_pretrained(folder, subfolder="transformer")
        self._family = family
        family.on_loaded(self._model)

    def __call__(self, calls: list[Any]) -> list[Any]:
        return [self._family.finish(self._model(**self._family.prepare(call.rows, call.shared))) for call in calls]


def build(plan: Any, name: str, dispatch: Any = None) -> Any:
    """A MODEL on `plan`, or the same MODEL whose calls `dispatch` answers."""
    load_transformer = setup.load_package("nodes.load_transformer")
    remote_model = setup.load_package("nodes.remote_model")
    model = remote_model.build_model(load_transformer.make_remote(name, "default", plan))
    if dispatch is not None:
        model.model.diffusion_model.forward_orig._dispatch = dispatch
        model.load = lambda *args, **kwargs: None
    return model


def paired(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each run, in turn, after one round that does not count."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for index in range(rounds + 1):
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            if index:
                times[name].append(time.perf_counter() - started)
    return times


def report(times: dict[str, list[float]], base: str) -> None:
    """Seconds per step, and how each compares with `base` round by round."""
    for name, values in times.items():
        ratio = setup.median([b / v for b, v in zip(times[base], values, strict=True)])
        setup.say(f"{name}: {setup.median(values) / STEPS:.3f} s per step, {ratio:.3f} x the speed of {base}")


def main() -> None:
    """Runs all of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with setup.bench("bench", **setup.COMPUTE_BOUND) as models:
        runtime = setup.load_package("nodes.runtime")
        plans = setup.load_package("parallel_core.plan")
        flux = setup.load_package("parallel_core.families.flux")
        group = setup.load_package("parallel_core.engine.group")
        protocol = setup.load_package("parallel_core.protocol")
        engine = runtime.engine()
        setup.say(f"{os.cpu_count()} cores, one thread per rank, {SIZE} x {SIZE} pixels, float32")
        empty_operations(engine, group.GroupKey, protocol.Ping)
        one = plans.ParallelPlan(devices=("cpu:0",))
        local = build(one, "bench", InProcess(models / "bench", flux.FAMILY))
        times = paired({"in this process": sampler(local), "one rank": sampler(build(one, "bench"))}, rounds)
        report(times, "in this process")
        runs = {"one rank": sampler(build(one, "bench"))}
        for axis in ("ulysses", "tensor"):
            plan = plans.ParallelPlan(devices=("cpu:0", "cpu:1"), **{axis: 2})
            runs[f"two ranks, {axis} 2"] = sampler(build(plan, "bench"))
        report(paired(runs, rounds), "one rank")


if __name__ == "__main__":
    main()
