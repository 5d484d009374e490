"""Applies a parallel plan to a loaded diffusers transformer and removes it again: every apply has its undo.

`context` puts a sequence over ranks, `tensor` joins sliced weights. Does not know families' tensors, how weights are
read, or ComfyUI.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .. import upstream
from ..families.base import Family
from ..plan import RunMode
from .applied import Applied
from .compiled import apply_compile
from .context import apply_context
from .tensor import ShardSpec, apply_tensor, tensor_shards

__all__ = ["Applied", "ShardSpec", "apply_context", "apply_plan", "apply_tensor", "tensor_shards"]


def apply_plan(
    model: nn.Module, family: Family, shards: Mapping[str, ShardSpec], mesh: DeviceMesh, mode: RunMode
) -> Applied:
    """The attention backend, weights sliced by `shards`, the sequence over the mesh's context axes, compiled blocks."""
    with ExitStack() as undo:
        undo.callback(upstream.choose_backend(model, mode.attention_backend))
        undo.callback(apply_tensor(model, family, shards, mesh).remove)
        undo.callback(apply_context(model, family, mesh, mode).remove)
        undo.callback(apply_compile(model, mode.compile).remove)
        return Applied(undo.pop_all())
