"""The tiny transformers of every family by name: how they are written, and what goes into their `forward`.

Does not know: ranks, plans, ComfyUI.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parallel_core.families.base import Family
from parallel_core.families.registry import family_named
from tests import tiny_flux, tiny_qwen, tiny_wan


@dataclass(frozen=True, kw_only=True)
class Case:
    """One input. `text` counts tokens; `size` is height and width in tokens."""

    batch: int = 1
    text: int = 16
    frames: int = 1
    size: tuple[int, int] = (4, 4)
    ragged: bool = False
    """Prompts of different length in the batch, padded and masked."""
    dtype: torch.dtype = torch.float32


class Noise:
    """Seeded random tensors, the same on every rank."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._generator = torch.Generator().manual_seed(7)
        self._dtype = dtype

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator).to(self._dtype)


@dataclass(frozen=True, kw_only=True)
class TinyModel:
    """`write(folder, **config)` writes a transformer folder; `inputs(case, config)` are the arguments of `forward`.

    `config` is what `write` starts from.
    """

    family: str
    config: dict[str, Any]
    write: Callable[..., Path]
    inputs: Callable[[Case, dict[str, Any]], dict[str, Any]]


def _flux_inputs(case: Case, config: dict[str, Any]) -> dict[str, Any]:
    noise = Noise(case.dtype)
    height, width = case.size
    rows, columns = torch.meshgrid(torch.arange(float(height)), torch.arange(float(width)), indexing="ij")
    return {
        "hidden_states": noise(case.batch, height * width, 64),
        "encoder_hidden_states": noise(case.batch, case.text, config["joint_attention_dim"]),
        "pooled_projections": noise(case.batch, config["pooled_projection_dim"]),
        "timestep": torch.linspace(0.3, 0.9, case.batch),
        "guidance": torch.full((case.batch,), 3.5) if config["guidance_embeds"] else None,
        "img_ids": torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).flatten(0, 1),
        "txt_ids": torch.zeros(case.text, 3),
        "return_dict": False,
    }


def _qwen_inputs(case: Case, config: dict[str, Any]) -> dict[str, Any]:
    """`frames` counts images: the picture and its references, which are smaller."""
    noise = Noise(case.dtype)
    height, width = case.size
    sizes = [(height, width), *[(height + 1, width - 1)] * (case.frames - 1)]
    ids = [_grid(number, *size) for number, size in enumerate(sizes)]
    lengths = torch.arange(case.batch) * 5 % case.text + 1
    return {
        "hidden_states": noise(case.batch, sum(rows * columns for rows, columns in sizes), 64),
        "encoder_hidden_states": noise(case.batch, case.text, config["joint_attention_dim"]),
        "encoder_hidden_states_mask": torch.arange(case.text) < lengths[:, None] if case.ragged else None,
        "timestep": torch.linspace(0.3, 0.9, case.batch),
        "img_shapes": [[(1, *size) for size in sizes[:1]]] * case.batch,
        "img_ids": torch.cat(ids),
        "txt_ids": torch.arange(case.text).float()[:, None].expand(-1, 3) + max(case.size),
        "return_dict": False,
    }


def _grid(index: int, height: int, width: int) -> Tensor:
    """Positions (image, row, column) of an image's tokens, around its middle."""
    rows, columns = torch.meshgrid(torch.arange(float(height)), torch.arange(float(width)), indexing="ij")
    return torch.stack([torch.full_like(rows, index), rows - height // 2, columns - width // 2], dim=-1).flatten(0, 1)


def _wan_inputs(case: Case, config: dict[str, Any]) -> dict[str, Any]:
    """The 5B model gets a time per frame, I2V an image of 7 tokens."""
    noise = Noise(case.dtype)
    height, width = case.size
    rows = {
        "x": noise(case.batch, config["in_channels"], case.frames, 2 * height, 2 * width),
        "times": torch.linspace(300, 900, case.batch),
        "context": noise(case.batch, case.text, config["text_dim"]),
    }
    if config["out_channels"] == 48:
        rows["times"] = torch.outer(rows["times"], torch.linspace(0, 1, case.frames))
    if config.get("image_dim"):
        rows["clip_fea"] = noise(case.batch, 7, config["image_dim"])
    return family_named("wan").prepare(rows, {"rope": tiny_wan.rotations(case.frames, height, width)})


def _tiny_wan(variant: str) -> TinyModel:
    config = {**tiny_wan.TINY, **tiny_wan.VARIANTS[variant]}
    return TinyModel(
        family="wan", config=config, write=partial(tiny_wan.write_transformer, variant=variant), inputs=_wan_inputs
    )


TINY_MODELS: dict[str, TinyModel] = {
    "flux": TinyModel(family="flux", config=tiny_flux.TINY, write=tiny_flux.write_transformer, inputs=_flux_inputs),
    "qwen": TinyModel(
        family="qwen-image", config=tiny_qwen.TINY, write=tiny_qwen.write_transformer, inputs=_qwen_inputs
    ),
    "wan": _tiny_wan("t2v"),
    "wan-i2v": _tiny_wan("i2v"),
    "wan-5b": _tiny_wan("5b"),
}


def family_of(name: str) -> Family:
    """The family of a tiny model."""
    return family_named(TINY_MODELS[name].family)


def full_config(name: str, changed: dict[str, Any]) -> dict[str, Any]:
    """A tiny model's config with the defaults filled in."""
    return family_of(name).full_config({**TINY_MODELS[name].config, **changed})
