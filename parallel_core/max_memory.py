"""What a user writes into `max_memory`: "0:16GB,1:16GB,cpu:64GB", and how bytes are shown to a person.

Owns the parsing, its errors and the unit of every byte count shown. Knows no device's real memory, no model, no torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from .errors import UserError

HOST = "cpu"
"""The host's memory, for weights that no device has room for. A CPU rank is "cpu:0", "cpu:1", ..."""
DISK = "disk"
"""The model's own files: weights that stay there are read anew each time they are needed."""
WEIGHTS_SHARE = 0.75
"""The part of a GPU's memory that a transformer's weights may take where no limit says otherwise: what evaluating it
takes grows with the picture."""

FORM = (
    "'0:16GB,1:16GB,cpu:64GB' (device number : size, comma between; 'cpu' is the host's memory, "
    "'disk' the model's files)"
)

_UNITS = {"B": 1} | {
    f"{letter}{infix}B": base**power
    for power, letter in enumerate("KMGT", start=1)
    for infix, base in (("", 1000), ("i", 1024))
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)")
_UNITS_BY_LOWER = {unit.lower(): factor for unit, factor in _UNITS.items()}


def parse_max_memory(text: str, devices: Sequence[str]) -> dict[str, int]:
    """Bytes per device name for what a user wrote.

    `devices` are the names of the group's devices, "cuda:0" or "cpu:0" (a CPU rank). A key of `text` is such a name or
    its number, "cpu" or "disk"; a size is a number with a unit (1 GB = 1000^3, 1 GiB = 1024^3 bytes). An empty text
    gives no entry. Raises `UserError` that names the part which is wrong and shows the right form.
    """
    budgets: dict[str, int] = {}
    if not text.strip():
        return budgets
    for token in text.split(","):
        key, separator, size = token.strip().rpartition(":")
        if not separator or not key:
            raise UserError(f"max_memory has {token.strip()!r}, which is not 'device:size'. Expected {FORM}.")
        name = _device_name(key.strip(), devices)
        if name in budgets:
            raise UserError(f"max_memory names {name} twice; each device may be named once. Expected {FORM}.")
        budgets[name] = _size_bytes(size.strip(), token.strip())
    return budgets


def _device_name(key: str, devices: Sequence[str]) -> str:
    wanted = key.lower()
    if wanted in (HOST, DISK):
        return wanted
    for device in devices:
        if wanted in (device.lower(), device.rpartition(":")[2]):
            return device
    known = [device.rpartition(":")[2] for device in devices]
    raise UserError(
        f"max_memory names device {key!r}, but this group has {', '.join(devices)}. "
        f"Known keys here: {', '.join([*known, HOST, DISK])}. Expected {FORM}."
    )


def _size_bytes(size: str, token: str) -> int:
    match = _SIZE.fullmatch(size)
    factor = _UNITS_BY_LOWER.get(match.group(2).lower()) if match else None
    if match is None or factor is None:
        hint = f"Did you mean '{size}GB'? " if re.fullmatch(r"\d+(\.\d+)?", size) else ""
        raise UserError(
            f"max_memory has {token!r}: {size!r} is not a size. {hint}"
            f"Expected a number and one of {', '.join(_UNITS)}, as in {FORM}."
        )
    return int(float(match.group(1)) * factor)


def format_bytes(count: int) -> str:
    """Bytes for a person in decimal units, rounded: "9.8 GB", "246 MB", "12 kB"."""
    if count >= 1000**3:
        return f"{count / 1000**3:.1f} GB"
    if count >= 1000**2:
        return f"{count / 1000**2:.0f} MB"
    return f"{count / 1000:.0f} kB"


def format_entry(device: str, count: int) -> str:
    """An entry of `max_memory` that grants at least `count` bytes: "cpu:2.4GB"."""
    key = device if device in (HOST, DISK) else device.rpartition(":")[2]
    if count >= 1000**3:
        return f"{key}:{math.ceil(count / 1000**2 / 100) / 10:g}GB"
    return f"{key}:{max(1, math.ceil(count / 1000**2))}MB"
