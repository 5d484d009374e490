"""Runs a tiny transformer in pieces over devices that are not there, cut in many ways; says what came of each in json.

The tensors hold no data, but an operation on tensors of two devices fails as it would on real ones. A program of its
own (`python -m tests.pretend_devices flux`), because a device type, once known to torch, stays known to the process.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from parallel_core import upstream
from parallel_core.families.base import resolve_class
from parallel_core.max_memory import DISK, HOST
from parallel_core.placement import Component, plan_placement
from parallel_core.worker.placed import Places, attach, whole_classes
from tests.tiny_models import TINY_MODELS, Case, family_of

TWO = ("pretend:0", "pretend:1")

LAYOUTS: dict[str, Callable[[int, int], str]] = {
    **{
        f"cut after {percent} %": lambda index, count, percent=percent: TWO[100 * index >= percent * count]  # type: ignore[misc]
        for percent in range(0, 100, 10)
    },
    "in turns": lambda index, count: TWO[index % 2],
    "in turns, the second first": lambda index, count: TWO[1 - index % 2],
    "the end on the host": lambda index, count: (*TWO, HOST)[3 * index // count],
    "all on the host": lambda index, count: HOST,
    "devices, host and files in turns": lambda index, count: (*TWO, HOST, DISK)[index % 4],
}
"""(number of a part, number of parts) -> where it lies."""


class PretendPlaces(Places):
    """Places whose devices torch knows by the same names."""

    def torch_device(self, name: str) -> torch.device:
        return torch.device(self.computes_on(name))


def empty_model(name: str) -> nn.Module:
    """One of `TINY_MODELS` without weights."""
    with init_empty_weights(include_buffers=False):
        model: nn.Module = resolve_class(family_of(name).transformer).from_config(TINY_MODELS[name].config)
    return model


def parts_of(model: nn.Module) -> list[str]:
    """The parts that the planner places, in its order."""
    whole = whole_classes(model, upstream.blocks_kept_whole(model))
    plan = plan_placement([Component(name="model", module=model, no_split=whole)], {TWO[0]: 1 << 40}, "single")
    return [name for unit in plan.units for name in unit.modules]


def _fill(model: nn.Module, places: Places, mode: FakeTensorMode) -> Mapping[str, Tensor]:
    """Weights on their devices; those that lie on none are returned."""
    outside = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        module, _, attribute = name.rpartition(".")
        if not isinstance(tensor, nn.Parameter):
            value = mode.from_tensor(tensor).to(places.torch_device(name))
        elif places.home(name) in (HOST, DISK):
            outside[name] = torch.empty(tensor.shape)
            continue
        else:
            value = nn.Parameter(torch.empty(tensor.shape, device=places.torch_device(name)), requires_grad=False)
        setattr(model.get_submodule(module), attribute, value)
    return outside


def _on_first(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=TWO[0])


def run(name: str, layout: Callable[[int, int], str]) -> str:
    """ "ok", or what went wrong. Inputs come on the first device, as a rank's do."""
    model, family = empty_model(name), family_of(name)
    parts = parts_of(model)
    homes = {part: layout(index, len(parts)) for index, part in enumerate(parts)}
    places = PretendPlaces(homes=homes, devices=TWO, guests=TWO[1])
    inputs = TINY_MODELS[name].inputs(Case(batch=2), TINY_MODELS[name].config)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        outside = _fill(model, places, mode)
        if family.on_loaded is not None:
            family.on_loaded(model)
        attach(model, places, outside)
        on_first = {key: _on_first(value) if isinstance(value, Tensor) else value for key, value in inputs.items()}
        try:
            output = family.finish(model(**on_first))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    wrong = [key for key, value in model.named_parameters() if value.is_meta != (places.home(key) in (HOST, DISK))]
    return f"{wrong} stayed or left" if wrong else "ok" if output.device.type == "pretend" else f"{output.device}"


if __name__ == "__main__":
    _setup_privateuseone_for_python_backend("pretend")
    sys.stdout.write(json.dumps({label: run(sys.argv[1], layout) for label, layout in LAYOUTS.items()}))
