"""Linear layers whose weights stay packed in memory and are unpacked whenever they compute.

Owns `PackedLinear` and which layers of a model become ones: the linear layers of its repeated blocks, which are nearly
all of its bytes. Everything else is held in plain numbers: it is small, and some of it is read by the models' own code.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from .. import upstream
from ..checkpoint import Checkpoint
from ..eager import eager
from ..quantised import FP8_DTYPES
from ..storage import AS_STORED, TORCHAO_CHOICES, Storage
from .packing import Packing
from .stored import Slice, StoredWeight, read_packings


class PackedLinear(nn.Module):
    """A linear layer over packed bytes: `weight` uint8 [out, bytes of a row].

    The bytes are unpacked to `dtype` exactly as when a file is unpacked while it is loaded, so both have equal bits.
    """

    scale: Tensor | None
    patched: nn.Module | None
    """Called with the unpacked weight in float32, returns it with the patches that are on it."""

    def __init__(self, linear: nn.Linear, packing: Packing, dtype: torch.dtype) -> None:
        """From a linear layer, or a rank's slice of one, on the meta device."""
        super().__init__()
        rows, columns = linear.weight.shape
        stored = torch.empty(rows, packing.row_bytes(columns), dtype=torch.uint8, device="meta")
        self.weight = nn.Parameter(stored, requires_grad=False)
        self.bias = linear.bias
        self.packing = packing
        self.dtype = dtype
        self.in_features, self.out_features = linear.in_features, linear.out_features
        scale = None if packing.scale is None else torch.tensor(packing.scale, dtype=torch.float32)
        self.register_buffer("scale", scale, persistent=False)
        self.register_module("patched", None)
        self._is_patched = False

    def unpack(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """The weight [out, in], or a part of it, from its bytes and without patches."""
        return self.packing.unpack(stored, dtype, self.scale)

    def unpacked(self) -> Tensor:
        """The weight [out, in] in the compute dtype, as it is computed with."""
        return self._patched_weight() if self._is_patched else self.unpack(self.weight, self.dtype)

    def patch(self, patched: nn.Module | None) -> None:
        """Puts patches on, or takes them off."""
        self.patched = patched
        self._is_patched = patched is not None

    @eager
    def _patched_weight(self) -> Tensor:
        """A compiled block sees only that there are patches: other ones are no reason to compile it again."""
        assert self.patched is not None
        patched: Tensor = self.patched(self.unpack(self.weight, torch.float32))
        return patched.to(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """As `nn.Linear`."""
        return nn.functional.linear(x, self.unpacked(), self.bias)


def block_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers inside the repeated blocks, by name."""
    blocks = {id(block) for block in upstream.repeated_blocks(model)}
    found: dict[str, nn.Linear] = {}
    for prefix, block in model.named_modules():
        if id(block) in blocks:
            for name, module in block.named_modules():
                if isinstance(module, nn.Linear):
                    found[f"{prefix}.{name}"] = module
    return found


class Held:
    """How the weights of one model are held while it runs, where that is not in plain numbers."""

    def __init__(self, packings: Mapping[str, Packing], kind: str, linears: Collection[str]) -> None:
        self._packings = packings
        self._kind = kind
        self._linears = linears

    def is_packed(self, name: str) -> bool:
        """Whether the weight of that name is the bytes of a `PackedLinear`."""
        return name in self._packings

    def source(self, source: Any, name: str, dtype: torch.dtype) -> Slice:
        """`source`, a weight of the checkpoint, in the numbers (of `dtype`) or the bytes that are held of it."""
        if name not in self._packings:
            if isinstance(source, StoredWeight):
                source.dtype = dtype
            return cast(Slice, source)
        return _Bytes(source) if self._kind == AS_STORED else _Cast(source, self._packings[name])

    def meta_source(self, weight: Tensor, name: str) -> Any:
        """What a part of the meta parameter `weight` is cut out of, counted in numbers as in the checkpoint."""
        return _MetaBytes(weight, self._packings[name]) if name in self._packings else weight

    def finish(self, model: nn.Module, name: str) -> None:
        """After the weight of that name has come to its place."""
        if self._kind in TORCHAO_CHOICES and name.removesuffix(".weight") in self._linears:
            quantise_linear(model.get_submodule(name.removesuffix(".weight")), self._kind)


def hold_packed(model: nn.Module, checkpoint: Checkpoint, storage: Storage) -> Held:
    """Prepares a model on the meta device for how `storage` holds the blocks' linear layers."""
    linears = block_linears(model)
    if storage.kind in FP8_DTYPES:
        packings = dict.fromkeys((f"{name}.weight" for name in linears), Packing(storage.kind))
    elif storage.kind == AS_STORED:
        known = read_packings(checkpoint)
        names = [f"{name}.weight" for name in linears]
        packings = {name: known[name] for name in names if name in known and known[name].is_packed}
    else:
        packings = {}
    for name, packing in packings.items():
        path, _, attribute = name.removesuffix(".weight").rpartition(".")
        layer = PackedLinear(linears[name.removesuffix(".weight")], packing, getattr(torch, storage.dtype))
        setattr(model.get_submodule(path), attribute, layer)
    return Held(packings, storage.kind, set(linears))


class _Bytes:
    """The bytes of a stored weight."""

    def __init__(self, source: StoredWeight) -> None:
        self._source = source

    def __getitem__(self, index: Any) -> Tensor:
        return self._source.stored(index).view(torch.uint8)

    def get_shape(self) -> list[int]:
        """In numbers; what is cut is counted in them too."""
        return self._source.get_shape()


class _MetaBytes:
    """The bytes of a packed parameter on the meta device."""

    def __init__(self, weight: Tensor, packing: Packing) -> None:
        self._weight = weight
        self._packing = packing

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        rows, *columns = index
        numbers, size = self._packing.block
        parts = [self._packing.columns(part, self._weight.shape[1] // size * numbers) for part in columns]
        return self._weight[tuple([rows, *parts])]


class _Cast:
    """The bytes of a plain weight that is cast to fp8, without a scale, as ComfyUI does; what is beyond fp8's range
    becomes its largest number (a cast alone would make it no number at all)."""

    def __init__(self, source: Slice, packing: Packing) -> None:
        self._source = source
        self._dtype = getattr(torch, packing.kind)

    def __getitem__(self, index: Any) -> Tensor:
        most = torch.finfo(self._dtype).max
        return self._source[index].clamp(-most, most).to(self._dtype).view(torch.uint8)

    def get_shape(self) -> list[int]:
        """As the weight's."""
        return self._source.get_shape()


def quantise_linear(linear: nn.Module, kind: str) -> None:
    """Quantises the weight of a linear layer with torchao, weight-only: activations stay in the compute dtype."""
    from torchao import quantization  # takes seconds to import, and few models need it

    config = quantization.Int8WeightOnlyConfig() if kind == "torchao_int8" else quantization.Float8WeightOnlyConfig()
    quantization.quantize_(linear, config)
