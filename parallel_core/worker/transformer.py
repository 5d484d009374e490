"""The transformer operations of a rank: load, and evaluate a list of calls.

Owns which plan is applied to a loaded model and the change from one to another. Knows families by their declarations
and nothing of ComfyUI.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from .. import upstream
from ..families.base import Family
from ..families.registry import family_named
from ..model_file import ModelSource
from ..parallelize import Applied, apply_plan
from ..parallelize.compiled import check_compiler, num_graphs
from ..plan import RunMode
from ..protocol import CheckMode, Forward, HoldTensors, LoadTransformer, PatchWeights, PlaceTransformer, Request
from ..storage import Storage
from .loading import LoadedTransformer, Part, Weights, load_transformer
from .redivide import from_ranks
from .shared_weights import is_shared, let_go
from .store import StoredModel
from .stored import from_files
from .weight_patches import Division, ModelPatches, hold_tensors, patch_weights
from .worker import Handler, Inputs, Result, Worker


class _AppliedPlan:
    """The plan that is on a model now: switched only when a request asks for another one."""

    def __init__(self, loaded: LoadedTransformer, family: Family) -> None:
        self.family = family
        self.loaded = loaded
        self._mode: RunMode | None = None
        self._mesh: DeviceMesh | None = None
        self._applied: Applied | None = None

    def switch(self, mode: RunMode, mesh: DeviceMesh) -> None:
        """Makes `mode` the applied one; free when it is already."""
        if mode != self._mode or mesh is not self._mesh:
            self.remove()
            self._applied = apply_plan(self.loaded.model, self.family, self.loaded.shards, mesh, mode)
            self._mode, self._mesh = mode, mesh

    def remove(self) -> None:
        """Takes the plan off the model."""
        if self._applied is not None:
            self._applied.remove()
        self._applied = None
        self._mode = self._mesh = None


def load(worker: Worker, request: LoadTransformer, tensors: Inputs) -> Result:
    """Reads the weights, or this rank's part of them, straight to the device."""
    if request.key not in worker.store:
        family = family_named(request.family)
        weights = _weights_of(worker, request.source) if request.source else from_files
        storage = Storage(request.dtype, request.storage)
        part = _part_of(worker, request)
        loaded = load_transformer(source_of(request), family, storage, worker.device, part, weights)
        plan = _AppliedPlan(loaded, family)
        model = StoredModel(
            module=loaded.model,
            device=worker.device,
            close=plan.remove,
            extra={"plan": plan, "tensor": request.tensor, "patches": _patches(worker, loaded, family, part)},
            on_host=request.offload,
        )
        worker.store.add(request.key, model, was_read=not request.source)
    size = worker.store.use(request.key).num_bytes
    return Result(data={"device_bytes": {worker.devices[0]: 0 if request.offload else size}})


def source_of(request: LoadTransformer | PlaceTransformer) -> ModelSource:
    """Where the weights that a request asks for come from."""
    return ModelSource(Path(request.folder), Path(request.config_from) if request.config_from else None)


def _weights_of(worker: Worker, key: str) -> Weights:
    """The weights of a model that is here in other parts, without the patches that are on them."""
    model = worker.store.use(key)
    model.extra["patches"].apply([])
    return from_ranks(model.extra["plan"].loaded, _tensor_group(worker, model.extra["tensor"]))


def _tensor_group(worker: Worker, degree: int) -> ProcessGroup:
    """The ranks that hold slices of the same weights as this one."""
    return worker.meshes.get((worker.world_size // degree, 1, 1, degree)).get_group("tensor")


def _patches(worker: Worker, loaded: LoadedTransformer, family: Family, part: Part) -> ModelPatches:
    division = Division(
        shards=loaded.shards,
        tensor_group=lambda: _tensor_group(worker, part.tensor_degree),
        tensor_rank=part.tensor_rank,
        tensor_degree=part.tensor_degree,
        shared_over=part.shared_over,
    )
    return ModelPatches(loaded.model, family, division, worker.device)


def _part_of(worker: Worker, request: LoadTransformer) -> Part:
    """This rank's part of the weights; the tensor axis is the innermost."""
    shared = request.shards > 1 or request.offload
    return Part(
        tensor_rank=worker.rank % request.tensor,
        tensor_degree=request.tensor,
        shared_over=worker.meshes.sharing(request.shards, request.tensor) if shared else None,
        offload=request.offload,
    )


def check_mode(worker: Worker, request: CheckMode, tensors: Inputs) -> Result:
    """Refuses what these ranks lack for a mode, before any weight is read."""
    mode = RunMode(**request.mode)
    upstream.check_backend_package(mode.attention_backend)
    if mode.compile != "off":
        check_compiler(worker.device)
    return Result()


def forward(worker: Worker, request: Forward, tensors: Inputs) -> Result:
    """Evaluates this replica's batches; the first rank of each replica returns them as "call:first:last" tensors."""
    if request.first:
        worker.restart_peak()
    model = worker.store.use(request.key)
    plan: _AppliedPlan = model.extra["plan"]
    mode = RunMode(**request.mode)
    plan.switch(mode, worker.meshes.get(mode.shape))
    return run_batches(worker, model.module, plan.family, mode, request, tensors)


def run_batches(
    worker: Worker, model: torch.nn.Module, family: Family, mode: RunMode, request: Forward, tensors: Inputs
) -> Result:
    """Evaluates this replica's batches on a model to which `mode` is applied."""
    replica, place = divmod(worker.rank, mode.ranks_per_replica)
    outputs: dict[str, torch.Tensor] = {}
    graphs = num_graphs()
    with torch.no_grad() if is_shared(model) else torch.inference_mode():  # FSDP2 counts versions of what it collects
        for batch in request.assignments[replica]:
            rows, shared = _gather(batch, request.calls, tensors)
            output = family.finish(model(**family.prepare(rows, shared)))
            if place == 0:
                sizes = [last - first for _, first, last in batch]
                for (call, first, last), part in zip(batch, output.split(sizes), strict=True):
                    outputs[f"{call}:{first}:{last}"] = part
    let_go(model)
    worker.synchronize()  # an error of this step belongs to this step
    return Result(data={"peak_bytes": worker.peak_bytes(), "graphs": num_graphs() - graphs}, tensors=outputs)


def _gather(
    batch: list[list[int]], calls: list[dict[str, dict[str, str]]], tensors: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The rows of one batch, joined over the calls that they come from; and what holds for all of them."""
    first_call = calls[batch[0][0]]
    rows = {
        name: _join([tensors[calls[call]["rows"][name]][first:last] for call, first, last in batch])
        for name in first_call["rows"]
    }
    return rows, {name: tensors[slot] for name, slot in first_call["shared"].items()}


def _join(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


OPERATIONS: dict[str, tuple[type[Request], Handler]] = {
    CheckMode.operation: (CheckMode, check_mode),
    LoadTransformer.operation: (LoadTransformer, load),
    PatchWeights.operation: (PatchWeights, patch_weights),
    HoldTensors.operation: (HoldTensors, hold_tensors),
    Forward.operation: (Forward, forward),
}
