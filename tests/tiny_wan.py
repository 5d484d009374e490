"""Writes tiny Wan folders in the diffusers layout, for tests.

Owns: what each variant of a tiny Wan looks like on disk (config, scheduler, seeded random weights). Needs diffusers, so
it runs in the ranks' interpreter.
Does not know: ComfyUI, ranks, plans.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanTransformer3DModel
from safetensors.torch import load_file, save_file

from tests.tiny_weights import fill

WEIGHTS = "diffusion_pytorch_model.safetensors"

# 2 blocks, 4 heads of 16: heads that 1, 2 and 4 ranks can share, axes of 8, 4 and 4 channels.
TINY: dict[str, Any] = {
    "patch_size": [1, 2, 2],
    "num_attention_heads": 4,
    "attention_head_dim": 16,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 32,
    "freq_dim": 256,
    "ffn_dim": 160,
    "num_layers": 2,
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
    "eps": 1e-6,
    "rope_max_seq_len": 1024,
}

_IMAGE = {"image_dim": 1280, "added_kv_proj_dim": 64}  # ComfyUI's class takes images of 1280 channels only

VARIANTS: dict[str, dict[str, Any]] = {
    "t2v": {},
    "i2v": {"in_channels": 36, **_IMAGE},
    "flf2v": {"in_channels": 36, **_IMAGE, "pos_embed_seq_len": 12},
    "i2v-2.2": {"in_channels": 36},
    "5b": {"in_channels": 48, "out_channels": 48},
}
"""What each variant changes in TINY."""


def rotations(frames: int, height: int, width: int) -> torch.Tensor:
    """Cosines and sines (tokens, 8, 2) of TINY's rotary positions for a grid of tokens."""
    grid = torch.cartesian_prod(torch.arange(frames), torch.arange(height), torch.arange(width)).float()
    angles = [grid[:, [axis]] / 10000 ** (torch.arange(half) / half) for axis, half in enumerate((4, 2, 2))]
    angle = torch.cat(angles, dim=1)
    return torch.stack([angle.cos(), angle.sin()], dim=-1)


def build_transformer(
    variant: str = "t2v", *, seed: int = 0, dtype: torch.dtype = torch.float32, **config: Any
) -> WanTransformer3DModel:
    """A seeded random transformer; `config` overrides fields (diffusers' own names)."""
    model = WanTransformer3DModel(**{**TINY, **VARIANTS[variant], **config})
    fill(model, seed)
    return model.eval() if dtype == torch.float32 else model.to(dtype).eval()


def write_transformer(folder: Path, variant: str = "t2v", *, seed: int = 0, **config: Any) -> Path:
    """Writes config.json and the weights into `folder` itself (a bare transformer folder) and returns it."""
    build_transformer(variant, seed=seed, **config).save_pretrained(folder)
    return folder


def write_pipeline(folder: Path, variant: str = "t2v", *, seed: int = 0, experts: int = 1, **config: Any) -> Path:
    """Writes `model_index.json`, `scheduler/`, `transformer/` and, with two experts, `transformer_2/`."""
    transformers = ["transformer", "transformer_2"][:experts]
    for index, name in enumerate(transformers):
        write_transformer(folder / name, variant, seed=seed + 100 * index, **config)
    FlowMatchEulerDiscreteScheduler(shift=8.0).save_pretrained(folder / "scheduler")
    index_json = {
        "_class_name": "WanPipeline",
        "_diffusers_version": "0.42.1",
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        **{name: ["diffusers", "WanTransformer3DModel"] for name in transformers},
    }
    (folder / "model_index.json").write_text(json.dumps(index_json, indent=2))
    return folder


def add_unused_norms(transformer: Path) -> None:
    """Adds the query norms for the image that the first I2V folders have, and that no model reads."""
    weights = load_file(transformer / WEIGHTS)
    for index in range(TINY["num_layers"]):
        weights[f"blocks.{index}.attn2.norm_added_q.weight"] = torch.full((64,), math.nan)
    save_file(weights, transformer / WEIGHTS, metadata={"format": "pt"})


def write_all(folder: Path) -> None:
    """`folder`/wan-<variant> for every variant, and wan-experts with two transformers."""
    for seed, variant in enumerate(VARIANTS):
        write_pipeline(folder / f"wan-{variant}", variant, seed=10 + seed)
    add_unused_norms(folder / "wan-i2v" / "transformer")
    write_pipeline(folder / "wan-experts", seed=20, experts=2)
