"""Attention kernels that also return the log-sum-exp, which ring attention merges by.

Owns the choice among torch's own kernels, which its public function does not offer. Knows no process group.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

RingKernel = Callable[[Tensor, Tensor, Tensor, Tensor | None, float | None], tuple[Tensor, Tensor]]
"""(query, key, value, mask, scale) -> (output, log-sum-exp): (batch, tokens, heads, dim) each, the mask over keys as in
`masks.ChunkMask`, the log-sum-exp (batch, tokens, heads)."""

_FLASH_DTYPES = (torch.float16, torch.bfloat16)


def native_ring_kernel(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """A `RingKernel` over torch's own kernels.

    On a CPU its flash kernel. On a GPU the flash kernel where there is no mask, the numbers have 16 bits and the GPU is
    of compute capability 8.0 or newer, else the memory-efficient one.
    """
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    if query.device.type == "cpu":
        output, lse = _cpu(query, key, value, mask, scale)
    elif mask is None and query.dtype in _FLASH_DTYPES and _has_flash(query.device):
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, scale=scale)[:2]
    else:
        output, lse = _efficient(query, key, value, mask, scale)
    return output.transpose(1, 2), lse.transpose(1, 2)


@lru_cache
def _has_flash(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _cpu(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> tuple[Tensor, Tensor]:
    bias = None if mask is None else _additive(mask, query.dtype)
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, attn_mask=bias, scale=scale
    )
    return output, lse


def _efficient(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """The kernel wants a bias of the full shape whose rows start at multiples of 8 elements, and pads the lse."""
    bias = None
    if mask is not None:
        keys = key.shape[2]
        padded = torch.nn.functional.pad(_additive(mask, query.dtype), (0, -keys % 8))
        bias = padded[..., :keys].expand(query.shape[0], query.shape[1], query.shape[2], keys)
    output, lse = torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, bias, True, scale=scale)[:2]
    return output, lse[..., : query.shape[2]]


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
