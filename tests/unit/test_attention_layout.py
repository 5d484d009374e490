"""Who holds which tokens: the arithmetic of `parallel_core.attention`, without ranks."""

from __future__ import annotations

import pytest
import torch

from parallel_core.attention.layout import make_layout, split_sizes


@pytest.mark.parametrize("length", [0, 1, 3, 4, 77, 512])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7])
def test_sizes_are_those_of_tensor_split(length: int, num_ranks: int) -> None:
    parts = torch.arange(length).tensor_split(num_ranks)
    assert split_sizes(length, num_ranks) == [len(part) for part in parts]


@pytest.mark.parametrize("lengths", [(1, 25), (77, 63), (16, 16), (40,), (5, 0, 7)])
@pytest.mark.parametrize(("ring", "ulysses"), [(1, 1), (1, 4), (2, 1), (2, 2), (3, 2), (5, 1)])
def test_the_layout_undoes_the_split(lengths: tuple[int, ...], ring: int, ulysses: int) -> None:
    segments = torch.arange(sum(lengths)).split(list(lengths))
    shares = [segment.tensor_split(ring * ulysses) for segment in segments]
    held = [torch.cat(parts) for parts in zip(*shares, strict=True)]
    layout = make_layout(lengths, ring, ulysses)
    found = []
    for position, chunk in enumerate(layout.chunks):
        row = held[position * ulysses : (position + 1) * ulysses]
        assert chunk.tokens == tuple(len(tokens) for tokens in row)
        joined = torch.cat([row[rank][offset : offset + count] for rank, offset, count in chunk.by_sequence])
        whole = torch.arange(layout.length)
        assert joined.tolist() == torch.cat([whole[start : start + count] for start, count in chunk.positions]).tolist()
        for tokens, parts in zip(row, chunk.by_rank, strict=True):
            assert torch.equal(torch.cat([joined[start : start + count] for start, count in parts]), tokens)
        found += joined.tolist()
    assert sorted(found) == list(range(layout.length)) == list(range(sum(lengths)))
