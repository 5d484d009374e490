"""Writes tiny AutoencoderKL folders in the diffusers layout and files in the original one, for tests.

Owns what a tiny VAE looks like on disk. Channels are multiples of 32 because ComfyUI's own VAE has GroupNorm(32)
built in, so that the same file also loads there. Needs diffusers, so it runs in the ranks' interpreter. Does not know
ComfyUI or ranks.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL
from safetensors.torch import save_file
from torch import Tensor

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


# ----- the original layout, in which the published single files are -----


def write_original(file: Path, *, seed: int = 0, prefix: str = "", **config: object) -> Path:
    """Writes the VAE as one file in the layout of latent diffusion and returns it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    weights = original_weights(build_vae(seed=seed, **config))
    save_file({prefix + name: tensor for name, tensor in weights.items()}, file)
    return file


def original_weights(vae: Any) -> dict[str, Tensor]:
    """The weights of `vae` by their original names; attention as convolutions over 1 x 1 pixels."""
    last = len(vae.config.block_out_channels) - 1
    weights: dict[str, Tensor] = {}
    for name, tensor in vae.state_dict().items():
        if ".attentions." in name and tensor.ndim == 2:
            tensor = tensor[:, :, None, None]
        weights[_original_name(name, last)] = tensor.contiguous()
    return weights


_PARTS = {
    "mid_block.resnets.0": "mid.block_1",
    "mid_block.resnets.1": "mid.block_2",
    "mid_block.attentions.0": "mid.attn_1",
    "group_norm": "norm",
    "to_q": "q",
    "to_k": "k",
    "to_v": "v",
    "to_out.0": "proj_out",
    "conv_shortcut": "nin_shortcut",
    "conv_norm_out": "norm_out",
    "downsamplers.0": "downsample",
    "upsamplers.0": "upsample",
    "resnets": "block",
}


def _original_name(name: str, last: int) -> str:
    for ours, theirs in _PARTS.items():
        name = name.replace(ours, theirs)
    name = name.replace("down_blocks", "down")
    return re.sub(r"up_blocks\.(\d+)", lambda found: f"up.{last - int(found[1])}", name)
