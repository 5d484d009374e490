"""Writes tiny AutoencoderKL folders in the diffusers layout, for tests.

Owns what a tiny VAE looks like on disk. Channels are multiples of 32 because ComfyUI's own VAE has GroupNorm(32)
built in, so that the same file also loads there. Needs diffusers, so it runs in the ranks' interpreter. Does not know
ComfyUI or ranks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL

# Flux's VAE in small: 8 pixels per latent cell, 16 channels, no quant_conv; 1 M parameters.
TINY = {
    "block_out_channels": (32, 32, 64, 64),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 1,
    "latent_channels": 16,
    "norm_num_groups": 32,
    "sample_size": 64,
    "scaling_factor": 0.3611,
    "shift_factor": 0.1159,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
    "force_upcast": True,
}


def build_vae(*, seed: int = 0, dtype: torch.dtype = torch.float32, **config: object) -> Any:
    """A seeded random VAE; `config` overrides fields of TINY (diffusers' own names)."""
    vae: Any = AutoencoderKL(**{**TINY, **config})
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in vae.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.copy_((1.0 if name.endswith("weight") else 0.0) + 0.2 * noise)
            else:  # unit gain, so that activations keep their size through the blocks
                parameter.copy_(noise / parameter[0].numel() ** 0.5)
    return vae.to(dtype=dtype).eval()


def write_vae(folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **config: object) -> Path:
    """Writes a bare VAE folder (config.json and one safetensors file) into `folder` and returns it."""
    build_vae(seed=seed, dtype=dtype, **config).save_pretrained(folder)
    return folder


def write_pipeline(folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **config: object) -> Path:
    """Writes a model folder as far as its VAE goes: model_index.json and vae/. Returns `folder`."""
    write_vae(folder / "vae", seed=seed, dtype=dtype, **config)
    index = {"_class_name": "FluxPipeline", "vae": ["diffusers", "AutoencoderKL"]}
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder
