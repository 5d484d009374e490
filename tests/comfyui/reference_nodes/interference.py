"""What other node packs do to a MODEL: patches inside the blocks, wrappers, arguments of a newer ComfyUI.

Does not know: whose MODEL it is.
"""

# ruff: noqa: N802 (INPUT_TYPES is ComfyUI's name)

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable
from typing import Any

import comfy.ldm.flux.model
import comfy.model_management
import comfy.patcher_extension
import torch

from .probes import COUNTERS


class _ModelNode:
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "apply"
    CATEGORY = "test"


def _wrap_diffusion_model(model: Any, key: str, wrapper: Callable[..., Any]) -> tuple[Any]:
    patched = model.clone()
    patched.add_wrapper_with_key(comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL, key, wrapper)
    return (patched,)


class TestBlockPatch(_ModelNode):
    """Python that has to run inside the transformer's blocks."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"model": ("MODEL",), "kind": (["replace", "post_input", "attention"], {})}}

    def apply(self, model: Any, kind: str) -> tuple[Any]:
        patched = model.clone()
        if kind == "replace":
            patched.set_model_patch_replace(_twice, "dit", "double_block", 0)
        elif kind == "post_input":
            patched.set_model_patch(lambda arguments: arguments, "post_input")
        else:
            patched.set_model_attn1_patch(lambda q, k, v, *rest, **more: {"q": q, "k": k, "v": v})
        return (patched,)


def _twice(arguments: dict[str, Any], extra: dict[str, Any]) -> Any:
    out = extra["original_block"](arguments)
    return {**out, "img": out["img"] * 2}


class TestSlow(_ModelNode):
    """Each call of the transformer takes `seconds` longer, in ComfyUI's process."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"model": ("MODEL",), "seconds": ("FLOAT", {"default": 0.1, "min": 0.0, "step": 0.001})}}

    def apply(self, model: Any, seconds: float) -> tuple[Any]:
        def slow(executor: Any, *args: Any, **kwargs: Any) -> Any:
            time.sleep(seconds)
            return executor(*args, **kwargs)

        return _wrap_diffusion_model(model, "test_slow", slow)


class TestFreeMemory(_ModelNode):
    """While it samples, ComfyUI believes that so many bytes of its device are free."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        limits = {"default": 0, "min": 0, "max": 1 << 50}
        return {"required": {"model": ("MODEL",), "bytes": ("INT", limits)}}

    def apply(self, model: Any, bytes: int) -> tuple[Any]:
        def free(device: Any = None, torch_free_too: bool = False) -> Any:
            return (bytes, bytes) if torch_free_too else bytes

        def sample(executor: Any, *args: Any, **kwargs: Any) -> Any:
            before = comfy.model_management.get_free_memory
            comfy.model_management.get_free_memory = free
            try:
                return executor(*args, **kwargs)
            finally:
                comfy.model_management.get_free_memory = before

        patched = model.clone()
        patched.add_wrapper_with_key(comfy.patcher_extension.WrappersMP.SAMPLER_SAMPLE, "test_free_memory", sample)
        return (patched,)


class TestUnloadModels:
    """In the middle of a prompt ComfyUI takes all models off its devices; the latent passes through."""

    RETURN_TYPES = ("LATENT",)
    FUNCTION = "unload"
    CATEGORY = "test"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"samples": ("LATENT",)}}

    def unload(self, samples: dict[str, Any]) -> tuple[dict[str, Any]]:
        comfy.model_management.unload_all_models()
        return (samples,)


class TestCountCalls(_ModelNode):
    """Counts the calls that reach the transformer (a step that EasyCache skips does not), and the rows of each."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"model": ("MODEL",), "counter": ("STRING", {})}}

    def apply(self, model: Any, counter: str) -> tuple[Any]:
        rows = COUNTERS.setdefault(counter, [])

        def count(executor: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            rows.append(x.shape[0])
            return executor(x, *args, **kwargs)

        return _wrap_diffusion_model(model, "test_count", count)


def _newer_flux() -> None:
    """Makes ComfyUI's Flux take one argument more, `tomorrow`, in the function that does the work.

    Versions differ in just this way. It is done when the pack is loaded, since a MODEL may read the signature early.
    """
    flux = comfy.ldm.flux.model.Flux
    original = flux.forward_orig

    def forward_orig(self: Any, *args: Any, tomorrow: Any = None, **kwargs: Any) -> torch.Tensor:
        return original(self, *args, **kwargs)

    signature = inspect.signature(original)
    more = inspect.Parameter("tomorrow", inspect.Parameter.KEYWORD_ONLY, default=None)
    forward_orig.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*signature.parameters.values(), more]
    )
    flux.forward_orig = forward_orig


_newer_flux()


class TestNewerComfyUI(_ModelNode):
    """ComfyUI passes its Flux the argument `tomorrow`; "None" is Python's None."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"model": ("MODEL",), "tomorrow": ("STRING", {})}}

    def apply(self, model: Any, tomorrow: str) -> tuple[Any]:
        passed = None if tomorrow == "None" else tomorrow

        def newer(executor: Any, *args: Any, **kwargs: Any) -> Any:
            flux = executor.class_obj
            own = vars(flux).get("forward_orig")
            object.__setattr__(flux, "forward_orig", functools.partial(flux.forward_orig, tomorrow=passed))
            try:
                return executor(*args, **kwargs)
            finally:
                if own is None:
                    object.__delattr__(flux, "forward_orig")
                else:
                    object.__setattr__(flux, "forward_orig", own)

        return _wrap_diffusion_model(model, "test_newer", newer)


class TestTransformerOption(_ModelNode):
    """A transformer_options key that the model's author has never seen."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"model": ("MODEL",), "key": ("STRING", {}), "value": ("STRING", {})}}

    def apply(self, model: Any, key: str, value: str) -> tuple[Any]:
        patched = model.clone()
        patched.model_options["transformer_options"][key] = value
        return (patched,)


NODES = {
    "TestBlockPatch": TestBlockPatch,
    "TestSlow": TestSlow,
    "TestFreeMemory": TestFreeMemory,
    "TestUnloadModels": TestUnloadModels,
    "TestCountCalls": TestCountCalls,
    "TestNewerComfyUI": TestNewerComfyUI,
    "TestTransformerOption": TestTransformerOption,
}
