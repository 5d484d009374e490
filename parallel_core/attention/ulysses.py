"""The Ulysses exchange: some tokens of all heads on every rank <-> all tokens of some heads.

Owns the two all-to-all messages. Lengths and heads may be uneven and nothing is padded; heads stay together with the
tokens' order of the joint sequence, so that every head sums the same numbers in the same order as on one rank.
Jacobs et al., "DeepSpeed Ulysses", arXiv:2309.14509. The same code runs on gloo and NCCL.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from .layout import Chunk


def to_heads(
    query: Tensor, key: Tensor, value: Tensor, chunk: Chunk, heads: list[int], group: dist.ProcessGroup
) -> Tensor:
    """Three of (batch, own tokens, all heads, dim) -> (3, batch, chunk's tokens, own heads, dim), in one exchange.

    `heads`: how many each rank of `group` gets.
    """
    batch, tokens, _, dim = query.shape
    own_heads = heads[dist.get_rank(group)]
    send_sizes = [3 * batch * tokens * count * dim for count in heads]
    receive_sizes = [3 * batch * count * own_heads * dim for count in chunk.tokens]
    send = query.new_empty(sum(send_sizes))
    by_rank = [torch.split(tensor, heads, dim=2) for tensor in (query, key, value)]
    for rank, message in enumerate(torch.split(send, send_sizes)):
        torch.stack([parts[rank] for parts in by_rank], out=message.view(3, batch, tokens, heads[rank], dim))
    blocks = [
        message.view(3 * batch, count, own_heads * dim)
        for message, count in zip(_exchange(send, send_sizes, receive_sizes, group), chunk.tokens, strict=True)
    ]
    joint = torch.cat([blocks[rank].narrow(1, offset, count) for rank, offset, count in chunk.by_sequence], dim=1)
    return joint.view(3, batch, chunk.length, own_heads, dim)


def to_tokens(out: Tensor, chunk: Chunk, heads: list[int], group: dist.ProcessGroup) -> Tensor:
    """(batch, chunk's tokens, own heads, dim) -> (batch, own tokens, all heads, dim)."""
    batch, _, own_heads, dim = out.shape
    tokens = chunk.tokens[dist.get_rank(group)]
    send_sizes = [batch * count * own_heads * dim for count in chunk.tokens]
    receive_sizes = [batch * tokens * count * dim for count in heads]
    send = out.new_empty(sum(send_sizes))
    for rank, message in enumerate(torch.split(send, send_sizes)):
        parts = [out.narrow(1, offset, count) for offset, count in chunk.by_rank[rank]]
        torch.cat(parts, dim=1, out=message.view(batch, chunk.tokens[rank], own_heads, dim))
    blocks = [
        message.view(batch, tokens, count, dim)
        for message, count in zip(_exchange(send, send_sizes, receive_sizes, group), heads, strict=True)
    ]
    return torch.cat(blocks, dim=2)


def _exchange(
    send: Tensor, send_sizes: list[int], receive_sizes: list[int], group: dist.ProcessGroup
) -> tuple[Tensor, ...]:
    """Sends one message to every rank, of `send_sizes` elements, and returns one from every rank."""
    received = send.new_empty(sum(receive_sizes))
    dist.all_to_all_single(received, send, receive_sizes, send_sizes, group=group)
    return torch.split(received, receive_sizes)
