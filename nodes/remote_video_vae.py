"""The VAE that stands for a video VAE on the ranks (Wan's, and Qwen-Image's, whose pictures are videos of one frame).

Owns what ComfyUI's nodes read of such a VAE, and how a tiled call becomes pieces: ComfyUI's own code cuts the tiles
over time, height and width and blends them; it runs twice, first to learn which tiles there are, then with the finished
ones. So a tiled video is the same on any number of ranks, and ComfyUI's (but that diffusers cuts each tile to the range
of pixels before it is blended). Knows nothing of how ranks compute.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import comfy.model_management
import comfy.utils
import torch
from torch import Tensor

from ..parallel_core.engine.vae import RemoteVae
from ..parallel_core.errors import UserError
from .remote_patcher import local_device
from .remote_vae import RemoteVAE, memory_estimate
from .runtime import as_comfy_interrupt, cancel_requested, say

# Bytes of working memory per pixel of a frame and byte of dtype, to decode and to encode, as ComfyUI estimates them: by
# pixels per latent cell, and whatever the number of frames, of which a few are computed at a time.
_BYTES = {8: (7000, 6000), 16: (8000, 3300)}

Pieces = Callable[..., list[Tensor]]
"""`RemoteVae.decode_pieces` or `.encode_pieces`."""


class RemoteVideoVAE(RemoteVAE):
    """See the module."""

    def __init__(self, remote: RemoteVae) -> None:
        """As ComfyUI's constructor sets a causal video VAE up."""
        super().__init__(remote)
        scale, temporal = remote.spec.vae.scale, remote.spec.vae.temporal
        self.latent_dim = 3
        self.upscale_ratio = (lambda frames: max(0, frames * temporal - temporal + 1), scale, scale)
        self.downscale_ratio = (
            lambda frames: max(0, math.floor((frames + temporal - 1) / temporal)),
            scale,
            scale,
        )
        self.upscale_index_formula = self.downscale_index_formula = (temporal, scale, scale)
        decode_bytes, encode_bytes = _BYTES[scale]
        self.memory_used_decode = memory_estimate(decode_bytes * scale**2)
        self.memory_used_encode = memory_estimate(encode_bytes)

    # -- whole videos ----------------------------------------------------------------------------------------------

    def decode(self, samples_in: Tensor, vae_options: dict[str, Any] | None = None) -> Tensor:
        """Raw latents [B, C, T, H, W] -> pixels [B, frames, H, W, 3] in 0..1. Each video whole on one rank."""
        if vae_options:
            raise UserError(f"VAE options {', '.join(vae_options)} are for other kinds of VAE; this one has none.")
        if samples_in.ndim == 4:
            samples_in = samples_in.unsqueeze(2)  # pictures: videos of one frame
        pieces = self._share(self.remote.decode_pieces, samples_in.split(1), self.memory_used_decode, "video")
        return self._as_output(self.process_output(torch.cat(pieces))).movedim(1, -1)

    def encode(self, pixel_samples: Tensor) -> Tensor:
        """Pixels [frames, H, W, 3] or [B, frames, H, W, 3] in 0..1, cropped to whole latent cells -> raw latents."""
        rows = len(pixel_samples) if pixel_samples.ndim == 5 else 1
        # one by one: ComfyUI's cropping would take the frames of a batch of videos for a side of the picture
        frames = self._cropped(pixel_samples.reshape(-1, *pixel_samples.shape[-3:]))
        videos = self.process_input(frames.unflatten(0, (rows, -1)).movedim(1, 2)).split(1)
        pieces = self._share(self.remote.encode_pieces, videos, self.memory_used_encode, "video")
        return self._as_output(torch.cat(pieces))

    # -- tiles -----------------------------------------------------------------------------------------------------

    def decode_tiled(self, samples: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """As `decode`, with all tiles shared out. ComfyUI's arguments: sizes in latent cells and latent frames."""
        if samples.ndim == 4:
            samples = samples.unsqueeze(2)
        tiled: Tensor = super(RemoteVAE, self).decode_tiled(samples, *args, **kwargs)
        return tiled

    def encode_tiled(self, pixel_samples: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """As `encode`, with all tiles shared out. ComfyUI's arguments: sizes in pixels and frames."""
        tiled: Tensor = super(RemoteVAE, self).encode_tiled(pixel_samples, *args, **kwargs)
        return tiled

    def decode_tiled_3d(
        self,
        samples: Tensor,
        tile_t: int = 999,
        tile_x: int = 32,
        tile_y: int = 32,
        overlap: tuple[int, int, int] = (1, 8, 8),
    ) -> Tensor:
        """What ComfyUI's `decode_tiled` calls: latents [B, C, T, H, W] -> pixels, channels first."""
        self.remote.spec.vae.check_latents(samples.shape)

        def size(tile: Tensor) -> list[int]:
            frames, scale = self.upscale_ratio[0](tile.shape[2]), self.remote.spec.vae.scale
            return [1, self.output_channels, frames, tile.shape[3] * scale, tile.shape[4] * scale]

        def run(function: Callable[[Tensor], Tensor]) -> Tensor:
            return comfy.utils.tiled_scale_multidim(
                samples,
                function,
                tile=(tile_t, tile_x, tile_y),
                overlap=overlap,
                upscale_amount=self.upscale_ratio,
                out_channels=self.output_channels,
                index_formulas=self.upscale_index_formula,
                output_device=self.output_device,
            )

        tiled = self._replay(run, size, self.remote.decode_pieces, self.memory_used_decode)
        return self._as_output(self.process_output(tiled))

    def encode_tiled_3d(
        self,
        samples: Tensor,
        tile_t: int = 9999,
        tile_x: int = 512,
        tile_y: int = 512,
        overlap: tuple[int, int, int] = (1, 64, 64),
    ) -> Tensor:
        """What ComfyUI's `encode_tiled` calls: pixels [B, 3, frames, H, W] in 0..1 -> raw latents."""

        def size(tile: Tensor) -> list[int]:
            frames, scale = self.downscale_ratio[0](tile.shape[2]), self.remote.spec.vae.scale
            return [1, self.latent_channels, frames, tile.shape[3] // scale, tile.shape[4] // scale]

        def run(function: Callable[[Tensor], Tensor]) -> Tensor:
            return comfy.utils.tiled_scale_multidim(
                self.process_input(samples),
                function,
                tile=(tile_t, tile_x, tile_y),
                overlap=overlap,
                upscale_amount=self.downscale_ratio,
                out_channels=self.latent_channels,
                downscale=True,
                index_formulas=self.downscale_index_formula,
                output_device=self.output_device,
            )

        return self._as_output(self._replay(run, size, self.remote.encode_pieces, self.memory_used_encode))

    def _replay(
        self,
        run: Callable[[Callable[[Tensor], Tensor]], Tensor],
        size: Callable[[Tensor], list[int]],
        pieces: Pieces,
        memory: Callable[..., int],
    ) -> Tensor:
        """`run` cuts and blends around its function: first around one that notes the tiles, then around the results."""
        tiles: list[Tensor] = []

        def note(tile: Tensor) -> Tensor:
            tiles.append(tile)
            return torch.zeros(()).expand(size(tile))

        run(note)
        finished = iter(self._share(pieces, tiles, memory, "tile"))
        return run(lambda tile: next(finished))

    # -- the way to the ranks --------------------------------------------------------------------------------------

    def _share(self, compute: Pieces, pieces: Sequence[Tensor], memory: Callable[..., int], what: str) -> list[Tensor]:
        """Lets ComfyUI make room on its own card, runs the pieces on the ranks and says on the node what ran where."""
        devices = self.remote.spec.devices
        largest = max(pieces, key=lambda piece: piece.numel())
        needed = memory(largest.shape, self.vae_dtype) if local_device() in devices else 0
        comfy.model_management.load_models_gpu([self.patcher], memory_required=needed)
        bar = comfy.utils.ProgressBar(len(pieces))
        started = time.monotonic()
        with as_comfy_interrupt():
            done = compute(pieces, poll=cancel_requested, progress=bar.update_absolute)
        seconds = time.monotonic() - started
        left_out = 0
        if what == "video" and compute == self.remote.encode_pieces:
            left_out = pieces[0].shape[2] - self.upscale_ratio[0](done[0].shape[2])
        say(account_pieces(len(pieces), what, devices, seconds, left_out))
        return done


def account_pieces(count: int, what: str, devices: Sequence[str], seconds: float, left_out: int = 0) -> str:
    """What a finished call did, for the node. `left_out`: frames at the end of each video that were not encoded."""
    used = devices[:count]
    counted = f"1 {what}" if count == 1 else f"{count} {what}s"
    ranks = "1 rank" if len(used) == 1 else f"{len(used)} ranks"
    text = f"{counted} on {ranks} ({', '.join(used)}): {seconds:.1f} s"
    if len(used) < len(devices) and what == "video":
        text += f"\nA whole video keeps one rank busy; the tiled nodes share it out over all {len(devices)}."
    if left_out:
        text += f"\nThe last frames ({left_out}) do not fill a latent frame and were left out."
    return text
