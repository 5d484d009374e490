"""What a group is and holds, as json types: for people and tests. Starts and changes nothing."""

from __future__ import annotations

from typing import Any

from ..protocol import Status
from .group import Group
from .ledger import Ledger

PATIENCE = 0.2
"""Seconds to wait for a group that is at work before it is called "busy"."""


def group_status(group: Group, ledger: Ledger, deadline: float) -> dict[str, Any]:
    """Devices, kind, models, and per rank its process id and its own account; the latter not while it is "busy"."""
    ranks: list[dict[str, Any]] = [
        {"rank": link.rank, "device": link.device, "pid": link.process.pid} for link in group.links
    ]
    busy = not group.lock.acquire(timeout=PATIENCE)
    if not busy:
        try:
            for rank, reply in zip(ranks, group.request(Status(), deadline=deadline), strict=True):
                rank.update(reply.data)
        finally:
            group.lock.release()
    models = [
        {"label": holding.label, "resident": holding.resident, "device_bytes": holding.device_bytes}
        for holding in ledger.of_group(group.key)
    ]
    return {
        "devices": list(group.key.devices),
        "kind": group.key.kind,
        "busy": busy,
        "ranks": ranks,
        "models": models,
    }
