"""Key masks: which keys nobody attends to, and what a chunk of the ring needs of that.

Owns the reduction of attention masks to key masks and their cutting into chunks. A mask is whole on every rank: it is
never shared out, so nothing can be paired with the wrong tokens. Knows no process group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .layout import Layout


@dataclass(frozen=True)
class ChunkMask:
    """The part of a key mask that belongs to one chunk of the ring."""

    mask: Tensor | None
    """(batch or 1, heads or 1, 1, chunk's keys), boolean or additive; None where no key is masked. Rows in which every
    key is masked are let through here, since kernels disagree on what comes out of them; see `dead`."""
    dead: Tensor | None
    """(batch or 1, heads or 1, 1) boolean: True where every key of the chunk is masked. None where that is nowhere."""


def as_key_mask(mask: Tensor, batch: int, length: int) -> Tensor:
    """`mask` as (batch or 1, heads or 1, 1, length), boolean or additive.

    Accepts (batch, keys), (batch, 1 or queries, keys) and (batch, heads, 1 or queries, keys), as diffusers' dispatch
    does. Raises ValueError for a mask over other keys than all `length` of them, and for one that differs from query to
    query: the queries are shared out, and such a mask would have to be too.
    """
    shape = tuple(mask.shape)
    if mask.shape[-1] != length or mask.shape[0] not in (1, batch):
        raise ValueError(
            f"Context-parallel attention got a mask of shape {shape}, expected {batch} rows and all {length} keys of "
            "the joint sequence: a mask stays whole on every rank."
        )
    while mask.ndim < 4:
        mask = mask.unsqueeze(1)
    if not torch.equal(mask, mask[:, :, :1].expand_as(mask)):
        raise ValueError(
            f"Context-parallel attention got a mask of shape {shape} that differs from query to query, expected a mask "
            "over keys alone. Run this model with ring 1 and ulysses 1."
        )
    return mask[:, :, :1]


def chunk_masks(mask: Tensor | None, layout: Layout) -> tuple[ChunkMask, ...]:
    """The mask of every chunk.

    Looks at the mask's values, which on a GPU waits for it: done once per forward, not per layer.
    """
    if mask is None:
        return tuple(ChunkMask(None, None) for _ in layout.chunks)
    parts = [
        torch.cat([mask.narrow(-1, start, count) for start, count in chunk.positions], dim=-1)
        for chunk in layout.chunks
    ]
    return tuple(_chunk_mask(part) for part in parts)


def _chunk_mask(part: Tensor) -> ChunkMask:
    closed = ~part if part.dtype == torch.bool else torch.isneginf(part)
    dead = closed.all(-1)
    has_dead = bool(dead.any())
    if has_dead:
        opened = True if part.dtype == torch.bool else 0.0
        part = part.masked_fill(dead.unsqueeze(-1), opened)
    is_open = part.all() if part.dtype == torch.bool else ~part.any()
    return ChunkMask(None if bool(is_open) else part, dead if has_dead else None)
