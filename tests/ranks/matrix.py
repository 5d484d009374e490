"""The table of what must be right: models x modes x inputs. Tests and the README's support table are made from it.

A cell (a model, a mode, an input) gives the numbers of one rank, or the mode is refused before anything is loaded.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from parallel_core.errors import UserError
from parallel_core.plan import ParallelPlan
from tests.tiny_models import family_of, full_config

CAN_COMPILE = shutil.which("g++") is not None and " " not in torch.__file__
NO_COMPILER = "torch.compile needs g++ on CPU ranks, and a PyTorch whose path has no space in it"

SHARED = {"shard_weights": True}
OFFLOADED = {"shard_weights": True, "offload": True}
PLACED = {"device_map": True}
_WEIGHTS = {*OFFLOADED, *PLACED}

MODES: dict[str, dict[str, Any]] = {
    "ulysses 2": {"ulysses": 2},
    "ulysses 3": {"ulysses": 3},
    "ulysses 4": {"ulysses": 4},
    "ring 2": {"ring": 2},
    "ring 3": {"ring": 3},
    "ring 4": {"ring": 4},
    "ring 2 x ulysses 2": {"ring": 2, "ulysses": 2},
    "tensor 2": {"tensor": 2},
    "tensor 3": {"tensor": 3},
    "tensor 4": {"tensor": 4},
    "ulysses 2 x tensor 2": {"ulysses": 2, "tensor": 2},
    "ring 2 x tensor 2": {"ring": 2, "tensor": 2},
    "replicas 2 x ulysses 2": {"replicas": 2, "ulysses": 2},
    "ring 2 x ulysses 2 x tensor 2": {"ring": 2, "ulysses": 2, "tensor": 2},
    "ulysses 2, shard_weights": {"ulysses": 2, **SHARED},
    "ring 3, shard_weights": {"ring": 3, **SHARED},
    "ulysses 2, shard_weights in host memory": {"ulysses": 2, **OFFLOADED},
    "ulysses 2 x tensor 2, shard_weights": {"ulysses": 2, "tensor": 2, **SHARED},
    "replicas 2 x ulysses 2, shard_weights": {"replicas": 2, "ulysses": 2, **SHARED},
    "device_map": PLACED,
}


@dataclass(frozen=True, kw_only=True)
class Model:
    """A tiny model: its name in `tiny_models`, what its config changes, and the inputs it gets."""

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, dict[str, Any]]


_FLUX_INPUTS: dict[str, dict[str, Any]] = {
    "even": {"text": 16, "size": [4, 4]},
    "text 77": {"text": 77, "size": [5, 5]},
    "text 1": {"batch": 2, "text": 1, "size": [9, 7]},
    "batch 3": {"batch": 3, "text": 17, "size": [5, 5]},
    "text 511": {"text": 511, "size": [9, 7]},
    "fewer tokens than ranks": {"text": 1, "size": [1, 2]},
}

_QWEN_INPUTS: dict[str, dict[str, Any]] = {
    "even": {"text": 16, "size": [4, 4]},
    "text 77": {"text": 77, "size": [5, 5]},
    "text 1": {"batch": 2, "text": 1, "size": [9, 7]},
    "ragged masks": {"batch": 3, "text": 20, "size": [5, 5], "ragged": True},
    "ragged masks, text 77": {"batch": 2, "text": 77, "size": [4, 7], "ragged": True},
    "text 511, two references": {"text": 511, "frames": 3, "size": [5, 4]},
}

_VIDEO_INPUTS: dict[str, dict[str, Any]] = {
    "even, text 511": {"text": 511, "frames": 2, "size": [4, 4]},
    "odd frames": {"batch": 2, "text": 77, "frames": 3, "size": [3, 5]},
    "one frame": {"text": 1, "size": [5, 5]},
    "batch 3": {"batch": 3, "text": 600, "frames": 3, "size": [3, 3]},
    "few tokens": {"text": 1, "size": [2, 2]},
}

MODELS: dict[str, Model] = {
    "flux": Model(name="flux", inputs=_FLUX_INPUTS),
    "flux, 3 heads": Model(name="flux", config={"num_attention_heads": 3}, inputs=_FLUX_INPUTS),
    "flux, 6 heads": Model(name="flux", config={"num_attention_heads": 6}, inputs=_FLUX_INPUTS),
    "qwen": Model(name="qwen", inputs=_QWEN_INPUTS),
    "qwen, 3 heads": Model(name="qwen", config={"num_attention_heads": 3}, inputs=_QWEN_INPUTS),
    "flux without guidance": Model(name="flux", config={"guidance_embeds": False}, inputs={"even": {}}),
    "wan": Model(name="wan", inputs=_VIDEO_INPUTS),
    "wan, 6 heads": Model(name="wan", config={"num_attention_heads": 6, "ffn_dim": 192}, inputs=_VIDEO_INPUTS),
    "wan I2V": Model(name="wan-i2v", inputs=_VIDEO_INPUTS),
    "wan 5B": Model(name="wan-5b", inputs=_VIDEO_INPUTS),
}


def degrees_of(mode: str) -> dict[str, int]:
    """The fields of `RunMode` that a mode sets."""
    return {name: value for name, value in MODES[mode].items() if name not in _WEIGHTS}


def sharing_of(mode: str) -> dict[str, bool]:
    """How a mode divides the weights."""
    return {name: value for name, value in MODES[mode].items() if name in _WEIGHTS}


def plan_of(mode: str) -> ParallelPlan:
    """The plan a user would have to set for a mode."""
    if MODES[mode] == PLACED:
        return ParallelPlan(devices=("cpu:0", "cpu:1"), strategy="device_map")
    degrees = degrees_of(mode)
    devices = tuple(f"cpu:{rank}" for rank in range(math.prod(degrees.values())))
    return ParallelPlan(devices=devices, shard_weights="shard_weights" in MODES[mode], **degrees)


def num_processes(mode: str) -> int:
    """How many take part."""
    return 1 if MODES[mode] == PLACED else plan_of(mode).world_size


def refusal(model: Model, mode: str) -> str:
    """Why a mode is refused for a model, before anything is loaded; empty where it is not."""
    family = family_of(model.name)
    try:
        family.check_plan(full_config(model.name, model.config), plan_of(mode))
    except UserError as error:
        return str(error)
    return ""


def rows() -> Iterator[tuple[str, str]]:
    """(model, mode) for every row of cells."""
    for model in MODELS:
        for mode in MODES:
            yield model, mode
