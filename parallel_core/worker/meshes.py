"""`MeshCache`: the device meshes of one group of ranks, each built once.

Owns the process groups behind them: a mesh left alone keeps threads and file descriptors for ever, so their number is
bounded and the one not used for longest is taken down. Every rank must ask for the same shapes in the same order.
Does not know models.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..plan import AXES

MAX_MESHES = 8


class MeshCache:
    """Meshes over all ranks by shape; axes as in `plan.AXES`, outermost first.

    The same object is returned for as long as its groups live. What was applied over another object must be applied
    again: the groups of that one may be gone.
    """

    def __init__(self, device_type: str) -> None:
        """`device_type`: "cpu" or "cuda"."""
        self._device_type = device_type
        self._meshes: dict[tuple[int, ...], DeviceMesh] = {}  # least recently used first
        self._sharing: dict[tuple[int, int], DeviceMesh] = {}
        self._everyone: DeviceMesh | None = None

    def get(self, shape: tuple[int, int, int, int]) -> DeviceMesh:
        """The mesh of a plan's `shape`, whose product is the number of ranks. A collective when it is new."""
        mesh = self._meshes.pop(shape, None)
        if mesh is None:
            if len(self._meshes) >= MAX_MESHES:
                self._destroy(next(iter(self._meshes)))
            mesh = init_device_mesh(self._device_type, shape, mesh_dim_names=AXES)
        self._meshes[shape] = mesh
        return mesh

    def sharing(self, shards: int, tensor: int) -> DeviceMesh:
        """The 1-D mesh of the ranks that share weights out: those of one replica with the same place along "tensor".

        It stays until `close`, since a model that is shared out over it cannot change to another.
        """
        if (shards, tensor) not in self._sharing:
            replicas = dist.get_world_size() // (shards * tensor)
            names = ("replica", "shard", "tensor")
            self._sharing[shards, tensor] = init_device_mesh(
                self._device_type, (replicas, shards, tensor), mesh_dim_names=names
            )
        return self._sharing[shards, tensor]["shard"]

    def everyone(self) -> DeviceMesh:
        """The 1-D mesh of all ranks. It has no process group of its own but the world's, so it is never taken down."""
        if self._everyone is None:
            self._everyone = init_device_mesh(self._device_type, (dist.get_world_size(),), mesh_dim_names=("tensor",))
        return self._everyone

    def close(self) -> None:
        """Takes every mesh down."""
        for mesh in self._sharing.values():
            _destroy(mesh)
        self._sharing.clear()
        while self._meshes:
            self._destroy(next(iter(self._meshes)))

    def _destroy(self, shape: tuple[int, ...]) -> None:
        _destroy(self._meshes.pop(shape))


def _destroy(mesh: DeviceMesh) -> None:
    for group in mesh.get_all_groups():
        if group is not dist.group.WORLD:  # an axis over all ranks borrows it
            dist.destroy_process_group(group)
