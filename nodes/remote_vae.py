"""The VAE that stands for one on the ranks: ComfyUI's own VAE nodes work with it.

A subclass of ComfyUI's VAE without weights, in which decode and encode, whole and tiled, are remote calls. Owns
ComfyUI's conventions (channels last, 0..1, float32, cropping) and nothing of how the ranks compute.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import comfy.model_management
import comfy.sd
import comfy.utils
import torch
from torch import Tensor

from ..parallel_core.engine.vae import RemoteVae
from ..parallel_core.errors import UserError
from ..parallel_core.vae_spec import TileSize
from .remote_patcher import RemotePatcher, WeightlessModel, local_device
from .runtime import as_comfy_interrupt, cancel_requested, say

logger = logging.getLogger("parallel_diffusion")

# Bytes of working memory per pixel and byte of dtype, as ComfyUI estimates them for this kind of VAE.
_DECODE_BYTES = 2178
_ENCODE_BYTES = 1767


class RemoteVAE(comfy.sd.VAE):
    """A VAE whose decode and encode run on the ranks. Whole methods are replaced: ComfyUI's own would compute here when
    they run out of memory."""

    def __init__(self, remote: RemoteVae) -> None:
        """Sets what ComfyUI's constructor would have worked out from weights; that one is not called."""
        vae = remote.spec.vae
        self.remote = remote
        self.first_stage_model = WeightlessModel(remote)
        self.device = comfy.model_management.get_torch_device()
        self.output_device = comfy.model_management.intermediate_device()
        self.vae_dtype = getattr(torch, vae.dtype)
        self.working_dtypes = [self.vae_dtype]
        self.latent_channels = vae.latent_channels
        self.output_channels = vae.image_channels
        self.downscale_ratio = self.upscale_ratio = vae.scale
        self.latent_dim = 2
        self.size = vae.num_bytes
        self.process_input = lambda image: image * 2.0 - 1.0
        self.process_output = lambda image: torch.clamp((image + 1.0) / 2.0, min=0.0, max=1.0)
        self.memory_used_decode = memory_estimate(_DECODE_BYTES * vae.scale**2)
        self.memory_used_encode = memory_estimate(_ENCODE_BYTES)
        self.disable_offload = False
        self.handles_tiling = False
        self.not_video = False
        self.crop_input = True
        self.pad_channel_value = None
        self.extra_1d_channel = None
        self.format_encoded = None
        self.downscale_index_formula = self.upscale_index_formula = None
        self.audio_sample_rate = 44100
        self.patcher = RemotePatcher(
            self.first_stage_model,
            load_device=self.device,
            offload_device=comfy.model_management.vae_offload_device(),
        )

    # -- what ComfyUI's nodes call ---------------------------------------------------------------------------------

    def decode(self, samples_in: Tensor, vae_options: dict[str, Any] | None = None) -> Tensor:
        """Raw latents [B, C, H, W] -> pixels [B, H, W, 3] in 0..1. Whole pictures, shared out over the ranks."""
        if vae_options:
            raise UserError(f"VAE options {', '.join(vae_options)} are for other kinds of VAE; this one has none.")
        return self._decode(samples_in, None).movedim(1, -1)

    def decode_tiled(
        self,
        samples: Tensor,
        tile_x: int | None = None,
        tile_y: int | None = None,
        overlap: int | None = None,
        tile_t: int | None = None,
        overlap_t: int | None = None,
    ) -> Tensor:
        """As `decode`, with the tiles of each picture shared out. Tile sizes in latent cells; an image has no `_t`."""
        overlap = 16 if overlap is None else overlap
        return self.decode_tiled_(samples, tile_x or 64, tile_y or 64, overlap).movedim(1, -1)

    def decode_tiled_(self, samples: Tensor, tile_x: int = 64, tile_y: int = 64, overlap: int = 16) -> Tensor:
        """As `decode_tiled`, channels first."""
        return self._decode(samples, TileSize(side=_square(tile_x, tile_y), overlap=overlap))

    def encode(self, pixel_samples: Tensor) -> Tensor:
        """Pixels [B, H, W, 3] in 0..1, cropped to whole latent cells -> raw latents: the mean, nothing is drawn."""
        return self._encode(self._cropped(pixel_samples), None)

    def encode_tiled(
        self,
        pixel_samples: Tensor,
        tile_x: int | None = None,
        tile_y: int | None = None,
        overlap: int | None = None,
        tile_t: int | None = None,
        overlap_t: int | None = None,
    ) -> Tensor:
        """As `encode`, with the tiles of each picture shared out. Tile sizes in pixels; an image has no `_t`."""
        pixels = self._cropped(pixel_samples)
        return self.encode_tiled_(pixels, tile_x or 512, tile_y or 512, 64 if overlap is None else overlap)

    def encode_tiled_(self, pixel_samples: Tensor, tile_x: int = 512, tile_y: int = 512, overlap: int = 64) -> Tensor:
        """As `encode_tiled`, channels first."""
        return self._encode(pixel_samples, TileSize.from_pixels(_square(tile_x, tile_y), overlap, self.downscale_ratio))

    def get_sd(self) -> dict[str, Tensor]:
        """Refused: an empty file would be saved."""
        raise UserError(
            f"The {self.remote.spec.label} lives on the ranks and cannot be saved from here; its file is in "
            f"{self.remote.spec.vae.folder}."
        )

    # -- the way to the ranks --------------------------------------------------------------------------------------

    def _decode(self, samples: Tensor, tile: TileSize | None) -> Tensor:
        if samples.ndim == 5:
            samples = samples[:, :, 0]  # one frame: what current ComfyUI does for an image VAE
        self.remote.spec.vae.check_latents(samples.shape)
        shape = _one_tile(samples.shape, tile.side if tile else None)
        memory = self.memory_used_decode(shape, self.vae_dtype)
        pixels = self._run(self.remote.decode, samples, tile, memory)
        return self._as_output(self.process_output(pixels))

    def _cropped(self, pixels: Tensor) -> Tensor:
        """Whole latent cells out of the middle, as ComfyUI cuts them; channels first."""
        cropped: Tensor = self.vae_encode_crop_pixels(pixels)
        if 0 in cropped.shape[1:3]:
            raise UserError(
                f"The picture is {pixels.shape[2]} x {pixels.shape[1]} pixels; this VAE needs at least "
                f"{self.remote.spec.vae.scale} x {self.remote.spec.vae.scale}."
            )
        return cropped.movedim(-1, 1)

    def _encode(self, pixels: Tensor, tile: TileSize | None) -> Tensor:
        self.remote.spec.vae.check_pixels(pixels.shape)
        shape = _one_tile(pixels.shape, tile.side * self.downscale_ratio if tile else None)
        memory = self.memory_used_encode(shape, self.vae_dtype)
        return self._as_output(self._run(self.remote.encode, self.process_input(pixels), tile, memory))

    def _run(self, call: Callable[..., Tensor], batch: Tensor, tile: TileSize | None, memory: int) -> Tensor:
        """Lets ComfyUI make room on its own card, runs `call` on the ranks and says on the node what ran where."""
        devices = self.remote.spec.devices
        comfy.model_management.load_models_gpu(
            [self.patcher], memory_required=memory if local_device() in devices else 0
        )
        bar = comfy.utils.ProgressBar(len(batch))
        started = time.monotonic()
        with as_comfy_interrupt():
            result = call(batch, tile, poll=cancel_requested, progress=bar.update_absolute)
        cells = max(batch.shape[2:]) // (1 if call == self.remote.decode else self.downscale_ratio)
        if tile is not None and cells <= tile.side:
            tile = None  # one tile holds the picture
        say(account(len(batch), tile, devices, self.downscale_ratio, time.monotonic() - started))
        return result

    def _as_output(self, result: Tensor) -> Tensor:
        # ComfyUI 0.3.75 has float32 only; later versions let the user choose.
        dtype = self.vae_output_dtype() if hasattr(self, "vae_output_dtype") else torch.float32
        return result.to(self.output_device, dtype)


def account(num_pictures: int, tile: TileSize | None, devices: Sequence[str], scale: int, seconds: float) -> str:
    """What a finished call did, for the node."""
    used = devices if tile else devices[:num_pictures]
    pictures = "1 picture" if num_pictures == 1 else f"{num_pictures} pictures"
    ranks = "1 rank" if len(used) == 1 else f"{len(used)} ranks"
    how = f"in tiles of {tile.side * scale} pixels" if tile else "whole"
    text = f"{pictures}, {how}, on {ranks} ({', '.join(used)}): {seconds:.1f} s"
    if len(used) < len(devices):
        text += f"\nA whole picture keeps one rank busy; the tiled nodes share it out over all {len(devices)}."
    return text


def memory_estimate(bytes_per_cell: int) -> Callable[[Sequence[int], torch.dtype], int]:
    """Working memory from a shape that ends in height and width."""

    def estimate(shape: Sequence[int], dtype: torch.dtype) -> int:
        return bytes_per_cell * shape[-2] * shape[-1] * int(comfy.model_management.dtype_size(dtype))

    return estimate


def _one_tile(shape: Sequence[int], side: int | None) -> Sequence[int]:
    """The shape of what is computed at once: a tile, or the whole picture."""
    return shape if side is None else (*shape[:2], min(shape[2], side), min(shape[3], side))


def _square(tile_x: int, tile_y: int) -> int:
    if tile_x != tile_y:
        logger.warning("tiles of %d x %d were asked for; the smaller side is used, tiles are square", tile_x, tile_y)
    return min(tile_x, tile_y)
