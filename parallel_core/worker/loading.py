"""Loads a diffusers transformer, or one tensor rank's slices of it, from a folder of safetensors.

Owns building the model on the meta device and filling it tensor by tensor: the peak is the model (or the slices) and
one tensor, and no memory map stays behind. Does not know process groups, plans or what a family's tensors mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import Tensor, nn

from ..checkpoint import Checkpoint, check_loadable, check_shapes, read_checkpoint
from ..families.base import Family, resolve_class
from ..parallelize import ShardSpec, tensor_shards


@dataclass(frozen=True, kw_only=True)
class LoadedTransformer:
    """A transformer on its device, in eval mode."""

    model: nn.Module
    shards: Mapping[str, ShardSpec]
    """Which parameters are slices; none with tensor 1."""
    bytes_read: int
    """Bytes of the tensors and slices taken from the files, in the files' dtypes."""


def load_transformer(
    folder: Path,
    family: Family,
    dtype: torch.dtype,
    device: torch.device,
    *,
    tensor_rank: int = 0,
    tensor_degree: int = 1,
) -> LoadedTransformer:
    """The transformer in `folder` (a diffusers pipeline or its transformer folder), or this tensor rank's slices of it.

    Raises UserError, before any weight is read, for a folder without config or weights, damaged files, weights that do
    not fit the config and a degree that does not fit the model.
    """
    checkpoint, model = empty_transformer(folder, family)
    shards = tensor_shards(model, family, tensor_degree)
    bytes_read = 0
    for file in checkpoint.files:
        with safe_open(file, framework="pt") as source:
            for name in _names_in(checkpoint, file):
                part = _read(source, name, shards.get(name), tensor_rank, tensor_degree)
                bytes_read += 0 if part is None else part.nbytes
                # a copy even where dtype and device already fit: the file's memory map must not live on in the model
                _put(model, name, None if part is None else part.to(device, dtype, copy=True).contiguous())
    model.to(device)  # buffers that the constructor computed
    model.requires_grad_(False).eval()
    if family.on_loaded is not None:
        family.on_loaded(model)
    return LoadedTransformer(model=model, shards=shards, bytes_read=bytes_read)


def empty_transformer(folder: Path, family: Family) -> tuple[Checkpoint, nn.Module]:
    """What is in `folder`, and its transformer on the meta device but for buffers that the constructor computes.

    Raises UserError as `load_transformer` does.
    """
    checkpoint = read_checkpoint(folder, "transformer")
    check_loadable(checkpoint)
    with init_empty_weights(include_buffers=False):
        model: nn.Module = resolve_class(family.transformer).from_config(dict(checkpoint.config))
    check_shapes(checkpoint, {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()})
    return checkpoint, model


def _names_in(checkpoint: Checkpoint, file: Path) -> list[str]:
    return [info.name for info in checkpoint.tensors.values() if info.file == file]


def _read(source: Any, name: str, spec: ShardSpec | None, rank: int, degree: int) -> Tensor | None:
    if spec is None:
        tensor: Tensor = source.get_tensor(name)
        return tensor
    return spec.take(source.get_slice(name), rank, degree)


def _put(model: nn.Module, name: str, value: Tensor | None) -> None:
    path, _, attribute = name.rpartition(".")
    module = model.get_submodule(path)
    is_parameter = attribute in dict(module.named_parameters(recurse=False))
    if is_parameter and value is not None:
        value = nn.Parameter(value, requires_grad=False)
    setattr(module, attribute, value)
