"""Which GPUs this process sees, how a child is shown exactly one of them, and how much memory each has.

Knows no plan and no model. torch.cuda is asked only when ComfyUI's torch has CUDA.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..plan import DeviceInfo


def visible_tokens(count: int, environ: Mapping[str, str]) -> tuple[str, ...]:
    """For each of this process's GPUs the CUDA_VISIBLE_DEVICES token that shows a child only that GPU.

    Mapped through this process's own mask, whose entries may be numbers, GPU UUIDs or MIG names.
    """
    mask = environ.get("CUDA_VISIBLE_DEVICES")
    tokens = [token.strip() for token in mask.split(",")] if mask else [str(index) for index in range(count)]
    return tuple(tokens[:count])


def list_gpus() -> tuple[DeviceInfo, ...]:
    """The GPUs that this process sees, in its numbering."""
    if not torch.cuda.is_available():
        return ()
    count = torch.cuda.device_count()
    tokens = visible_tokens(count, os.environ)
    found = []
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        uuid = str(getattr(properties, "uuid", ""))
        found.append(
            DeviceInfo(
                name=f"cuda:{index}",
                uuid=uuid if not uuid or uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}",
                token=tokens[index],
                total_bytes=properties.total_memory,
            )
        )
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one device's memory."""

    free: int
    total: int


def device_memory(name: str, num_cpu_ranks: int = 1) -> Memory:
    """Memory of "cuda:N" now, or a CPU rank's equal share of the machine's memory."""
    if name.startswith("cuda:"):
        free, total = torch.cuda.mem_get_info(int(name.removeprefix("cuda:")))
        return Memory(free=free, total=total)
    page = os.sysconf("SC_PAGE_SIZE")
    free = os.sysconf("SC_AVPHYS_PAGES") * page
    total = os.sysconf("SC_PHYS_PAGES") * page
    return Memory(free=free // num_cpu_ranks, total=total // num_cpu_ranks)


def tokens_for(devices: Sequence[str], gpus: Sequence[DeviceInfo]) -> tuple[str, ...]:
    """The CUDA_VISIBLE_DEVICES tokens of those `devices` that are GPUs, in the same order."""
    by_name = {gpu.name: gpu.token for gpu in gpus}
    return tuple(by_name[name] for name in devices if name.startswith("cuda:"))
