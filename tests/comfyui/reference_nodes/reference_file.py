"""The reference for single files: ComfyUI's own class of a family, which reads the file's names, as a stock MODEL.

The class is built with a config's numbers, since ComfyUI's detection takes some of them from the full-size models; the
weights go into it strictly, under the names that the file has.
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

from . import reference_flux, reference_qwen, reference_wan

PREFIX = "model.diffusion_model."


def _declared(family: str, config: dict[str, Any]) -> Any:
    if family == "flux":
        described = reference_flux.unet_config(config)
        declared = comfy.supported_models.Flux if config["guidance_embeds"] else comfy.supported_models.FluxSchnell
        return declared(described)
    if family == "qwen":
        return comfy.supported_models.QwenImage(reference_qwen.unet_config(config))
    described = reference_wan.unet_config(config)
    return reference_wan.declared_class(described)(described)


def build_model(family: str, file: Path, config: dict[str, Any], dtype: torch.dtype) -> Any:
    """ComfyUI's model with the weights of `file`, computing in `dtype`."""
    model_config = _declared(family, config)
    model_config.set_inference_dtype(dtype, None)
    stored = load_file(file)
    prefix = PREFIX if any(name.startswith(PREFIX) for name in stored) else ""  # else all of the file is the model
    weights = {name.removeprefix(prefix): t.to(dtype) for name, t in stored.items() if name.startswith(prefix)}
    weights = model_config.process_unet_state_dict(weights)
    model = model_config.get_model({}, "", device=torch.device("cpu"))
    model.diffusion_model.load_state_dict(weights)
    return model.eval()


class TestReferenceFile:
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "load"
    CATEGORY = "test"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        text = ("STRING", {})
        return {"required": {"family": text, "file": text, "config": text, "dtype": (["float32", "bfloat16"], {})}}

    def load(self, family: str, file: str, config: str, dtype: str) -> tuple[Any]:
        """`file`: relative to the models folder; `config`: a folder in models/diffusers."""
        models = Path(folder_paths.get_folder_paths("diffusers")[0])
        numbers = json.loads((models / config / "config.json").read_text())
        patcher = comfy.model_patcher.ModelPatcher(
            build_model(family, models.parent / file, numbers, getattr(torch, dtype)),
            load_device=comfy.model_management.get_torch_device(),
            offload_device=comfy.model_management.unet_offload_device(),
        )
        return (patcher,)


NODES = {"TestReferenceFile": TestReferenceFile}
