"""Which GPUs this process sees, how much memory each has in all, and how a child is shown exactly one of them.

Knows no plan and no model. What is free on a GPU the ranks say: asking from here would create a CUDA context of
ComfyUI's process on each of them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

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


def tokens_for(devices: Sequence[str], gpus: Sequence[DeviceInfo]) -> tuple[str, ...]:
    """The CUDA_VISIBLE_DEVICES tokens of those `devices` that are GPUs, in the same order."""
    by_name = {gpu.name: gpu.token for gpu in gpus}
    return tuple(by_name[name] for name in devices if name.startswith("cuda:"))
