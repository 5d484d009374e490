"""The rank's models: keyed by spec, resident on the device or parked in host memory, with a ledger in bytes.

Knows no family and no plan; a model is anything with parameters and a `close`.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .shared_weights import is_shared, move_own_part, own_part


@dataclass
class StoredModel:
    """One model in the store. `close` undoes what was applied to it (hooks, meshes) before it is forgotten."""

    module: torch.nn.Module
    device: torch.device
    close: Callable[[], None]
    extra: dict[str, Any] = field(default_factory=dict)
    homes: Mapping[str, torch.device] = field(default_factory=dict)
    """Where tensors lie that do not lie on `device`, by their names in `module`."""
    outside_bytes: int = 0
    """Bytes of further weights that lie in host memory all the time; their places in `module` are on meta."""
    on_host: bool = False
    """The weights lie in host memory even while the model is in use."""
    movable: bool = True
    """False: the weights cannot leave the device and come back, so to park the model is to release it."""
    resident: bool = True

    @property
    def num_bytes(self) -> int:
        """Bytes of the local weights and buffers, each storage counted once."""
        seen: dict[int, int] = {}
        for _, tensor in _local_tensors(self.module):
            for part in _parts(tensor):
                storage = part.untyped_storage()
                seen[storage.data_ptr()] = storage.nbytes()
        return sum(seen.values())


class ModelStore:
    """See the module."""

    def __init__(self) -> None:
        self._models: dict[str, StoredModel] = {}
        self.num_loads = 0
        """How many times weights were read from disk."""

    def __contains__(self, key: str) -> bool:
        return key in self._models

    def add(self, key: str, model: StoredModel, *, was_read: bool = True) -> None:
        """Takes a new model; `was_read` from disk, or made of another one."""
        self._models[key] = model
        self.num_loads += was_read

    def use(self, key: str) -> StoredModel:
        """The model, resident: brought back from host memory when it was parked. KeyError when it was never loaded."""
        model = self._models[key]
        if not model.resident:
            _move(model.module, model.device, model.homes)
            model.resident = True
        return model

    def park(self, key: str) -> None:
        """Moves the weights to host memory. Nothing when the model is unknown or parked."""
        model = self._models.get(key)
        if model is not None and not model.movable:
            self.release(key)
        elif model is not None and model.resident:
            _move(model.module, torch.device("cpu"))
            model.resident = False
            give_memory_back()

    def release(self, key: str) -> None:
        """Forgets the model and gives its memory back. Nothing when it is unknown."""
        model = self._models.pop(key, None)
        if model is not None:
            model.close()
            del model
            give_memory_back()

    def release_all(self) -> None:
        """Forgets every model."""
        for key in list(self._models):
            self.release(key)

    def ledger(self) -> dict[str, dict[str, int]]:
        """Per model the bytes on the device and in host memory."""
        return {
            key: {
                "device_bytes": 0 if model.on_host or not model.resident else model.num_bytes,
                "host_bytes": model.outside_bytes + (model.num_bytes if model.on_host or not model.resident else 0),
            }
            for key, model in self._models.items()
        }


def give_memory_back() -> None:
    """Returns freed memory to the driver and the system, so that others can use it and a measurement shows it."""
    gc.collect()  # hooks and wrapped forwards are cycles
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)


def _local_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if not tensor.is_meta:
            yield name, own_part(tensor)


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors that a tensor is made of: itself, or those inside one of torchao's."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _parts(getattr(tensor, name))
    else:
        yield tensor


def _move(module: torch.nn.Module, device: torch.device, homes: Mapping[str, torch.device] | None = None) -> None:
    """Moves local weights in place, to `device` but for those that have another home.

    Parameters stay the same objects, so hooks and sharding stay valid; torchao's, which nothing is sharded by, are
    replaced.
    """
    if is_shared(module):
        module.to(device)
        return
    for parameter in module.parameters():
        if isinstance(parameter, DTensor):
            move_own_part(parameter, device)
    for name, tensor in _local_tensors(module):
        moved = tensor.data.to((homes or {}).get(name, device))
        if is_traceable_wrapper_subclass(tensor):
            path, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(path), attribute, torch.nn.Parameter(moved, requires_grad=False))
        else:
            tensor.data = moved
