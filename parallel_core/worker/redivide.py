"""Weights that the ranks hold already, divided in another way: nothing is read from disk.

Owns putting whole tensors together out of the ranks' parts, one at a time. Every rank of the group takes part.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..checkpoint import Checkpoint
from ..parallelize import ShardSpec
from .loading import LoadedTransformer, Weights
from .stored import Loaded, Slice


def from_ranks(loaded: LoadedTransformer, group: dist.ProcessGroup) -> Weights:
    """The weights of `loaded`, whose slices the tensor ranks of `group` hold."""

    def weights(checkpoint: Checkpoint) -> Iterator[tuple[str, Slice]]:
        parameters = dict(loaded.model.named_parameters())
        for name in checkpoint.tensors:
            own: Tensor | None = parameters.get(name)
            whole = own.full_tensor() if isinstance(own, DTensor) else own
            spec = loaded.shards.get(name)
            if spec is not None:
                weight = parameters[name.rpartition(".")[0] + ".weight"]
                whole = join(whole, weight, spec, checkpoint.tensors[name].shape, group)
            assert whole is not None, "only a bias of a row-wise linear is not on every rank, and it has a spec"
            yield name, Loaded(whole)

    return weights


def join(
    own: Tensor | None, weight: Tensor, spec: ShardSpec, shape: tuple[int, ...], group: dist.ProcessGroup
) -> Tensor:
    """The whole tensor, of `shape`, from every tensor rank's slice: the inverse of `ShardSpec.take`.

    `weight`: of the same layer, since the weights of one model can differ in their dtypes.
    """
    if spec.dim is None:
        whole = torch.empty(shape, dtype=weight.dtype, device=weight.device)
        if own is not None:
            whole.copy_(own)
        dist.broadcast(whole, dist.get_global_rank(group, 0), group=group)
        return whole
    assert own is not None
    own = own.detach().contiguous()
    degree = dist.get_world_size(group)
    gathered = own.new_empty(degree * own.numel())
    dist.all_gather_into_tensor(gathered, own.flatten(), group=group)
    sizes = [block // degree for block in spec.blocks]
    by_rank = [part.split(sizes, spec.dim) for part in gathered.view(degree, *own.shape)]
    return torch.cat([part[block] for block in range(len(sizes)) for part in by_rank], spec.dim)
