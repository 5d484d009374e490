"""Who holds which tokens of a joint sequence, for ring x ulysses ranks.

Owns the arithmetic of uneven shares; every size that an exchange needs follows from it, so that none is exchanged.
Knows no tensor and no process group.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache


def split_sizes(length: int, num_ranks: int) -> list[int]:
    """How `torch.tensor_split` shares `length` items out: the first `length % num_ranks` ranks hold one more."""
    base, extra = divmod(length, num_ranks)
    return [base + (rank < extra) for rank in range(num_ranks)]


@dataclass(frozen=True)
class Chunk:
    """What the ulysses ranks of one ring position hold together, in the order of the joint sequence."""

    length: int
    tokens: tuple[int, ...]
    """Per ulysses rank: how many it holds of all segments together."""
    by_sequence: tuple[tuple[int, int, int], ...]
    """The chunk from first to last token: (ulysses rank, offset in what that rank holds, count)."""
    by_rank: tuple[tuple[tuple[int, int], ...], ...]
    """Per ulysses rank, for each segment: (offset in the chunk, count)."""
    positions: tuple[tuple[int, int], ...]
    """For each segment: (offset in the whole joint sequence, count)."""


@dataclass(frozen=True)
class Layout:
    """A joint sequence whose segments (text, image) are each shared out by themselves over all ranks."""

    length: int
    chunks: tuple[Chunk, ...]
    """One per ring position."""


@lru_cache(maxsize=64)
def make_layout(lengths: tuple[int, ...], ring: int, ulysses: int) -> Layout:
    """The layout of segments of these whole `lengths`, in the order in which attention joins them.

    Shares are dealt to ring x ulysses ranks, ulysses innermost: a chunk has consecutive tokens of every segment.
    """
    shares = [split_sizes(length, ring * ulysses) for length in lengths]
    starts = [sum(lengths[:index]) for index in range(len(lengths))]
    chunks = tuple(
        _make_chunk([share[position * ulysses : (position + 1) * ulysses] for share in shares],
                    [start + sum(share[: position * ulysses]) for start, share in zip(starts, shares, strict=True)])
        for position in range(ring)
    )  # fmt: skip
    return Layout(sum(lengths), chunks)


def _make_chunk(shares: list[list[int]], starts: list[int]) -> Chunk:
    """`shares`: per segment what each ulysses rank holds; `starts`: where the segments' parts begin in the whole."""
    num_ranks = len(shares[0]) if shares else 0
    by_sequence: list[tuple[int, int, int]] = []
    by_rank: list[list[tuple[int, int]]] = [[] for _ in range(num_ranks)]
    tokens = [0] * num_ranks
    position = 0
    for share in shares:
        for rank, count in enumerate(share):
            by_sequence.append((rank, tokens[rank], count))
            by_rank[rank].append((position, count))
            tokens[rank] += count
            position += count
    positions = tuple((start, sum(share)) for start, share in zip(starts, shares, strict=True))
    return Chunk(position, tuple(tokens), tuple(by_sequence), tuple(map(tuple, by_rank)), positions)
