"""The environment of a rank: what it inherits from ComfyUI's process and what it must not.

Knows variables and device names only; starts nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

_NOT_INHERITED = (
    "PYTHONHOME",
    "PYTHONPATH",
    "PYTHONSTARTUP",
    "PYTHONSAFEPATH",
    "VIRTUAL_ENV",
    "CUDA_VISIBLE_DEVICES",
    # ComfyUI sets backend:cudaMallocAsync for its own process; a rank chooses its own allocator.
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    # Some plans would honour it and others not; which kernel runs is not the environment's choice.
    "DIFFUSERS_ATTN_BACKEND",
    "DIFFUSERS_ATTN_CHECKS",
    # Left over from a launcher around ComfyUI, they would describe another job.
    "MASTER_ADDR",
    "MASTER_PORT",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
)


def threads_per_rank(parent: Mapping[str, str], num_ranks: int) -> int:
    """CPU threads for each of `num_ranks` ranks: what the user set, else an equal share of the cores."""
    if parent.get("OMP_NUM_THREADS", "").isdigit():
        return max(1, int(parent["OMP_NUM_THREADS"]))
    cores = len(os.sched_getaffinity(0))
    return max(1, cores // num_ranks)


def rank_environment(
    parent: Mapping[str, str], *, rank: int, world_size: int, visible_devices: Sequence[str], threads: int
) -> dict[str, str]:
    """The variables of one rank.

    `visible_devices` are the CUDA_VISIBLE_DEVICES tokens of the GPUs this rank may see (numbers or UUIDs as the driver
    counts them, so already mapped through the parent's own mask); empty for a CPU rank.
    """
    env = {name: value for name, value in parent.items() if name not in _NOT_INHERITED}
    env.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK="0",
        CUDA_VISIBLE_DEVICES=",".join(visible_devices),
        OMP_NUM_THREADS=str(threads),
        PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True",
        # gloo and NCCL listen by nature; on loopback nobody else can reach them.
        GLOO_SOCKET_IFNAME="lo",
        NCCL_SOCKET_IFNAME="lo",
        # Ranks read the paths they are given; a hub request would be a network call that nobody asked for.
        HF_HUB_OFFLINE="1",
        TRANSFORMERS_OFFLINE="1",
        HF_HUB_DISABLE_TELEMETRY="1",
        TOKENIZERS_PARALLELISM="false",
        PYTHONUNBUFFERED="1",
    )
    return env
