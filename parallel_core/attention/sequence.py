"""One model's sequence over the ranks of ring x ulysses, and the function that diffusers' attention calls for it.

Owns the sharing out and the gathering of tokens, the masks of a forward, and which exchange an attention takes. Sizes
follow from the whole lengths, once per forward; none are exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..eager import eager
from .kernels import RingKernel, native_ring_kernel
from .layout import Layout, make_layout, split_sizes
from .masks import ChunkMask, as_key_mask, chunk_masks
from .ring import ring_attention
from .ulysses import to_heads, to_tokens

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""(query, key, value, mask) -> output; (batch, tokens, heads, dim), the mask (batch or 1, heads or 1, 1, tokens)."""


class SequenceParallel:
    """Tokens shared out over ring x ulysses ranks: split on the way in, attended jointly, gathered on the way out.

    A segment is a named part of the sequence that is shared out by itself. `begin` comes first in every forward.
    """

    def __init__(
        self,
        ring: dist.ProcessGroup,
        ulysses: dist.ProcessGroup,
        *,
        merge_in_fp32: bool = True,
        kernel_returns_lse: bool = False,
    ) -> None:
        """`ring` and `ulysses` are this rank's groups along both axes, of one rank where the axis is not used.

        `merge_in_fp32`: partial results of the ring are added up in float32 even where the model computes in 16 bits.
        `kernel_returns_lse`: the attention backend's own kernel gives the log-sum-exp; else torch's kernels are used in
        the ring.
        """
        self._ring, self._ulysses = ring, ulysses
        self._ring_rank, self._num_ring = dist.get_rank(ring), dist.get_world_size(ring)
        self._ulysses_rank, self._num_ulysses = dist.get_rank(ulysses), dist.get_world_size(ulysses)
        self._merge_in_fp32 = merge_in_fp32
        self.kernel_returns_lse = kernel_returns_lse
        self._segments: Mapping[str, int] = {}
        self._layout: Layout = make_layout((), 1, 1)
        self._own: list[int] = []
        self._shown: list[int] = []
        """Tokens of each segment that this rank holds, and that the model sees: see `split`."""
        self._mask: Tensor | None = None
        self._chunk_masks: tuple[ChunkMask, ...] = ()

    @property
    def num_ranks(self) -> int:
        """ring x ulysses."""
        return self._num_ring * self._num_ulysses

    @property
    def rank(self) -> int:
        """This rank's place among them, ulysses innermost."""
        return self._ring_rank * self._num_ulysses + self._ulysses_rank

    # -- a forward -------------------------------------------------------------------------------------------------

    def begin(self, segments: Mapping[str, int], masks: Mapping[str, Tensor | None] | None = None) -> None:
        """`segments`: whole token count of each segment, in the order in which attention joins them.

        `masks`: for some segments, which of their tokens may be attended to: (batch, tokens), True or nonzero.
        """
        self._segments = segments
        self._layout = make_layout(tuple(segments.values()), self._num_ring, self._num_ulysses)
        self._own = [split_sizes(length, self.num_ranks)[self.rank] for length in segments.values()]
        self._shown = [own or min(1, length) for own, length in zip(self._own, segments.values(), strict=True)]
        self._mask = _joint_mask(segments, masks or {})
        self._chunk_masks = chunk_masks(self._mask, self._layout) if self._num_ring > 1 else ()

    def split(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's part of a segment along `dim`; where there are fewer tokens than ranks, a token for show.

        Models do not take a sequence of no tokens. `attend` and `gather` leave such a token out: nobody sees it.
        Contiguous, as the whole is: torch's linear rounds strided input differently (it adds the bias apart).
        """
        part = tensor.tensor_split(self.num_ranks, dim)[self.rank]
        if part.shape[dim] == 0 < tensor.shape[dim]:
            part = tensor.narrow(dim, 0, 1)
        return part.contiguous()

    def gather(self, tensor: Tensor, dim: int, segment: str) -> Tensor:
        """The inverse of `split`, on every rank: the whole segment from the ranks' parts along `dim`."""
        shares = split_sizes(self._segments[segment], self.num_ranks)
        if tensor.shape[dim] == 1 > shares[self.rank]:
            tensor = tensor.narrow(dim, 0, 0)
        if tensor.shape[dim] != shares[self.rank]:
            raise ValueError(
                f"Rank {self.rank} of {self.num_ranks} has an output of shape {tuple(tensor.shape)}; expected its "
                f"share of {segment}, {shares[self.rank]} of {self._segments[segment]} tokens, in dim {dim}."
            )
        rows = [shares[start : start + self._num_ulysses] for start in range(0, self.num_ranks, self._num_ulysses)]
        local = tensor.movedim(dim, 0)
        chunk = _gather(local, rows[self._ring_rank], self._ulysses)
        return _gather(chunk, [sum(row) for row in rows], self._ring).movedim(0, dim).contiguous()

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        kernel: Kernel,
        ring_kernel: RingKernel,
        mask: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Attention of this rank's tokens over all tokens.

        query: (batch, this rank's tokens, heads, head_dim); key and value the same, or with fewer heads that divide the
        query's (grouped). Returns the query's shape. `kernel` attends over a whole sequence, `ring_kernel` over a part.
        `mask`, whole as `masks.as_key_mask` takes it, replaces that of `begin`.
        """
        chunk = self._layout.chunks[self._ring_rank]
        local = query
        query, key, value = (self._without_show(tensor) for tensor in (query, key, value))
        self._check(query, key, value, chunk.tokens[self._ulysses_rank])
        key, value = (_repeat_heads(tensor, query.shape[2]) for tensor in (key, value))
        heads = split_sizes(query.shape[2], self._num_ulysses)
        if self._num_ulysses > 1:
            joint = to_heads(query, key, value, chunk, heads, self._ulysses)
        else:
            joint = torch.stack([query, key, value])
        whole, parts = self._own_masks(mask, heads, query.shape[0])
        if self._num_ring > 1:
            out = ring_attention(
                joint[0],
                joint[1:],
                [other.length for other in self._layout.chunks],
                parts,
                ring_kernel,
                scale=scale,
                merge_dtype=torch.float32 if self._merge_in_fp32 and query.element_size() < 4 else query.dtype,
                group=self._ring,
            )
        elif heads[self._ulysses_rank]:
            out = kernel(joint[0], joint[1], joint[2], whole)
        else:
            out = joint[0]
        if self._num_ulysses > 1:
            out = to_tokens(out, chunk, heads, self._ulysses)
        return self._with_show(out, local)

    def _without_show(self, tensor: Tensor) -> Tensor:
        """The tokens that this rank really holds, of those that `split` gave it (dim 1)."""
        if self._own == self._shown or tensor.shape[1] != sum(self._shown):
            return tensor
        parts = tensor.split(self._shown, dim=1)
        return torch.cat([part[:, :count] for part, count in zip(parts, self._own, strict=True)], dim=1)

    def _with_show(self, out: Tensor, local: Tensor) -> Tensor:
        """The reverse of `_without_show`, for a tensor of the shape of `local`."""
        if out.shape == local.shape:
            return out
        parts = zip(out.split(self._own, dim=1), self._own, self._shown, strict=True)
        return torch.cat([part if own else torch.zeros_like(local[:, :shown]) for part, own, shown in parts], dim=1)

    def _own_masks(
        self, mask: Tensor | None, heads: list[int], batch: int
    ) -> tuple[Tensor | None, tuple[ChunkMask, ...]]:
        """The mask over the whole sequence and over each chunk, for this rank's heads."""
        if mask is None:
            return self._mask, self._chunk_masks
        mask = as_key_mask(mask, batch, self._layout.length)
        if mask.shape[1] != 1:
            mask = mask.split(heads, dim=1)[self._ulysses_rank]
        return mask, chunk_masks(mask, self._layout) if self._num_ring > 1 else ()

    def _check(self, query: Tensor, key: Tensor, value: Tensor, tokens: int) -> None:
        batch, length, heads, dim = query.shape
        fits = key.shape == value.shape == (batch, length, key.shape[2], dim) and heads % key.shape[2] == 0
        if not fits or length != tokens:
            raise ValueError(
                f"Context-parallel attention got query {tuple(query.shape)}, key {tuple(key.shape)}, value "
                f"{tuple(value.shape)} on rank {self.rank} of {self.num_ranks}; expected {tokens} tokens in dim 1 of "
                f"each, this rank's share of {dict(self._segments)}, and heads of the query in groups of equal size."
            )


def _joint_mask(segments: Mapping[str, int], masks: Mapping[str, Tensor | None]) -> Tensor | None:
    """(batch, 1, 1, all tokens) from the segments' masks, True for segments without one; None where none has one."""
    given = {name: mask for name, mask in masks.items() if mask is not None}
    if not given:
        return None
    some = next(iter(given.values()))
    parts = []
    for name, length in segments.items():
        part = given.get(name)
        if part is None:
            part = torch.ones(some.shape[0], length, dtype=torch.bool, device=some.device)
        elif part.shape != (some.shape[0], length):
            raise ValueError(f"The mask of {name} has shape {tuple(part.shape)}, expected {(some.shape[0], length)}.")
        parts.append(part.bool())
    return torch.cat(parts, dim=1)[:, None, None, :]


def _repeat_heads(tensor: Tensor, heads: int) -> Tensor:
    return tensor if tensor.shape[2] == heads else tensor.repeat_interleave(heads // tensor.shape[2], dim=2)


def _gather(local: Tensor, sizes: list[int], group: dist.ProcessGroup) -> Tensor:
    """Parts of `sizes` along dim 0 from the ranks of `group`, joined."""
    if len(sizes) == 1:
        return local
    rank, longest = dist.get_rank(group), max(sizes)
    if min(sizes) == longest:
        padded = local.contiguous()
    else:  # gloo cannot gather uneven parts; the padding is never read
        padded = local.new_empty(longest, *local.shape[1:])
        padded[: sizes[rank]] = local
    gathered = padded.new_empty(len(sizes) * longest, *local.shape[1:])
    dist.all_gather_into_tensor(gathered, padded, group=group)
    if min(sizes) == longest:
        return gathered
    parts = torch.chunk(gathered, len(sizes))
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


@eager
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
    forward_op: Callable[..., Any],
    backward_op: Callable[..., Any],
    _parallel_config: object,
) -> Tensor:
    """What stands in for diffusers' context-parallel attention; see `upstream.replace_context_attention`.

    `forward_op` is the kernel of the chosen backend. There is no backward. Grouped keys are repeated, so `enable_gqa`
    changes nothing. Raises ValueError for causal attention, dropout and a configuration that is not ours.
    """
    if not isinstance(_parallel_config, SequenceParallel):
        raise ValueError(
            f"Context-parallel attention was set up by {type(_parallel_config).__name__}, expected SequenceParallel: "
            "diffusers' own is wrong for uneven lengths and masks. Use apply_context."
        )
    if is_causal or return_lse or dropout_p:
        raise ValueError(
            f"Context-parallel attention got is_causal={is_causal}, return_lse={return_lse}, dropout_p={dropout_p}; "
            "expected plain attention. Run this model with ring 1 and ulysses 1."
        )

    def kernel(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        out: Tensor = forward_op(None, query, key, value, mask, scale=scale, _save_ctx=False)
        return out

    def ring_kernel(
        query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        out, lse = forward_op(None, query, key, value, mask, scale=scale, return_lse=True, _save_ctx=False)
        return out, lse

    return _parallel_config.attend(
        query,
        key,
        value,
        kernel=kernel,
        ring_kernel=ring_kernel if _parallel_config.kernel_returns_lse else native_ring_kernel,
        mask=attn_mask,
        scale=scale,
    )
