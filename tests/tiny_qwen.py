"""Writes tiny Qwen-Image folders in the diffusers layout, for tests.

Owns: what a tiny Qwen-Image looks like on disk (config, scheduler, seeded random weights). Needs diffusers, so
it runs in the ranks' interpreter.
Does not know: ComfyUI, ranks, plans.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, QwenImageTransformer2DModel

from tests.tiny_weights import fill

# 3 blocks, 4 heads of 16: 0.4 M parameters, milliseconds a forward, and heads that 1, 2 and 4 ranks can share.
TINY = {
    "num_layers": 3,
    "attention_head_dim": 16,
    "num_attention_heads": 4,
    "joint_attention_dim": 32,
    "axes_dims_rope": [4, 6, 6],
}


def build_transformer(
    *, seed: int = 0, dtype: torch.dtype = torch.float32, **config: object
) -> QwenImageTransformer2DModel:
    """A seeded random transformer; `config` overrides fields of TINY (diffusers' own names)."""
    model = QwenImageTransformer2DModel(**{**TINY, **config})
    fill(model, seed)
    return model.to(dtype).eval()


def write_transformer(folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **config: object) -> Path:
    """Writes config.json and the weights into `folder` itself (a bare transformer folder) and returns it."""
    build_transformer(seed=seed, dtype=dtype, **config).save_pretrained(folder)
    return folder


def write_pipeline(folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **config: object) -> Path:
    """Writes `model_index.json`, `scheduler/` and `transformer/`: a QwenImagePipeline folder without encoder, VAE."""
    write_transformer(folder / "transformer", seed=seed, dtype=dtype, **config)
    FlowMatchEulerDiscreteScheduler(shift=1.0).save_pretrained(folder / "scheduler")
    index = {
        "_class_name": "QwenImagePipeline",
        "_diffusers_version": "0.42.1",
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "transformer": ["diffusers", "QwenImageTransformer2DModel"],
    }
    (folder / "model_index.json").write_text(json.dumps(index, indent=2))
    return folder
