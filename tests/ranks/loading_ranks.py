"""What the ranks of `test_loading_memory` run: write a middle-sized Flux in every layout, and load a part of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from parallel_core.model_file import ModelSource, read_transformer
from parallel_core.storage import choose_storage
from parallel_core.worker.loading import Part, load_transformer
from parallel_core.worker.placed_transformer import place_transformer
from parallel_core.worker.store import StoredModel, give_memory_back
from tests.ranks.transformer_ranks import CPU, anonymous_peak, make_inputs, mapped_lines
from tests.tiny_files import write_file
from tests.tiny_flux import build_transformer
from tests.tiny_models import family_of

MIDDLE: dict[str, Any] = {
    "attention_head_dim": 128,
    "num_attention_heads": 8,
    "axes_dims_rope": [16, 56, 56],
    "joint_attention_dim": 512,
    "pooled_projection_dim": 256,
}
"""0.1 billion weights in blocks of 4 x 2: so many that what a process takes besides does not count."""

FLUX = family_of("flux")


def write_middle(rank: int, world_size: int, root: str, files: dict[str, str]) -> None:
    """`root`/NAME for each name of `files`, in the layout that stands beside it; bfloat16, heads of the real size."""
    folder = Path(root) / "folder"
    build_transformer(dtype=torch.bfloat16, **MIDDLE).save_pretrained(folder)
    for name, layout in files.items():
        write_file(Path(root) / name, folder, FLUX, layout)


def _held_bytes(model: nn.Module) -> int:
    return StoredModel(module=model, device=CPU, close=lambda: None).num_bytes


def load_slices(rank: int, world_size: int, file: str, weight_dtype: str) -> dict[str, Any]:
    """Loads this tensor rank's slices: bytes held and needed on the way, and what maps the file while they live."""
    source = ModelSource(Path(file))
    storage = choose_storage(read_transformer(source)[0], weight_dtype)
    give_memory_back()
    with anonymous_peak() as growth:
        part = Part(tensor_rank=rank, tensor_degree=world_size)
        loaded = load_transformer(source, FLUX, storage, CPU, part)
    return {"held": _held_bytes(loaded.model), "peak": growth[0], "mapped": mapped_lines(file)}


@torch.inference_mode()
def place(rank: int, world_size: int, file: str, weight_dtype: str, limits: dict[str, int]) -> dict[str, Any]:
    """The same for layers on a device, in host memory and in the file, after an evaluation that reads the latter."""
    source = ModelSource(Path(file))
    storage = choose_storage(read_transformer(source)[0], weight_dtype)
    give_memory_back()
    with anonymous_peak() as growth:
        placed = place_transformer(source, FLUX, storage, ("cpu:0",), limits)
    placed.model(**make_inputs("flux", placed.model, {"text": 4, "size": [2, 2]}, storage.dtype))
    return {
        "held": _held_bytes(placed.model) + placed.outside.host_bytes,
        "peak": growth[0],
        "homes": sorted(placed.plan.bytes_per_device),
        "mapped": mapped_lines(file),
    }
