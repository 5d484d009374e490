"""Tile sharing without processes: who computes which tile, and that nothing stays patched."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from parallel_core.tile_parallel import run_tiled


class Toy(nn.Module):
    """An autoencoder whose tiled decode is two rows of tiles, the lower ones half as high, blended in place."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.Linear(4, 4)

    def blend_v(self, above: Tensor, tile: Tensor, extent: int) -> Tensor:
        tile[:extent] = above[-extent:] + tile[:extent]
        return tile

    def tiled(self, rows: Tensor) -> Tensor:
        tiles = [self.decoder(rows[:4]), self.decoder(rows[4:])]
        return torch.cat([tiles[0], self.blend_v(tiles[0], tiles[1], 1)])


@pytest.fixture
def fake_ranks() -> Iterator[None]:
    """Three ranks of which this is number 1; collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=3)
    yield
    dist.destroy_process_group()


def test_without_a_process_group_it_is_the_plain_call() -> None:
    toy, rows = Toy(), torch.randn(6, 4)
    with torch.inference_mode():
        assert torch.equal(run_tiled(toy, toy.decoder, lambda: toy.tiled(rows)), toy.tiled(rows))


def watch(decoder: nn.Module) -> list[tuple[str, int]]:
    """Notes (device, rows) of every real call of `decoder`."""
    calls: list[tuple[str, int]] = []
    original = decoder.forward
    decoder.forward = lambda tile: calls.append((tile.device.type, len(tile))) or original(tile)
    return calls


def test_a_rank_computes_only_its_own_tiles(fake_ranks: None) -> None:
    toy = Toy()
    calls = watch(toy.decoder)
    with torch.inference_mode():
        run_tiled(toy, toy.decoder, lambda: toy.tiled(torch.randn(6, 4)))
    assert calls == [("meta", 4), ("cpu", 2)]  # rank 0 has the large tile; here only its shape is worked out


def test_work_is_shared_by_size_not_in_turns(fake_ranks: None) -> None:
    toy, sizes = Toy(), [8, 1, 1, 1, 1, 1, 1, 1, 1]  # taking turns, rank 1 would compute three of these
    calls = watch(toy.decoder)
    with torch.inference_mode():
        run_tiled(toy, toy.decoder, lambda: torch.cat([toy.decoder(torch.randn(size, 4)) for size in sizes]))
    assert calls.count(("cpu", 1)) == 4


def test_nothing_stays_patched(fake_ranks: None) -> None:
    toy = Toy()
    with torch.inference_mode():
        run_tiled(toy, toy.decoder, lambda: toy.tiled(torch.randn(6, 4)))
    assert "forward" not in toy.decoder.__dict__ and "blend_v" not in toy.__dict__


def test_nothing_stays_patched_after_an_error(fake_ranks: None) -> None:
    toy = Toy()
    original = toy.decoder.forward
    earlier = toy.decoder.forward = lambda tile: original(tile)  # somebody else's patch has to stay

    def run() -> Tensor:
        toy.tiled(torch.randn(6, 4))
        raise ValueError("in the middle")

    with torch.inference_mode(), pytest.raises(ValueError, match="in the middle"):
        run_tiled(toy, toy.decoder, run)
    assert toy.decoder.__dict__["forward"] is earlier and "blend_v" not in toy.__dict__
