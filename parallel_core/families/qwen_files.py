"""Qwen-Image in single files: ComfyUI's model has diffusers' own names.

Owns what shapes show. Knows neither files nor tensors.
"""

from __future__ import annotations

from typing import Any

from .layout import Config, FileLayout, Shapes


def _structure(shapes: Shapes, preset: Config) -> dict[str, Any]:
    width, channels = shapes["img_in.weight"]
    (head,) = shapes["transformer_blocks.0.attn.norm_q.weight"]
    return {
        "in_channels": channels,
        "num_layers": shapes.count("transformer_blocks.{}.attn.norm_q.weight"),
        "attention_head_dim": head,
        "num_attention_heads": width // head,
        "joint_attention_dim": shapes["txt_in.weight"][1],
    }


QWEN_FILES = FileLayout(
    rename=lambda name: name,
    marks=(
        "txt_norm.weight",
        "txt_in.weight",
        "img_in.weight",
        "transformer_blocks.0.img_mod.1.weight",
        "transformer_blocks.0.attn.norm_added_q.weight",
    ),
    structure=_structure,
    variant=lambda shapes: "qwen-image",
    presets={"qwen-image": {"patch_size": 2, "out_channels": 16, "axes_dims_rope": (16, 56, 56)}},
    refused={
        "time_text_embed.addition_t_embedding.*": "Qwen-Image-Layered",
        "controlnet_*": "a ControlNet for Qwen-Image",
    },
    flags={"__index_timestep_zero__": {"zero_cond_t": True}},
)
