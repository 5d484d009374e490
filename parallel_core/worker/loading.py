"""Loads a diffusers transformer, or one rank's part of it, from a diffusers folder or a single file.

Owns building the model on the meta device and filling it tensor by tensor: the peak is the model (or the part) and one
tensor, and no memory map stays behind. Does not know plans or what a family's tensors mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .. import upstream
from ..checkpoint import Checkpoint, check_shapes
from ..families.base import Family, resolve_class
from ..model_file import ModelSource, read_transformer
from ..parallelize import ShardSpec, tensor_shards
from ..storage import Storage, check_blocks
from .heap import large_blocks_apart
from .packed import Held, hold_packed
from .shared_weights import as_shared, part_of_rank, share_weights
from .stored import Slice, from_files


@dataclass(frozen=True, kw_only=True)
class Part:
    """Which part of the weights a rank holds; all of them by default."""

    tensor_rank: int = 0
    tensor_degree: int = 1
    shared_over: DeviceMesh | None = None
    """The ranks (1-D) that share the weights out among them, each tensor rank's slices by themselves."""
    offload: bool = False
    """Shared weights lie in host memory until they are collected."""


@dataclass(frozen=True, kw_only=True)
class LoadedTransformer:
    """A transformer on its device, in eval mode."""

    model: nn.Module
    shards: Mapping[str, ShardSpec]
    """Which parameters are slices; none with tensor 1."""
    bytes_read: int
    """Bytes of the tensors and slices taken from the files, in the files' dtypes; unpacked ones as they are held."""


WHOLE = Part()


Weights = Callable[[Checkpoint], Iterator[tuple[str, Slice]]]
"""Where the weights come from: every name of a checkpoint with its tensor, one after the other."""


@large_blocks_apart()
def load_transformer(
    source: ModelSource,
    family: Family,
    storage: Storage,
    device: torch.device,
    part: Part = WHOLE,
    weights: Weights = from_files,
) -> LoadedTransformer:
    """The transformer that `source` names, or a rank's part of it, its weights held as `storage` says.

    Raises UserError, before any weight is read, for a folder without config or weights, damaged files, weights that do
    not fit the config and a degree that does not fit the model.
    """
    checkpoint, model = empty_transformer(source, family)
    shards = tensor_shards(model, family, part.tensor_degree)
    check_blocks(checkpoint, storage, part.tensor_degree)
    held = hold_packed(model, checkpoint, storage)
    reader = _Reader(shards, held, part, family, getattr(torch, storage.dtype), device)
    put = _put if part.shared_over is None else _share(model, reader, part)
    for name, stored in weights(checkpoint):
        put(model, name, reader.read(stored, name))
        held.finish(model, name)
    _to_device(model, device)
    model.requires_grad_(False).eval()
    if family.on_loaded is not None:
        family.on_loaded(model)
    return LoadedTransformer(model=model, shards=shards, bytes_read=reader.bytes_read)


def empty_transformer(source: ModelSource, family: Family) -> tuple[Checkpoint, nn.Module]:
    """What `source` names, and its transformer on the meta device but for buffers that the constructor computes.

    Raises UserError as `load_transformer` does.
    """
    checkpoint, _ = read_transformer(source)
    with init_empty_weights(include_buffers=False):
        model: nn.Module = resolve_class(family.transformer).from_config(dict(checkpoint.config))
    check_shapes(checkpoint, {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()})
    return checkpoint, model


def held_dtype(family: Family, name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which the weight of that name is held when the model runs in `dtype`."""
    return torch.promote_types(dtype, torch.float32) if family.is_fp32(name) else dtype


def _to_device(model: nn.Module, device: torch.device) -> None:
    """The buffers that the constructor computed; the weights are there."""
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)


class _Reader:
    """Reads a rank's part of one tensor after the other."""

    def __init__(
        self,
        shards: Mapping[str, ShardSpec],
        held: Held,
        part: Part,
        family: Family,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._shards = shards
        self._held = held
        self._part = part
        self._family = family
        self._dtype = dtype
        self._device = torch.device("cpu") if part.offload else device
        self.bytes_read = 0

    def read(self, source: Slice, name: str) -> Tensor | None:
        """This rank's part on its device in the wanted dtype; None where it holds nothing."""
        dtype = self._dtype_of(name)
        part = self._cut(self._held.source(source, name, dtype), self._shards.get(name))
        if part is None:
            return None
        self.bytes_read += part.nbytes
        # a copy even where dtype and device already fit: the file's memory map must not live on in the model
        return part.to(self._device, dtype, copy=True).contiguous()

    def _dtype_of(self, name: str) -> torch.dtype:
        return torch.uint8 if self._held.is_packed(name) else held_dtype(self._family, name, self._dtype)

    def _cut(self, source: Slice, spec: ShardSpec | None) -> Tensor | None:
        mesh = self._part.shared_over
        if spec is not None:
            sliced = spec.take(source, self._part.tensor_rank, self._part.tensor_degree)
            return sliced if sliced is None or mesh is None else sliced[part_of_rank(sliced.shape[0], mesh)]
        return source[:] if mesh is None else source[part_of_rank(source.get_shape()[0], mesh)]

    def shape_on_meta(self, name: str, whole: Tensor) -> Tensor | None:
        """A meta tensor of the shape and dtype that this tensor rank has of `whole`, before it is shared out."""
        spec = self._shards.get(name)
        source = self._held.meta_source(whole, name)
        sliced = whole if spec is None else spec.take(source, self._part.tensor_rank, self._part.tensor_degree)
        return None if sliced is None else torch.empty(sliced.shape, dtype=self._dtype_of(name), device="meta")


def _share(model: nn.Module, reader: _Reader, part: Part) -> Callable[[nn.Module, str, Tensor | None], None]:
    """Makes the model's parameters shared ones; returns what puts a rank's part in its place."""
    assert part.shared_over is not None
    for name, parameter in list(model.named_parameters()):
        _put(model, name, reader.shape_on_meta(name, parameter))
    blocks = upstream.repeated_blocks(model.requires_grad_(False))
    share_weights(model, blocks, part.shared_over, offload=part.offload)
    parameters = dict(model.named_parameters())

    def put(model: nn.Module, name: str, value: Tensor | None) -> None:
        if value is not None:
            shared = as_shared(value, parameters[name])
            path, _, attribute = name.rpartition(".")
            model.get_submodule(path).load_state_dict({attribute: shared}, strict=False, assign=True)

    return put


def _put(model: nn.Module, name: str, value: Tensor | None) -> None:
    path, _, attribute = name.rpartition(".")
    module = model.get_submodule(path)
    is_parameter = attribute in dict(module.named_parameters(recurse=False))
    if is_parameter and value is not None:
        value = nn.Parameter(value, requires_grad=False)
    setattr(module, attribute, value)
