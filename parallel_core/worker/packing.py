"""How packed numbers become floating-point ones again: fp8, scaled or not, and GGUF's blocks.

Owns `Packing`. Knows neither files nor modules.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import upstream
from ..gguf_header import GGUF_BLOCKS
from ..quantised import FP8_DTYPES


@dataclass(frozen=True)
class Packing:
    """`kind`: an fp8 dtype or a GGUF type. `scale`: what the numbers are multiplied by; None for one."""

    kind: str
    scale: float | None = None

    @staticmethod
    def of(dtype: str, scale: float | None) -> Packing | None:
        """The packing of a stored dtype; None for plain numbers without a scale."""
        if dtype in FP8_DTYPES or dtype in GGUF_BLOCKS or scale is not None:
            return Packing(dtype, scale)
        return None

    @property
    def block(self) -> tuple[int, int]:
        """(numbers, bytes) that belong together along the last dimension."""
        return GGUF_BLOCKS.get(self.kind, (1, 1))

    @property
    def is_packed(self) -> bool:
        """Whether a layer can keep the numbers as they are stored: not those that are plain but for a scale."""
        return self.kind in FP8_DTYPES or self.kind in GGUF_BLOCKS

    def row_bytes(self, length: int) -> int:
        """Bytes of so many numbers."""
        numbers, size = self.block
        return length // numbers * size

    def holds_whole_blocks(self, part: slice, length: int) -> bool:
        """Whether a part of a row of `length` numbers begins and ends with a block."""
        start, stop, _ = part.indices(length)
        return start % self.block[0] == stop % self.block[0] == 0

    def columns(self, part: slice, length: int) -> slice:
        """Where the numbers of a part of a row of `length` numbers lie in it as it is stored."""
        numbers, size = self.block
        start, stop, _ = part.indices(length)
        assert self.holds_whole_blocks(part, length), "checked before anything is read"
        return slice(start // numbers * size, stop // numbers * size)

    def unpack(self, stored: Tensor, dtype: torch.dtype, scale: Tensor | None = None) -> Tensor:
        """The numbers in `dtype`, from their bytes (or from fp8). They are multiplied in float32 and rounded once.

        `scale`: the same number as a tensor, where this is a part of a graph that is compiled for many layers.
        """
        if self.kind in GGUF_BLOCKS:
            return upstream.unpack_gguf(stored, self.kind, dtype)
        if stored.dtype == torch.uint8:
            stored = stored.view(getattr(torch, self.kind))
        factor = scale if scale is not None else self.scale
        return stored.to(dtype) if factor is None else (stored.float() * factor).to(dtype)
