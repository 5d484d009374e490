"""What the reference loaders share: from a folder's name to ComfyUI's own model of it, as a stock MODEL.

Does not know: any model family, the product.
"""

# ruff: noqa: N802 (INPUT_TYPES is ComfyUI's name)

from __future__ import annotations

from pathlib import Path
from typing import Any

import comfy.model_management
import comfy.model_patcher
import folder_paths
import torch
from safetensors.torch import load_file


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a transformer folder, whose weights may be in several files."""
    weights: dict[str, torch.Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        weights.update(load_file(shard))
    return weights


class ReferenceLoader:
    """The node. A family's loader says how its model is built."""

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "load"
    CATEGORY = "test"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"model_name": ("STRING", {}), "dtype": (["float32", "bfloat16"], {})}}

    def build_model(self, folder: Path, dtype: torch.dtype) -> Any:
        """ComfyUI's model with the weights of `folder` (the one that holds config.json), computing in `dtype`."""
        raise NotImplementedError

    def load(self, model_name: str, dtype: str) -> tuple[Any]:
        folder = Path(folder_paths.get_folder_paths("diffusers")[0]) / model_name
        if (folder / "transformer").is_dir():
            folder = folder / "transformer"
        patcher = comfy.model_patcher.ModelPatcher(
            self.build_model(folder, getattr(torch, dtype)),
            load_device=comfy.model_management.get_torch_device(),
            offload_device=comfy.model_management.unet_offload_device(),
        )
        return (patcher,)
