"""What the ranks of `test_attention` run: one attention over a shared-out sequence, against torch's over the whole."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from parallel_core.attention import SequenceParallel
from parallel_core.attention.kernels import native_ring_kernel
from parallel_core.plan import RunMode
from parallel_core.worker.meshes import MeshCache

SEGMENTS = {"text": 7, "image": 14}
LENGTH, BATCH, DIM = 21, 2, 16


def _masks(heads: int) -> dict[str, Tensor | None]:
    """Masks over the 21 keys by name; the query's dimension as torch takes it."""
    generator = torch.Generator().manual_seed(3)
    open_keys = torch.rand(BATCH, LENGTH, generator=generator) > 0.4
    dead_chunk = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    dead_chunk[0, :4], dead_chunk[0, 7:14], dead_chunk[1, 4:7], dead_chunk[1, 14:] = False, False, False, False
    no_key = open_keys.clone()
    no_key[1] = False
    bias = torch.randn(BATCH, 1, 1, LENGTH, generator=generator)
    return {
        "none": None,
        "keys": open_keys[:, None, None],
        "keys, two dimensions": open_keys,
        "the same for every query": open_keys[:, None, None].expand(BATCH, 1, LENGTH, LENGTH),
        "a chunk without keys": dead_chunk[:, None, None],
        "a row without keys": no_key[:, None, None],
        "additive": bias.masked_fill(~open_keys[:, None, None], -torch.inf),
        "additive, with the least number": bias.masked_fill(~dead_chunk[:, None, None], torch.finfo(torch.float32).min),
        "per head": torch.rand(BATCH, heads, 1, LENGTH, generator=generator) > 0.3,
    }


def _whole(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """(batch, tokens, heads, dim) -> the same, by torch."""
    if mask is not None and mask.ndim == 2:
        mask = mask[:, None, None]
    inputs = (tensor.transpose(1, 2) for tensor in (query, key, value))
    grouped = query.shape[2] != key.shape[2]
    return scaled_dot_product_attention(*inputs, attn_mask=mask, enable_gqa=grouped).transpose(1, 2)


def _sequence(mode: dict[str, Any]) -> SequenceParallel:
    run = RunMode(**mode)
    mesh = MeshCache("cpu").get(run.shape)
    return SequenceParallel(mesh.get_group("ring"), mesh.get_group("ulysses"), merge_in_fp32=run.ring_fp32)


def _share(sequence: SequenceParallel, tensor: Tensor) -> Tensor:
    text, image = tensor.split(list(SEGMENTS.values()), dim=1)
    return torch.cat([sequence.split(text, 1), sequence.split(image, 1)], dim=1)


def _attend(sequence: SequenceParallel, qkv: list[Tensor], mask: Tensor | None) -> Tensor:
    """The whole result on every rank."""
    local = [_share(sequence, tensor) for tensor in qkv]
    out = sequence.attend(*local, kernel=_whole, ring_kernel=native_ring_kernel, mask=mask)
    sizes = [len(torch.arange(length).tensor_split(sequence.num_ranks)[sequence.rank]) for length in SEGMENTS.values()]
    parts = zip(out.split(sizes, dim=1), SEGMENTS, strict=True)
    return torch.cat([sequence.gather(part, 1, name) for part, name in parts], dim=1)


@torch.inference_mode()
def masks(rank: int, world_size: int, mode: dict[str, Any], heads: int, kv_heads: int) -> dict[str, float]:
    """Per mask the largest difference from torch's attention over the whole."""
    sequence = _sequence(mode)
    sequence.begin(SEGMENTS)
    generator = torch.Generator().manual_seed(1)
    qkv = [torch.randn(BATCH, LENGTH, count, DIM, generator=generator) for count in (heads, kv_heads, kv_heads)]
    return {
        name: float((_attend(sequence, qkv, mask) - _whole(*qkv, mask)).abs().max())
        for name, mask in _masks(heads).items()
    }


@torch.inference_mode()
def merging(rank: int, world_size: int) -> dict[str, float]:
    """Distance of bfloat16 from float32: of a ring that merges in float32, of one that does not, of torch's own."""
    generator = torch.Generator().manual_seed(1)
    exact = [torch.randn(BATCH, LENGTH, 4, DIM, generator=generator) for _ in range(3)]
    rounded = [tensor.bfloat16() for tensor in exact]
    wanted = _whole(*(tensor.float() for tensor in rounded), None)
    found = {"whole": _whole(*rounded, None)}
    for name, in_fp32 in {"float32": True, "bfloat16": False}.items():
        sequence = _sequence({"ring": world_size, "ring_fp32": in_fp32})
        sequence.begin(SEGMENTS)
        found[name] = _attend(sequence, rounded, None)
    return {name: float((result.float() - wanted).square().mean().sqrt()) for name, result in found.items()}


@torch.inference_mode()
def refused(rank: int, world_size: int) -> dict[str, str]:
    """Error texts for masks that cannot be served."""
    sequence = _sequence({"ring": world_size})
    sequence.begin(SEGMENTS)
    qkv = [torch.randn(BATCH, LENGTH, 4, DIM) for _ in range(3)]
    wrong = {
        "per query": torch.ones(BATCH, 1, LENGTH, LENGTH).tril().bool(),
        "too short": torch.ones(BATCH, LENGTH - 1, dtype=torch.bool),
    }
    texts = {}
    for name, mask in wrong.items():
        try:
            _attend(sequence, qkv, mask)
        except ValueError as error:
            texts[name] = str(error)
    dist.barrier()
    return texts
