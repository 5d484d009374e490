"""Loading a 2 GB transformer from a single file: ours on one and two ranks, ComfyUI's own loader, diffusers'.

`python -m benchmarks.load [--layers N]`. FLUX.1's width, fused tensors, bfloat16 and scaled fp8. Each loader loads
three times in the same processes: once uncounted, since what is imported late comes then; with the file out of the
system's cache; with the file in it. Takes 7 GB of memory and 4 GB of disk. ComfyUI's interpreter is .dev/venv, or what
COMFYUI_PYTHON names.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import setup
from benchmarks.processes import Taken, watched

FILES = {"bfloat16": "flux-bf16.safetensors", "scaled fp8": "flux-fp8.safetensors"}
OURS = {"1 rank": ("cpu:1", {}), "ulysses 2": ("cpu:2", {"ulysses": 2}), "tensor 2": ("cpu:2", {"tensor": 2})}
_CODES = {"BF16": 2, "F8_E4M3": 1, "F32": 4}

# ----- the files -----


def write_files(models: Path, layers: int) -> None:
    """Both files in `models`, and `models`/config for diffusers. One seeded stretch of numbers serves all tensors."""
    import torch

    flux = setup.load_package("parallel_core.families.flux").FAMILY
    layout = setup.load_package("parallel_core.families.layout")
    config = flux.full_config({"num_layers": layers, "num_single_layers": layers, "guidance_embeds": True})
    shapes = flux.expected_shapes(config)
    names = {
        name: (sum(shapes[part][0] for part, _ in parts), *shapes[parts[0][0]][1:])
        for name, parts in layout.reverse(flux.files.weights(shapes, config)).items()
    }
    numbers = torch.randn(1 << 24, generator=torch.Generator().manual_seed(0)) / 50
    plain = {name: ("BF16", shape) for name, shape in names.items()}
    _write(models / FILES["bfloat16"], plain, {"BF16": numbers.bfloat16()})
    scaled: dict[str, tuple[str, tuple[int, ...]]] = {"scaled_fp8": ("F8_E4M3", (2,))}
    for name, shape in names.items():
        is_packed = len(shape) == 2 and "blocks." in name
        scaled[name] = ("F8_E4M3" if is_packed else "BF16", shape)
        if is_packed:
            scaled[f"{name.removesuffix('.weight')}.scale_weight"] = ("F32", ())
    sources = {"BF16": numbers.bfloat16(), "F8_E4M3": (numbers * 1000).to(torch.float8_e4m3fn), "F32": numbers.abs()}
    _write(models / FILES["scaled fp8"], scaled, sources)
    (models / "config").mkdir()
    described = {**config, "_class_name": "FluxTransformer2DModel"}
    (models / "config" / "config.json").write_text(json.dumps(described))


def _write(file: Path, tensors: dict[str, tuple[str, tuple[int, ...]]], sources: dict[str, Any]) -> None:
    """A safetensors file, written without ever holding it."""
    import torch

    header, end = {}, 0
    for name, (code, shape) in tensors.items():
        begin, end = end, end + _CODES[code] * math.prod(shape)
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for code, shape in tensors.values():
            data, left = memoryview(sources[code].view(torch.uint8).numpy()), _CODES[code] * math.prod(shape)
            while left:
                left -= stream.write(data[: min(left, len(data))])
        os.fsync(stream.fileno())


def forget(file: Path) -> None:
    """Takes a file out of the system's cache."""
    with file.open("rb") as stream:
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# ----- the loaders -----


@dataclass
class Measured:
    """One loader: seconds, file not cached and cached; what its processes took when it was not."""

    name: str
    seconds: list[float] = field(default_factory=list)
    taken: list[Taken] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    """Bytes of weights per rank, of ours."""
    grown: Taken | None = None
    """ComfyUI's process beside our ranks."""


def _measure(name: str, file: Path, pids: list[int], load: Callable[[], Any], drop: Callable[[], Any]) -> Measured:
    measured = Measured(name)
    load()
    drop()
    for is_cached in (False, True):
        if not is_cached:
            forget(file)
        with watched(pids) as taken:
            started = time.perf_counter()
            load()
            measured.seconds.append(time.perf_counter() - started)
        if not is_cached:
            measured.taken = [taken[pid] for pid in pids]
        drop()
    return measured


def load_elsewhere(who: str, python: Path, models: Path, kind: str) -> Measured:
    """Another program's loader, in a process of its own."""
    script = setup.ROOT / "benchmarks" / "load_elsewhere.py"
    command = [str(python), str(script), who, str(models / FILES[kind]), str(models / "config")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=models)
    assert process.stdin is not None and process.stdout is not None
    answers, orders = process.stdout, process.stdin

    def ask(expected: str) -> None:
        orders.write("\n")
        orders.flush()
        wait_for(expected)

    def wait_for(expected: str) -> None:
        if answers.readline().strip() != expected:
            raise RuntimeError(f"{who} did not answer {expected!r}")

    with process:
        wait_for("ready")
        name = f"{who}, {kind}"
        measured = _measure(name, models / FILES[kind], [process.pid], lambda: ask("loaded"), lambda: ask("gone"))
        orders.close()
    return measured


def load_ours(models: Path, kind: str, weight_dtype: str, plan_name: str) -> Measured:
    """Our ranks, started anew."""
    plans = setup.load_package("parallel_core.plan")
    engine = setup.load_package("nodes.runtime").engine()
    devices, degrees = OURS[plan_name]
    plan = plans.ParallelPlan(devices=plans.parse_devices(devices, ()), **degrees)
    make_remote = setup.load_package("nodes.load_transformer").make_remote
    remote = make_remote(FILES[kind], weight_dtype, plan)
    pids = [link.process.pid for link in engine.group(remote.spec.group).links]
    how = {"default": "", "bfloat16": ", unpacked"}[weight_dtype] if kind == "scaled fp8" else ""

    def load() -> None:
        with watched([os.getpid()]) as own:
            make_remote(FILES[kind], weight_dtype, plan).ensure_loaded()
        grown[:] = [own[os.getpid()]]
        held[:] = [sum(rank["models"][remote.spec.key].values()) for rank in engine.status()[0]["ranks"]]

    def drop() -> None:
        engine.release_later(remote.spec.group, remote.spec.key)
        engine.group(remote.spec.group)

    held: list[int] = []
    grown: list[Taken] = []
    measured = _measure(f"ours, {plan_name}, {kind}{how}", models / FILES[kind], pids, load, drop)
    measured.held, measured.grown = held, grown[0]
    engine.shutdown()
    return measured


# ----- the report -----


def report(measured: Measured, base: Measured, file: Path) -> None:
    """Two lines about one loader."""
    cold, warm = (mine / theirs for mine, theirs in zip(measured.seconds, base.seconds, strict=True))
    size = file.stat().st_size
    setup.say(
        f"{measured.name}: {measured.seconds[0]:.2f} s from disk ({cold:.2f} x ComfyUI's time), "
        f"{measured.seconds[1]:.2f} s from the cache ({warm:.2f} x)"
    )
    for index, taken in enumerate(measured.taken):
        held = measured.held[index] if measured.held else 0
        share = f"{taken.anonymous_peak / held:.3f} x its weights, " if held else ""
        setup.say(
            f"  process {index}: own memory at most {taken.anonymous_peak / 1e6:.0f} MB ({share}"
            f"{taken.anonymous_peak / size:.2f} x the file), with the file's mapped pages "
            f"{taken.resident_peak / 1e6:.0f} MB; {taken.from_disk / size:.2f} x the file read from disk"
        )
    if measured.grown is not None:
        grown = measured.grown
        setup.say(
            f"  ComfyUI's process: grew by {grown.resident_peak / 1e6:.1f} MB, read {grown.by_calls / 1e6:.2f} MB"
        )


@contextmanager
def _models(layers: int) -> Iterator[Path]:
    setup.one_thread()
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder)
        setup.load_comfyui(models)
        import folder_paths

        folder_paths.add_model_folder_path("diffusion_models", str(models), is_default=True)
        write_files(models, layers)
        try:
            yield models
        finally:
            setup.load_package("nodes.runtime").engine().shutdown()


def main() -> None:
    """Runs all of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=2, help="blocks of each of the two kinds: 0.5 GB each")
    layers = parser.parse_args().layers
    comfy_python = Path(os.environ.get("COMFYUI_PYTHON", setup.ROOT / ".dev" / "venv" / "bin" / "python"))
    with _models(layers) as models:
        for kind, file in FILES.items():
            setup.say(f"{kind}: {(models / file).stat().st_size / 1e6:.0f} MB, {os.cpu_count()} cores")
            base = load_elsewhere("comfyui", comfy_python, models, kind)
            report(base, base, models / file)
            if kind == "bfloat16":
                report(load_elsewhere("diffusers", Path(sys.executable), models, kind), base, models / file)
            for plan in OURS:
                report(load_ours(models, kind, "default", plan), base, models / file)
            if kind != "bfloat16":
                report(load_ours(models, kind, "bfloat16", "tensor 2"), base, models / file)


if __name__ == "__main__":
    main()
