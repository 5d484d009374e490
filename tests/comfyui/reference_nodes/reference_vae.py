"""The reference: ComfyUI's own VAE holding the weights of a diffusers VAE folder; and pictures in and out.

ComfyUI's loader builds the full-size model whatever the file says, so its VAE class is given the folder's own numbers;
the weights go through the conversion that it has for diffusers files. Does not know: the product.
"""

# ruff: noqa: N802 (INPUT_TYPES is ComfyUI's name)

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import comfy.sd
import folder_paths
import torch
from safetensors.torch import load_file, save_file


def build_vae(folder: Path) -> comfy.sd.VAE:
    """A comfy.sd.VAE in float32 with the weights of `folder`."""
    config = json.loads((folder / "config.json").read_text())
    channels, blocks = config["latent_channels"], config["block_out_channels"]
    weights = load_file(folder / "diffusion_pytorch_model.safetensors")
    # ComfyUI's class for a given config always has the two 1x1 convolutions; where the folder has none they do nothing.
    for name, size in (("quant_conv", 2 * channels), ("post_quant_conv", channels)):
        weights.setdefault(f"{name}.weight", torch.eye(size)[:, :, None, None])
        weights.setdefault(f"{name}.bias", torch.zeros(size))
    shape = {
        "double_z": True,
        "z_channels": channels,
        "resolution": 256,
        "in_channels": 3,
        "out_ch": 3,
        "ch": blocks[0],
        "ch_mult": [size // blocks[0] for size in blocks],
        "num_res_blocks": config["layers_per_block"],
        "attn_resolutions": [],
        "dropout": 0.0,
    }
    vae = comfy.sd.VAE(sd=weights, config={"params": {"ddconfig": shape, "embed_dim": channels}}, dtype=torch.float32)
    vae.latent_channels = channels
    return vae


class TestReferenceVAE:
    RETURN_TYPES = ("VAE",)
    FUNCTION = "load"
    CATEGORY = "test"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"model_name": ("STRING", {})}}

    def load(self, model_name: str) -> tuple[Any]:
        root = Path(folder_paths.get_folder_paths("diffusers")[0])
        return (build_vae(root / model_name / "vae"),)


class TestPicture:
    """A soft random picture: a coarse one, enlarged."""

    RETURN_TYPES = ("IMAGE",)
    FUNCTION = "make"
    CATEGORY = "test"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        size = ("INT", {"default": 64, "min": 1, "max": 4096})
        return {"required": {"width": size, "height": size, "batch": size, "seed": size}}

    def make(self, width: int, height: int, batch: int, seed: int) -> tuple[torch.Tensor]:
        coarse = torch.rand(batch, 3, 7, 7, generator=torch.Generator().manual_seed(seed))
        picture = torch.nn.functional.interpolate(coarse, (height, width), mode="bicubic").clamp(0, 1)
        return (picture.movedim(1, -1).contiguous(),)


class TestSavePicture:
    """Writes the picture to output/<name>.safetensors as "samples", bit for bit."""

    RETURN_TYPES = ()
    FUNCTION = "save"
    CATEGORY = "test"
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"image": ("IMAGE",), "name": ("STRING", {})}}

    def save(self, image: torch.Tensor, name: str) -> dict[str, Any]:
        path = Path(folder_paths.get_output_directory()) / f"{name}.safetensors"
        save_file({"samples": image.contiguous()}, path)
        return {"ui": {"latent": [{"filename": path.name, "subfolder": "", "type": "output"}]}}


class TestConcatLatent:
    """The concat_latent_image that an inpaint node put into a conditioning, as a LATENT."""

    RETURN_TYPES = ("LATENT",)
    FUNCTION = "take"
    CATEGORY = "test"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"conditioning": ("CONDITIONING",)}}

    def take(self, conditioning: list[Any]) -> tuple[dict[str, torch.Tensor]]:
        return ({"samples": conditioning[0][1]["concat_latent_image"]},)


NODES = {
    "TestReferenceVAE": TestReferenceVAE,
    "TestPicture": TestPicture,
    "TestSavePicture": TestSavePicture,
    "TestConcatLatent": TestConcatLatent,
}
