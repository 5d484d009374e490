"""Context parallel: a declared plan (diffusers' `_cp_plan` or a family's own) as hooks on the model's modules.

Hooks are torch's own, so that removing them leaves nothing behind. Does not know families' tensors or ComfyUI.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .. import upstream
from ..attention import SequenceParallel, context_parallel_attention
from ..attention_backends import backend_named
from ..eager import eager
from ..errors import UserError
from ..families.base import Family
from ..plan import RunMode
from .applied import Applied

SAMPLE = "hidden_states"  # in every diffusers transformer the argument whose tokens the output has

Rules = dict[Any, Any]


def apply_context(model: nn.Module, family: Family, mesh: DeviceMesh, mode: RunMode) -> Applied:
    """Shares the sequence out over the mesh's "ring" and "ulysses" axes; nothing when those have one rank.

    The model is called as before, with the same whole inputs on every rank of the axes, and returns the whole output on
    each. Raises UserError when neither model nor family declares a plan.
    """
    if mode.ring * mode.ulysses == 1:
        return Applied(ExitStack())
    plan = family.cp_plan or upstream.context_parallel_plan(model)
    if plan is None:
        raise UserError(
            f"{type(model).__name__} declares no context-parallel plan; it runs with ring 1, ulysses 1 only."
        )
    sequence = SequenceParallel(
        mesh.get_group("ring"),
        mesh.get_group("ulysses"),
        merge_in_fp32=mode.ring_fp32,
        kernel_returns_lse=backend_named(mode.attention_backend).returns_lse,
    )
    with ExitStack() as undo:
        upstream.replace_context_attention(context_parallel_attention, owner=sequence)
        undo.callback(upstream.release_context_attention, sequence)
        for processor in upstream.attention_processors(model):
            upstream.route_attention(processor, sequence)
            undo.callback(upstream.unroute_attention, processor)
        inputs, outputs, gathers = _by_module(model, plan)
        for path, rules in inputs.items():
            module = model.get_submodule(path)
            hook = _split_hook(sequence, module, rules, family)
            undo.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        for path, rules in outputs.items():
            split_output = _split_output_hook(sequence, rules)
            undo.callback(model.get_submodule(path).register_forward_hook(split_output).remove)
        for path, rule in gathers.items():
            undo.callback(model.get_submodule(path).register_forward_hook(_gather_hook(sequence, rule)).remove)
        return Applied(undo.pop_all())


def _by_module(model: nn.Module, plan: Mapping[str, Any]) -> tuple[dict[str, Rules], dict[str, Rules], dict[str, Any]]:
    """The plan per module: rules for arguments, rules for outputs, and what is gathered."""
    inputs: dict[str, Rules] = {}
    outputs: dict[str, Rules] = {}
    gathers: dict[str, Any] = {}
    for pattern, rules in plan.items():
        for path in _paths(model, pattern):
            if isinstance(rules, upstream.ContextParallelOutput):
                gathers[path] = rules
                continue
            for name, rule in rules.items():
                is_input = isinstance(rule, upstream.ContextParallelInput)
                if not is_input or rule.split_output != isinstance(name, int):
                    raise ValueError(
                        f"The context-parallel plan of {type(model).__name__} has {rule!r} for {name!r} of {path!r}; "
                        "expected an input rule of one argument, or of one output by its number."
                    )
                (outputs if rule.split_output else inputs).setdefault(path, {})[name] = rule
    return inputs, outputs, gathers


def _paths(model: nn.Module, pattern: str) -> Iterator[str]:
    """Module paths for a plan's key, in which "*" stands for every index of a list."""
    if "*" not in pattern:
        yield pattern
        return
    before, _, after = pattern.partition("*")
    for index, _ in model.get_submodule(before.rstrip(".")).named_children():
        yield from _paths(model, f"{before}{index}{after}")


def _split_hook(
    sequence: SequenceParallel, module: nn.Module, rules: Rules, family: Family
) -> Callable[..., tuple[tuple[()], dict[str, Any]]]:
    """Replaces every planned argument of `forward` by this rank's part.

    Where all segments come in, their whole lengths and masks are noted first: a new forward begins. Masks stay whole
    and go to the attention that way; to the modules between there is none.
    """
    parameters = list(inspect.signature(type(module).forward).parameters)[1:]
    segments, masks = family.cp_segments, family.cp_masks

    @eager
    def split(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
        arguments = {**dict(zip(parameters, args, strict=False)), **kwargs}
        planned = {
            name: rule
            for name, rule in rules.items()
            if name not in masks and arguments.get(name) is not None and not _stays_whole(name, rule, arguments, family)
        }
        if rules.keys() >= set(segments):
            lengths = {name: arguments[name].shape[planned[name].split_dim] for name in segments}
            sequence.begin(lengths, {segment: arguments.get(name) for name, segment in masks.items()})
        parts = {name: sequence.split(arguments[name], rule.split_dim) for name, rule in planned.items()}
        without = {name: None for name in masks if name in arguments}
        return (), {**arguments, **parts, **without}

    return split


def _stays_whole(name: str, rule: Any, arguments: Mapping[str, Any], family: Family) -> bool:
    """Whether an argument does not run along the sequence this time. ValueError when it should and has another form."""
    dims = arguments[name].dim()
    if rule.expected_dims in (None, dims):
        return False
    if name in family.cp_sometimes:
        return True
    raise ValueError(
        f"{name} has shape {tuple(arguments[name].shape)}, expected {rule.expected_dims} dimensions: its tokens could "
        "not be shared out over the ranks."
    )


def _split_output_hook(sequence: SequenceParallel, rules: Rules) -> Callable[..., tuple[Tensor, ...]]:
    @eager
    def split(module: nn.Module, args: tuple[Any, ...], output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        for index, rule in rules.items():
            if rule.expected_dims not in (None, output[index].dim()):
                raise ValueError(
                    f"Output {index} of {type(module).__name__} has shape {tuple(output[index].shape)}, expected "
                    f"{rule.expected_dims} dimensions: its tokens could not be shared out over the ranks."
                )
        return tuple(
            sequence.split(part, rules[index].split_dim) if index in rules else part
            for index, part in enumerate(output)
        )

    return split


def _gather_hook(sequence: SequenceParallel, rule: Any) -> Callable[..., Tensor]:
    @eager
    def gather(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return sequence.gather(output, rule.gather_dim, SAMPLE)

    return gather
