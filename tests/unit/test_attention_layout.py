"""Who holds which tokens: the arithmetic of `parallel_core.attention`, without ranks."""

from __future__ import annotations

import pytest
import torch

from parallel_core.attention import make_layout, split_sizes


@pytest.mark.parametrize("length", [0, 1, 3, 4, 77, 512])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7])
def test_sizes_are_those_of_tensor_split(length: int, num_ranks: int) -> None:
    parts = torch.arange(length).tensor_split(num_ranks)
    assert split_sizes(length, num_ranks) == [len(part) for part in parts]


@pytest.mark.parametrize("lengths", [(1, 25), (77, 63), (16, 16), (40,), (5, 0, 7)])
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 5])
def test_the_layout_undoes_the_split(lengths: tuple[int, ...], num_ranks: int) -> None:
    segments = torch.arange(sum(lengths)).split(list(lengths))
    held = [torch.cat(parts) for parts in zip(*(segment.tensor_split(num_ranks) for segment in segments), strict=True)]
    layout = make_layout(lengths, num_ranks)
    assert layout.tokens == tuple(len(tokens) for tokens in held)
    joined = torch.cat([held[rank][offset : offset + count] for rank, offset, count in layout.by_sequence])
    assert joined.tolist() == list(range(layout.length)) == list(range(sum(lengths)))
    for tokens, parts in zip(held, layout.by_rank, strict=True):
        assert [token for start, count in parts for token in range(start, start + count)] == tokens.tolist()
