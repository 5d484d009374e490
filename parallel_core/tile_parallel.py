"""Shares the tiles of an autoencoder's own tiled decode or encode over the ranks of a process group.

Owns the replay: the library's tiled code runs twice. The first run computes only this rank's tiles and finds out
which tiles there are; then every tile goes from its owner to all ranks; the second run gets the finished tiles, so
that cutting and blending are the library's own and the result has the same bits as on one rank. Does not know which
autoencoder it is, what a latent means, or where the requests come from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .upstream import VAE_BLEND_PREFIX


class PeerFailedError(RuntimeError):
    """Another rank could not compute its tiles; its own error says why."""


@dataclass(frozen=True)
class Tile:
    """One call of the encoder or decoder: the rank that computes it and its output (still empty on the other ranks)."""

    owner: int
    output: Tensor


def run_tiled(
    model: nn.Module, coder: nn.Module, run: Callable[[], Tensor], group: dist.ProcessGroup | None = None
) -> Tensor:
    """Runs `run`, a tiled decode or encode of `model`, with the calls of `coder` shared over `group` (default: all
    ranks).

    `coder` is the submodule that is called once per tile (`model.decoder` or `model.encoder`) with one tensor and
    returns one tensor. Every rank must call this with the same input and gets the whole result. `model` and `coder`
    are left as they were, also when something fails. A rank whose own part fails raises its error; the others raise
    `PeerFailedError`, and the process group stays usable.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return run()
    share = _Share(coder, dist.get_rank(group), dist.get_world_size(group))
    failure: Exception | None = None
    with _replaced(coder, forward=share.forward), _replaced(model, **_without_blending(model)):
        try:
            run()
        except Exception as error:  # raised below, when the other ranks know
            failure = error
    _agree(failure, group)
    for tile in share.tiles:
        dist.broadcast(tile.output, group=group, group_src=tile.owner)
    outputs = iter(share.tiles)
    with _replaced(coder, forward=lambda _tile: next(outputs).output):
        return run()


class _Share:
    """The first run: computes this rank's tiles, notes all of them."""

    def __init__(self, coder: nn.Module, rank: int, world_size: int) -> None:
        self.tiles: list[Tile] = []
        self._coder = coder
        self._forward = coder.forward
        self._rank = rank
        self._load = [0] * world_size  # input elements given to each rank so far
        self._outputs: dict[tuple[torch.Size, torch.dtype], tuple[torch.Size, torch.dtype]] = {}
        stored = (*coder.named_parameters(), *coder.named_buffers())
        self._weights = {name: torch.empty_like(tensor, device="meta") for name, tensor in stored}
        self._measuring = False

    def forward(self, tile: Tensor) -> Tensor:
        if self._measuring:
            output: Tensor = self._forward(tile)
            return output
        # The tiles at the right and lower edge are smaller, so taking turns would give one rank all of those.
        owner = self._load.index(min(self._load))
        self._load[owner] += tile.numel()
        output = self._compute(tile) if owner == self._rank else self._reserve(tile)
        self.tiles.append(Tile(owner, output))
        return output

    def _compute(self, tile: Tensor) -> Tensor:
        output: Tensor = self._forward(tile)
        self._outputs[tile.shape, tile.dtype] = output.shape, output.dtype
        return output.contiguous()

    def _reserve(self, tile: Tensor) -> Tensor:
        """Room for another rank's output; taken now, so that a lack of memory shows before the ranks depend on each
        other.
        """
        key = tile.shape, tile.dtype
        if key not in self._outputs:
            self._outputs[key] = self._measure(tile)
        shape, dtype = self._outputs[key]
        return torch.empty(shape, dtype=dtype, device=tile.device)

    def _measure(self, tile: Tensor) -> tuple[torch.Size, torch.dtype]:
        self._measuring = True
        try:
            output = torch.func.functional_call(self._coder, self._weights, (tile.to("meta"),))
        finally:
            self._measuring = False
        return output.shape, output.dtype


def _without_blending(model: nn.Module) -> dict[str, Callable[..., Tensor]]:
    """Replacements for the methods that blend: they write into the tiles, of which most are still empty in the first
    run.
    """
    return {name: _second for name in dir(type(model)) if name.startswith(VAE_BLEND_PREFIX)}


def _second(_neighbour: Tensor, tile: Tensor, _extent: int) -> Tensor:
    return tile


def _agree(failure: Exception | None, group: dist.ProcessGroup | None) -> None:
    """Raises on every rank of `group` if any of them has a `failure`; a CPU tensor, for a device may be what failed."""
    failed = torch.zeros(dist.get_world_size(group), dtype=torch.int32)
    failed[dist.get_rank(group)] = int(failure is not None)
    dist.all_reduce(failed, group=group)
    if failure is not None:
        raise failure
    if failed.any():
        ranks = ", ".join(str(rank) for rank in failed.nonzero().flatten().tolist())
        raise PeerFailedError(f"the tiles of rank {ranks} could not be computed: see that rank's error")


@contextmanager
def _replaced(module: nn.Module, **methods: Callable[..., Any]) -> Iterator[None]:
    """Sets `methods` on the instance `module` and puts back what its own dictionary held."""
    before = {name: module.__dict__[name] for name in methods if name in module.__dict__}
    module.__dict__.update(methods)
    try:
        yield
    finally:
        for name in methods:
            del module.__dict__[name]
        module.__dict__.update(before)
