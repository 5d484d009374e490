"""The ModelPatcher of everything whose weights live on ranks: ComfyUI loads, parks and frees through it.

Knows ComfyUI's memory management and the engine's verbs; knows neither transformers nor VAEs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import comfy.model_management
import comfy.model_patcher
import torch

from ..parallel_core.engine import Engine
from ..parallel_core.engine.models import ModelSpec
from .runtime import as_comfy_interrupt, cancel_requested, say

ATTRIBUTE = "parallel_diffusion"
"""Where a stand-in module keeps its handle."""


class RemoteHandle(Protocol):
    """What a patcher needs of a handle: `engine.transformer.RemoteTransformer`, `engine.vae.RemoteVae`."""

    @property
    def engine(self) -> Engine:
        """The engine."""

    @property
    def spec(self) -> ModelSpec:
        """What to load."""

    def ensure_loaded(self, poll: Callable[[], bool] | None = None) -> None:
        """Makes the weights resident."""


def bind(module: torch.nn.Module, remote: RemoteHandle) -> None:
    """Makes `module` stand for `remote`: when it is collected, its hold on the ranks' memory ends."""
    setattr(module, ATTRIBUTE, remote)
    remote.engine.retain(remote.spec)
    finalizer = weakref.finalize(module, remote.engine.drop_reference, remote.spec.group, remote.spec.key)
    finalizer.atexit = False


def remote_of(module: Any) -> Any:
    """The handle that `module` stands for, or None for an ordinary one."""
    return getattr(module, ATTRIBUTE, None)


def local_device() -> str:
    """The device that ComfyUI itself computes on."""
    return str(comfy.model_management.get_torch_device())


class WeightlessModel(torch.nn.Module):
    """What ComfyUI sees as the model where it needs none of its own classes."""

    def __init__(self, remote: RemoteHandle) -> None:
        super().__init__()
        self.device: torch.device | None = None
        bind(self, remote)


class RemotePatcher(comfy.model_patcher.ModelPatcher):
    """Derives from ModelPatcher, not from ComfyUI's dynamic-memory patcher: there is no local weight to stage."""

    @property
    def remote(self) -> RemoteHandle:
        """The controller's handle."""
        handle: RemoteHandle = remote_of(self.model)
        return handle

    def model_size(self) -> int:
        """Bytes on the card that ComfyUI itself computes on, so that it makes room there for its share of the ranks."""
        return max(1, self.remote.spec.estimated_bytes().get(local_device(), 0))

    def loaded_size(self) -> int:
        """What ComfyUI takes to be on its card: nothing when the ranks have parked or lost the weights meanwhile."""
        if not self.remote.engine.is_resident(self.remote.spec):
            self.model.model_loaded_weight_memory = 0
        return int(self.model.model_loaded_weight_memory)

    def partially_load(self, device_to: Any, extra_memory: float = 0, force_patch_weights: bool = False) -> Any:
        """As ComfyUI's, from what is really loaded."""
        self.loaded_size()
        return super().partially_load(device_to, extra_memory, force_patch_weights=force_patch_weights)

    def load(self, device_to: Any = None, *args: Any, **kwargs: Any) -> None:
        """Makes the weights resident on the ranks."""
        with as_comfy_interrupt():
            self.remote.ensure_loaded(cancel_requested)
        if notices := self.remote.engine.take_notices():
            say("\n".join(notices))
        self.model.device = device_to
        self.model.model_loaded_weight_memory = self.model_size()
        self.model.current_weight_patches_uuid = self.patches_uuid
        for callback in self.get_all_callbacks(comfy.model_patcher.CallbacksMP.ON_LOAD):
            callback(self, device_to, *args, **kwargs)

    def unpatch_model(self, device_to: Any = None, unpatch_weights: bool = True) -> None:
        """Parks the weights in the ranks' host memory when ComfyUI takes its own off the device."""
        super().unpatch_model(device_to=None, unpatch_weights=unpatch_weights)
        if unpatch_weights:
            self.remote.engine.park(self.remote.spec)

    def partially_unload(self, device_to: Any, memory_to_free: float = 0, **kwargs: Any) -> int:
        """Nothing: a rank holds all of its share or none."""
        return 0
