"""Random but seeded inputs of a sampler: conditioning, latents, sigmas, a control net.

Does not know: models.
"""

# ruff: noqa: N802 (INPUT_TYPES is ComfyUI's name)

from __future__ import annotations

from typing import Any

import comfy.controlnet
import torch


def _int(default: int, minimum: int = 0) -> tuple[str, dict[str, int]]:
    return ("INT", {"default": default, "min": minimum, "max": 1 << 30})


def _randn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class TestConditioning:
    """`tokens` text tokens of width `dim`; `pooled` 0 leaves pooled_output out, as other families do.

    padding: how many of the tokens, the last ones, the attention mask hides; 0 leaves the mask out.
    """

    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "make"
    CATEGORY = "test"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {"tokens": _int(17, 1), "seed": _int(0)},
            "optional": {"dim": _int(32, 1), "pooled": _int(16), "rows": _int(1, 1), "padding": _int(0)},
        }

    def make(
        self, tokens: int, seed: int, dim: int = 32, pooled: int = 16, rows: int = 1, padding: int = 0
    ) -> tuple[list[Any]]:
        options = {"pooled_output": _randn(seed + 1, rows, pooled)} if pooled else {}
        if padding:
            options["attention_mask"] = (torch.arange(tokens) < tokens - padding).long().repeat(rows, 1)
        return ([[_randn(seed, rows, tokens, dim), options]],)


class TestLatent:
    """A latent that is not empty, in raw VAE space; `width` and `height` in pixels; `frames` 0: no such dimension."""

    RETURN_TYPES = ("LATENT",)
    FUNCTION = "make"
    CATEGORY = "test"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        sizes = {"width": _int(64, 8), "height": _int(64, 8), "seed": _int(0)}
        return {"required": sizes, "optional": {"batch": _int(1, 1), "channels": _int(16, 1), "frames": _int(0)}}

    def make(
        self, width: int, height: int, seed: int, batch: int = 1, channels: int = 16, frames: int = 0
    ) -> tuple[dict[str, Any]]:
        shape = (batch, channels, *([frames] if frames else []), height // 8, width // 8)
        return ({"samples": 3 * _randn(seed, *shape)},)


class TestMask:
    """A soft random mask, in pixels."""

    RETURN_TYPES = ("MASK",)
    FUNCTION = "make"
    CATEGORY = "test"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"width": _int(64, 8), "height": _int(64, 8), "seed": _int(0)}}

    def make(self, width: int, height: int, seed: int) -> tuple[torch.Tensor]:
        return (_randn(seed, 1, height, width).sigmoid(),)


class TestStackMasks:
    """Two masks as a batch of masks: a row for each second image."""

    RETURN_TYPES = ("MASK",)
    FUNCTION = "make"
    CATEGORY = "test"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"first": ("MASK",), "second": ("MASK",)}}

    def make(self, first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor]:
        return (torch.cat([first, second]),)


class TestSigmas:
    RETURN_TYPES = ("SIGMAS",)
    FUNCTION = "make"
    CATEGORY = "test"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"sigmas": ("STRING", {"default": "1.0, 0.5, 0.0"})}}

    def make(self, sigmas: str) -> tuple[torch.Tensor]:
        return (torch.tensor([float(sigma) for sigma in sigmas.split(",")]),)


class _Residuals(comfy.controlnet.ControlBase):  # type: ignore[misc]
    """A control net without a network: it adds constants to the first double block."""

    def get_control(self, x_noisy: torch.Tensor, *args: Any, **kwargs: Any) -> dict[str, list[torch.Tensor]]:
        rows, _, height, width = x_noisy.shape
        return {"input": [torch.full((rows, (height // 2) * (width // 2), 64), 0.1)], "output": []}

    def copy(self) -> _Residuals:
        copied = _Residuals()
        self.copy_to(copied)
        return copied


class TestControlNet:
    RETURN_TYPES = ("CONTROL_NET",)
    FUNCTION = "make"
    CATEGORY = "test"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {}}

    def make(self) -> tuple[Any]:
        return (_Residuals(),)


class _Clip:
    """A text encoder of one weight, for nodes that only change weights."""

    def __init__(self) -> None:
        self.cond_stage_model = self

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"clip_l.transformer.text_model.encoder.layers.0.mlp.fc1.weight": torch.ones(2, 2)}

    def clone(self) -> _Clip:
        return _Clip()

    def add_patches(self, patches: dict[str, Any], strength: float) -> list[str]:
        return [key for key in patches if key in self.state_dict()]


class TestClip:
    RETURN_TYPES = ("CLIP",)
    FUNCTION = "build"
    CATEGORY = "test"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {}}

    def build(self) -> tuple[Any]:
        return (_Clip(),)


NODES = {
    "TestClip": TestClip,
    "TestConditioning": TestConditioning,
    "TestLatent": TestLatent,
    "TestMask": TestMask,
    "TestStackMasks": TestStackMasks,
    "TestSigmas": TestSigmas,
    "TestControlNet": TestControlNet,
}
