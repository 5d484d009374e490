"""The transformer operations of a rank that sees all devices: place and load, and evaluate a list of calls.

Owns the way from a folder and the user's limits to a transformer that lies where the planner says. Every tensor goes
straight to its place: the peak is the model and one tensor. Knows families by their declarations and nothing of
ComfyUI.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate.utils import OffloadedWeightsLoader, set_module_tensor_to_device
from torch import Tensor, nn

from .. import upstream
from ..checkpoint import Checkpoint
from ..families.base import Family
from ..families.registry import family_named
from ..max_memory import DISK, HOST, WEIGHTS_SHARE
from ..placement import Component, PlacementPlan, plan_placement
from ..plan import RunMode
from ..protocol import CheckMode, Forward, PlaceTransformer, Request
from .budgets import apply_limits, free_budgets
from .loading import Slice, empty_transformer, from_files, held_dtype
from .placed import Places, attach, beside_blocks, bytes_by_device
from .store import StoredModel
from .transformer import check_mode, run_batches
from .worker import Handler, Inputs, Result, Worker, torch_dtype


@dataclass(frozen=True, kw_only=True)
class PlacedTransformer:
    """A transformer in eval mode, ready to be called with arguments on any device."""

    model: nn.Module
    plan: PlacementPlan
    places: Places
    host_bytes: int
    """Bytes of the weights that lie in host memory although the model computes elsewhere."""


def place_transformer(
    folder: Path, family: Family, dtype: torch.dtype, devices: tuple[str, ...], limits: Mapping[str, int]
) -> PlacedTransformer:
    """The transformer in `folder`, its layers balanced over `devices`, then in host memory, then left in the files.

    Raises `UserError` before any weight is read, as `load_transformer` does and when there is no room.
    """
    checkpoint, model = empty_transformer(folder, family)
    for name, parameter in model.named_parameters():  # on meta still: the planner counts what will lie there
        parameter.data = parameter.data.to(held_dtype(family, name, dtype))
    component = transformer_component(model)
    budgets = apply_limits(free_budgets(devices, limits, WEIGHTS_SHARE), limits)
    unlimited = free_budgets(devices, {name: size for name, size in limits.items() if name == DISK}, WEIGHTS_SHARE)
    plan = plan_placement([component], budgets, "balanced", free=unlimited)
    places = Places.of(plan, devices, budgets, component.together[0])
    outside = _read_weights(model, checkpoint, places, lambda name: held_dtype(family, name, dtype))
    for name, buffer in list(model.named_buffers()):  # those that the constructor computed
        set_module_tensor_to_device(model, name, places.torch_device(name), buffer, clear_cache=False)
    model.requires_grad_(False).eval()
    if family.on_loaded is not None:
        family.on_loaded(model)
    attach(model, places, outside)
    host_bytes = sum(tensor.nbytes for tensor in outside.state_dict.values())
    return PlacedTransformer(model=model, plan=plan, places=places, host_bytes=host_bytes)


def transformer_component(model: nn.Module) -> Component:
    """What the planner may take apart: the blocks of one another, and from all that stands beside them."""
    blocks = upstream.blocks_kept_whole(model)
    beside = beside_blocks(model, blocks)
    whole = dict.fromkeys([*blocks, *filter(None, beside.values())])
    return Component(name="transformer", module=model, no_split=tuple(whole), together=tuple(beside))


def _read_weights(
    model: nn.Module, checkpoint: Checkpoint, places: Places, dtype_of: Callable[[str], torch.dtype]
) -> OffloadedWeightsLoader:
    """Fills what lies on a device. Returns the rest: tensors in host memory, or read from the files when asked for."""
    buffers = {name for name, _ in model.named_buffers()}
    host: dict[str, Tensor] = {}
    files: dict[str, dict[str, str]] = {}
    for name, source in from_files(checkpoint):
        home, dtype = places.home(name), dtype_of(name)
        if name in buffers or home not in (HOST, DISK):
            value = _read(source, places.torch_device(name), dtype)
            set_module_tensor_to_device(model, name, value.device, value, dtype=dtype, clear_cache=False)
        elif home == HOST:
            host[name] = _read(source, torch.device("cpu"), dtype)
        else:
            file = str(checkpoint.tensors[name].file)
            files[name] = {"safetensors_file": file, "weight_name": name, "dtype": str(dtype).removeprefix("torch.")}
    return OffloadedWeightsLoader(state_dict=host, index=files)


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
        placed = place_transformer(
            Path(request.folder), family, torch_dtype(request.dtype), worker.devices, request.max_memory
        )
        backend = _Backend(placed.model)
        names = [name for name, _ in [*placed.model.named_parameters(), *placed.model.named_buffers()]]
        model = StoredModel(
            module=placed.model,
            device=worker.device,
            close=backend.remove,
            extra={"placed": placed, "family": family, "backend": backend},
            homes={name: placed.places.torch_device(name) for name in names},
            outside_bytes=placed.host_bytes,
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
    Forward.operation: (Forward, forward),
}
