"""Writes tiny Wan and Qwen-Image VAEs, as diffusers folders and as single files in the original layout, for tests.

The original names follow from the product's declaration; that they are right is shown by ComfyUI's own VAE, which reads
the same files. Needs diffusers, so it runs in the ranks' interpreter. Does not know ComfyUI or ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import torch
from safetensors.torch import save_file

from parallel_core.vae_files import vae_file_name

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "Wan 2.1": ("AutoencoderKLWan", {"base_dim": 8}),
    "Wan 2.2": (
        "AutoencoderKLWan",
        {
            "base_dim": 8,
            "decoder_base_dim": 8,
            "z_dim": 48,
            "is_residual": True,
            "in_channels": 12,
            "out_channels": 12,
            "patch_size": 2,
            "scale_factor_spatial": 16,
            "latents_mean": [0.0] * 48,
            "latents_std": [1.0] * 48,
        },
    ),
    "Qwen-Image": ("AutoencoderKLQwenImage", {"base_dim": 8}),
}
"""What it is: diffusers' class and its config."""


def build_video_vae(variant: str, *, seed: int = 0) -> Any:
    """A seeded random VAE in float32."""
    name, config = VARIANTS[variant]
    vae: Any = getattr(diffusers, name)(**config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter_name, parameter in vae.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter_name.endswith("gamma"):
                parameter.copy_(1 + 0.2 * noise)
            elif parameter.ndim == 1:
                parameter.copy_(0.1 * noise)
            else:  # unit gain, so that activations keep their size through the blocks
                parameter.copy_(noise / parameter[0].numel() ** 0.5)
        vae.decoder.conv_out.weight.mul_(0.1)  # pixels within -1..1: diffusers cuts the rest off before tiles blend
    return vae.eval()


def write_video_vae(folder: Path, variant: str, *, seed: int = 0) -> Path:
    """A bare VAE folder."""
    build_video_vae(variant, seed=seed).save_pretrained(folder)
    return folder


def write_video_vae_file(file: Path, variant: str, *, seed: int = 0, prefix: str = "") -> Path:
    """A single file in the original layout."""
    vae = build_video_vae(variant, seed=seed)
    weights = {prefix + vae_file_name(name, variant, VARIANTS[variant][1]): w for name, w in vae.state_dict().items()}
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, file)
    return file
