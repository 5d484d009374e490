"""Writes tiny FLUX folders in the diffusers layout, for tests.

Owns: what a tiny Flux looks like on disk (config, scheduler, seeded random weights). Needs diffusers, so it runs in the
ranks' interpreter.
Does not know: ComfyUI, ranks, plans.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel

from tests.tiny_weights import fill, write_zeros

# 2 + 2 blocks, 4 heads of 16: 0.5 M parameters, milliseconds a forward, and heads that 1, 2 and 4 ranks can share.
TINY = {
    "patch_size": 1,
    "in_channels": 64,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 4,
    "joint_attention_dim": 32,
    "pooled_projection_dim": 16,
    "guidance_embeds": True,
    "axes_dims_rope": [4, 6, 6],
}


def build_transformer(*, seed: int = 0, dtype: torch.dtype = torch.float32, **config: object) -> FluxTransformer2DModel:
    """A seeded random transformer; `config` overrides fields of TINY (diffusers' own names)."""
    model = FluxTransformer2DModel(**{**TINY, **config})
    fill(model, seed)
    return model.eval() if dtype == torch.float32 else model.to(dtype).eval()


def write_transformer(
    folder: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "10GB",
    **config: object,
) -> Path:
    """Writes config.json and the weights into `folder` itself (a bare transformer folder) and returns it."""
    model = build_transformer(seed=seed, dtype=dtype, **config)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def write_pipeline(
    folder: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "10GB",
    **config: object,
) -> Path:
    """Writes `model_index.json`, `scheduler/` and `transformer/`: a FluxPipeline folder without encoders and VAE."""
    write_transformer(folder / "transformer", seed=seed, dtype=dtype, max_shard_size=max_shard_size, **config)
    _write_rest(folder)
    return folder


def write_hollow(folder: Path, **config: object) -> Path:
    """As write_pipeline, but all weights are zero and take no space on the disk: for models of any size."""
    with torch.device("meta"):
        model = FluxTransformer2DModel(**{**TINY, **config})
    model.save_config(folder / "transformer")
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    write_zeros(folder / "transformer" / "diffusion_pytorch_model.safetensors", shapes)
    _write_rest(folder)
    return folder


def _write_rest(folder: Path) -> None:
    FlowMatchEulerDiscreteScheduler(shift=1.0).save_pretrained(folder / "scheduler")
    index = {
        "_class_name": "FluxPipeline",
        "_diffusers_version": "0.42.1",
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "transformer": ["diffusers", "FluxTransformer2DModel"],
    }
    (folder / "model_index.json").write_text(json.dumps(index, indent=2))
