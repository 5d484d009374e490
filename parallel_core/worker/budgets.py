"""How many bytes of weights each device of a placement group can take now.

Owns the measuring and the user's limits. Knows no model and no strategy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ..host import host_memory
from ..max_memory import DISK, HOST

ACTIVATION_BYTES = 512 * 1024**2
"""Kept free on each GPU for what encoding itself takes: T5-XXL at 512 tokens needs about 0.3 GB beside its weights."""
HOST_SHARE = 0.9
"""Of the host's available memory, what weights may take; the rest is for everybody else."""


def free_budgets(devices: Sequence[str], limits: Mapping[str, int], gpu_share: float = 1.0) -> dict[str, int]:
    """Bytes of weights that each device can take now, in the order of `devices`, then the host and the files.

    GPUs: free memory without `ACTIVATION_BYTES`, and without a limit no more than `gpu_share` of all their memory. CPU
    ranks share the host's memory: those with a limit of their own take that much of it, the others share the rest
    equally, and the host itself has what then remains. The files count only when `limits` names them.
    """
    host = int(host_memory()[0] * HOST_SHARE)
    if devices[0].startswith("cuda:"):
        free = {
            device: _gpu_budget(*torch.cuda.mem_get_info(index), 1.0 if device in limits else gpu_share)
            for index, device in enumerate(devices)
        }
        free[HOST] = host
    else:
        limited = {device: min(limits[device], host) for device in devices if device in limits}
        rest = max(0, host - sum(limited.values()))
        others = len(devices) - len(limited)
        free = {device: limited.get(device, rest // max(others, 1)) for device in devices}
        free[HOST] = 0 if others else rest
    if DISK in limits:
        free[DISK] = limits[DISK]
    return free


def _gpu_budget(free: int, total: int, share: float) -> int:
    return max(0, min(free - ACTIVATION_BYTES, int(total * share)))


def apply_limits(free: Mapping[str, int], limits: Mapping[str, int]) -> dict[str, int]:
    """`free` with the user's limits on it."""
    return {device: min(size, limits.get(device, size)) for device, size in free.items()}
