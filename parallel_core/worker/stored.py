"""Weights as they lie in files: any rows and columns of one, unpacked, or in the bytes that it is stored in.

Owns opening files and what is cut out of them: only that is read. Knows no family and no plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from ..checkpoint import Checkpoint, TensorInfo
from ..errors import UserError
from ..gguf_header import GGUF_BLOCKS, GgufHeader, parse_gguf
from .packing import Packing


class Slice(Protocol):
    """What can be cut out of one tensor before all of it is read: a safetensors slice, say."""

    def __getitem__(self, index: Any) -> Tensor: ...

    def get_shape(self) -> list[int]: ...


class File(Protocol):
    """An open file of weights."""

    def slice_of(self, name: str) -> Slice:
        """A stored tensor; of a packed one its bytes, [..., bytes of a row]."""


class _Safetensors:
    def __init__(self, path: Path, stack: ExitStack) -> None:
        self._source = stack.enter_context(safe_open(path, framework="pt"))

    def slice_of(self, name: str) -> Slice:
        found: Slice = self._source.get_slice(name)
        return found


class _Gguf:
    def __init__(self, path: Path, stack: ExitStack) -> None:
        self._header: GgufHeader = parse_gguf(path)
        self._bytes = np.memmap(path, mode="c")  # private pages: torch asks for an array that may be written to

    def slice_of(self, name: str) -> Slice:
        info, start = self._header.tensors[name], self._header.offsets[name]
        data = torch.from_numpy(self._bytes[start : start + info.num_bytes])
        if info.dtype in GGUF_BLOCKS:
            block, size = GGUF_BLOCKS[info.dtype]
            return Loaded(data.view(*info.shape[:-1], info.shape[-1] // block * size))
        return Loaded(data.view(getattr(torch, info.dtype)).view(info.shape))


class Loaded:
    """A tensor in the form of a safetensors slice."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __getitem__(self, index: Any) -> Tensor:
        return self._tensor[index]

    def get_shape(self) -> list[int]:
        """As a safetensors slice's."""
        return list(self._tensor.shape)


def open_file(path: Path, stack: ExitStack) -> File:
    """The file, open until `stack` ends."""
    return _Gguf(path, stack) if path.suffix == ".gguf" else _Safetensors(path, stack)


_CHUNK = 1 << 15
"""Numbers that are unpacked at once: what that takes beside the result does not grow with the weight, and stays in the
processor's cache."""


class StoredWeight:
    """One weight of a checkpoint, as a `Slice` of unpacked numbers: quantised ones come out as `dtype`."""

    def __init__(self, file: File, info: TensorInfo, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype
        self._info = info
        self._source = file.slice_of(info.stored_name)
        self._packing = Packing.of(info.dtype, _scale(file, info))

    def get_shape(self) -> list[int]:
        """In numbers."""
        return list(self._info.shape)

    def __getitem__(self, index: Any) -> Tensor:
        """`index`: a slice of rows, a tuple of slices, without steps, or ... for all of it."""
        index = slice(None) if index is ... else index
        if self._packing is None:
            return self.stored(index)
        columns = self._columns(index)
        if columns is None or self._packing.holds_whole_blocks(columns, self._info.shape[-1]):
            return self._unpack(self._packing, self.stored(index))
        return self._unpack(self._packing, self.stored(index[:-1]), columns)

    def _unpack(self, packing: Packing, stored: Tensor, columns: slice | None = None) -> Tensor:
        """The numbers of whole rows, or of these columns of them."""
        if stored.ndim < 2:
            return packing.unpack(stored, torch.float32).to(self.dtype)
        numbers, size = packing.block
        length = stored.shape[-1] // size * numbers
        wanted = range(length)[columns or slice(None)]
        result = torch.empty(*stored.shape[:-1], len(wanted), dtype=self.dtype)
        if not result.numel():  # a rank's part of shared weights can be nothing
            return result
        step = max(1, _CHUNK * stored.shape[0] * stored.shape[-1] // (stored.numel() * length))
        for rows, packed in zip(result.split(step), stored.split(step), strict=True):
            rows.copy_(packing.unpack(packed, torch.float32)[..., columns or slice(None)])
        return result

    def stored(self, index: Any) -> Tensor:
        """The same part in the bytes it is stored in; a part of a packed row must be whole blocks."""
        if not self._info.shape:
            return self._source[...]
        first, *rest = index if isinstance(index, tuple) else (index,)
        columns = self._columns(index)
        if columns is not None and self._packing is not None:
            rest[-1] = self._packing.columns(columns, self._info.shape[-1])
        start, stop, _ = first.indices(self._info.shape[0])
        pieces = [self._source[tuple([slice(begin, end), *rest])] for begin, end in self._rows(start, stop)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _columns(self, index: Any) -> slice | None:
        """What `index` takes of the last dimension, where that is not the first one and not all of it."""
        if not isinstance(index, tuple) or len(index) < max(2, len(self._info.shape)):
            return None
        columns: slice = index[-1]
        return columns

    def _rows(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """The stored rows that are the weight's rows from `start` to `stop`."""
        if self._info.rows is None:
            yield start, stop
            return
        position, found = 0, False
        for begin, end in self._info.rows:
            low, high = max(start, position), min(stop, position + end - begin)
            if low < high:
                found = True
                yield begin + low - position, begin + high - position
            position += end - begin
        if not found:
            yield self._info.rows[0][0], self._info.rows[0][0]


def _scale(file: File, info: TensorInfo) -> float | None:
    if not info.scale:
        return None
    scale = float(file.slice_of(info.scale)[...].item())
    if not math.isfinite(scale) or scale == 0:
        raise UserError(
            f"The scale {info.scale!r} in {info.file.name!r} is {scale}, with which its weights mean nothing. Use "
            "another copy of the file."
        )
    return scale


def from_files(checkpoint: Checkpoint) -> Iterator[tuple[str, StoredWeight]]:
    """Every weight of the checkpoint, one after the other; only what is cut out is read."""
    for path in checkpoint.files:
        with ExitStack() as stack:
            file = open_file(path, stack)
            for info in checkpoint.tensors.values():
                if info.file == path:
                    yield info.name, StoredWeight(file, info)


def read_packings(checkpoint: Checkpoint) -> dict[str, Packing]:
    """How the packed weights of the checkpoint are packed; reads their scales alone."""
    found: dict[str, Packing] = {}
    for path in checkpoint.files:
        with ExitStack() as stack:
            file = open_file(path, stack)
            for info in checkpoint.tensors.values():
                packing = Packing.of(info.dtype, _scale(file, info)) if info.file == path else None
                if packing is not None:
                    found[info.name] = packing
    return found
