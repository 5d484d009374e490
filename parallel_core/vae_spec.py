"""What a VAE is, as far as both sides must agree on it: its sizes, its dtype, its tiles.

Owns `VaeSpec` (read from a diffusers folder's config and headers, or a single file's header alone) and
`TileSize`, with every refusal about them.
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
from .vae_files import read_vae_file

IMAGE_CLASSES = ("AutoencoderKL",)
"""diffusers' classes for pictures; SD 1.x to SD 3.5, Flux and Z-Image all have this one."""

VIDEO_CLASSES = ("AutoencoderKLWan", "AutoencoderKLQwenImage")
"""Causal ones over time, for Wan's videos and for Qwen-Image's pictures, which are videos of one frame."""

CLASSES = IMAGE_CLASSES + VIDEO_CLASSES
"""What the ranks can run."""

_TEMPORAL = 4
"""Frames per latent frame: the code of these VAEs has the number built in, in diffusers and in ComfyUI."""

DTYPES = ("default", "bfloat16", "float16", "float32")
"""Choices of the loader node. "default": as the file has it, except where its config forbids half precision."""


@dataclass(frozen=True, kw_only=True)
class VaeSpec:
    """One VAE in one dtype. Latents [B, latent_channels, H, W] are pixels [B, image_channels, H * scale, W * scale].

    A video VAE has frames before H: T of them in a latent are `temporal` * (T - 1) + 1 of the video.
    """

    folder: str
    """Or the single file."""
    dtype: str
    latent_channels: int
    image_channels: int
    scale: int
    """Pixels per latent cell and side."""
    temporal: int
    """Frames per latent frame but the first; 0 for pictures."""
    num_bytes: int
    """Of the weights in `dtype`."""
    fingerprint: str
    """Changes when the file is replaced."""

    @property
    def is_video(self) -> bool:
        """Whether tensors have a dimension of frames."""
        return self.temporal > 0

    def check_latents(self, shape: Sequence[int]) -> None:
        """Refuses anything but [B, latent_channels, H, W], of a video VAE [B, latent_channels, T, H, W]."""
        if len(shape) != 4 + self.is_video or 0 in shape:
            kind, frames = ("a video", "frames, ") if self.is_video else ("an image", "")
            raise UserError(
                f"The latent has shape {list(shape)}; {kind} VAE needs [batch, channels, {frames}height, width]."
            )
        if shape[1] != self.latent_channels:
            raise UserError(
                f"The latent has {shape[1]} channels, but this VAE ({Path(self.folder).name}) decodes "
                f"{self.latent_channels}. Use the VAE of the model that made the latent."
            )

    def check_pixels(self, shape: Sequence[int]) -> None:
        """Refuses anything but [B, image_channels, H, W] ([.., frames, H, W]) with H and W multiples of `scale`."""
        if len(shape) != 4 + self.is_video or 0 in shape or shape[1] != self.image_channels:
            frames = "frames, " if self.is_video else ""
            raise UserError(
                f"The picture has shape {list(shape)}; expected [batch, {self.image_channels}, {frames}height, width]."
            )
        height, width = shape[-2:]
        if min(height, width) < self.scale or height % self.scale or width % self.scale:
            raise UserError(
                f"The picture is {width} x {height} pixels; this VAE needs sides that are multiples of {self.scale}."
            )


def read_vae_checkpoint(path: Path) -> Checkpoint:
    """The VAE of a diffusers folder (its `vae` subfolder, or a bare VAE folder) or a single file, with its config."""
    if path.is_file():
        return read_vae_file(path)
    checkpoint = read_checkpoint(path, "vae")
    if checkpoint.class_name not in CLASSES:
        raise UserError(
            f"{checkpoint.folder.name}/config.json says _class_name {checkpoint.class_name!r}; "
            f"Load Parallel VAE can run {', '.join(CLASSES)}. Other VAEs work with ComfyUI's own Load VAE."
        )
    check_loadable(checkpoint)
    return checkpoint


def read_vae(path: Path, dtype: str = "default") -> VaeSpec:
    """The VAE at `path`, checked as far as headers allow."""
    if dtype not in DTYPES:
        raise UserError(f"dtype is {dtype!r}; expected one of {', '.join(DTYPES)}.")
    checkpoint = read_vae_checkpoint(path)
    chosen = dtype if dtype != "default" else _default_dtype(checkpoint)
    is_video = checkpoint.class_name in VIDEO_CLASSES
    latent_channels, image_channels, scale = (_video_sizes if is_video else _image_sizes)(checkpoint)
    return VaeSpec(
        folder=str(checkpoint.folder),
        dtype=chosen,
        latent_channels=latent_channels,
        image_channels=image_channels,
        scale=scale,
        temporal=_TEMPORAL if is_video else 0,
        num_bytes=checkpoint.num_elements * (4 if chosen == "float32" else 2),
        fingerprint=checkpoint.fingerprint,
    )


def _image_sizes(checkpoint: Checkpoint) -> tuple[int, int, int]:
    blocks = checkpoint.config.get("block_out_channels", ())
    latent_channels = checkpoint.config.get("latent_channels")
    if not isinstance(blocks, list) or not blocks or not isinstance(latent_channels, int):
        raise UserError(f"{checkpoint.folder.name}/config.json lacks block_out_channels or latent_channels.")
    return latent_channels, int(checkpoint.config.get("out_channels", 3)), 2 ** (len(blocks) - 1)


_HALVINGS = [False, True, True]
"""Where these VAEs halve time: what diffusers calls temperal_downsample."""


def _video_sizes(checkpoint: Checkpoint) -> tuple[int, int, int]:
    config, name = checkpoint.config, checkpoint.folder.name
    patch = config.get("patch_size") or 1
    channels, latent_channels = config.get("in_channels", config.get("input_channels", 3)), config.get("z_dim", 16)
    if not all(type(number) is int and number > 0 for number in (patch, channels, latent_channels)):
        raise UserError(f"{name}/config.json has no usable patch_size, in_channels or z_dim.")
    if channels != 3 * patch**2:
        raise UserError(
            f"{name!r} has {channels // patch**2} channels per pixel; only VAEs with 3 (red, green, blue) run here. "
            "Use ComfyUI's own Load VAE."
        )
    halvings = config.get("temperal_downsample", _HALVINGS)
    if halvings != _HALVINGS:
        raise UserError(f"{name!r} has temperal_downsample {halvings}; only VAEs with {_HALVINGS} run.")
    return latent_channels, 3, 2 ** len(_HALVINGS) * patch


def _default_dtype(checkpoint: Checkpoint) -> str:
    upcast = checkpoint.class_name in IMAGE_CLASSES and checkpoint.config.get("force_upcast", True)
    if checkpoint.dtype == "float16" and upcast:
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

    `tile_side` and `tile_overlap` in latent cells; a side of 0 decodes whole pictures. A video VAE gets tensors "0",
    "1" ... of any shapes [1, C, T, H, W] instead and returns each under its number.
    """

    operation: ClassVar[str] = "decode_vae"
    key: str
    tile_side: int = 0
    tile_overlap: int = 0


@dataclass(frozen=True, kw_only=True)
class EncodeVae(Request):
    """Tensor "pixels" [B, 3, H, W] in -1..1 -> "latents" (posterior mean, raw VAE space). Tiles and videos as in
    `DecodeVae`."""

    operation: ClassVar[str] = "encode_vae"
    key: str
    tile_side: int = 0
    tile_overlap: int = 0
