"""The reference: ComfyUI's own Flux class holding the weights of a diffusers folder, as a stock MODEL.

ComfyUI's loader cannot be used as it is, since it takes the head count and the rotary axes of the full-size model. So
its class is built with the folder's own numbers, and the weights go through the conversion that its loader uses for
diffusers files.
Does not know: the product.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import comfy.ldm.flux.model
import comfy.model_detection
import comfy.model_management
import comfy.model_patcher
import comfy.supported_models
import torch

from .reference_loader import ReferenceLoader, read_weights


def unet_config(config: dict[str, Any]) -> dict[str, Any]:
    """ComfyUI's description of the model that a diffusers transformer/config.json describes."""
    head_dim, heads = config["attention_head_dim"], config["num_attention_heads"]
    ours = {
        "in_channels": config["in_channels"] // 4,
        "out_channels": (config.get("out_channels") or config["in_channels"]) // 4,
        "patch_size": 2,
        "vec_in_dim": config["pooled_projection_dim"],
        "context_in_dim": config["joint_attention_dim"],
        "hidden_size": head_dim * heads,
        "mlp_ratio": 4.0,
        "num_heads": heads,
        "depth": config["num_layers"],
        "depth_single_blocks": config["num_single_layers"],
        "axes_dim": list(config["axes_dims_rope"]),
        "theta": 10000,
        "qkv_bias": True,
        "guidance_embed": config["guidance_embeds"],
        "txt_ids_dims": [],
    }
    known = {field.name for field in dataclasses.fields(comfy.ldm.flux.model.FluxParams)}  # versions differ
    return {"image_model": "flux", **{name: value for name, value in ours.items() if name in known}}


def build_model(folder: Path, dtype: torch.dtype) -> Any:
    """A comfy.model_base.Flux with the weights of `folder` (the one that holds config.json), computing in `dtype`."""
    config = unet_config(json.loads((folder / "config.json").read_text()))
    declared = comfy.supported_models.Flux if config["guidance_embed"] else comfy.supported_models.FluxSchnell
    model_config = declared(config)
    model_config.set_inference_dtype(dtype, None)
    weights = read_weights(folder)
    weights = {name: tensor.to(dtype) for name, tensor in weights.items()}
    converted = comfy.model_detection.convert_diffusers_mmdit(weights, "")
    model = model_config.get_model(converted, "", device=torch.device("cpu"))
    converted = model_config.process_unet_state_dict(converted)
    missing, unexpected = model.diffusion_model.load_state_dict(converted, strict=False)
    if missing or unexpected or weights:
        raise ValueError(f"{folder}: missing {missing}, unexpected {unexpected}, not converted {sorted(weights)}")
    return model.eval()


class TestReferenceFlux(ReferenceLoader):
    def build_model(self, folder: Path, dtype: torch.dtype) -> Any:
        return build_model(folder, dtype)


NODES = {"TestReferenceFlux": TestReferenceFlux}
