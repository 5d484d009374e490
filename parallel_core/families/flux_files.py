"""FLUX.1 in single files: Black Forest Labs' own layout, which ComfyUI's model has too.

Owns names, fused projections and what shapes show. Knows neither files nor tensors.
"""

from __future__ import annotations

from typing import Any

from .layout import Config, FileLayout, Rows, Shapes, renamed

_TOP = {
    "x_embedder": "img_in",
    "context_embedder": "txt_in",
    "time_text_embed.timestep_embedder.linear_1": "time_in.in_layer",
    "time_text_embed.timestep_embedder.linear_2": "time_in.out_layer",
    "time_text_embed.text_embedder.linear_1": "vector_in.in_layer",
    "time_text_embed.text_embedder.linear_2": "vector_in.out_layer",
    "time_text_embed.guidance_embedder.linear_1": "guidance_in.in_layer",
    "time_text_embed.guidance_embedder.linear_2": "guidance_in.out_layer",
    "norm_out.linear": "final_layer.adaLN_modulation.1",
    "proj_out": "final_layer.linear",
}

_DOUBLE = {
    "norm1.linear": "img_mod.lin",
    "norm1_context.linear": "txt_mod.lin",
    "attn.to_q": "img_attn.qkv",
    "attn.to_k": "img_attn.qkv",
    "attn.to_v": "img_attn.qkv",
    "attn.add_q_proj": "txt_attn.qkv",
    "attn.add_k_proj": "txt_attn.qkv",
    "attn.add_v_proj": "txt_attn.qkv",
    "attn.to_out.0": "img_attn.proj",
    "attn.to_add_out": "txt_attn.proj",
    "attn.norm_q.weight": "img_attn.norm.query_norm.scale",
    "attn.norm_k.weight": "img_attn.norm.key_norm.scale",
    "attn.norm_added_q.weight": "txt_attn.norm.query_norm.scale",
    "attn.norm_added_k.weight": "txt_attn.norm.key_norm.scale",
    "ff.net.0.proj": "img_mlp.0",
    "ff.net.2": "img_mlp.2",
    "ff_context.net.0.proj": "txt_mlp.0",
    "ff_context.net.2": "txt_mlp.2",
}

_SINGLE = {
    "norm.linear": "modulation.lin",
    "attn.to_q": "linear1",
    "attn.to_k": "linear1",
    "attn.to_v": "linear1",
    "proj_mlp": "linear1",
    "proj_out": "linear2",
    "attn.norm_q.weight": "norm.query_norm.scale",
    "attn.norm_k.weight": "norm.key_norm.scale",
}

_FUSED = {"attn.to_q": 0, "attn.to_k": 1, "attn.to_v": 2, "attn.add_q_proj": 0, "attn.add_k_proj": 1,
          "attn.add_v_proj": 2}  # fmt: skip
"""Place of a projection in its fused tensor, in widths of a token."""


def _rename(name: str) -> str:
    for kind, original, parts in (
        ("transformer_blocks", "double_blocks", _DOUBLE),
        ("single_transformer_blocks", "single_blocks", _SINGLE),
    ):
        if name.startswith(f"{kind}."):
            _, number, rest = name.split(".", 2)
            return f"{original}.{number}.{renamed(rest, parts)}"
    return renamed(name, _TOP)


def _rows(name: str, length: int, config: Config) -> Rows | None:
    """Which rows of its original tensor the weight or bias of that name is; `length` is its own."""
    width = int(config["num_attention_heads"]) * int(config["attention_head_dim"])
    if name.startswith("norm_out.linear."):  # diffusers: scale, shift; originally: shift, scale
        return ((width, 2 * width), (0, width))
    layer = name.rpartition(".")[0].partition("blocks.")[2].partition(".")[2]
    if layer in _FUSED:
        return ((_FUSED[layer] * width, (_FUSED[layer] + 1) * width),)
    if layer == "proj_mlp":
        return ((3 * width, 3 * width + length),)
    return None


_GUIDANCE = "time_text_embed.guidance_embedder.linear_1.weight"


def _structure(shapes: Shapes, preset: Config) -> dict[str, Any]:
    width, channels = shapes["x_embedder.weight"]
    (head,) = shapes["transformer_blocks.0.attn.norm_q.weight"]
    out_channels = shapes["proj_out.weight"][0]
    return {
        "in_channels": channels,
        "out_channels": None if out_channels == channels else out_channels,
        "num_layers": shapes.count("transformer_blocks.{}.attn.norm_q.weight"),
        "num_single_layers": shapes.count("single_transformer_blocks.{}.attn.norm_q.weight"),
        "attention_head_dim": head,
        "num_attention_heads": width // head,
        "joint_attention_dim": shapes["context_embedder.weight"][1],
        "pooled_projection_dim": shapes["time_text_embed.text_embedder.linear_1.weight"][1],
        "guidance_embeds": _GUIDANCE in shapes,
    }


FLUX_FILES = FileLayout(
    rename=_rename,
    marks=(
        "x_embedder.weight",
        "context_embedder.weight",
        "transformer_blocks.0.attn.norm_q.weight",
        "transformer_blocks.0.attn.norm_added_q.weight",
        "single_transformer_blocks.0.attn.norm_q.weight",
    ),
    structure=_structure,
    variant=lambda shapes: "flux-dev" if _GUIDANCE in shapes else "flux-schnell",
    presets={
        "flux-dev": {"patch_size": 1, "axes_dims_rope": (16, 56, 56)},
        "flux-schnell": {"patch_size": 1, "axes_dims_rope": (16, 56, 56)},
    },
    rows=_rows,
    canonical=lambda name: f"{name[:-7]}.scale" if name.endswith("_norm.weight") else name,  # ComfyUI from 0.4 on
    refused={
        "double_stream_modulation_img.*": "FLUX.2",
        "distilled_guidance_layer.*": "Chroma",
        "nerf_blocks.*": "Chroma Radiance",
        "*controlnet*": "a ControlNet for FLUX",
    },
)
