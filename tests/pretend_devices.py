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
from torch.utils._pytree import tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from parallel_core.families.base import resolve_class
from parallel_core.max_memory import DISK, HOST
from parallel_core.placement import plan_placement
from parallel_core.worker.placed import Places, attach
from parallel_core.worker.placed_transformer import transformer_component
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
"""(number of a unit, number of units) -> where it lies."""


CASES = {"plain": Case(batch=2), "several images, masked": Case(batch=2, frames=3, ragged=True)}


class PretendPlaces(Places):
    """Places whose devices torch knows by the same names."""

    def known_as(self, device: str) -> torch.device:
        return torch.device(device)


def empty_model(name: str) -> nn.Module:
    """One of `TINY_MODELS` without weights."""
    with init_empty_weights(include_buffers=False):
        model: nn.Module = resolve_class(family_of(name).transformer).from_config(TINY_MODELS[name].config)
    return model


def units_of(model: nn.Module) -> list[tuple[str, ...]]:
    """The names of what the planner places as one, in its order."""
    plan = plan_placement([transformer_component(model)], {TWO[0]: 1 << 40}, "single")
    return [unit.modules for unit in plan.units]


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


def run(name: str, layout: Callable[[int, int], str], case: Case) -> str:
    """ "ok", or what went wrong. Inputs come on the first device, as a rank's do."""
    model, family = empty_model(name), family_of(name)
    units = units_of(model)
    homes = {name: layout(index, len(units)) for index, unit in enumerate(units) for name in unit}
    beside = homes[units[0][0]]
    places = PretendPlaces(homes=homes, devices=TWO, root=beside if beside in TWO else TWO[1], guests=TWO[1])
    inputs = TINY_MODELS[name].inputs(case, TINY_MODELS[name].config)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        outside = _fill(model, places, mode)
        if family.on_loaded is not None:
            family.on_loaded(model)
        attach(model, places, outside)
        try:
            output = family.finish(model(**tree_map_only(Tensor, _on_first, inputs)))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    wrong = [key for key, value in model.named_parameters() if value.is_meta != (places.home(key) in (HOST, DISK))]
    return f"{wrong} stayed or left" if wrong else "ok" if output.device.type == "pretend" else f"{output.device}"


def _literal(data: object, *, dtype: torch.dtype | None = None, device: object = None) -> Tensor:
    """For `torch.tensor` and `torch.as_tensor`, which would really move the data that it has."""
    like = torch.asarray(data, dtype=dtype)
    return torch.empty(like.shape, dtype=like.dtype, device=device)


if __name__ == "__main__":
    torch.tensor = torch.as_tensor = _literal
    torch.unique = torch.flatten  # how many distinct times there are depends on data: as many as can be
    _setup_privateuseone_for_python_backend("pretend")
    results = {
        f"{label}, {kind}": run(sys.argv[1], layout, case)
        for label, layout in LAYOUTS.items()
        for kind, case in CASES.items()
    }
    sys.stdout.write(json.dumps(results))
