"""Models whose layers are placed over devices, from the controller's side: how much each device is expected to hold.

Owns the spec of a transformer under strategy "device_map". What lies where in the end the rank decides, which knows
what is free. Knows no process and no layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from ..errors import UserError
from ..max_memory import DISK, HOST, WEIGHTS_SHARE, format_bytes, format_entry, parse_max_memory
from ..plan import ParallelPlan
from ..protocol import PlaceTransformer, Request
from .group import GroupKey
from .models import TransformerSpec


@dataclass(frozen=True, kw_only=True)
class PlacedTransformerSpec(TransformerSpec):
    """A transformer whose layers are placed over `devices`, all seen by one process.

    `limits`: the user's max_memory in bytes per device, "cpu" and "disk". `capacities`: memory of each device in bytes.
    """

    limits: tuple[tuple[str, int], ...]
    capacities: tuple[int, ...]

    @property
    def weights(self) -> str:
        """As the key: they are not divided, and nothing else is made of them."""
        return self.key

    @property
    def group(self) -> GroupKey:
        """One process that sees all devices."""
        return GroupKey(devices=self.devices, kind="placement")

    def load_request(self) -> Request:
        """See `protocol.PlaceTransformer`."""
        return PlaceTransformer(
            key=self.key,
            folder=self.folder,
            family=self.family,
            dtype=self.dtype,
            storage=self.storage,
            config_from=self.config_from,
            max_memory=dict(self.limits),
        )

    def estimated_bytes(self) -> dict[str, int]:
        """What the placement puts on each device when nothing else lies there; 0 for a device that is left out."""
        limits = dict(self.limits)
        room = {
            device: min(capacity, limits.get(device, int(capacity * WEIGHTS_SHARE)))
            for device, capacity in zip(self.devices, self.capacities, strict=True)
        }
        return expected_shares("balanced", room, self.num_bytes)


def placed(spec: TransformerSpec, plan: ParallelPlan, capacities: Sequence[int]) -> PlacedTransformerSpec:
    """`spec` with its layers placed as `plan` says, over devices with so many bytes of memory.

    `UserError` for limits that cannot hold the weights whatever is free.
    """
    limits = parse_max_memory(plan.max_memory, plan.devices)
    granted = sum(limits.values())
    if {*plan.devices, HOST} <= limits.keys() and granted < spec.num_bytes:
        raise UserError(
            f"The weights take {format_bytes(spec.num_bytes)}, and max_memory {plan.max_memory!r} allows "
            f"{format_bytes(granted)} in all. Raise a limit, or add '{format_entry(DISK, spec.num_bytes - granted)}', "
            "which leaves that part in the model's files (slow)."
        )
    return PlacedTransformerSpec(
        **{item.name: getattr(spec, item.name) for item in fields(spec)},
        limits=tuple(sorted(limits.items())),
        capacities=tuple(capacities),
    )


def expected_shares(placement: str, room: Mapping[str, int], total: int) -> dict[str, int]:
    """About how many of `total` bytes the placement puts on each device that has `room` for so many bytes."""
    if placement == "balanced":  # those with least room first: the others take over what they cannot hold
        order = sorted(room, key=lambda device: room[device])
    elif placement == "sequential":
        order = list(room)
    else:
        order = sorted(room, key=lambda device: -room[device])[: 1 if placement == "single" else None]
    shares: dict[str, int] = {}
    rest = total
    for index, device in enumerate(order):
        fair = rest // (len(order) - index) if placement == "balanced" else rest
        shares[device] = min(fair, room[device])
        rest -= shares[device]
    return shares
