"""Text encoders in slices: every matrix dealt out over the ranks of a mesh group, filled as it is read.

Owns the use of transformers' tensor parallelism (its styles and plans) and what T5 and UMT5 need on top. It is applied
to an empty model over the group's own mesh, rather than through `from_pretrained(distributed_config=...)`: that one
makes process groups of its own at each load, and takes whatever accelerator the machine has for the ranks' device,
which is wrong for CPU ranks. Knows no family but by declarations, and no process.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
from transformers.distributed.sharding_utils import DtensorShardOperation
from transformers.distributed.tensor_parallel import TensorParallelLayer, apply_tensor_parallelism

from ..checkpoint import Checkpoint
from ..families.text_plans import HEADS_OF_BIAS
from .stored import from_files


class _HeadsOfBias(TensorParallelLayer):
    """An embedding with a column per head: a rank looks up its own heads' columns and nothing is gathered."""

    def should_use_local_tensors(self, module: nn.Module) -> bool:
        return True

    def shard_param(self, module: nn.Module, param: str, mesh: DeviceMesh) -> None:
        table = cast(Tensor, module._parameters[param])
        module._parameters[param] = nn.Parameter(
            distribute_tensor(table, mesh, [Shard(1)], src_data_rank=None), requires_grad=False
        )


ALL_PARALLEL_STYLES.register(HEADS_OF_BIAS, cast(Any, _HeadsOfBias()))


def slice_model(model: Any, plan: Mapping[str, str], mesh: DeviceMesh) -> None:
    """Makes `model`, empty on the meta device, one of which each rank of `mesh` (1-D) holds its slices.

    `plan` comes on top of what its class declares: module glob -> style.
    """
    apply_tensor_parallelism(model, mesh, model._expand_parallel_plan({**(model.tp_plan or {}), **plan}))
    for name, module in model.named_modules():
        if hasattr(module, "n_heads") and any(fnmatchcase(name, glob.rpartition(".")[0]) for glob in plan):
            # UMT5 arranges by these counts; T5 computes its bias's shape with them
            module.n_heads //= mesh.size()
            module.inner_dim //= mesh.size()


def fill(model: Any, checkpoint: Checkpoint, dtypes: Mapping[str, torch.dtype], device: torch.device) -> None:
    """Reads this rank's part of every weight to `device`, one tensor after the other; ties what is one weight.

    `dtypes`: by name, for every parameter. All weights are there, as `checkpoint`'s header has shown.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    tied = dict(model.all_tied_weights_keys)
    doubles = {target for target, source in tied.items() if source in checkpoint.tensors}
    for name, stored in from_files(checkpoint):
        if name in parameters and name not in doubles:
            _put(model, name, _filled(parameters[name], stored, dtypes[name], device))
    for target, source in tied.items():
        there, other = (source, target) if source in checkpoint.tensors else (target, source)
        _put(model, other, model.get_parameter(there))
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)  # those that the constructor computed


def _filled(empty: Tensor, stored: Any, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    # a copy even where dtype and device fit: the file's memory map must not live on in the model
    if not isinstance(empty, DTensor):
        return nn.Parameter(stored[:].to(device, dtype, copy=True), requires_grad=False)
    cut = cast(Tensor, DtensorShardOperation(empty).shard_tensor(stored))
    part = cut.to(device, dtype, copy=True).contiguous()
    whole = DTensor.from_local(
        part, empty.device_mesh, empty.placements, run_check=False, shape=empty.shape, stride=empty.stride()
    )
    return nn.Parameter(whole, requires_grad=False)


def _put(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    path, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(path), attribute, parameter)
