"""The reference: ComfyUI's own Qwen-Image class holding the weights of a diffusers folder, as a stock MODEL.

ComfyUI's loader cannot be used as it is, since it takes all but the number of layers from the full-size model. So its
class is built with the folder's own numbers; the weights' names are the same in both.
Does not know: the product.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import comfy.model_management
import comfy.model_patcher
import comfy.supported_models
import torch

from .reference_loader import ReferenceLoader, read_weights


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
    weights = read_weights(folder)
    model = model_config.get_model({}, "", device=torch.device("cpu"))
    # Newer versions of ComfyUI mark the 2511 model by an empty buffer; diffusers' files have no such thing.
    weights.update({name: buffer for name, buffer in model.diffusion_model.named_buffers() if buffer.numel() == 0})
    model.diffusion_model.load_state_dict({name: tensor.to(dtype) for name, tensor in weights.items()})
    return model.eval()


class TestReferenceQwen(ReferenceLoader):
    def build_model(self, folder: Path, dtype: torch.dtype) -> Any:
        return build_model(folder, dtype)


NODES = {"TestReferenceQwen": TestReferenceQwen}
