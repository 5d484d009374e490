"""The reference: ComfyUI's own Wan class holding the weights of a diffusers folder, as a stock MODEL.

ComfyUI's loader takes the head count of the full-size models, and reads no Wan folder of diffusers. So its class is
built with the folder's own numbers, and the weights get the names of the original.
Does not know: the product.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import comfy.model_management
import comfy.model_patcher
import comfy.supported_models
import torch

from .reference_loader import ReferenceLoader, read_weights

RENAMED = (
    (r"^scale_shift_table", "head.modulation"),
    (r"^proj_out\.", "head.head."),
    (r"^condition_embedder\.time_embedder\.linear_1\.", "time_embedding.0."),
    (r"^condition_embedder\.time_embedder\.linear_2\.", "time_embedding.2."),
    (r"^condition_embedder\.time_proj\.", "time_projection.1."),
    (r"^condition_embedder\.text_embedder\.linear_1\.", "text_embedding.0."),
    (r"^condition_embedder\.text_embedder\.linear_2\.", "text_embedding.2."),
    (r"^condition_embedder\.image_embedder\.pos_embed", "img_emb.emb_pos"),
    (r"^condition_embedder\.image_embedder\.norm1\.", "img_emb.proj.0."),
    (r"^condition_embedder\.image_embedder\.ff\.net\.0\.proj\.", "img_emb.proj.1."),
    (r"^condition_embedder\.image_embedder\.ff\.net\.2\.", "img_emb.proj.3."),
    (r"^condition_embedder\.image_embedder\.norm2\.", "img_emb.proj.4."),
    (r"\.scale_shift_table", ".modulation"),
    (r"\.norm2\.", ".norm3."),
    (r"\.ffn\.net\.0\.proj\.", ".ffn.0."),
    (r"\.ffn\.net\.2\.", ".ffn.2."),
    (r"\.attn1\.", ".self_attn."),
    (r"\.attn2\.", ".cross_attn."),
    (r"\.to_([qkv])\.", r".\1."),
    (r"\.to_out\.0\.", ".o."),
    (r"\.add_([kv])_proj\.", r".\1_img."),
    (r"\.norm_added_k\.", ".norm_k_img."),
)
"""(pattern, replacement), applied in this order: diffusers' names -> the original's."""


def original_name(name: str) -> str:
    for pattern, replacement in RENAMED:
        name = re.sub(pattern, replacement, name)
    return name


def unet_config(config: dict[str, Any]) -> dict[str, Any]:
    """ComfyUI's description of the model that a diffusers transformer/config.json describes."""
    return {
        "image_model": "wan2.1",
        "model_type": "i2v" if config.get("image_dim") else "t2v",
        "patch_size": (1, 2, 2),
        "in_dim": config["in_channels"],
        "out_dim": config["out_channels"],
        "dim": config["num_attention_heads"] * config["attention_head_dim"],
        "ffn_dim": config["ffn_dim"],
        "freq_dim": config["freq_dim"],
        "text_dim": config["text_dim"],
        "num_heads": config["num_attention_heads"],
        "num_layers": config["num_layers"],
        "qk_norm": True,
        "cross_attn_norm": config["cross_attn_norm"],
        "eps": config["eps"],
        "flf_pos_embed_token_number": config.get("pos_embed_seq_len"),
    }


def declared_class(config: dict[str, Any]) -> Any:
    """The first of ComfyUI's classes that takes the model, as its own detection finds it."""
    return next(cls for cls in comfy.supported_models.models if cls.matches(config))


def build_model(folder: Path, dtype: torch.dtype) -> Any:
    """A comfy.model_base.WAN21 or WAN22 with the weights of `folder` (that of config.json), computing in `dtype`."""
    config = unet_config(json.loads((folder / "config.json").read_text()))
    model_config = declared_class(config)(config)
    model_config.set_inference_dtype(dtype, None)
    weights = read_weights(folder)
    weights = {original_name(name): tensor for name, tensor in weights.items() if "norm_added_q" not in name}
    model = model_config.get_model(weights, "", device=torch.device("cpu"))
    model.diffusion_model.load_state_dict(weights)
    return model.eval()


class TestReferenceWan(ReferenceLoader):
    def build_model(self, folder: Path, dtype: torch.dtype) -> Any:
        return build_model(folder, dtype)


NODES = {"TestReferenceWan": TestReferenceWan}
