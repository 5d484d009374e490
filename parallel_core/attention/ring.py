"""Ring attention: keys and values pass from rank to rank while every rank attends with its own queries.

Owns the rotation and the merging of partial results. The next chunk is on its way while the present one is worked on.
Liu et al., "Ring Attention with Blockwise Transformers", arXiv:2310.01889. Knows no layout but the chunks' sizes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .kernels import RingKernel
from .masks import ChunkMask


def ring_attention(
    query: Tensor,
    key_value: Tensor,
    sizes: Sequence[int],
    masks: Sequence[ChunkMask],
    kernel: RingKernel,
    *,
    scale: float | None,
    merge_dtype: torch.dtype,
    group: dist.ProcessGroup,
) -> Tensor:
    """Attention of `query` over the keys of all ranks of `group`.

    query: (batch, own tokens, heads, dim). key_value: (2, batch, own keys, heads, dim), contiguous. `sizes` and `masks`
    per rank: its number of keys and which of them count. Partial results are added up in `merge_dtype`. Returns the
    shape of `query`; a row without any key gives zeros, as torch's attention does.
    """
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    if sizes[rank] == 0:  # a key that nobody attends to: every rank takes part in every transfer
        key_value = key_value.new_zeros(2, key_value.shape[1], 1, *key_value.shape[3:])
    merged: Tensor | None = None
    merged_lse: Tensor | None = None
    for step in range(num_ranks):
        owner = (rank - step) % num_ranks
        following = None
        transfers: list[dist.Work] = []
        if step + 1 < num_ranks:
            following = key_value.new_empty(2, key_value.shape[1], max(1, sizes[owner - 1]), *key_value.shape[3:])
            transfers = _pass_on(key_value, following, group)
        if query.numel() and sizes[owner]:
            output, lse = _attend(query, key_value, masks[owner], kernel, scale)
            if merged is None or merged_lse is None:
                merged, merged_lse = output.to(merge_dtype), lse
            else:
                merged, merged_lse = _merge(merged, merged_lse, output.to(merge_dtype), lse)
        for transfer in transfers:
            transfer.wait()
        if following is not None:
            key_value = following
    return torch.zeros_like(query) if merged is None else merged.to(query.dtype)


def _pass_on(send: Tensor, receive: Tensor, group: dist.ProcessGroup) -> list[dist.Work]:
    """Starts sending to the next rank and receiving from the one before; nothing where the ranks have no heads."""
    if not send.numel():
        return []
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    send_to = dist.P2POp(dist.isend, send, dist.get_global_rank(group, (rank + 1) % num_ranks), group)
    receive_from = dist.P2POp(dist.irecv, receive, dist.get_global_rank(group, (rank - 1) % num_ranks), group)
    return dist.batch_isend_irecv([send_to, receive_from])


def _attend(
    query: Tensor, key_value: Tensor, mask: ChunkMask, kernel: RingKernel, scale: float | None
) -> tuple[Tensor, Tensor]:
    output, lse = kernel(query, key_value[0], key_value[1], mask.mask, scale)
    if mask.dead is not None:
        dead = mask.dead.transpose(1, 2)  # (batch, 1, heads)
        output = output.masked_fill(dead.unsqueeze(-1), 0.0)
        lse = lse.masked_fill(dead, -torch.inf)
    return output, lse


def _merge(output: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Two partial results as one: their mean weighted by exp(lse), with weights that cannot overflow.

    The weight of `other` is exp(b) / (exp(a) + exp(b)) = sigmoid(b - a); where both are -inf nothing was attended to.
    """
    weight = torch.sigmoid(other_lse - lse).nan_to_num_(0.0).to(output.dtype)
    return torch.lerp(output, other, weight.unsqueeze(-1)), torch.logaddexp(lse, other_lse)
