"""Runs a model whose modules lie on several devices, in host memory and in files, as if it lay on one.

Owns where each part computes, how its arguments get there, and how weights that lie on no device come in for as long
as their layer computes. Hooks are torch's own: unlike accelerate's, which replace `forward`, they cost nothing on the
modules inside a part, take weights out again when a layer fails, and make a part's device the current one, which
kernels outside torch rely on. Knows no family, and no plan but the finished placement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn

from ..max_memory import DISK, HOST
from ..placement import PlacementPlan


def accelerate_device(device: str, devices: Sequence[str]) -> str | int:
    """accelerate's name for a device of a plan: a GPU's number in this process; CPU ranks are this process's CPU."""
    if device in (HOST, DISK):
        return device
    return devices.index(device) if device.startswith("cuda:") else HOST


def beside_blocks(model: nn.Module, blocks: Sequence[str]) -> dict[str, str]:
    """Name -> class name of all that a placement puts beside the blocks (modules of the classes `blocks`).

    These are the outermost modules that hold no block, each called as a whole (embedders, the last norm), and tensors
    of the model itself, whose class name is empty. They are small, and the model's own code joins what comes out of
    them: so they lie together.
    """
    found: dict[str, str] = {}

    def visit(prefix: str, module: nn.Module) -> None:
        for name, _ in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            found[prefix + name] = ""
        for name, child in module.named_children():
            if any(type(inner).__name__ in blocks for inner in child.modules()) or isinstance(child, nn.ModuleList):
                if type(child).__name__ not in blocks:  # a list is never called itself
                    visit(f"{prefix}{name}.", child)
            else:
                found[prefix + name] = type(child).__name__

    visit("", model)
    return found


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where the parts of one model lie and compute."""

    homes: Mapping[str, str]
    """A device of `devices`, "cpu" or "disk" by the names of the parts: modules, or tensors of the model itself."""
    devices: Sequence[str]
    """The group's names; this process sees them in the same order."""
    root: str
    """The device where the model's own code computes: its arguments come there first."""
    guests: str
    """The device where parts compute that lie on none."""

    @staticmethod
    def of(plan: PlacementPlan, devices: Sequence[str], budgets: Mapping[str, int], beside: str) -> Places:
        """The places of a plan's one component; `budgets` as the plan was made with, `beside` one of its parts that is
        no block.

        Guests compute where the last part on a device does: their neighbours. The planner keeps room on each device
        for the largest guest.
        """
        placed = list(zip(plan.units, plan.devices, strict=True))
        homes = {name: home for unit, home in placed for name in unit.modules}
        used = [home for unit, home in placed if home in devices and unit.num_bytes]
        guests = used[-1] if used else max(devices, key=lambda device: budgets[device])
        root = homes[beside] if homes[beside] in devices else guests
        return Places(homes=homes, devices=devices, root=root, guests=guests)

    def home(self, name: str) -> str:
        """Where the tensor of this name lies."""
        while name not in self.homes:
            name = name.rpartition(".")[0]
        return self.homes[name]

    def computes_on(self, name: str) -> str:
        """The device, by the group's name, where the part or the tensor of this name is used."""
        home = self.home(name)
        return self.guests if home in (HOST, DISK) else home

    def torch_device(self, name: str) -> torch.device:
        """The same, as this process knows it."""
        return self.known_as(self.computes_on(name))

    def known_as(self, device: str) -> torch.device:
        """A device of the group, as this process knows it."""
        known = accelerate_device(device, self.devices)
        return torch.device(known if isinstance(known, str) else f"cuda:{known}")


def attach(model: nn.Module, places: Places, outside: Mapping[str, Tensor]) -> None:
    """Makes `model` run: its parts lie as `places` says, parameters that are on meta are taken from `outside`.

    Arguments come to the root's device before any other hook of the model sees them, so that what a family remembers
    of a call is there too. The hooks stay for as long as the model lives.
    """
    modules = dict(model.named_modules())
    root = _arguments_to(places.known_as(places.root))
    model.register_forward_pre_hook(root, prepend=True, with_kwargs=True)
    for name in places.homes:
        # A part without tensors computes where its arguments are; a tensor of the model itself has none.
        if name in modules and any(True for _ in _tensors(modules[name])):
            hook = _arguments_to(places.torch_device(name))
            modules[name].register_forward_pre_hook(hook, with_kwargs=True)
    for name, module in modules.items():
        prefix = f"{name}." if name else ""
        empty = {own: parameter for own, parameter in module.named_parameters(recurse=False) if parameter.is_meta}
        if empty:
            device = places.torch_device(prefix + next(iter(empty)))
            visit = _Visit(prefix, empty, outside, device)
            module.register_forward_pre_hook(visit.begin)
            module.register_forward_hook(visit.end, always_call=True)
    model.register_forward_hook(_back_to_first, always_call=True)


def bytes_by_device(model: nn.Module, places: Places) -> dict[str, int]:
    """Bytes of weights and buffers that lie on each device of the group, by the group's names."""
    totals = dict.fromkeys(places.devices, 0)
    for name, tensor in _tensors(model):
        if not tensor.is_meta:
            totals[places.computes_on(name)] += tensor.nbytes
    return totals


def _tensors(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _arguments_to(device: torch.device) -> Callable[..., tuple[Any, Any]]:
    """A pre-hook that brings all arguments to `device` and makes it the current one."""

    def move(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        return send_to_device(args, device), send_to_device(kwargs, device)

    return move


def _back_to_first(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """What runs between two evaluations starts from the first GPU."""
    if torch.cuda.is_available():
        torch.cuda.set_device(0)


class _Visit:
    """The own weights of one module that come to its device while it computes, and leave again."""

    def __init__(
        self, prefix: str, empty: Mapping[str, nn.Parameter], outside: Mapping[str, Tensor], device: torch.device
    ) -> None:
        self._prefix = prefix
        self._empty = empty
        self._outside = outside
        self._device = device

    def begin(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Pre-hook."""
        for name in self._empty:
            value = self._outside[self._prefix + name].to(self._device)
            setattr(module, name, nn.Parameter(value, requires_grad=False))

    def end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Hook, also after an error."""
        for name, parameter in self._empty.items():
            setattr(module, name, parameter)
