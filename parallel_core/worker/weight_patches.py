"""Puts sets of weight patches on a loaded model and takes them off again, whatever part of the weights a rank holds.

A weight that is held in plain numbers is rewritten in place, and its own bits are kept in host memory until it has no
patch any more. A packed weight never changes: it is patched whenever it is unpacked. Only what differs between two sets
is touched. Knows families by their declarations, and no file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..errors import UserError
from ..families.base import Family
from ..families.layout import Original, reverse
from ..parallelize import ShardSpec
from ..protocol import HoldTensors, PatchWeights
from ..weight_math import Factors, Part, Place, Shape, apply_patch, dora_ratios
from ..weight_patches import WeightPatch
from .packed import PackedLinear
from .redivide import join
from .shared_weights import as_shared, own_part, part_of_rank
from .worker import Inputs, Result, Worker


@dataclass(frozen=True, kw_only=True)
class Division:
    """How the weights of a model are dealt to the ranks; not at all by default."""

    shards: Mapping[str, ShardSpec] = field(default_factory=dict)
    tensor_group: Callable[[], dist.ProcessGroup] | None = None
    """Asked whenever the group is needed: groups do not live as long as a model."""
    tensor_rank: int = 0
    tensor_degree: int = 1
    shared_over: DeviceMesh | None = None


class PatchedPart(nn.Module):
    """The patches of one tensor, for the part of it that a weight is. Its buffers move and are counted with the model.

    Called with that part in float32 (which may be changed), it returns it patched.
    """

    def __init__(
        self,
        patches: Sequence[WeightPatch],
        factors: Sequence[Factors],
        ratios: Sequence[Tensor | None],
        shape: Shape,
        part: Part,
    ) -> None:
        super().__init__()
        self._patches = tuple(patches)
        self._places = tuple(Place.of(patch, shape, part) for patch in patches)
        for index, (tensors, ratio) in enumerate(zip(factors, ratios, strict=True)):
            for role, tensor in tensors.items():
                self.register_buffer(f"{role}_{index}", tensor, persistent=False)
            self.register_buffer(f"ratio_{index}", ratio, persistent=False)

    def forward(self, own: Tensor) -> Tensor:
        """See the class."""
        for index, (patch, place) in enumerate(zip(self._patches, self._places, strict=True)):
            factors = {role: getattr(self, f"{role}_{index}").to(own.device) for role in patch.tensors}
            ratio = getattr(self, f"ratio_{index}")
            own = apply_patch(own, patch, factors, place, None if ratio is None else ratio.to(own.device))
        return own


class ModelPatches:
    """The patches that are on one model. All ranks that hold parts of it get the same calls in the same order."""

    def __init__(
        self,
        model: nn.Module,
        family: Family,
        division: Division,
        device: torch.device,
        outside: Mapping[str, Tensor] | None = None,
        in_files: Collection[str] = (),
    ) -> None:
        """`outside`: weights in host memory or left in the files, whose places in `model` are on meta; `in_files`: the
        latter.
        """
        self._model = model
        self._division = division
        self._device = device
        self._outside = {} if outside is None else outside
        self._in_files = in_files
        config = family.full_config(dict(cast(Any, model).config))
        self._shapes = family.expected_shapes(config)
        self._places = family.files.weights(self._shapes, config)
        self._targets = reverse(self._places)
        self._factors: dict[str, Tensor] = {}
        self._recent: list[set[str]] = []
        self._originals: dict[str, Tensor] = {}
        self._applied: dict[str, tuple[WeightPatch, ...]] = {}

    @property
    def host_bytes(self) -> int:
        """What this takes in host memory: the factors, and the bits of the weights that are changed."""
        return sum(tensor.nbytes for kept in (self._factors, self._originals) for tensor in kept.values())

    def hold(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes tensors (in host memory) that patches name."""
        self._factors.update(tensors)

    def missing(self, patches: Sequence[WeightPatch]) -> list[str]:
        """Which tensors of `patches` are not here."""
        return sorted({name for patch in patches for name in patch.tensors.values()} - set(self._factors))

    @torch.no_grad()
    def apply(self, patches: Sequence[WeightPatch]) -> None:
        """Makes these the patches that are on the model; their tensors are here.

        `UserError` before anything is changed for a weight that is left in the files.
        """
        wanted: dict[str, list[WeightPatch]] = {}
        for patch in patches:
            wanted.setdefault(patch.target, []).append(patch)
        changed = [
            target
            for target in sorted({*wanted, *self._applied})
            if tuple(wanted.get(target, ())) != self._applied.get(target, ())
        ]
        weights = _Weights(self._model, self._outside)
        self._refuse_in_files(weights, (name for target in changed for name, _ in self._targets[target]))
        for target in changed:
            self._applied.pop(target, None)  # until it is done: what fails half-way is done again
            self._change(weights, target, wanted.get(target, ()))
            if target in wanted:
                self._applied[target] = tuple(wanted[target])
        self._forget_factors(patches)

    def _refuse_in_files(self, weights: _Weights, names: Iterable[str]) -> None:
        for name in names:
            if name in self._in_files and weights.packed(name) is None:
                raise UserError(
                    f"The LoRA changes {name!r}, which max_memory leaves in the model's files. Give the model more of "
                    "'cpu' in max_memory, so that nothing is left on 'disk', or remove the LoRA."
                )

    def _forget_factors(self, patches: Sequence[WeightPatch]) -> None:
        """Keeps what the last two sets name: MODELs with different patches take turns in one workflow."""
        if patches:
            names = {name for patch in patches for name in patch.tensors.values()}
            self._recent = [*(names_ for names_ in self._recent if names_ != names), names][-2:]
            self._factors = {
                name: tensor for name, tensor in self._factors.items() if any(name in kept for kept in self._recent)
            }

    def _change(self, weights: _Weights, target: str, patches: Sequence[WeightPatch]) -> None:
        """Makes `patches` the ones on one tensor of the original layout."""
        factors = [
            {role: self._factors[name].to(self._device) for role, name in patch.tensors.items()} for patch in patches
        ]
        shape = self._shape(target)
        ratios: list[Tensor | None] = [None] * len(patches)
        if any(patch.is_decomposed for patch in patches):
            ratios = dora_ratios(self._whole(weights, target, shape), patches, factors)
        for name, original in self._targets[target]:
            part = self._part(name, original, shape, is_packed=weights.packed(name) is not None)
            patched = PatchedPart(patches, factors, ratios, shape, part) if patches else None
            layer = weights.packed(name)
            if layer is not None:
                layer.patch(patched)
            else:
                self._rewrite(weights, name, patched)

    def _rewrite(self, weights: _Weights, name: str, patched: PatchedPart | None) -> None:
        own = weights.stored(name)
        if own is None:
            return
        if patched is None:
            if name in self._originals:
                own.copy_(self._originals.pop(name))
            return
        if name not in self._originals:
            self._originals[name] = own.detach().to("cpu", copy=True)
        if own.numel():
            own.copy_(patched(self._originals[name].to(self._device, torch.float32, copy=True)))

    def _shape(self, target: str) -> Shape:
        """Of a tensor of the original layout: its parts one below the other."""
        parts = [self._shapes[name] for name, _ in self._targets[target]]
        return (sum(shape[0] for shape in parts), *parts[0][1:])

    def _part(self, name: str, original: Original, shape: Shape, *, is_packed: bool) -> Part:
        """What of a tensor of the original layout this rank computes of the weight of that name."""
        rows = _rows(original, shape[0])
        columns: Tensor | None = None
        spec, division = self._division.shards.get(name), self._division
        if spec is not None and spec.dim is not None:
            indices = rows if spec.dim == 0 else torch.arange(shape[spec.dim])
            taken = replace(spec, dim=0).take(indices, division.tensor_rank, division.tensor_degree)
            assert taken is not None
            rows, columns = (taken, None) if spec.dim == 0 else (rows, taken)
        if division.shared_over is not None and not is_packed:  # a packed layer computes with all that is collected
            rows = rows[part_of_rank(len(rows), division.shared_over)]
        everything = len(rows) == shape[0] and bool((rows == torch.arange(shape[0])).all())
        return Part(None if everything else rows, columns)

    # ----- DoRA needs all of a tensor -----

    def _whole(self, weights: _Weights, target: str, shape: Shape) -> Tensor:
        """A tensor of the original layout without patches, in float32, put together from all ranks' parts."""
        whole = torch.empty(shape, dtype=torch.float32, device=self._device)
        for name, original in self._targets[target]:
            whole[_rows(original, shape[0]).to(self._device)] = self._collect(weights, name)
        return whole

    def _collect(self, weights: _Weights, name: str) -> Tensor:
        own = self._originals.get(name, weights.stored(name))
        parameter = weights.parameters.get(name)
        if own is not None:
            own = own.to(self._device)
            if self._division.shared_over is not None:
                assert parameter is not None
                own = cast(Any, as_shared(own, parameter)).full_tensor()
            layer = weights.packed(name)
            own = own.float() if layer is None else layer.unpack(own, torch.float32)
        spec = self._division.shards.get(name)
        if spec is None:
            assert own is not None
            return own
        assert self._division.tensor_group is not None
        like = own if own is not None else torch.empty(0, dtype=torch.float32, device=self._device)
        return join(own, like, spec, self._shapes[name], self._division.tensor_group())


class _Weights:
    """The weights of a model by name, wherever they lie."""

    def __init__(self, model: nn.Module, outside: Mapping[str, Tensor]) -> None:
        self._model = model
        self._outside = outside
        self.parameters = dict(model.named_parameters())

    def packed(self, name: str) -> PackedLinear | None:
        """The layer whose packed weight has this name."""
        path, _, attribute = name.rpartition(".")
        module = self._model.get_submodule(path)
        return module if attribute == "weight" and isinstance(module, PackedLinear) else None

    def stored(self, name: str) -> Tensor | None:
        """What this rank holds of a weight, packed or not; None for nothing. What is in host memory may be changed."""
        parameter = self.parameters.get(name)
        if parameter is None:
            return None
        return self._outside[name] if parameter.is_meta else own_part(parameter.data)


def _rows(original: Original, height: int) -> Tensor:
    """Indices of the rows of a tensor of `height` rows that are a weight."""
    if original.rows is None:
        return torch.arange(height)
    return torch.cat([torch.arange(first, last) for first, last in original.rows])


def patch_weights(worker: Worker, request: PatchWeights, tensors: Inputs) -> Result:
    """Makes the request's patches the ones on the model, unless tensors of them are missing, which it answers."""
    model = worker.store.use(request.key)
    patches: ModelPatches = model.extra["patches"]
    wanted = [WeightPatch.from_json(patch) for patch in request.patches]
    missing = patches.missing(wanted)
    if not missing:
        before = patches.host_bytes
        patches.apply(wanted)
        model.outside_bytes += patches.host_bytes - before
    return Result(data={"missing": missing})


def hold_tensors(worker: Worker, request: HoldTensors, tensors: Inputs) -> Result:
    """Keeps the frame's tensors in host memory for patches of the model."""
    model = worker.store.use(request.key)
    patches: ModelPatches = model.extra["patches"]
    before = patches.host_bytes
    patches.hold({name: tensors.on_host(name) for name in tensors})
    model.outside_bytes += patches.host_bytes - before
    return Result()
