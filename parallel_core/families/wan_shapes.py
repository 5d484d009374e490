"""The names and shapes of a Wan transformer's weights, from its config alone. Knows neither tensors nor ComfyUI."""

from __future__ import annotations

import math

from .base import Config
from .common import linear

Shapes = dict[str, tuple[int, ...]]


def inner_dim(config: Config) -> int:
    """Width of a token."""
    return int(config["num_attention_heads"]) * int(config["attention_head_dim"])


def out_channels(config: Config) -> int:
    """Channels of the video that comes out."""
    return int(config.get("out_channels") or config["in_channels"])


def expected_shapes(config: Config) -> Shapes:
    """Names and shapes of diffusers' WanTransformer3DModel."""
    inner, patch = inner_dim(config), tuple(int(size) for size in config["patch_size"])
    shapes: Shapes = {
        "patch_embedding.weight": (inner, int(config["in_channels"]), *patch),
        "patch_embedding.bias": (inner,),
        "scale_shift_table": (1, 2, inner),
        **linear("proj_out", out_channels(config) * math.prod(patch), inner),
        **_condition_shapes("condition_embedder", config),
    }
    for index in range(int(config["num_layers"])):
        shapes |= _block_shapes(f"blocks.{index}", config)
    return shapes


def _norm(name: str, width: int) -> Shapes:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _condition_shapes(name: str, config: Config) -> Shapes:
    inner = inner_dim(config)
    shapes = {
        **linear(f"{name}.time_embedder.linear_1", inner, int(config["freq_dim"])),
        **linear(f"{name}.time_embedder.linear_2", inner, inner),
        **linear(f"{name}.time_proj", 6 * inner, inner),
        **linear(f"{name}.text_embedder.linear_1", inner, int(config["text_dim"])),
        **linear(f"{name}.text_embedder.linear_2", inner, inner),
    }
    if config.get("image_dim") is not None:
        image = int(config["image_dim"])
        shapes |= _norm(f"{name}.image_embedder.norm1", image)
        shapes |= linear(f"{name}.image_embedder.ff.net.0.proj", image, image)
        shapes |= linear(f"{name}.image_embedder.ff.net.2", inner, image)
        shapes |= _norm(f"{name}.image_embedder.norm2", inner)
        if config.get("pos_embed_seq_len") is not None:
            shapes[f"{name}.image_embedder.pos_embed"] = (1, int(config["pos_embed_seq_len"]), image)
    return shapes


def _block_shapes(block: str, config: Config) -> Shapes:
    inner, hidden = inner_dim(config), int(config["ffn_dim"])
    shapes: Shapes = {f"{block}.scale_shift_table": (1, 6, inner)}
    for attention in ("attn1", "attn2"):
        for name in ("to_q", "to_k", "to_v", "to_out.0"):
            shapes |= linear(f"{block}.{attention}.{name}", inner, inner)
        for name in ("norm_q", "norm_k"):
            shapes[f"{block}.{attention}.{name}.weight"] = (inner,)
    if config.get("added_kv_proj_dim") is not None:
        for name in ("add_k_proj", "add_v_proj"):
            shapes |= linear(f"{block}.attn2.{name}", inner, int(config["added_kv_proj_dim"]))
        shapes[f"{block}.attn2.norm_added_k.weight"] = (inner,)
    if config["cross_attn_norm"]:
        shapes |= _norm(f"{block}.norm2", inner)
    shapes |= linear(f"{block}.ffn.net.0.proj", hidden, inner)
    shapes |= linear(f"{block}.ffn.net.2", inner, hidden)
    return shapes
