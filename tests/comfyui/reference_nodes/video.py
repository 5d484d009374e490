"""Random but seeded inputs of video nodes: a VAE, what a CLIP vision model sees.

Does not know: models.
"""

# ruff: noqa: N802 (INPUT_TYPES is ComfyUI's name)

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch


def _randn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class _VideoVAE:
    """Encodes every video to the same random numbers."""

    def __init__(self, channels: int, scale: int) -> None:
        self.latent_channels, self.scale = channels, scale

    def spacial_compression_encode(self) -> int:
        """Pixels per cell, each way."""
        return self.scale

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """Pixels [frames, height, width, 3] -> [1, channels, latent frames, height, width]."""
        frames, height, width, _ = pixels.shape
        return _randn(77, 1, self.latent_channels, (frames - 1) // 4 + 1, height // self.scale, width // self.scale)


class TestVideoVAE:
    RETURN_TYPES = ("VAE",)
    FUNCTION = "make"
    CATEGORY = "test"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"channels": ("INT", {"default": 16}), "scale": ("INT", {"default": 8})}}

    def make(self, channels: int, scale: int) -> tuple[_VideoVAE]:
        return (_VideoVAE(channels, scale),)


class TestClipVision:
    RETURN_TYPES = ("CLIP_VISION_OUTPUT",)
    FUNCTION = "make"
    CATEGORY = "test"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        numbers = {"tokens": ("INT", {"default": 257}), "seed": ("INT", {"default": 0})}
        return {"required": {**numbers, "channels": ("INT", {"default": 1280})}}

    def make(self, tokens: int, seed: int, channels: int) -> tuple[Any]:
        return (SimpleNamespace(penultimate_hidden_states=_randn(seed, 1, tokens, channels)),)


NODES = {"TestVideoVAE": TestVideoVAE, "TestClipVision": TestClipVision}
