"""`ParallelPlan`: which devices work together and how many of them along each axis.

Owns the degrees, their validation and the text of every error about them. Knows no process, no model, no ComfyUI.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from .attention_backends import check_backend
from .errors import UserError
from .max_memory import DISK, parse_max_memory

AXES = ("replica", "ring", "ulysses", "tensor")
"""Mesh axes, outermost first: neighbours along the last axis are neighbouring devices."""

STRATEGIES = ("auto", "mesh", "device_map")
UNEVEN = ("auto", "never", "always")
COMPILE_MODES = ("off", "default", "max-autotune-no-cudagraphs")
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
class RunMode:
    """How one evaluation runs on weights that are loaded: all of it can change from one evaluation to the next."""

    replicas: int = 1
    ring: int = 1
    ulysses: int = 1
    tensor: int = 1
    ring_fp32: bool = True
    attention_backend: str = "auto"
    compile: str = "off"

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The mesh shape in the order of `AXES`."""
        return (self.replicas, self.ring, self.ulysses, self.tensor)

    @property
    def context(self) -> int:
        """Ranks that share one row's tokens."""
        return self.ring * self.ulysses

    @property
    def ranks_per_replica(self) -> int:
        """Ranks that evaluate the same rows together."""
        return self.context * self.tensor


@dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """Devices, degrees and how the ranks compute.

    `strategy` "auto" leaves the degrees to `resolve`; "mesh" takes them as they are; with "device_map" one process sees
    all devices and a model's layers are placed over them.
    """

    devices: tuple[str, ...]
    """One entry per rank: "cuda:0", "cuda:1", or "cpu:0", "cpu:1" (rank numbers, not processors)."""
    strategy: str = "mesh"
    replicas: int = 1
    """Copies of the model; each takes whole rows of the batch (images, and the two halves of CFG)."""
    ring: int = 1
    """Ranks that share one row's sequence, passing keys and values round (arXiv:2310.01889)."""
    ulysses: int = 1
    """Ranks that share one row's sequence, exchanging heads in attention (arXiv:2309.14509)."""
    tensor: int = 1
    """Ranks that share the weights (arXiv:1909.08053): each holds and computes a slice of every layer."""
    uneven: str = "auto"
    """Whether ranks may get shares of tokens or heads of unequal size: "never" refuses, "auto" says so where it
    costs time, "always" does it without saying."""
    shard_weights: bool = False
    """Ranks that share a row's sequence hold a part of the weights each and collect a layer when its turn comes."""
    attention_backend: str = "auto"
    ring_fp32: bool = True
    """Partial results of the ring are added up in float32 even where the model computes in 16 bits."""
    compile: str = "off"
    """torch.compile's mode for the model's repeated blocks."""
    max_memory: str = ""
    """Limits per device, host and disk, as `max_memory.parse_max_memory` reads them."""

    def __post_init__(self) -> None:
        if not self.devices:
            raise UserError("A plan needs at least one device; got none.")
        if len(set(self.devices)) != len(self.devices):
            raise UserError(f"Each device may be named once; got {', '.join(self.devices)}.")
        choices = {"strategy": STRATEGIES, "uneven": UNEVEN, "compile": COMPILE_MODES}
        for name, options in choices.items():
            if getattr(self, name) not in options:
                raise UserError(f"{name} is {getattr(self, name)!r}; expected one of {', '.join(options)}.")
        for name, degree in self.degrees.items():
            if not isinstance(degree, int) or degree < 1:
                raise UserError(f"{name} is {degree!r}; expected a whole number of 1 or more.")
        self._check_degrees()
        self._check_settings()

    def _check_degrees(self) -> None:
        if self.strategy == "mesh" and self.product != self.world_size:
            raise UserError(self._equation_error())
        if self.strategy == "auto" and self.product != 1:
            raise UserError(
                f"strategy 'auto' chooses the degrees itself, but {self._degrees_text()} was given. "
                "Leave them at 1, or set strategy to 'mesh'."
            )
        if self.strategy == "device_map" and self.product != 1:
            raise UserError(
                f"strategy 'device_map' places layers over the devices and has no degrees, but {self._degrees_text()} "
                "was given. Leave them at 1, or set strategy to 'mesh'."
            )

    def _check_settings(self) -> None:
        """Every setting works with the others, or is refused."""
        parse_max_memory(self.max_memory, self.devices)
        if self.shard_weights and self.strategy == "device_map":
            raise UserError(
                "shard_weights splits every layer, strategy 'device_map' places whole ones; use one of them."
            )
        if self.compile != "off" and self.strategy == "device_map":
            raise UserError(
                f"compile is {self.compile!r}, but with strategy 'device_map' tensors change devices between layers, "
                "which cannot be compiled. Set compile to 'off', or strategy to 'mesh' or 'auto'."
            )
        if self.shard_weights and self.strategy == "mesh" and self.ring * self.ulysses == 1 and self.world_size > 1:
            raise UserError(
                f"shard_weights shares weights out over the ranks of ring and ulysses, but {self._degrees_text()} has "
                f"one of each. Use ulysses {self.world_size} or ring {self.world_size} in place of the other degrees, "
                "or leave shard_weights off."
            )
        if self.max_memory.strip() and not (self.shard_weights or self.strategy == "device_map"):
            raise UserError(
                f"max_memory is {self.max_memory!r}, but strategy {self.strategy!r} gives every device the same; it "
                "works with strategy 'device_map' and with shard_weights. Leave it empty otherwise."
            )
        if self.shard_weights and DISK in parse_max_memory(self.max_memory, self.devices):
            raise UserError(
                f"max_memory is {self.max_memory!r}, but shared weights lie on the devices or in host memory, never in "
                "files. Leave 'disk' out, or use strategy 'device_map'."
            )
        check_backend(self.attention_backend, device=self.devices[0], ring=self.ring, ulysses=self.ulysses)
        if self.strategy == "auto" and self.world_size > 1:  # any run may share its sequence out
            check_backend(self.attention_backend, device=self.devices[0], ring=1, ulysses=self.world_size)

    @property
    def degrees(self) -> dict[str, int]:
        """The degrees by their widget names, outermost axis first."""
        return {"replicas": self.replicas, "ring": self.ring, "ulysses": self.ulysses, "tensor": self.tensor}

    @property
    def product(self) -> int:
        """replicas x ring x ulysses x tensor."""
        return math.prod(self.degrees.values())

    @property
    def world_size(self) -> int:
        """Number of devices."""
        return len(self.devices)

    @property
    def mode(self) -> RunMode:
        """What an evaluation needs to know."""
        return RunMode(
            **self.degrees,
            ring_fp32=self.ring_fp32,
            attention_backend=self.attention_backend,
            compile=self.compile,
        )

    def describe(self) -> str:
        """For a person: "2 ranks (cpu:0, cpu:1): ulysses 2"."""
        names = ", ".join(self.devices)
        if self.strategy == "device_map":
            return f"layers placed over {names}"
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        details = [f"{name} {degree}" for name, degree in self.degrees.items() if degree > 1]
        details += ["weights shared out"] if self.shard_weights and self.world_size > 1 else []
        return f"{ranks} ({names})" + (f": {', '.join(details)}" if details else "")

    def with_degrees(self, *, replicas: int = 1, ring: int = 1, ulysses: int = 1, tensor: int = 1) -> ParallelPlan:
        """The same devices as a mesh of these degrees."""
        return replace(self, strategy="mesh", replicas=replicas, ring=ring, ulysses=ulysses, tensor=tensor)

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
    options = list(_factorisations(world_size, len(degrees)))
    asked = tuple(degrees.values())
    best = min(options, key=lambda option: (sum(abs(a - b) for a, b in zip(option, asked, strict=True)), option[::-1]))
    return ", ".join(f"{name} {degree}" for name, degree in zip(degrees, best, strict=True))


def _factorisations(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """All ways to write `number` as a product of `count` whole numbers, in order."""
    if count == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            for rest in _factorisations(number // first, count - 1):
                yield (first, *rest)


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
    -> replicas (what is left over goes to ulysses); else ulysses. Shared weights (`shard_weights`) tie all ranks
    together: ulysses. A "mesh" plan is returned as it is, "device_map" has no degrees.
    """
    world = plan.world_size
    if plan.strategy != "auto":
        return PlanChoice(plan=plan, reason="as set")
    if world == 1:
        return PlanChoice(plan=plan.with_degrees(), reason="one device")
    if plan.shard_weights:
        return PlanChoice(plan=plan.with_degrees(ulysses=world), reason="the weights are shared out over all ranks")
    if not fits_one_device:
        tensor = largest_divisor(world, lambda degree: heads % degree == 0)
        return PlanChoice(
            plan=plan.with_degrees(tensor=tensor, ulysses=world // tensor),
            reason="the weights do not fit one device, so every layer is sliced over the ranks",
        )
    replicas = largest_divisor(world, lambda degree: degree <= rows and rows % degree == 0)
    chosen = plan.with_degrees(replicas=replicas, ulysses=world // replicas)
    if replicas > 1:
        reason = f"{rows} rows to share out"
    elif rows > 1:
        reason = f"{rows} rows do not divide over {world} devices: each row's sequence is shared out"
    else:
        reason = "one row: its sequence is shared out"
    return PlanChoice(plan=chosen, reason=reason)


def largest_divisor(number: int, allowed: Callable[[int], bool]) -> int:
    """The largest divisor of `number` that `allowed` accepts; 1 always is."""
    return max(d for d in range(1, number + 1) if number % d == 0 and (d == 1 or allowed(d)))
