"""Shared weights: the ranks of one sequence hold a part of every weight each and collect a block's when its turn comes.

Owns the use of PyTorch's FSDP2 (`fully_shard`): no plan is needed, so it serves every class. Does not know families,
diffusers or how weights are read.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor


def share_weights(model: nn.Module, blocks: Iterable[nn.Module], mesh: DeviceMesh, *, offload: bool) -> None:
    """Prepares a model on the meta device, whose parameters have their final shapes and dtypes, for `mesh` (1-D).

    Each of its `blocks` is collected by itself, the rest of the model together. `offload`: a rank's part lies in host
    memory and only what is collected is on the device.
    """
    policy = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy()
    for block in blocks:
        fully_shard(block, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)


def part_of_rank(length: int, mesh: DeviceMesh) -> slice:
    """Which of `length` rows (dim 0 of a parameter) this rank holds: `torch.chunk`, as FSDP2 deals them."""
    size = -(-length // mesh.size())
    start = min(length, mesh.get_local_rank() * size)
    return slice(start, min(length, start + size))


def as_shared(part: Tensor, like: nn.Parameter) -> nn.Parameter:
    """This rank's `part` of a parameter, in the form of the prepared meta parameter `like`."""
    meta = cast(DTensor, like.data)
    whole = DTensor.from_local(
        part, meta.device_mesh, meta.placements, run_check=False, shape=meta.shape, stride=meta.stride()
    )
    return nn.Parameter(whole, requires_grad=False)


def is_shared(model: nn.Module) -> bool:
    """Whether `share_weights` prepared it."""
    return isinstance(model, FSDPModule)


def let_go(model: nn.Module) -> None:
    """Gives back what the last forward has collected: FSDP2 keeps the outermost part, for a backward."""
    if isinstance(model, FSDPModule):
        model.reshard()


def own_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a parameter."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def move_own_part(tensor: DTensor, device: torch.device) -> None:
    """Moves what this rank holds of a sliced parameter; on another device than its mesh's it cannot compute.

    By DTensor's own field: its public ways make a new parameter, and put that on the mesh's device at once.
    """
    tensor._local_tensor = tensor._local_tensor.to(device)
