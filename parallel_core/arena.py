"""Shared memory for tensors: one side writes, the others look.

An arena is an anonymous memory file (memfd: no name, nothing left behind, not bound by the size of /dev/shm). Its owner
writes tensors into slots; readers map the same file and look at them. It grows by a new, larger mapping: an old one
stays alive as long as a tensor over it does, since resizing a mapping under a live tensor would crash.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping

import torch

from .protocol import ProtocolError, TensorRef

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}
_ALIGN = 64
_FIRST_BYTES = 1 << 20


def dtype_name(dtype: torch.dtype) -> str:
    """ "float32" for torch.float32; only dtypes that may cross."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ProtocolError(f"Tensors of {dtype} cannot be sent to a rank; known: {', '.join(DTYPES)}.")
    return name


def create_memory(name: str) -> int:
    """A new, empty memory file; returns its descriptor, which only children that are given it inherit."""
    return os.memfd_create(name, os.MFD_CLOEXEC)


def _view(mapping: mmap.mmap, dtype: str, shape: tuple[int, ...], offset: int) -> torch.Tensor:
    torch_dtype = DTYPES.get(dtype)
    if torch_dtype is None:
        raise ProtocolError(f"Unknown dtype {dtype!r} in a tensor reference.")
    count = 1
    for size in shape:
        if size < 0:
            raise ProtocolError(f"A tensor reference has the negative size {size}.")
        count *= size
    if count == 0:
        return torch.empty(shape, dtype=torch_dtype)
    if offset < 0 or offset + count * torch_dtype.itemsize > len(mapping):
        raise ProtocolError(f"A tensor of {count} {dtype} at {offset} is outside the arena of {len(mapping)} bytes.")
    return torch.frombuffer(mapping, dtype=torch_dtype, count=count, offset=offset).view(shape)


class ArenaWriter:
    """The owner's side: puts tensors into slots and says where they are."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._mapping: mmap.mmap | None = None
        self._used = 0
        self._slots: dict[str, tuple[int, int]] = {}  # name -> (offset, capacity)
        self._refs: dict[str, TensorRef] = {}
        self._version = 0

    @property
    def size(self) -> int:
        """Bytes of the memory file."""
        return len(self._mapping) if self._mapping is not None else 0

    def close(self) -> None:
        """Closes the memory file; its bytes go when the last mapping does."""
        os.close(self._descriptor)
        self._descriptor = -1  # the number may soon be another file's

    def write(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorRef]:
        """Writes each tensor into the slot of its name and returns where it is.

        A tensor whose bytes are already there is not written again and keeps its version. Tensors may be on any device.
        """
        self._reserve(tensors)
        return {name: self._put(name, tensor) for name, tensor in tensors.items()}

    def _reserve(self, tensors: Mapping[str, torch.Tensor]) -> None:
        missing = {
            name: _aligned(tensor.nbytes)
            for name, tensor in tensors.items()
            if self._slots.get(name, (0, -1))[1] < tensor.nbytes
        }
        if not missing:
            return
        if self._used + sum(missing.values()) > self.size:
            # Nothing of an earlier request is looked at any more, so start over with what this one needs.
            self._slots.clear()
            self._refs.clear()
            self._used = 0
            missing = {name: _aligned(tensor.nbytes) for name, tensor in tensors.items()}
            self._grow(sum(missing.values()))
        for name, capacity in missing.items():
            self._slots[name] = (self._used, capacity)
            self._refs.pop(name, None)
            self._used += capacity

    def _grow(self, needed: int) -> None:
        if needed <= self.size:
            return
        size = max(_FIRST_BYTES, self.size)
        while size < needed:
            size *= 2
        os.ftruncate(self._descriptor, size)
        self._mapping = mmap.mmap(self._descriptor, size)

    def _put(self, name: str, tensor: torch.Tensor) -> TensorRef:
        source = tensor.detach().to("cpu").contiguous()
        dtype, shape = dtype_name(source.dtype), tuple(source.shape)
        if source.numel() == 0 or self._mapping is None:
            return TensorRef(dtype=dtype, shape=shape, offset=0, version=0)
        offset = self._slots[name][0]
        place = _view(self._mapping, dtype, shape, offset)
        known = self._refs.get(name)
        if known is not None and (known.dtype, known.shape) == (dtype, shape) and _same_bits(place, source):
            return known
        place.copy_(source)
        self._version += 1
        ref = TensorRef(dtype=dtype, shape=shape, offset=offset, version=self._version)
        self._refs[name] = ref
        return ref


class ArenaReader:
    """A reader's side: looks at tensors that the owner wrote."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._mapping: mmap.mmap | None = None

    def look(self, ref: TensorRef, size: int) -> torch.Tensor:
        """A CPU view of the tensor at `ref`; `size` is the arena's size as its owner states it.

        The view is valid until the owner writes again: clone it to keep it. Read-only by convention.
        """
        if self._mapping is None or len(self._mapping) < size:
            actual = os.fstat(self._descriptor).st_size
            if actual < size:
                raise ProtocolError(f"The arena is said to have {size} bytes, but it has {actual}.")
            if size == 0:
                return torch.empty(ref.shape, dtype=DTYPES[ref.dtype])
            self._mapping = mmap.mmap(self._descriptor, size)
        return _view(self._mapping, ref.dtype, ref.shape, ref.offset)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal byte for byte (so that NaN equals itself and 0.0 differs from -0.0)."""
    return torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))
