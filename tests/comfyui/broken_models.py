"""Model folders as they come out of broken downloads and wrong exports. Does not know: how the product reads them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

WEIGHTS = "diffusion_pytorch_model.safetensors"


def no_config(transformer: Path) -> None:
    (transformer / "config.json").unlink()


def config_not_json(transformer: Path) -> None:
    (transformer / "config.json").write_text('{"_class_name": "FluxTransf')


def truncated_header(transformer: Path) -> None:
    weights = transformer / WEIGHTS
    weights.write_bytes(weights.read_bytes()[:1000])


def damaged_header(transformer: Path) -> None:
    weights = transformer / WEIGHTS
    data = bytearray(weights.read_bytes())
    data[8:40] = b"\xff" * 32
    weights.write_bytes(data)


def empty_file(transformer: Path) -> None:
    (transformer / WEIGHTS).write_bytes(b"")


def truncated_body(transformer: Path) -> None:
    weights = transformer / WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-100_000])


def wrong_shape(transformer: Path) -> None:
    tensors = load_file(transformer / WEIGHTS)
    tensors["context_embedder.weight"] = torch.zeros(64, 48)
    save_file(tensors, transformer / WEIGHTS)


def missing_tensor(transformer: Path) -> None:
    tensors = load_file(transformer / WEIGHTS)
    del tensors["proj_out.bias"]
    save_file(tensors, transformer / WEIGHTS)


def no_weights(transformer: Path) -> None:
    (transformer / WEIGHTS).unlink()


def pickle_only(transformer: Path) -> None:
    (transformer / WEIGHTS).rename(transformer / "diffusion_pytorch_model.bin")


def checkpoint_only(transformer: Path) -> None:
    (transformer / WEIGHTS).rename(transformer / "model.ckpt")


def unknown_class(transformer: Path) -> None:
    _edit_config(transformer, _class_name="SpaghettiTransformer3DModel")


def no_class(transformer: Path) -> None:
    _edit_config(transformer, _class_name=None)


def unmarked_scales(transformer: Path) -> None:
    """Weights that are right only with scales whose meaning the file does not say."""
    tensors = load_file(transformer / WEIGHTS)
    tensors["proj_out.weight"] = tensors["proj_out.weight"].to(torch.float8_e4m3fn)
    tensors["proj_out.scale_weight"] = torch.ones(())
    save_file(tensors, transformer / WEIGHTS)


def lost_shard(transformer: Path) -> None:
    (transformer / WEIGHTS).rename(transformer / "part-1-of-2.safetensors")
    weight_map = {"x_embedder.weight": "part-1-of-2.safetensors", "proj_out.weight": "part-2-of-2.safetensors"}
    (transformer / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": weight_map}))


BROKEN: dict[Callable[[Path], None], list[str]] = {
    no_config: ["config.json"],
    config_not_json: ["config.json", "json"],
    truncated_header: [WEIGHTS, "1000"],
    damaged_header: [WEIGHTS, "header"],
    empty_file: [WEIGHTS],
    truncated_body: [WEIGHTS, "missing"],
    wrong_shape: ["context_embedder.weight", "[64, 48]", "[64, 32]"],
    missing_tensor: ["proj_out.bias", "missing"],
    no_weights: ["safetensors"],
    pickle_only: ["diffusion_pytorch_model.bin", "safetensors"],
    checkpoint_only: ["model.ckpt", "safetensors"],
    unknown_class: ["SpaghettiTransformer3DModel", "FluxTransformer2DModel"],
    no_class: ["_class_name"],
    unmarked_scales: ["proj_out.scale_weight", "scaled_fp8", "comfy_quant"],
    lost_shard: ["part-2-of-2.safetensors"],
}
"""How to break a folder, and what the message must name."""


def write_broken(folder: Path, sound: Path, break_it: Callable[[Path], None]) -> None:
    """A copy of the pipeline folder `sound`, broken."""
    shutil.copytree(sound, folder)
    break_it(folder / "transformer")


@contextlib.contextmanager
def other_weights(weights: Path) -> Iterator[None]:
    """Meanwhile the file holds zeros under the same header, size and time: who reads it again computes something else.

    A new file takes the place of the old one, so that what was mapped into memory before is not changed.
    """
    kept = weights.with_suffix(".kept")
    weights.rename(kept)
    data = kept.read_bytes()
    header = 8 + int(struct.unpack("<Q", data[:8])[0])
    weights.write_bytes(data[:header] + bytes(len(data) - header))
    times = kept.stat()
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    try:
        yield
    finally:
        kept.replace(weights)


def _edit_config(transformer: Path, **changes: object) -> None:
    config = json.loads((transformer / "config.json").read_text())
    config.update(changes)
    (transformer / "config.json").write_text(json.dumps(config))
