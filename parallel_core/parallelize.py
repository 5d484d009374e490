"""Applies a parallel plan to a loaded diffusers transformer and removes it again.

Owns how the declared plans (diffusers' `_cp_plan` and `_tp_plan`, or a family's own) become hooks on the model's
modules, and which slice of which weight a rank holds. Hooks are torch's own, so that removing them leaves nothing
behind. Sharded weights are plain local tensors, not DTensors: a column-wise linear then needs no hook at all and a
row-wise one a single all-reduce, where DTensor adds about a millisecond of Python to every linear (a tiny Flux on two
ranks: 12 ms a forward against 52). Does not know families' tensors, how weights are read, or ComfyUI.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from . import upstream
from .attention import SequenceParallel, context_parallel_attention
from .errors import UserError
from .families.base import Family

SAMPLE = "hidden_states"  # in every diffusers transformer the argument whose tokens the output has


class Applied:
    """What one apply put on a model. `remove` takes all of it back; a second `remove` does nothing."""

    def __init__(self, undo: ExitStack) -> None:
        self._undo = undo

    def remove(self) -> None:
        self._undo.close()


def apply_plan(model: nn.Module, family: Family, shards: Mapping[str, ShardSpec], mesh: DeviceMesh) -> Applied:
    """The sequence over the mesh's "ulysses" axis, and weights sliced by `shards` over its "tensor" axis."""
    with ExitStack() as undo:
        undo.callback(apply_tensor(model, shards, mesh).remove)
        undo.callback(apply_context(model, family, mesh).remove)
        return Applied(undo.pop_all())


# ----- context parallel -----


def apply_context(model: nn.Module, family: Family, mesh: DeviceMesh) -> Applied:
    """Shares the sequence out over the mesh's "ulysses" axis; nothing when that has one rank.

    The model is called as before, with the same whole inputs on every rank of the axis, and returns the whole output on
    each. Raises UserError when neither model nor family declares a plan.
    """
    group = mesh.get_group("ulysses")
    if dist.get_world_size(group) == 1:
        return Applied(ExitStack())
    plan = family.cp_plan or upstream.context_parallel_plan(model)
    if plan is None:
        raise UserError(f"{type(model).__name__} declares no context-parallel plan; it runs with ulysses 1 only.")
    sequence = SequenceParallel(group)
    with ExitStack() as undo:
        upstream.replace_context_attention(context_parallel_attention, owner=sequence)
        undo.callback(upstream.release_context_attention, sequence)
        for processor in upstream.attention_processors(model):
            upstream.route_attention(processor, sequence)
            undo.callback(upstream.unroute_attention, processor)
        for path, rules in plan.items():
            module = model.get_submodule(path)
            if isinstance(rules, upstream.ContextParallelOutput):
                handle = module.register_forward_hook(_gather_hook(sequence, rules))
            else:
                hook = _split_hook(sequence, module, rules, family.cp_segments)
                handle = module.register_forward_pre_hook(hook, with_kwargs=True)
            undo.callback(handle.remove)
        return Applied(undo.pop_all())


def _split_hook(
    sequence: SequenceParallel, module: nn.Module, rules: Mapping[str, Any], segments: tuple[str, ...]
) -> Callable[..., tuple[tuple[()], dict[str, Any]]]:
    """Replaces every planned argument of `forward` by this rank's part, after noting the segments' whole lengths."""
    _check_rules(module, rules)
    parameters = list(inspect.signature(type(module).forward).parameters)[1:]

    def split(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
        arguments = {**dict(zip(parameters, args, strict=False)), **kwargs}
        planned = {name: rule for name, rule in rules.items() if arguments.get(name) is not None}
        for name, rule in planned.items():
            if rule.expected_dims not in (None, arguments[name].dim()):
                raise ValueError(
                    f"{name} has shape {tuple(arguments[name].shape)}, expected {rule.expected_dims} dimensions: its "
                    "tokens could not be shared out over the ranks."
                )
        if rules.keys() >= set(segments):
            sequence.begin({name: arguments[name].shape[planned[name].split_dim] for name in segments})
        parts = {name: sequence.split(arguments[name], rule.split_dim) for name, rule in planned.items()}
        return (), {**arguments, **parts}

    return split


def _check_rules(module: nn.Module, rules: Mapping[str, Any]) -> None:
    for name, rule in rules.items():
        if not isinstance(rule, upstream.ContextParallelInput) or rule.split_output:
            raise ValueError(
                f"The context-parallel plan of {type(module).__name__} has {rule!r} for {name!r}; expected the input "
                "rule of one tensor."
            )


def _gather_hook(sequence: SequenceParallel, rule: Any) -> Callable[..., Tensor]:
    def gather(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return sequence.gather(output, rule.gather_dim, SAMPLE)

    return gather


# ----- tensor parallel -----


@dataclass(frozen=True)
class ShardSpec:
    """Which part of one parameter a tensor rank holds, and what becomes of its linear's output."""

    dim: int | None
    """The sharded dimension. None: the bias of a row-wise linear, which the first rank alone holds, since the ranks'
    outputs are summed and it must count once."""
    blocks: tuple[int, ...]
    """Sizes along `dim` of the parts that are sharded each by itself: a fused projection has several."""
    output: Literal["local", "summed", "gathered"]

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
    try:
        planned = upstream.resolve_tp_shard_specs(model, dict(plan), degree)
        modulation = upstream.resolve_tp_shard_specs(model, gathered, degree)
    except ValueError as error:
        raise UserError(f"tensor {degree} does not fit this {type(model).__name__}. {error}") from error
    shards = {}
    for name, spec in planned.items():
        shards[name] = ShardSpec(spec.dim, tuple(spec.block_sizes or ()), "local" if spec.dim == 0 else "summed")
    for name, spec in modulation.items():
        shards[name] = ShardSpec(spec.dim, tuple(spec.block_sizes or ()), "gathered")
    return shards


def _check_heads(model: Any, degree: int) -> None:
    heads: int = model.config.num_attention_heads
    if heads % degree:
        nearest = min((n for n in range(1, heads + 1) if heads % n == 0), key=lambda n: abs(n - degree))
        raise UserError(
            f"tensor {degree} does not divide the {heads} attention heads of this {type(model).__name__}; the nearest "
            f"degree that works is {nearest}."
        )


def apply_tensor(model: nn.Module, shards: Mapping[str, ShardSpec], mesh: DeviceMesh) -> Applied:
    """Joins the outputs of a model whose parameters are slices by `shards`, over the mesh's "tensor" axis.

    Nothing without shards. After `remove` they can be joined again, over this or another mesh.
    """
    group = mesh.get_group("tensor")
    hooks = {"summed": _sum_hook(group), "gathered": _concatenate_hook(group)}
    with ExitStack() as undo:
        for name, spec in shards.items():
            path, _, parameter = name.rpartition(".")
            if parameter == "weight" and spec.output in hooks:
                undo.callback(model.get_submodule(path).register_forward_hook(hooks[spec.output]).remove)
        return Applied(undo.pop_all())


def _sum_hook(group: dist.ProcessGroup) -> Callable[..., Tensor]:
    def add_up(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        dist.all_reduce(output, group=group)
        return output

    return add_up


def _concatenate_hook(group: dist.ProcessGroup) -> Callable[..., Tensor]:
    degree = dist.get_world_size(group)

    def concatenate(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        parts = output.new_empty(degree * output.shape[0], *output.shape[1:])
        dist.all_gather_into_tensor(parts, output, group=group)
        return torch.cat(parts.chunk(degree), dim=-1)

    return concatenate
