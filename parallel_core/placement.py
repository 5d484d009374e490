"""The device_map planner: which module of which component lies on which device.

Owns the four strategies, the order of fall-back (devices, then host memory, then the files) and the error that says
how much is missing. Works on modules on the meta device and on devices that need not exist: it reads no weight and
touches no device. Built on accelerate's `compute_module_sizes`, `find_tied_parameters`, `get_max_layer_size`,
`clean_device_map` and `check_device_map`. Not on its `infer_auto_device_map`: that one handles one model at a time,
always keeps the largest layer's size free on the first device (so 9.5 GB on two 5 GB devices spill over), and its
balanced budgets ignore devices of unequal size; the tests hold our result against it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from accelerate.utils import check_device_map, compute_module_sizes, find_tied_parameters
from accelerate.utils.modeling import clean_device_map, get_max_layer_size
from torch import Tensor, nn

from .errors import UserError
from .max_memory import DISK, HOST, format_bytes, format_entry
from .text_spec import PLACEMENTS


@dataclass(frozen=True, kw_only=True)
class Component:
    """A model to place, with or without weights. `no_split` are names of module classes that stay on one device,
    `together` those of modules and tensors that lie on the same one."""

    name: str
    module: nn.Module
    no_split: tuple[str, ...] = ()
    together: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Unit:
    """What is placed as a whole: modules (more than one when they share parameters), their bytes, and the bytes of
    the largest layer in them (what has to fit beside the rest when the unit is kept elsewhere and brought in layer by
    layer)."""

    component: str
    modules: tuple[str, ...]
    num_bytes: int
    largest_layer: int


@dataclass(frozen=True, kw_only=True)
class PlacementPlan:
    """Where everything lies. `units` and `devices` run in parallel, in the order in which the modules are
    registered."""

    units: tuple[Unit, ...]
    devices: tuple[str, ...]

    @property
    def bytes_per_device(self) -> dict[str, int]:
        """Bytes of weights on each device that holds some."""
        totals: dict[str, int] = {}
        for unit, device in zip(self.units, self.devices, strict=True):
            totals[device] = totals.get(device, 0) + unit.num_bytes
        return {device: count for device, count in totals.items() if count}

    def device_map(self, component: str) -> dict[str, str]:
        """Module name -> device in accelerate's form; `{"": device}` when the component lies on one device."""
        full = {
            name: device
            for unit, device in zip(self.units, self.devices, strict=True)
            if unit.component == component
            for name in unit.modules
        }
        cleaned: dict[str, str] = clean_device_map(full)
        return cleaned

    def describe(self) -> str:
        """For a person: "text_encoder_2: blocks 0-13 on cuda:0, 14-23 on cuda:1; text_encoder: cuda:0; 5.1 GB on
        ..."."""
        names = list(dict.fromkeys(unit.component for unit in self.units))
        parts = [f"{name}: {self._describe_component(name)}" for name in names]
        totals = " + ".join(f"{format_bytes(count)} on {device}" for device, count in self.bytes_per_device.items())
        return "; ".join([*parts, totals])

    def _describe_component(self, component: str) -> str:
        by_device: dict[str, list[str]] = {}
        for unit, device in zip(self.units, self.devices, strict=True):
            if unit.component == component and unit.num_bytes:
                by_device.setdefault(device, []).extend(unit.modules)
        if len(by_device) == 1:
            return next(iter(by_device))
        return ", ".join(f"{_module_ranges(modules)} on {device}" for device, modules in by_device.items())


def plan_placement(
    components: Sequence[Component],
    budgets: Mapping[str, int],
    strategy: str,
    *,
    free: Mapping[str, int] | None = None,
) -> PlacementPlan:
    """Places all `components` together by `strategy`, one of `PLACEMENTS`.

    `budgets`: bytes of weights that each device may take, in the order of the devices; the keys "cpu" (host memory)
    and "disk" are used last, and never by strategy "single". `free`: the same without the user's caps, for the
    error's advice. Raises `UserError` with the missing bytes, what each device has and what would fit.
    """
    if strategy not in PLACEMENTS:
        raise UserError(f"placement is {strategy!r}; expected one of {', '.join(PLACEMENTS)}.")
    units = [unit for component in components for unit in _units(component)]
    placed = _place(units, budgets, strategy)
    if None in placed:
        raise UserError(_does_not_fit(units, placed, budgets, strategy, free or budgets))
    plan = PlacementPlan(units=tuple(units), devices=tuple(device for device in placed if device))
    for component in components:
        check_device_map(component.module, plan.device_map(component.name))
    return plan


# ----- what is placed as a whole -----


def _units(component: Component) -> list[Unit]:
    """The component's modules in registration order, as deep as they may be split; what must lie together becomes
    one unit."""
    sizes: dict[str, int] = compute_module_sizes(component.module)
    units = [
        Unit(
            component=component.name,
            modules=(name,),
            num_bytes=sizes.get(name, 0),
            largest_layer=get_max_layer_size([(name, module)], sizes, [])[0],
        )
        for name, module in _split("", component.module, component.no_split)
    ]
    for tied in find_tied_parameters(component.module):
        units = _merge(units, tied)
    return _merge(units, component.together) if component.together else units


def _split(name: str, module: nn.Module, no_split: Sequence[str]) -> Iterable[tuple[str, nn.Module | Tensor]]:
    """(name, module or tensor) for everything that may lie on a device of its own."""
    prefix = f"{name}." if name else ""
    children = list(module.named_children())
    if not children or type(module).__name__ in no_split:
        yield name, module
        return
    for direct, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
        yield prefix + direct, tensor
    for child_name, child in children:
        yield from _split(prefix + child_name, child, no_split)


def _merge(units: list[Unit], names: Sequence[str]) -> list[Unit]:
    """`units` with those that hold one of the named modules or parameters joined, at the place of the first."""
    together = [
        unit for unit in units if any(f"{name}.".startswith(f"{module}.") for module in unit.modules for name in names)
    ]
    first = together[0]
    joined = Unit(
        component=first.component,
        modules=tuple(name for unit in together for name in unit.modules),
        num_bytes=sum(unit.num_bytes for unit in together),
        largest_layer=max(unit.largest_layer for unit in together),
    )
    return [joined if unit is first else unit for unit in units if unit is first or unit not in together]


# ----- the strategies -----


def _place(units: Sequence[Unit], budgets: Mapping[str, int], strategy: str) -> list[str | None]:
    """A device for each unit; None for those that find no room."""
    devices = {name: budget for name, budget in budgets.items() if name not in (HOST, DISK)}
    if strategy == "single":
        best = max(devices, key=lambda name: devices[name])
        return _fill(units, {best: devices[best]})
    placed = {"balanced": _balanced, "auto": _fewest, "sequential": _fill}[strategy](units, devices)
    return _with_offload(units, budgets) if None in placed else placed


def _fill(units: Sequence[Unit], budgets: Mapping[str, int]) -> list[str | None]:
    """In order: a unit that does not fit closes its device, so that neighbours stay together."""
    placed: list[str | None] = []
    names = list(budgets)
    used = 0
    for unit in units:
        while names and used + unit.num_bytes > budgets[names[0]]:
            names.pop(0)
            used = 0
        placed.append(names[0] if names else None)
        used += unit.num_bytes
    return placed


def _balanced(units: Sequence[Unit], devices: Mapping[str, int]) -> list[str | None]:
    """The smallest cap, equal for all devices, under which everything fits: the fullest device holds as little as can
    be."""

    def fill(cap: int) -> list[str | None]:
        return _fill(units, {name: min(cap, budget) for name, budget in devices.items()})

    low, high = 0, max(devices.values())
    while low < high:  # a larger cap never places less, so the smallest one can be bisected
        middle = (low + high) // 2
        low, high = (middle + 1, high) if None in fill(middle) else (low, middle)
    return fill(high)


def _fewest(units: Sequence[Unit], devices: Mapping[str, int]) -> list[str | None]:
    """The first 1, 2, ... devices by memory, as soon as everything fits on them."""
    order = sorted(devices, key=lambda name: -devices[name])
    placed: list[str | None] = []
    for count in range(1, len(order) + 1):
        placed = _fill(units, {name: devices[name] for name in order[:count]})
        if None not in placed:
            break
    return placed


def _with_offload(units: Sequence[Unit], budgets: Mapping[str, int]) -> list[str | None]:
    """All devices, then the host's memory, then the files.

    What lies outside the devices is brought in layer by layer, so every device keeps room for the largest such layer.
    """
    reserve = 0
    while True:
        room = {name: size if name in (HOST, DISK) else max(0, size - reserve) for name, size in budgets.items()}
        placed = _fill(units, room)
        outside = [unit.largest_layer for unit, name in zip(units, placed, strict=True) if name in (HOST, DISK)]
        if max(outside, default=0) <= reserve:
            return placed
        reserve = max(outside)


# ----- text -----


def _does_not_fit(
    units: Sequence[Unit],
    placed: Sequence[str | None],
    budgets: Mapping[str, int],
    strategy: str,
    free: Mapping[str, int],
) -> str:
    """What is missing, what there is, what would fit."""
    missing = sum(unit.num_bytes for unit, device in zip(units, placed, strict=True) if device is None)
    needs: dict[str, int] = {}
    for unit in units:
        needs[unit.component] = needs.get(unit.component, 0) + unit.num_bytes
    parts = ", ".join(f"{name} {format_bytes(count)}" for name, count in needs.items())
    there = ", ".join(f"{name} {format_bytes(budget)}" for name, budget in budgets.items())
    total = format_bytes(sum(needs.values()))
    if len(needs) == 1:
        (component,) = needs
        verdict = f"{component} does not fit: it needs {total} and {format_bytes(missing)} are missing"
    else:
        verdict = (
            f"{' and '.join(needs)} do not fit: they need {total} ({parts}) and {format_bytes(missing)} are missing"
        )
    return f"{verdict}. placement {strategy!r} may use: {there}. " + _advice(units, budgets, strategy, free)


def _advice(units: Sequence[Unit], budgets: Mapping[str, int], strategy: str, free: Mapping[str, int]) -> str:
    """The nearest settings under which everything has a place."""
    if strategy == "single" and None not in (placed := _place(units, budgets, "balanced")):
        return f"placement 'balanced' would fit: {_totals(units, placed)}."
    strategy = "balanced" if strategy == "single" else strategy
    if None not in (placed := _place(units, free, strategy)):
        return f"It would fit without the limits in max_memory: placement {strategy!r}, {_totals(units, placed)}."
    elsewhere = dict(budgets)
    elsewhere.pop(DISK, None)
    placed = _place(units, {**elsewhere, DISK: sum(unit.num_bytes for unit in units)}, strategy)
    amount = sum(unit.num_bytes for unit, device in zip(units, placed, strict=True) if device == DISK)
    return (
        f"It would fit with {format_bytes(amount)} more host memory (or as much more on the devices), or with "
        f"'{format_entry(DISK, amount)}' in max_memory, which reads that part from the model's files each time it is "
        "needed (slow)."
    )


def _totals(units: Sequence[Unit], placed: Sequence[str | None]) -> str:
    plan = PlacementPlan(units=tuple(units), devices=tuple(device or "" for device in placed))
    return " + ".join(f"{format_bytes(count)} on {device}" for device, count in plan.bytes_per_device.items())


def _module_ranges(modules: Sequence[str]) -> str:
    """Module names for a person: numbered ones as ranges ("blocks 0-13"), others only where there are no numbered
    ones."""
    numbers: dict[str, list[int]] = {}
    for module in modules:
        if match := re.match(r"(?:.*?\.)?([^.]+)\.(\d+)(?:\.|$)", module):
            numbers.setdefault(match.group(1), []).append(int(match.group(2)))
    if not numbers:
        return ", ".join(modules)
    lists = []
    for label, found in numbers.items():
        low, high = min(found), max(found)
        singular = label.removesuffix("s")
        lists.append(f"{singular} {low}" if low == high else f"{singular}s {low}-{high}")
    return ", ".join(lists)
