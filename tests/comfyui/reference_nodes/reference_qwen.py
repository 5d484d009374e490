"""The reference: ComfyUI's own Qwen-Image class holding the weights of a diffusers folder, as a stock MODEL.

ComfyUI's loader cannot be used as it is, since it takes all but the number of layers from the full-size model. So its
class is built with the folder's own numbers; the weights' names are the same in both.
Does not know: the product.
"""

# ruff: noqa: N802 (INPUT_TYPES is ComfyUI's name)

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import comfy.model_management
import comfy.model_patcher
import comfy.supported_models
import folder_paths
import torch
from safetensors.torch import load_file


def unet_config(config: dict[str, Any]) -> dict[str, Any]:
    """ComfyUI's description of the model that a diffusers transformer/config.json describes."""
    names = ("num_layers", "attention_head_dim", "num_attention_heads", "joint_attention_dim", "axes_dims_rope")
    described = {"image_model": "qwen_image", **{name: config[name] for name in names}}
    if config.get("zero_cond_t"):
        described["default_ref_method"] = "index_timestep_zero"
    return described


def build_model(folder: Path, dtype: torch.dtype) -> Any:
    """A comfy.model_base.QwenImage with the weights of `folder` (that of config.json), computing in `dtype`."""
    model_config = comfy.supported_models.QwenImage(unet_config(json.loads((folder / "config.json").read_text())))
    model_config.set_inference_dtype(dtype, None)
    weights: dict[str, torch.Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        weights.update(load_file(shard))
    model = model_config.get_model({}, "", device=torch.device("cpu"))
    # Newer versions of ComfyUI mark the 2511 model by an empty buffer; diffusers' files have no such thing.
    weights.update({name: buffer for name, buffer in model.diffusion_model.named_buffers() if buffer.numel() == 0})
    model.diffusion_model.load_state_dict({name: tensor.to(dtype) for name, tensor in weights.items()})
    return model.eval()


class TestReferenceQwen:
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "load"
    CATEGORY = "test"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"model_name": ("STRING", {}), "dtype": (["float32", "bfloat16"], {})}}

    def load(self, model_name: str, dtype: str) -> tuple[Any]:
        folder = Path(folder_paths.get_folder_paths("diffusers")[0]) / model_name / "transformer"
        patcher = comfy.model_patcher.ModelPatcher(
            build_model(folder, getattr(torch, dtype)),
            load_device=comfy.model_management.get_torch_device(),
            offload_device=comfy.model_management.unet_offload_device(),
        )
        return (patcher,)


NODES = {"TestReferenceQwen": TestReferenceQwen}
