"""Wrappers of other node packs around the evaluation of conditions and around the model.

Does not know: whose MODEL it is.
"""

# ruff: noqa: N802 (INPUT_TYPES is ComfyUI's name)

from __future__ import annotations

import unittest.mock
from typing import Any

import comfy.patcher_extension


class _Model:
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "apply"
    CATEGORY = "test"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"model": ("MODEL",)}}


class TestMixingGuidance(_Model):
    """A CALC_COND_BATCH wrapper that mixes what the conditions gave, as guidance at that level does."""

    def apply(self, model: Any) -> tuple[Any]:
        def mix(executor: Any, *args: Any) -> Any:
            outputs = executor(*args)
            if len(outputs) > 1:
                outputs[0] = outputs[0] + 0.5 * (outputs[0] - outputs[1])
            return outputs

        patched = model.clone()
        patched.add_wrapper_with_key(comfy.patcher_extension.WrappersMP.CALC_COND_BATCH, "test_mixing", mix)
        return (patched,)


class TestSteeredModel(_Model):
    """A model function wrapper that changes something around each call and puts it back; it must not be nested."""

    def apply(self, model: Any) -> tuple[Any]:
        running: list[bool] = []

        def steer(apply_model: Any, arguments: dict[str, Any]) -> Any:
            assert not running, "the wrapper was entered while it was at work"
            running.append(True)
            try:
                scale = 1.0 + 0.1 * max(arguments["cond_or_uncond"])
                return apply_model(arguments["input"], arguments["timestep"], **arguments["c"]) * scale
            finally:
                running.clear()

        patched = model.clone()
        patched.set_model_unet_function_wrapper(steer)
        return (patched,)


class TestOwnForward(_Model):
    """Puts its own code in the place of the function that goes to the ranks, as TeaCache does."""

    def apply(self, model: Any) -> tuple[Any]:
        def around(apply_model: Any, arguments: dict[str, Any]) -> Any:
            flux = model.model.diffusion_model
            ours = type(flux).forward_orig.__get__(flux)
            with unittest.mock.patch.multiple(flux, forward_orig=ours):
                return apply_model(arguments["input"], arguments["timestep"], **arguments["c"])

        patched = model.clone()
        patched.set_model_unet_function_wrapper(around)
        return (patched,)


NODES = {
    "TestMixingGuidance": TestMixingGuidance,
    "TestOwnForward": TestOwnForward,
    "TestSteeredModel": TestSteeredModel,
}
