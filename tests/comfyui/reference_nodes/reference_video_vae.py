"""The reference for video VAEs: ComfyUI's own VAE over a file in models/vae; and frames in.

ComfyUI has the widths of Wan 2.2's VAE built in, so for a tiny one its class gets the file's own.
Does not know: the product.
"""

# ruff: noqa: N802 (INPUT_TYPES is ComfyUI's name)

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import comfy.ldm.wan.vae2_2
import comfy.sd
import folder_paths
import torch
from safetensors.torch import load_file

import nodes as comfy_nodes

_Wan22 = comfy.ldm.wan.vae2_2.WanVAE


def build_vae(file: Path) -> comfy.sd.VAE:
    """A comfy.sd.VAE in float32 with the weights of `file`, which is in the original layout."""
    weights = load_file(file)
    widths = {
        "dim": weights["encoder.conv1.weight"].shape[0],
        "dec_dim": weights["decoder.head.0.gamma"].shape[0],
    }
    with patch.object(comfy.ldm.wan.vae2_2, "WanVAE", lambda **fields: _Wan22(**{**fields, **widths})):
        vae = comfy.sd.VAE(sd=weights, dtype=torch.float32)
    stored = vae.first_stage_model.state_dict()
    assert set(stored) == set(weights), "ComfyUI's class has other weights than the file"
    return vae


class TestReferenceVideoVAE:
    RETURN_TYPES = ("VAE",)
    FUNCTION = "load"
    CATEGORY = "test"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"model_name": ("STRING", {})}}

    def load(self, model_name: str) -> tuple[Any]:
        return (build_vae(Path(folder_paths.get_full_path_or_raise("vae", model_name))),)


class TestVaeTraits:
    """What other nodes read from a VAE, as text."""

    RETURN_TYPES = ()
    FUNCTION = "read"
    CATEGORY = "test"
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"vae": ("VAE",)}}

    def read(self, vae: Any) -> dict[str, Any]:
        numbers = {
            name: getattr(vae, name)
            for name in (
                "latent_dim",
                "latent_channels",
                "output_channels",
                "not_video",
                "extra_1d_channel",
                "crop_input",
                "upscale_index_formula",
                "downscale_index_formula",
            )
        }
        numbers["space"] = (vae.spacial_compression_encode(), vae.spacial_compression_decode())
        numbers["time"] = vae.temporal_compression_decode()
        numbers["frames"] = [vae.upscale_ratio[0](number) for number in range(7)]
        numbers["latent frames"] = [vae.downscale_ratio[0](number) for number in range(19)]
        latents, pixels = (1, vae.latent_channels, 21, 60, 104), (1, 3, 81, 480, 832)
        numbers["memory"] = (
            vae.memory_used_decode(latents, torch.bfloat16),
            vae.memory_used_encode(pixels, torch.bfloat16),
        )
        return {"ui": {"text": [repr(numbers)]}}


class _NoText:
    """A CLIP without a text encoder."""

    def tokenize(self, prompt: str, images: list[torch.Tensor]) -> None:
        """Nothing."""

    def encode_from_tokens_scheduled(self, tokens: None) -> list[Any]:
        """One conditioning."""
        return [[torch.zeros(1, 4, 8), {}]]


class TestImageEditLatent:
    """The latent that TextEncodeQwenImageEdit makes of a picture."""

    RETURN_TYPES = ("LATENT",)
    FUNCTION = "encode"
    CATEGORY = "test"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"vae": ("VAE",), "image": ("IMAGE",)}}

    def encode(self, vae: Any, image: torch.Tensor) -> tuple[dict[str, torch.Tensor]]:
        node = comfy_nodes.NODE_CLASS_MAPPINGS["TextEncodeQwenImageEdit"]
        (conditioning,) = node.execute(_NoText(), "", vae, image).result
        return ({"samples": conditioning[0][1]["reference_latents"][0]},)


NODES = {
    "TestImageEditLatent": TestImageEditLatent,
    "TestReferenceVideoVAE": TestReferenceVideoVAE,
    "TestVaeTraits": TestVaeTraits,
}
