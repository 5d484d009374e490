"""The VAE on a rank: loading, decode and encode.

Owns how the work is divided. Whole pictures: the rows of the batch are shared out and each rank returns its own.
Tiles: the tiles of the library's own tiled code are shared out and the first rank returns the blended result. A
picture is always computed by itself, never together with others of its batch, so its bits depend neither on the batch
nor on the number of ranks. Videos: each whole video or tile of one is a piece by itself, dealt to the ranks in turn.
Latents are raw VAE space and pixels are -1..1: scaling to model space or to 0..1 is the caller's. Does not know
ComfyUI.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import Tensor, nn

from ..checkpoint import Checkpoint, check_shapes
from ..protocol import Request
from ..tile_parallel import run_tiled
from ..upstream import vae_tiles
from ..vae_files import vae_file_name
from ..vae_spec import DecodeVae, EncodeVae, LoadVae, TileSize, read_vae_checkpoint
from .store import StoredModel
from .worker import Handler, Inputs, Result, Worker, torch_dtype

# Attention as files from before diffusers 0.14 spell it (Stable Diffusion 1.x); diffusers renames it while loading.
OLD_NAMES = {".to_q.": ".query.", ".to_k.": ".key.", ".to_v.": ".value.", ".to_out.0.": ".proj_attn."}


def load_vae(path: Path, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The VAE in a folder or a single file on `device`, ready for inference.

    Raises `UserError` before any weight is read when names or shapes in the file do not fit the config.
    """
    checkpoint = read_vae_checkpoint(path)
    with init_empty_weights(include_buffers=False):
        model: nn.Module = getattr(diffusers, checkpoint.class_name).from_config(dict(checkpoint.config))
    empty = model.state_dict()
    stored_as = {name: _stored_name(checkpoint, name) for name in empty}
    shapes = {stored_as[name]: _stored_shape(checkpoint, stored_as[name], tensor) for name, tensor in empty.items()}
    check_shapes(checkpoint, shapes)
    weights: dict[str, Tensor] = {}
    for file in checkpoint.files:
        with safe_open(file, framework="pt") as source:
            for name, stored in stored_as.items():
                info = checkpoint.tensors[stored]
                if info.file == file:
                    # a copy even where dtype and device already fit: the file's memory map must not live on
                    value = source.get_tensor(info.stored_name).to(device, dtype, copy=True)
                    weights[name] = value.view(empty[name].shape)
    model.load_state_dict(weights, assign=True)
    return model.requires_grad_(False).eval()


def _stored_shape(checkpoint: Checkpoint, stored: str, wanted: Tensor) -> tuple[int, ...]:
    """The shape that a stored weight must have: attention's linear layers are 1 x 1 convolutions in some files."""
    shape = tuple(wanted.shape)
    info = checkpoint.tensors.get(stored)
    if info is not None and len(shape) == 2 and info.shape == (*shape, 1, 1):
        return info.shape
    return shape


def _stored_name(checkpoint: Checkpoint, name: str) -> str:
    if checkpoint.variant:
        name = vae_file_name(name, checkpoint.variant, checkpoint.config)
    old = name
    for new_part, old_part in OLD_NAMES.items():
        old = old.replace(new_part, old_part)
    return old if old in checkpoint.tensors else name


# ----- computing -----


def decode(vae: Any, latents: Tensor, tile: TileSize | None) -> Tensor | None:
    """This rank's part of decoding raw `latents` [B, C, H, W]: pixels [b, 3, H * scale, W * scale] in -1..1 on the CPU.

    None for a rank that has nothing to return. The rows that the ranks return, in rank order, are the batch.
    """
    return _share(vae, vae.decoder, lambda rows: vae.decode(rows).sample, latents, tile)


def encode(vae: Any, pixels: Tensor, tile: TileSize | None) -> Tensor | None:
    """The reverse of `decode`. Returns the mean of the posterior, as ComfyUI's own VAEs do: nothing is drawn."""
    return _share(vae, vae.encoder, lambda rows: vae.encode(rows).latent_dist.mode(), pixels, tile)


def _share(
    vae: Any, coder: nn.Module, compute: Callable[[Tensor], Tensor], batch: Tensor, tile: TileSize | None
) -> Tensor | None:
    weight = next(vae.parameters())
    with torch.inference_mode():
        if tile is None:
            mine = batch.tensor_split(_world_size())[_rank()]
            rows = torch.split(mine.to(weight.device, weight.dtype), 1) if len(mine) else ()
            parts = [compute(row).cpu() for row in rows]
            return torch.cat(parts) if parts else None
        whole_batch = batch.to(weight.device, weight.dtype)
        with vae_tiles(vae, side=tile.side, overlap=tile.overlap):
            whole = run_tiled(vae, coder, lambda: compute(whole_batch))
        return whole.cpu() if _rank() == 0 else None


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


# ----- operations -----


def load_operation(worker: Worker, request: LoadVae, tensors: Inputs) -> Result:
    """Reads the weights straight to the device; every rank has all of them."""
    if request.key not in worker.store:
        module = load_vae(Path(request.folder), torch_dtype(request.dtype), worker.device)
        worker.store.add(request.key, StoredModel(module=module, device=worker.device, close=lambda: None))
    return Result(data={"device_bytes": {worker.devices[0]: worker.store.use(request.key).num_bytes}})


def decode_operation(worker: Worker, request: DecodeVae, tensors: Inputs) -> Result:
    """See `DecodeVae`."""
    vae: Any = worker.store.use(request.key).module
    if "latents" not in tensors:
        return _answer(worker, _pieces(worker, vae, tensors, lambda piece: vae.decode(piece).sample))
    rows = decode(vae, tensors["latents"], _tile(request))
    return _answer(worker, {} if rows is None else {"pixels": rows})


def encode_operation(worker: Worker, request: EncodeVae, tensors: Inputs) -> Result:
    """See `EncodeVae`."""
    vae: Any = worker.store.use(request.key).module
    if "pixels" not in tensors:
        return _answer(worker, _pieces(worker, vae, tensors, lambda piece: vae.encode(piece).latent_dist.mode()))
    rows = encode(vae, tensors["pixels"], _tile(request))
    return _answer(worker, {} if rows is None else {"latents": rows})


def _pieces(
    worker: Worker, vae: Any, pieces: Mapping[str, Tensor], compute: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    """This rank's share of pieces that have nothing to do with one another: every world-size-th."""
    weight = next(vae.parameters())
    with torch.inference_mode():
        return {
            name: compute(pieces[name].to(weight.device, weight.dtype)).cpu()
            for name in pieces  # not items(): asking for a tensor copies it to the device
            if int(name) % worker.world_size == worker.rank
        }


def _tile(request: DecodeVae | EncodeVae) -> TileSize | None:
    return TileSize(side=request.tile_side, overlap=request.tile_overlap) if request.tile_side else None


def _answer(worker: Worker, tensors: dict[str, Tensor]) -> Result:
    if worker.device.type == "cuda":
        # A decode's working memory is a multiple of the VAE's weights; kept, it would be missing to everybody else.
        torch.cuda.empty_cache()
    return Result(tensors=tensors)


OPERATIONS: dict[str, tuple[type[Request], Handler]] = {
    LoadVae.operation: (LoadVae, load_operation),
    DecodeVae.operation: (DecodeVae, decode_operation),
    EncodeVae.operation: (EncodeVae, encode_operation),
}
