"""A VAE that runs on ranks: which requests one decode or encode becomes.

Owns the splitting of a batch into requests and putting the pictures together again. Tensors are raw latents and pixels
in -1..1. Knows neither ComfyUI nor how the ranks share a request out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..protocol import Request
from ..vae_spec import DecodeVae, EncodeVae, LoadVae, TileSize, VaeSpec
from .engine import Engine
from .group import GroupKey, RankReply
from .groups import Poll
from .models import spec_key

Progress = Callable[[int, int], None]
"""Told (pictures done, pictures in all) after each request."""


@dataclass(frozen=True, kw_only=True)
class VaeModel:
    """A VAE on `devices`: every rank holds the whole of it. See `models.ModelSpec`."""

    devices: tuple[str, ...]
    vae: VaeSpec

    @property
    def group(self) -> GroupKey:
        """One rank per device."""
        return GroupKey(devices=self.devices)

    @property
    def key(self) -> str:
        """Equal for equal specs."""
        return spec_key("vae", **asdict(self))

    @property
    def weights(self) -> str:
        """As the key: they are divided in one way only."""
        return self.key

    @property
    def label(self) -> str:
        """For messages: "VAE of flux-dev"."""
        folder = Path(self.vae.folder)
        return f"VAE of {folder.parent.name if folder.name == 'vae' else folder.name}"

    def load_request(self) -> Request:
        """See `LoadVae`."""
        return LoadVae(key=self.key, folder=self.vae.folder, dtype=self.vae.dtype)

    def estimated_bytes(self) -> dict[str, int]:
        """All weights on every device."""
        return dict.fromkeys(self.devices, self.vae.num_bytes)


@dataclass(frozen=True, kw_only=True)
class RemoteVae:
    """The controller's handle: a spec, never a live process."""

    engine: Engine
    spec: VaeModel

    def ensure_loaded(self, poll: Poll | None = None) -> None:
        """Loads the weights now rather than at the first use."""
        self.engine.ensure_loaded(self.spec, poll)

    def decode(
        self,
        latents: Tensor,
        tile: TileSize | None = None,
        *,
        poll: Poll | None = None,
        progress: Progress | None = None,
    ) -> Tensor:
        """Raw latents [B, C, H, W] -> pixels [B, 3, H * scale, W * scale] in -1..1, float32 on the CPU.

        Without `tile` whole pictures are shared out over the ranks, with it the tiles of each picture are. For pictures
        only; videos are decoded by `decode_pieces`.
        """
        self.spec.vae.check_latents(latents.shape)
        side, overlap = _tile_fields(tile)
        request = DecodeVae(key=self.spec.key, tile_side=side, tile_overlap=overlap)
        return self._run(request, ("latents", "pixels"), latents, poll, progress)

    def encode(
        self,
        pixels: Tensor,
        tile: TileSize | None = None,
        *,
        poll: Poll | None = None,
        progress: Progress | None = None,
    ) -> Tensor:
        """Pixels [B, 3, H, W] in -1..1, sides multiples of scale -> raw latents, float32 on the CPU."""
        self.spec.vae.check_pixels(pixels.shape)
        side, overlap = _tile_fields(tile)
        request = EncodeVae(key=self.spec.key, tile_side=side, tile_overlap=overlap)
        return self._run(request, ("pixels", "latents"), pixels, poll, progress)

    def decode_pieces(
        self, pieces: Sequence[Tensor], *, poll: Poll | None = None, progress: Progress | None = None
    ) -> list[Tensor]:
        """Raw video latents [1, C, T, H, W] of any sizes -> their pixels in -1..1, float32 on the CPU."""
        for piece in pieces:
            self.spec.vae.check_latents(piece.shape)
        return self._run_pieces(DecodeVae(key=self.spec.key), pieces, poll, progress)

    def encode_pieces(
        self, pieces: Sequence[Tensor], *, poll: Poll | None = None, progress: Progress | None = None
    ) -> list[Tensor]:
        """The reverse: pixels [1, 3, frames, H, W] in -1..1 -> raw latents."""
        for piece in pieces:
            self.spec.vae.check_pixels(piece.shape)
        return self._run_pieces(EncodeVae(key=self.spec.key), pieces, poll, progress)

    def _run_pieces(
        self, request: Request, pieces: Sequence[Tensor], poll: Poll | None, progress: Progress | None
    ) -> list[Tensor]:
        """One request per as many pieces as there are ranks, largest first, so that the ranks end together."""
        order = sorted(range(len(pieces)), key=lambda number: -pieces[number].numel())
        done: dict[int, Tensor] = {}
        for start in range(0, len(order), len(self.spec.devices)):
            numbers = order[start : start + len(self.spec.devices)]
            given = {str(place): pieces[number] for place, number in enumerate(numbers)}
            for reply in self._request(request, given, poll):
                done.update({numbers[int(place)]: tensor.float() for place, tensor in reply.tensors.items()})
            if progress is not None:
                progress(len(done), len(pieces))
        return [done[number] for number in range(len(pieces))]

    def _request(self, request: Request, tensors: dict[str, Tensor], poll: Poll | None) -> list[RankReply]:
        dtype = getattr(torch, self.spec.vae.dtype)
        with self.engine.using(self.spec, poll) as group:
            return self.engine.request_group(
                group,
                request,
                {name: tensor.to(dtype) for name, tensor in tensors.items()},
                deadline=self.engine.deadlines.first,
                label=f"{request.operation} by the {self.spec.label}",
                poll=poll,
            )

    def _run(
        self, request: Request, names: tuple[str, str], batch: Tensor, poll: Poll | None, progress: Progress | None
    ) -> Tensor:
        """One request per as many pictures as there are ranks: bounded memory, and Cancel works between them."""
        given, wanted = names
        parts: list[Tensor] = []
        for rows in torch.split(batch, len(self.spec.devices)):
            replies = self._request(request, {given: rows}, poll)
            parts += [reply.tensors[wanted].float() for reply in replies if wanted in reply.tensors]
            if progress is not None:
                progress(sum(map(len, parts)), len(batch))
        return torch.cat(parts)


def _tile_fields(tile: TileSize | None) -> tuple[int, int]:
    return (tile.side, tile.overlap) if tile is not None else (0, 0)
