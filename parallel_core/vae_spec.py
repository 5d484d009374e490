"""What an image VAE is, as far as both sides must agree on it: its sizes, its dtype, its tiles.

Owns `VaeSpec` (read from a diffusers folder's config and headers alone) and `TileSize`, with every refusal about them.
Reads no weight and knows neither ComfyUI nor how a VAE computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from .checkpoint import Checkpoint, check_loadable, read_checkpoint
from .errors import UserError
from .protocol import Request

CLASSES = ("AutoencoderKL",)
"""diffusers' VAE classes that the ranks can run; SD 1.x to SD 3.5, Flux and Z-Image all have this one."""

DTYPES = ("default", "bfloat16", "float16", "float32")
"""Choices of the loader node. "default": as the file has it, except where its config forbids half precision."""


@dataclass(frozen=True, kw_only=True)
class VaeSpec:
    """One VAE in one dtype. Latents [B, latent_channels, H, W] are pixels [B, image_channels, H * scale, W * scale]."""

    folder: str
    dtype: str
    latent_channels: int
    image_channels: int
    scale: int
    """Pixels per latent cell and side."""
    num_bytes: int
    """Of the weights in `dtype`."""
    fingerprint: str
    """Changes when the file is replaced."""

    def check_latents(self, shape: Sequence[int]) -> None:
        """Refuses anything but [B, latent_channels, H, W]."""
        if len(shape) != 4 or 0 in shape:
            raise UserError(f"The latent has shape {list(shape)}; an image VAE needs [batch, channels, height, width].")
        if shape[1] != self.latent_channels:
            raise UserError(
                f"The latent has {shape[1]} channels, but this VAE ({Path(self.folder).name}) decodes "
                f"{self.latent_channels}. Use the VAE of the model that made the latent."
            )

    def check_pixels(self, shape: Sequence[int]) -> None:
        """Refuses anything but [B, image_channels, H, W] with H and W multiples of `scale`."""
        if len(shape) != 4 or 0 in shape or shape[1] != self.image_channels:
            raise UserError(f"The picture has shape {list(shape)}; expected [batch, {self.image_channels}, H, W].")
        if min(shape[2:]) < self.scale or shape[2] % self.scale or shape[3] % self.scale:
            raise UserError(
                f"The picture is {shape[3]} x {shape[2]} pixels; this VAE needs sides that are multiples of "
                f"{self.scale}."
            )


def read_vae(folder: Path, dtype: str = "default") -> VaeSpec:
    """The VAE of a diffusers folder (its `vae` subfolder, or a bare VAE folder), checked as far as headers allow."""
    if dtype not in DTYPES:
        raise UserError(f"dtype is {dtype!r}; expected one of {', '.join(DTYPES)}.")
    checkpoint = read_checkpoint(folder, "vae")
    if checkpoint.class_name not in CLASSES:
        raise UserError(
            f"{checkpoint.folder.name}/config.json says _class_name {checkpoint.class_name!r}; "
            f"Load Parallel VAE can run {', '.join(CLASSES)}. Other VAEs work with ComfyUI's own Load VAE."
        )
    check_loadable(checkpoint)
    chosen = dtype if dtype != "default" else _default_dtype(checkpoint)
    blocks = checkpoint.config.get("block_out_channels", ())
    latent_channels = checkpoint.config.get("latent_channels")
    if not isinstance(blocks, list) or not blocks or not isinstance(latent_channels, int):
        raise UserError(f"{checkpoint.folder.name}/config.json lacks block_out_channels or latent_channels.")
    return VaeSpec(
        folder=str(checkpoint.folder),
        dtype=chosen,
        latent_channels=latent_channels,
        image_channels=int(checkpoint.config.get("out_channels", 3)),
        scale=2 ** (len(blocks) - 1),
        num_bytes=checkpoint.num_elements * (4 if chosen == "float32" else 2),
        fingerprint=checkpoint.fingerprint,
    )


def _default_dtype(checkpoint: Checkpoint) -> str:
    if checkpoint.dtype == "float16" and checkpoint.config.get("force_upcast", True):
        return "float32"  # SDXL's VAE overflows in float16: its own pipeline upcasts it for the same flag
    return checkpoint.dtype if checkpoint.dtype in DTYPES else "float32"


@dataclass(frozen=True, kw_only=True)
class TileSize:
    """Square tiles of `side` latent cells, of which neighbours share `overlap` cells."""

    side: int
    overlap: int

    def __post_init__(self) -> None:
        if self.side < 1 or not 0 <= self.overlap < self.side:
            raise UserError(
                f"A tile of {self.side} latent cells with an overlap of {self.overlap}: expected an overlap of 0 or "
                "more that is smaller than the tile. An overlap of a quarter of the tile works well."
            )

    @staticmethod
    def from_pixels(tile_size: int, overlap: int, scale: int) -> TileSize:
        """Tiles of `tile_size` pixels that overlap by `overlap` pixels, rounded down to whole latent cells."""
        if not 0 <= overlap < tile_size:
            raise UserError(
                f"overlap is {overlap} pixels and tile_size is {tile_size}: the overlap must be smaller than the tile. "
                f"Try {tile_size // 4}."
            )
        if tile_size < scale:
            raise UserError(f"tile_size is {tile_size} pixels; this VAE needs at least {scale}.")
        return TileSize(side=tile_size // scale, overlap=min(overlap // scale, tile_size // scale - 1))


@dataclass(frozen=True, kw_only=True)
class LoadVae(Request):
    """Loads a VAE's weights under `key`; nothing when it is there already."""

    operation: ClassVar[str] = "load_vae"
    key: str
    folder: str
    dtype: str


@dataclass(frozen=True, kw_only=True)
class DecodeVae(Request):
    """Tensor "latents" [B, C, H, W], raw VAE space -> "pixels" in -1..1 from the ranks that have rows to return.

    `tile_side` and `tile_overlap` in latent cells; a side of 0 decodes whole pictures.
    """

    operation: ClassVar[str] = "decode_vae"
    key: str
    tile_side: int = 0
    tile_overlap: int = 0


@dataclass(frozen=True, kw_only=True)
class EncodeVae(Request):
    """Tensor "pixels" [B, 3, H, W] in -1..1 -> "latents" (posterior mean, raw VAE space). Tiles as in `DecodeVae`."""

    operation: ClassVar[str] = "encode_vae"
    key: str
    tile_side: int = 0
    tile_overlap: int = 0
