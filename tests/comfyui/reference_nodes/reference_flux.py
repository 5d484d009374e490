"""The reference: ComfyUI's own Flux class holding the weights of a diffusers folder, as a stock MODEL.

ComfyUI's loader cannot be used as it is, since it takes the head count and the rotary axes of the full-size model. So
its class is built with the folder's own numbers, and the weights go through the conversion that its loader uses for
diffusers files.
Does not know: the product.
"""

# ruff: noqa: N802 (INPUT_TYPES is ComfyUI's name)

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
import folder_paths
import torch
from safetensors.torch import load_file


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
    weights: dict[str, torch.Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        weights.update(load_file(shard))
    weights = {name: tensor.to(dtype) for name, tensor in weights.items()}
    converted = comfy.model_detection.convert_diffusers_mmdit(weights, "")
    model = model_config.get_model(converted, "", device=torch.device("cpu"))
    converted = model_config.process_unet_state_dict(converted)
    missing, unexpected = model.diffusion_model.load_state_dict(converted, strict=False)
    if missing or unexpected or weights:
        raise ValueError(f"{folder}: missing {missing}, unexpected {unexpected}, not converted {sorted(weights)}")
    return model.eval()


class TestReferenceFlux:
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "load"
    CATEGORY = "test"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"model_name": ("STRING", {}), "dtype": (["float32", "bfloat16"], {})}}

    def load(self, model_name: str, dtype: str) -> tuple[Any]:
        folder = Path(folder_paths.get_folder_paths("diffusers")[0]) / model_name
        if (folder / "transformer").is_dir():
            folder = folder / "transformer"
        model = build_model(folder, getattr(torch, dtype))
        patcher = comfy.model_patcher.ModelPatcher(
            model,
            load_device=comfy.model_management.get_torch_device(),
            offload_device=comfy.model_management.unet_offload_device(),
        )
        return (patcher,)


NODES = {"TestReferenceFlux": TestReferenceFlux}
