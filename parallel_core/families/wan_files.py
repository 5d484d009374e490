"""Wan in single files: the layout of the original release, which ComfyUI's model has too.

Owns names and what shapes show. Knows neither files nor tensors.
"""

from __future__ import annotations

import math
from typing import Any

from ..errors import UserError
from .layout import Config, FileLayout, Shapes, renamed

_TOP = {
    "condition_embedder.time_embedder.linear_1": "time_embedding.0",
    "condition_embedder.time_embedder.linear_2": "time_embedding.2",
    "condition_embedder.time_proj": "time_projection.1",
    "condition_embedder.text_embedder.linear_1": "text_embedding.0",
    "condition_embedder.text_embedder.linear_2": "text_embedding.2",
    "condition_embedder.image_embedder.norm1": "img_emb.proj.0",
    "condition_embedder.image_embedder.ff.net.0.proj": "img_emb.proj.1",
    "condition_embedder.image_embedder.ff.net.2": "img_emb.proj.3",
    "condition_embedder.image_embedder.norm2": "img_emb.proj.4",
    "condition_embedder.image_embedder.pos_embed": "img_emb.emb_pos",
    "scale_shift_table": "head.modulation",
    "proj_out": "head.head",
}

_BLOCK = {
    "scale_shift_table": "modulation",
    "norm2": "norm3",
    "ffn.net.0.proj": "ffn.0",
    "ffn.net.2": "ffn.2",
    "attn2.add_k_proj": "cross_attn.k_img",
    "attn2.add_v_proj": "cross_attn.v_img",
    "attn2.norm_added_k": "cross_attn.norm_k_img",
    "attn2.norm_added_q": "cross_attn.norm_q_img",
    **{
        f"{new}.{ours}": f"{old}.{theirs}"
        for new, old in (("attn1", "self_attn"), ("attn2", "cross_attn"))
        for ours, theirs in (
            ("to_q", "q"), ("to_k", "k"), ("to_v", "v"), ("to_out.0", "o"), ("norm_q", "norm_q"), ("norm_k", "norm_k")
        )
    },
}  # fmt: skip


def _rename(name: str) -> str:
    if name.startswith("blocks."):
        _, number, rest = name.split(".", 2)
        return f"blocks.{number}.{renamed(rest, _BLOCK)}"
    return renamed(name, _TOP)


def _structure(shapes: Shapes, preset: Config) -> dict[str, Any]:
    width, in_channels, *patch = shapes["patch_embedding.weight"]
    head = int(preset["attention_head_dim"])
    if width % head:
        raise UserError(
            f"the weights have a width of {width}, which is no multiple of {head} (attention_head_dim). Set "
            "config_from to the diffusers folder of the model that this was made from."
        )
    image = shapes.get("condition_embedder.image_embedder.norm1.weight")
    positions = shapes.get("condition_embedder.image_embedder.pos_embed")
    return {
        "patch_size": tuple(patch),
        "in_channels": in_channels,
        "out_channels": shapes["proj_out.weight"][0] // math.prod(patch),
        "num_attention_heads": width // head,
        "text_dim": shapes["condition_embedder.text_embedder.linear_1.weight"][1],
        "freq_dim": shapes["condition_embedder.time_embedder.linear_1.weight"][1],
        "ffn_dim": shapes["blocks.0.ffn.net.0.proj.weight"][0],
        "num_layers": shapes.count("blocks.{}.attn1.norm_q.weight"),
        "cross_attn_norm": "blocks.0.norm2.weight" in shapes,
        "image_dim": image[0] if image else None,
        "added_kv_proj_dim": width if image else None,
        "pos_embed_seq_len": positions[1] if positions else None,
    }


def _variant(shapes: Shapes) -> str:
    _, in_channels, *_ = shapes["patch_embedding.weight"]
    if in_channels == 48:
        return "wan2.2-ti2v-5b"
    if "condition_embedder.image_embedder.norm1.weight" in shapes:
        return "wan2.1-flf2v" if "condition_embedder.image_embedder.pos_embed" in shapes else "wan2.1-i2v"
    return "wan2.2-i2v" if in_channels == 36 else "wan-t2v"


_COMMON = {"attention_head_dim": 128, "eps": 1e-6, "qk_norm": "rms_norm_across_heads", "rope_max_seq_len": 1024}

WAN_FILES = FileLayout(
    rename=_rename,
    marks=(
        "patch_embedding.weight",
        "condition_embedder.text_embedder.linear_1.weight",
        "blocks.0.attn1.norm_q.weight",
        "blocks.0.attn2.norm_q.weight",
    ),
    structure=_structure,
    variant=_variant,
    presets=dict.fromkeys(("wan-t2v", "wan2.1-i2v", "wan2.1-flf2v", "wan2.2-i2v", "wan2.2-ti2v-5b"), _COMMON),
    refused={
        "vace_blocks.*": "Wan VACE",
        "vace_patch_embedding.*": "Wan VACE",
        "control_adapter.*": "Wan Fun Camera",
        "ref_conv.*": "Wan Fun Control",
        "casual_audio_encoder.*": "Wan S2V",
        "face_adapter.*": "Wan Animate",
        "pose_patch_embedding.*": "Wan Animate",
        "audio_proj.*": "Wan HuMo",
        "motion_encoder.*": "Wan Animate",
        "blocks.0.attn1.add_q_proj.*": "a Wan variant of diffusers",
    },
)
