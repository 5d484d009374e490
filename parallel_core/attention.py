"""Context-parallel attention (Ulysses): a rank holds some tokens of all heads and attends over all tokens of some.

Owns who holds which tokens, the exchanges and the uneven gather. Any lengths (also fewer tokens than ranks) and any
number of heads (also fewer than ranks) are ordinary input, and nothing is padded for an attention. Inside it the
tokens are in the order they have on one rank, so that every head sums the same numbers in the same order: results are
bit-equal. Sizes follow from the whole lengths, once per forward; none are exchanged. The same code runs on gloo and
NCCL. Does not know families, plans or how it is plugged into diffusers.

Ulysses: Jacobs et al., "DeepSpeed Ulysses", arXiv:2309.14509.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Kernel = Callable[[Tensor, Tensor, Tensor], Tensor]


def split_sizes(length: int, num_ranks: int) -> list[int]:
    """How `torch.tensor_split` shares `length` items out: the first `length % num_ranks` ranks hold one more."""
    base, extra = divmod(length, num_ranks)
    return [base + (rank < extra) for rank in range(num_ranks)]


@dataclass(frozen=True)
class Layout:
    """Who holds which tokens of a joint sequence whose segments (text, image) are each shared out by themselves."""

    length: int
    tokens: tuple[int, ...]
    """Per rank: how many it holds of all segments together."""
    by_sequence: tuple[tuple[int, int, int], ...]
    """The joint sequence from first to last token: (rank, offset in what that rank holds, count)."""
    by_rank: tuple[tuple[tuple[int, int], ...], ...]
    """Per rank, for each segment: (offset in the joint sequence, count)."""


@lru_cache(maxsize=64)
def make_layout(lengths: tuple[int, ...], num_ranks: int) -> Layout:
    """The layout of segments of these whole `lengths`, in the order in which attention joins them."""
    by_sequence: list[tuple[int, int, int]] = []
    by_rank: list[list[tuple[int, int]]] = [[] for _ in range(num_ranks)]
    tokens = [0] * num_ranks
    position = 0
    for length in lengths:
        for rank, count in enumerate(split_sizes(length, num_ranks)):
            by_sequence.append((rank, tokens[rank], count))
            by_rank[rank].append((position, count))
            tokens[rank] += count
            position += count
    return Layout(position, tuple(tokens), tuple(by_sequence), tuple(map(tuple, by_rank)))


class SequenceParallel:
    """One model's sequence over the ranks of `group`: split on the way in, attended jointly, gathered on the way out.

    A segment is a named part of the sequence that is shared out by itself. `begin` comes first in every forward.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.num_ranks = dist.get_world_size(group)
        self._segments: Mapping[str, int] = {}
        self._layout = make_layout((), self.num_ranks)

    def begin(self, segments: Mapping[str, int]) -> None:
        """`segments`: whole token count of each segment, in the order in which attention joins them."""
        self._segments = segments
        self._layout = make_layout(tuple(segments.values()), self.num_ranks)

    def split(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's part of a segment along `dim`; empty where there are fewer tokens than ranks.

        Contiguous, as the whole is: torch's linear rounds strided input differently (it adds the bias apart).
        """
        return tensor.tensor_split(self.num_ranks, dim)[self.rank].contiguous()

    def gather(self, tensor: Tensor, dim: int, segment: str) -> Tensor:
        """The inverse of `split`, on every rank: the whole segment from the ranks' parts along `dim`."""
        sizes = split_sizes(self._segments[segment], self.num_ranks)
        if tensor.shape[dim] != sizes[self.rank]:
            raise ValueError(
                f"Rank {self.rank} of {self.num_ranks} has an output of shape {tuple(tensor.shape)}; expected its "
                f"share of {segment}, {sizes[self.rank]} of {self._segments[segment]} tokens, in dim {dim}."
            )
        local = tensor.movedim(dim, 0)
        longest = sizes[0]
        if sizes[-1] == longest:
            padded = local.contiguous()
        else:  # gloo cannot gather uneven parts; the padding is never read
            padded = local.new_empty(longest, *local.shape[1:])
            padded[: sizes[self.rank]] = local
        gathered = padded.new_empty(self.num_ranks * longest, *local.shape[1:])
        dist.all_gather_into_tensor(gathered, padded, group=self.group)
        if sizes[-1] != longest:
            parts = torch.chunk(gathered, self.num_ranks)
            gathered = torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
        return gathered.movedim(0, dim).contiguous()

    def attend(self, query: Tensor, key: Tensor, value: Tensor, kernel: Kernel) -> Tensor:
        """Attention of this rank's tokens over all tokens.

        query, key, value: (batch, this rank's tokens, heads, head_dim); returns the same shape. `kernel` maps three
        (batch, all tokens, this rank's heads, head_dim) to one of that shape.
        """
        layout = self._layout
        if not query.shape == key.shape == value.shape or query.shape[1] != layout.tokens[self.rank]:
            raise ValueError(
                f"Ulysses attention got query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)} "
                f"on rank {self.rank} of {self.num_ranks}; expected three equal shapes with {layout.tokens[self.rank]} "
                f"tokens in dim 1, this rank's share of {dict(self._segments)}."
            )
        heads = split_sizes(query.shape[2], self.num_ranks)
        joint = self._to_heads(query, key, value, layout, heads)
        out = kernel(*joint) if heads[self.rank] else joint[0]
        return self._to_tokens(out, layout, heads)

    def _to_heads(self, query: Tensor, key: Tensor, value: Tensor, layout: Layout, heads: list[int]) -> Tensor:
        """Three of (batch, own tokens, all heads, dim) -> (3, batch, all tokens, own heads, dim), in one exchange."""
        batch, tokens, _, dim = query.shape
        own_heads = heads[self.rank]
        send_sizes = [3 * batch * tokens * count * dim for count in heads]
        receive_sizes = [3 * batch * count * own_heads * dim for count in layout.tokens]
        send = query.new_empty(sum(send_sizes))
        by_rank = [torch.split(tensor, heads, dim=2) for tensor in (query, key, value)]
        for rank, message in enumerate(torch.split(send, send_sizes)):
            torch.stack([parts[rank] for parts in by_rank], out=message.view(3, batch, tokens, heads[rank], dim))
        blocks = [
            message.view(3 * batch, count, own_heads * dim)
            for message, count in zip(self._exchange(send, send_sizes, receive_sizes), layout.tokens, strict=True)
        ]
        joint = torch.cat([blocks[rank].narrow(1, offset, count) for rank, offset, count in layout.by_sequence], dim=1)
        return joint.view(3, batch, layout.length, own_heads, dim)

    def _to_tokens(self, out: Tensor, layout: Layout, heads: list[int]) -> Tensor:
        """(batch, all tokens, own heads, dim) -> (batch, own tokens, all heads, dim)."""
        batch, _, own_heads, dim = out.shape
        tokens = layout.tokens[self.rank]
        send_sizes = [batch * count * own_heads * dim for count in layout.tokens]
        receive_sizes = [batch * tokens * count * dim for count in heads]
        send = out.new_empty(sum(send_sizes))
        for rank, message in enumerate(torch.split(send, send_sizes)):
            parts = [out.narrow(1, offset, count) for offset, count in layout.by_rank[rank]]
            torch.cat(parts, dim=1, out=message.view(batch, layout.tokens[rank], own_heads, dim))
        blocks = [
            message.view(batch, tokens, count, dim)
            for message, count in zip(self._exchange(send, send_sizes, receive_sizes), heads, strict=True)
        ]
        return torch.cat(blocks, dim=2)

    def _exchange(self, send: Tensor, send_sizes: list[int], receive_sizes: list[int]) -> tuple[Tensor, ...]:
        """Sends one message to every rank, of `send_sizes` elements, and returns one from every rank."""
        received = send.new_empty(sum(receive_sizes))
        dist.all_to_all_single(received, send, receive_sizes, send_sizes, group=self.group)
        return torch.split(received, receive_sizes)


def context_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    *,
    forward_op: Callable[..., Tensor],
    backward_op: Callable[..., Any],
    _parallel_config: object,
) -> Tensor:
    """What stands in for diffusers' context-parallel attention; see `upstream.replace_context_attention`.

    `forward_op`, the kernel of the chosen backend, runs on this rank's heads as it would on one rank. There is no
    backward. Raises ValueError for a mask, causal or grouped attention, and a configuration that is not ours.
    """
    if not isinstance(_parallel_config, SequenceParallel):
        raise ValueError(
            f"Context-parallel attention was set up by {type(_parallel_config).__name__}, expected SequenceParallel: "
            "diffusers' own is wrong for uneven lengths and masks. Use apply_context."
        )
    if attn_mask is not None:
        raise ValueError(
            f"Ulysses attention got a mask of shape {tuple(attn_mask.shape)}, expected none: masks would have to be "
            "shared out with the tokens. Run this model with ulysses 1."
        )
    if is_causal or enable_gqa or return_lse or dropout_p:
        raise ValueError(
            f"Ulysses attention got is_causal={is_causal}, enable_gqa={enable_gqa}, return_lse={return_lse}, "
            f"dropout_p={dropout_p}; expected plain attention. Run this model with ulysses 1."
        )

    def kernel(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return forward_op(None, query, key, value, scale=scale, _save_ctx=False)

    return _parallel_config.attend(query, key, value, kernel)
