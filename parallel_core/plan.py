"""`ParallelPlan`: which devices work together and how many of them along each axis.

Owns the degrees, their validation and the text of every error about them. Knows no process, no model, no ComfyUI.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from .errors import UserError

AXES = ("replica", "ulysses", "tensor")
"""Mesh axes, outermost first: neighbours along the last axis are neighbouring devices."""

STRATEGIES = ("auto", "mesh")
MAX_CPU_RANKS = 64


@dataclass(frozen=True, kw_only=True)
class DeviceInfo:
    """One physical device as ComfyUI's process sees it.

    `name` is "cuda:N" in that process's numbering, `uuid` is as the driver prints it ("GPU-..." or ""), `token` is what
    CUDA_VISIBLE_DEVICES must hold so that a child sees exactly this device, `total_bytes` its memory.
    """

    name: str
    uuid: str
    token: str
    total_bytes: int


@dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """Devices and degrees. `strategy` "auto" leaves the degrees to `resolve`; "mesh" takes them as they are."""

    devices: tuple[str, ...]
    """One entry per rank: "cuda:0", "cuda:1", or "cpu:0", "cpu:1" (rank numbers, not processors)."""
    strategy: str = "mesh"
    replicas: int = 1
    """Copies of the model; each takes whole rows of the batch (images, and the two halves of CFG)."""
    ulysses: int = 1
    """Ranks that share one row's sequence, exchanging heads in attention (arXiv:2309.14509)."""
    tensor: int = 1
    """Ranks that share the weights (arXiv:1909.08053): each holds and computes a slice of every layer."""

    def __post_init__(self) -> None:
        if not self.devices:
            raise UserError("A plan needs at least one device; got none.")
        if len(set(self.devices)) != len(self.devices):
            raise UserError(f"Each device may be named once; got {', '.join(self.devices)}.")
        if self.strategy not in STRATEGIES:
            raise UserError(f"strategy is {self.strategy!r}; expected one of {', '.join(STRATEGIES)}.")
        for name, degree in self.degrees.items():
            if not isinstance(degree, int) or degree < 1:
                raise UserError(f"{name} is {degree!r}; expected a whole number of 1 or more.")
        if self.strategy == "mesh" and self.product != self.world_size:
            raise UserError(self._equation_error())
        if self.strategy == "auto" and self.product != 1:
            raise UserError(
                f"strategy 'auto' chooses the degrees itself, but {self._degrees_text()} was given. "
                "Leave them at 1, or set strategy to 'mesh'."
            )

    @property
    def degrees(self) -> dict[str, int]:
        """The degrees by their widget names, outermost axis first."""
        return {"replicas": self.replicas, "ulysses": self.ulysses, "tensor": self.tensor}

    @property
    def shape(self) -> tuple[int, int, int]:
        """The mesh shape in the order of `AXES`."""
        return (self.replicas, self.ulysses, self.tensor)

    @property
    def product(self) -> int:
        """replicas x ulysses x tensor."""
        return self.replicas * self.ulysses * self.tensor

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.devices)

    def describe(self) -> str:
        """For a person: "2 ranks (cpu:0, cpu:1): ulysses 2"."""
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        degrees = ", ".join(f"{name} {degree}" for name, degree in self.degrees.items() if degree > 1)
        return f"{ranks} ({', '.join(self.devices)})" + (f": {degrees}" if degrees else "")

    def with_degrees(self, *, replicas: int = 1, ulysses: int = 1, tensor: int = 1) -> ParallelPlan:
        """The same devices as a mesh of these degrees."""
        return replace(self, strategy="mesh", replicas=replicas, ulysses=ulysses, tensor=tensor)

    def _degrees_text(self) -> str:
        return " x ".join(f"{name} {degree}" for name, degree in self.degrees.items())

    def _equation_error(self) -> str:
        return (
            f"{self._degrees_text()} = {self.product}, but there are {self.world_size} devices "
            f"({', '.join(self.devices)}). The product must be {self.world_size}: for example "
            f"{_nearest_degrees(self.degrees, self.world_size)}, or set strategy to 'auto'."
        )


def _nearest_degrees(degrees: dict[str, int], world_size: int) -> str:
    """The degrees for `world_size` that differ least from those asked for, as text."""
    options = [
        (replicas, ulysses, world_size // (replicas * ulysses))
        for replicas in range(1, world_size + 1)
        for ulysses in range(1, world_size // replicas + 1)
        if world_size % (replicas * ulysses) == 0
    ]
    asked = tuple(degrees.values())
    best = min(options, key=lambda option: (sum(abs(a - b) for a, b in zip(option, asked, strict=True)), option[2]))
    return ", ".join(f"{name} {degree}" for name, degree in zip(degrees, best, strict=True))


def parse_devices(text: str, available: Sequence[DeviceInfo]) -> tuple[str, ...]:
    """Device names for what a user wrote.

    `text`: "all" (every GPU, or one CPU rank where there is none), "0,1" (GPU numbers), GPU UUIDs, or "cpu:2" (two CPU
    ranks). Raises `UserError` that lists what exists.
    """
    wanted = text.strip()
    if wanted.lower() == "all":
        return tuple(device.name for device in available) or ("cpu:0",)
    if wanted.lower().startswith("cpu"):
        return _parse_cpu(wanted)
    names = [_find_device(token.strip(), available) for token in wanted.split(",")]
    if len(set(names)) != len(names):
        raise UserError(f"devices {text!r} names a device twice; each may be named once.")
    return tuple(names)


def _parse_cpu(text: str) -> tuple[str, ...]:
    match = re.fullmatch(r"cpu(?::(\d+))?", text.lower())
    count = int(match.group(1) or 1) if match else 0
    if not 1 <= count <= MAX_CPU_RANKS:
        raise UserError(
            f"devices is {text!r}; 'cpu:N' means N CPU ranks, with N from 1 to {MAX_CPU_RANKS}: for example 'cpu:2'."
        )
    return tuple(f"cpu:{rank}" for rank in range(count))


def _find_device(token: str, available: Sequence[DeviceInfo]) -> str:
    for device in available:
        if token in (device.name, device.name.removeprefix("cuda:")) or (token and token == device.uuid):
            return device.name
    there = ", ".join(device.name.removeprefix("cuda:") for device in available)
    found = f"GPUs here: {there}" if there else "No GPU is visible to ComfyUI here; use 'cpu:2' for two CPU ranks"
    raise UserError(
        f"devices names {token!r}, which does not exist. {found}. "
        "Expected 'all', GPU numbers such as '0,1', GPU UUIDs, or 'cpu:N'."
    )


@dataclass(frozen=True, kw_only=True)
class PlanChoice:
    """A plan whose degrees are decided, and why."""

    plan: ParallelPlan
    reason: str


def resolve(plan: ParallelPlan, *, rows: int, heads: int, fits_one_device: bool) -> PlanChoice:
    """Degrees for one operation of `rows` batch rows on a model with `heads` attention heads.

    The rule of strategy "auto": one device -> one rank; weights too large for one device -> tensor; rows to share out
    -> replicas (what is left over goes to ulysses); else ulysses. A "mesh" plan is returned as it is.
    """
    world = plan.world_size
    if plan.strategy == "mesh":
        return PlanChoice(plan=plan, reason="as set")
    if world == 1:
        return PlanChoice(plan=plan.with_degrees(), reason="one device")
    if not fits_one_device:
        tensor = largest_divisor(world, lambda degree: heads % degree == 0)
        return PlanChoice(
            plan=plan.with_degrees(tensor=tensor, ulysses=world // tensor),
            reason="the weights do not fit one device, so every layer is sliced over the ranks",
        )
    replicas = largest_divisor(world, lambda degree: degree <= rows and rows % degree == 0)
    chosen = plan.with_degrees(replicas=replicas, ulysses=world // replicas)
    reason = f"{rows} rows to share out" if replicas > 1 else "one row: its sequence is shared out"
    return PlanChoice(plan=chosen, reason=reason)


def largest_divisor(number: int, allowed: Callable[[int], bool]) -> int:
    """The largest divisor of `number` that `allowed` accepts; 1 always is."""
    return max(d for d in range(1, number + 1) if number % d == 0 and (d == 1 or allowed(d)))
