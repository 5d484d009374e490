"""Tensor parallel: which slice of which weight a rank holds, and how the slices' results are joined.

Sharded weights are plain local tensors, not DTensors: a column-wise linear then needs no hook at all and a row-wise one
a single all-reduce, where DTensor adds about a millisecond of Python to every linear (a tiny Flux on two ranks: 12 ms
a forward against 52). Does not know families' tensors, how weights are read, or ComfyUI.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .. import upstream
from ..eager import eager
from ..errors import UserError
from ..families.base import Family
from .applied import Applied


@dataclass(frozen=True)
class ShardSpec:
    """Which part of one parameter a tensor rank holds, and what becomes of its linear's output."""

    dim: int | None
    """The sharded dimension. None: the bias of a row-wise linear, which the first rank alone holds, since the ranks'
    outputs are summed and it must count once."""
    blocks: tuple[int, ...]
    """Sizes along `dim` of the parts that are sharded each by itself: a fused projection has several."""
    output: Literal["local", "summed", "gathered", "normed"]
    """"normed": the weight of an RMS norm over all heads, which needs the sum of squares over all ranks."""

    def take(self, source: Any, rank: int, degree: int) -> Tensor | None:
        """The part of `source` (a tensor or a safetensors slice) that a rank holds; None where it holds nothing."""
        if self.dim is None:
            whole: Tensor = source[:]
            return whole if rank == 0 else None
        parts, start = [], 0
        for block in self.blocks:
            size = block // degree
            part = slice(start + rank * size, start + (rank + 1) * size)
            parts.append(source[(slice(None),) * self.dim + (part,)])
            start += block
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)


def tensor_shards(model: nn.Module, family: Family, degree: int) -> dict[str, ShardSpec]:
    """How `degree` ranks share the parameters: name -> spec; parameters without one are whole on every rank.

    Reads shapes only, so the model may be on the meta device. Raises UserError when the degree does not divide the
    attention heads or a sharded dimension.
    """
    if degree == 1:
        return {}
    plan = family.tp_plan or upstream.tensor_parallel_plan(model)
    if plan is None:
        raise UserError(f"{type(model).__name__} declares no tensor-parallel plan; it runs with tensor 1 only.")
    _check_heads(model, degree)
    gathered = dict.fromkeys(family.tp_replicated_output, "colwise")
    # by name: diffusers takes one wildcard per glob, and layers that not every variant of a model has must be there
    named = {name: style for glob, style in plan.items() for name, _ in _matching(model, [glob])}
    try:
        planned = upstream.resolve_tp_shard_specs(model, named, degree)
        modulation = upstream.resolve_tp_shard_specs(model, gathered, degree)
    except ValueError as error:
        raise UserError(f"tensor {degree} does not fit this {type(model).__name__}. {error}") from error
    shards = {f"{name}.weight": _norm_shard(name, module, degree) for name, module in _matching(model, family.tp_norms)}
    for name, spec in planned.items():
        shards[name] = ShardSpec(spec.dim, tuple(spec.block_sizes or ()), "local" if spec.dim == 0 else "summed")
    for name, spec in modulation.items():
        shards[name] = ShardSpec(spec.dim, tuple(spec.block_sizes or ()), "gathered")
    return shards


def _matching(model: nn.Module, globs: Sequence[str]) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if any(fnmatch.fnmatchcase(name, glob) for glob in globs):
            yield name, module


def _norm_shard(name: str, norm: nn.Module, degree: int) -> ShardSpec:
    width = int(norm.get_parameter("weight").shape[0])
    if width % degree:
        raise UserError(f"tensor {degree} does not divide the {width} channels of {name}.")
    return ShardSpec(0, (width,), "normed")


def _check_heads(model: Any, degree: int) -> None:
    heads: int = model.config.num_attention_heads
    if heads % degree:
        nearest = min((n for n in range(1, heads + 1) if heads % n == 0), key=lambda n: abs(n - degree))
        raise UserError(
            f"tensor {degree} does not divide the {heads} attention heads of this {type(model).__name__}; the nearest "
            f"degree that works is {nearest}."
        )


def apply_tensor(model: nn.Module, family: Family, shards: Mapping[str, ShardSpec], mesh: DeviceMesh) -> Applied:
    """Joins the results of a model whose parameters are slices by `shards`, over the mesh's "tensor" axis.

    Nothing without shards. After `remove` they can be joined again, over this or another mesh.
    """
    group = mesh.get_group("tensor")
    degree = dist.get_world_size(group)
    hooks = {"summed": _sum_hook(group), "gathered": _concatenate_hook(group)}
    with ExitStack() as undo:
        for name, spec in shards.items():
            path, _, parameter = name.rpartition(".")
            if parameter == "weight" and spec.output in hooks:
                undo.callback(model.get_submodule(path).register_forward_hook(hooks[spec.output]).remove)
            elif spec.output == "normed":
                undo.callback(_replace_forward(model.get_submodule(path), group, spec.blocks[0]))
        if shards:
            for _, module in _matching(model, family.tp_heads):
                undo.callback(_divide_heads(module, degree))
        return Applied(undo.pop_all())


def _divide_heads(attention: Any, degree: int) -> Callable[[], None]:
    whole = attention.heads
    attention.heads = whole // degree
    return lambda: setattr(attention, "heads", whole)


def _replace_forward(norm: Any, group: dist.ProcessGroup, width: int) -> Callable[[], None]:
    """RMS norm (arXiv:1910.07467) of the local channels by the root mean square of all `width` channels."""

    @eager
    def forward(x: Tensor) -> Tensor:
        local = x.float()
        squares = local.square().sum(-1, keepdim=True)
        dist.all_reduce(squares, group=group)
        eps = torch.finfo(x.dtype).eps if norm.eps is None else norm.eps
        normed = local * torch.rsqrt(squares / width + eps)
        weighted: Tensor = normed * norm.weight.float()
        return weighted.to(x.dtype)

    norm.forward = forward
    return lambda: delattr(norm, "forward")


def _sum_hook(group: dist.ProcessGroup) -> Callable[..., Tensor]:
    @eager
    def add_up(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        dist.all_reduce(output, group=group)
        return output

    return add_up


def _concatenate_hook(group: dist.ProcessGroup) -> Callable[..., Tensor]:
    degree = dist.get_world_size(group)

    @eager
    def concatenate(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        parts = output.new_empty(degree * output.shape[0], *output.shape[1:])
        dist.all_gather_into_tensor(parts, output, group=group)
        return torch.cat(parts.chunk(degree), dim=-1)

    return concatenate
