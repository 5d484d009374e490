"""Writes tiny Wan and Qwen-Image VAEs, as diffusers folders and as single files in the original layout, for tests.

Only the widths are small: ComfyUI's own classes have everything else built in, and read the same files. Needs
diffusers, so it runs in the ranks' interpreter. Does not know ComfyUI or ranks.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import diffusers
import torch
from safetensors.torch import save_file
from torch import Tensor

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "Wan 2.1": ("AutoencoderKLWan", {"base_dim": 8}),
    "Wan 2.2": (
        "AutoencoderKLWan",
        {
            "base_dim": 8,
            "decoder_base_dim": 16,
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
    weights = original_weights(build_video_vae(variant, seed=seed))
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file({prefix + name: tensor for name, tensor in weights.items()}, file)
    return file


def original_weights(vae: Any) -> dict[str, Tensor]:
    """The weights of `vae` by their original names."""
    nested = bool(vae.config.get("is_residual"))
    return {_original_name(name, nested): tensor.contiguous() for name, tensor in vae.state_dict().items()}


_FIXED = {
    "quant_conv.": "conv1.",
    "post_quant_conv.": "conv2.",
    "conv_in.": "conv1.",
    "norm_out.": "head.0.",
    "conv_out.": "head.2.",
    "mid_block.attentions.0.": "middle.1.",
    "mid_block.resnets.0.": "middle.0.",
    "mid_block.resnets.1.": "middle.2.",
}
_BLOCK = {"norm1.": "residual.0.", "conv1.": "residual.2.", "norm2.": "residual.3.", "conv2.": "residual.6."}
_LAYERS_PER_LEVEL = 4  # of the decoder: three blocks and a sampler


def _original_name(name: str, nested: bool) -> str:
    """`nested`: Wan 2.2, which has a list of layers per level."""
    side, dot, rest = name.partition(".")
    if side not in ("encoder", "decoder"):
        side, dot, rest = "", "", name
    for ours, theirs in _FIXED.items():
        if rest.startswith(ours):
            return side + dot + theirs + _in_block(rest[len(ours) :], "resnets" in ours)
    found = re.match(r"(down|up)_blocks\.(\d+)\.(?:resnets\.(\d+)\.|(?:down|up)sampler\.|upsamplers\.0\.)?(.+)", rest)
    assert found is not None, name
    samples, level, inner, last = found[1] + "samples", int(found[2]), found[3], found[4]
    if f"{found[1]}sampler." in rest:  # Wan 2.2: the last layer of its level
        return f"{side}.{samples}.{level}.{samples}.{3 if side == 'decoder' else 2}.{last}"
    if nested:
        return f"{side}.{samples}.{level}.{samples}.{inner}.{_in_block(last, True)}"
    if side == "decoder":
        level = level * _LAYERS_PER_LEVEL + (int(inner) if inner is not None else _LAYERS_PER_LEVEL - 1)
    return f"{side}.{samples}.{level}.{_in_block(last, True)}"


def _in_block(rest: str, is_block: bool) -> str:
    if not is_block:
        return rest
    for ours, theirs in _BLOCK.items():
        if rest.startswith(ours):
            return theirs + rest[len(ours) :]
    return rest.replace("conv_shortcut.", "shortcut.")
