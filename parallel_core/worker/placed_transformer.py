"""The transformer operations of a rank that sees all devices: place and load, and evaluate a list of calls.

Owns the way from a folder and the user's limits to a transformer that lies where the planner says. Every tensor goes
straight to its place: the peak is the model and one tensor. Knows families by their declarations and nothing of
ComfyUI.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from accelerate.utils import set_module_tensor_to_device
from torch import Tensor, nn

from .. import upstream
from ..checkpoint import Checkpoint
from ..families.base import Family
from ..families.registry import family_named
from ..max_memory import DISK, HOST, WEIGHTS_SHARE
from ..model_file import ModelSource
from ..placement import Component, PlacementPlan, plan_placement
from ..plan import RunMode
from ..protocol import CheckMode, Forward, HoldTensors, PatchWeights, PlaceTransformer, Request
from ..storage import Storage
from .budgets import apply_limits, free_budgets
from .heap import large_blocks_apart
from .loading import empty_transformer, held_dtype
from .packed import Held, hold_packed
from .placed import Places, attach, beside_blocks, bytes_by_device
from .store import StoredModel
from .stored import Slice, StoredWeight, from_files, open_file
from .transformer import check_mode, run_batches, source_of
from .weight_patches import Division, ModelPatches, hold_tensors, patch_weights
from .worker import Handler, Inputs, Result, Worker


@dataclass(frozen=True, kw_only=True)
class PlacedTransformer:
    """A transformer in eval mode, ready to be called with arguments on any device."""

    model: nn.Module
    plan: PlacementPlan
    places: Places
    outside: Outside
    """The weights that lie on no device."""


@large_blocks_apart()
def place_transformer(
    source: ModelSource, family: Family, storage: Storage, devices: tuple[str, ...], limits: Mapping[str, int]
) -> PlacedTransformer:
    """The transformer of `source`, its layers balanced over `devices`, then in host memory, then left in the files.

    Raises `UserError` before any weight is read, as `load_transformer` does and when there is no room.
    """
    checkpoint, model = empty_transformer(source, family)
    held = hold_packed(model, checkpoint, storage)
    dtypes = _Dtypes(family, held, getattr(torch, storage.dtype))
    for name, parameter in model.named_parameters():  # on meta still: the planner counts what will lie there
        parameter.data = parameter.data.to(dtypes.of(name))
    component = transformer_component(model)
    budgets = apply_limits(free_budgets(devices, limits, WEIGHTS_SHARE), limits)
    unlimited = free_budgets(devices, {name: size for name, size in limits.items() if name == DISK}, WEIGHTS_SHARE)
    plan = plan_placement([component], budgets, "balanced", free=unlimited)
    places = Places.of(plan, devices, budgets, component.together[0])
    outside = _read_weights(model, checkpoint, places, held, dtypes)
    for name, buffer in list(model.named_buffers()):  # those that the constructor computed
        set_module_tensor_to_device(model, name, places.torch_device(name), buffer, clear_cache=False)
    model.requires_grad_(False).eval()
    if family.on_loaded is not None:
        family.on_loaded(model)
    attach(model, places, outside)
    return PlacedTransformer(model=model, plan=plan, places=places, outside=outside)


def transformer_component(model: nn.Module) -> Component:
    """What the planner may take apart: the blocks of one another, and from all that stands beside them."""
    blocks = upstream.blocks_kept_whole(model)
    beside = beside_blocks(model, blocks)
    whole = dict.fromkeys([*blocks, *filter(None, beside.values())])
    return Component(name="transformer", module=model, no_split=tuple(whole), together=tuple(beside))


@dataclass(frozen=True)
class _Dtypes:
    """In which dtype each weight is held."""

    family: Family
    held: Held
    dtype: torch.dtype

    def of(self, name: str) -> torch.dtype:
        """Of the weight of that name; packed ones are bytes."""
        return torch.uint8 if self.held.is_packed(name) else held_dtype(self.family, name, self.dtype)


class Outside(Mapping[str, Tensor]):
    """Weights that lie on no device: in host memory, or left in the files and read whenever they are asked for."""

    def __init__(self, checkpoint: Checkpoint, held: Held, dtypes: _Dtypes) -> None:
        self._checkpoint = checkpoint
        self._held = held
        self._dtypes = dtypes
        self._in_host: dict[str, Tensor] = {}
        self.in_files: set[str] = set()
        """Names of those that are left in the files."""

    @property
    def host_bytes(self) -> int:
        """Bytes in host memory."""
        return sum(tensor.nbytes for tensor in self._in_host.values())

    def add(self, name: str, source: Slice | None) -> None:
        """Takes a weight: into host memory, or without a source to be read later."""
        if source is None:
            self.in_files.add(name)
        else:
            self._in_host[name] = _read(source, torch.device("cpu"), self._dtypes.of(name))

    def __getitem__(self, name: str) -> Tensor:
        if name in self._in_host:
            return self._in_host[name]
        with ExitStack() as stack:
            info = self._checkpoint.tensors[name]
            stored = StoredWeight(open_file(info.file, stack), info)
            dtype = self._dtypes.of(name)
            return _read(self._held.source(stored, name, dtype), torch.device("cpu"), dtype)

    def __iter__(self) -> Iterator[str]:
        return iter([*self._in_host, *self.in_files])

    def __len__(self) -> int:
        return len(self._in_host) + len(self.in_files)


def _read_weights(model: nn.Module, checkpoint: Checkpoint, places: Places, held: Held, dtypes: _Dtypes) -> Outside:
    """Fills what lies on a device. Returns the rest."""
    buffers = {name for name, _ in model.named_buffers()}
    outside = Outside(checkpoint, held, dtypes)
    for name, stored in from_files(checkpoint):
        home, dtype = places.home(name), dtypes.of(name)
        source = held.source(stored, name, dtype)
        if name in buffers or home not in (HOST, DISK):
            value = _read(source, places.torch_device(name), dtype)
            set_module_tensor_to_device(model, name, value.device, value, dtype=value.dtype, clear_cache=False)
        else:
            outside.add(name, source if home == HOST else None)
    return outside


def _read(source: Slice, device: torch.device, dtype: torch.dtype) -> Tensor:
    # a copy even where dtype and device already fit: the file's memory map must not live on in the model
    return source[:].to(device, dtype, copy=True).contiguous()


class _Backend:
    """The attention backend that is on a model now: all of a mode that one process without degrees can choose."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._name = ""
        self._undo: Callable[[], None] | None = None

    def switch(self, name: str) -> None:
        """Makes `name` the one in use."""
        if name != self._name:
            self.remove()
            self._undo, self._name = upstream.choose_backend(self._model, name), name

    def remove(self) -> None:
        """Back to diffusers' own choice."""
        if self._undo is not None:
            self._undo()
        self._undo, self._name = None, ""


def load(worker: Worker, request: PlaceTransformer, tensors: Inputs) -> Result:
    """Places the layers and reads each weight straight to its place."""
    if request.key not in worker.store:
        family = family_named(request.family)
        storage = Storage(request.dtype, request.storage)
        placed = place_transformer(source_of(request), family, storage, worker.devices, request.max_memory)
        backend = _Backend(placed.model)
        outside = placed.outside
        patches = ModelPatches(placed.model, family, Division(), worker.device, outside, outside.in_files)
        names = [name for name, _ in [*placed.model.named_parameters(), *placed.model.named_buffers()]]
        model = StoredModel(
            module=placed.model,
            device=worker.device,
            close=backend.remove,
            extra={"placed": placed, "family": family, "backend": backend, "patches": patches},
            homes={name: placed.places.torch_device(name) for name in names},
            outside_bytes=placed.outside.host_bytes,
        )
        worker.store.add(request.key, model)
    placed = worker.store.use(request.key).extra["placed"]
    return Result(data={"device_bytes": bytes_by_device(placed.model, placed.places)})


def forward(worker: Worker, request: Forward, tensors: Inputs) -> Result:
    """Evaluates all batches and returns them as "call:first:last" tensors, and the placement as text."""
    if request.first:
        worker.restart_peak()
    model = worker.store.use(request.key)
    mode = RunMode(**request.mode)
    model.extra["backend"].switch(mode.attention_backend)
    result = run_batches(worker, model.module, model.extra["family"], mode, request, tensors)
    result.data["placement"] = model.extra["placed"].plan.describe()
    return result


OPERATIONS: dict[str, tuple[type[Request], Handler]] = {
    CheckMode.operation: (CheckMode, check_mode),
    PlaceTransformer.operation: (PlaceTransformer, load),
    PatchWeights.operation: (PatchWeights, patch_weights),
    HoldTensors.operation: (HoldTensors, hold_tensors),
    Forward.operation: (Forward, forward),
}
