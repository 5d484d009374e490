"""The VAE through the engine: parity over devices, memory verbs, refusals, Cancel, a rank that runs out of memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from parallel_core.engine import Engine
from parallel_core.engine.vae import RemoteVae, VaeModel
from parallel_core.errors import Cancelled, RankUserError, UserError
from parallel_core.vae_spec import TileSize, read_vae
from tests.ranks.engines import make_engine
from tests.tiny_vae import build_vae, write_pipeline, write_vae

ONE, TWO = ("cpu:0",), ("cpu:0", "cpu:1")
TILE = TileSize(side=8, overlap=2)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """An engine with one thread per rank: on the CPU the last bit depends on their number, which ranks would share."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        engine = make_engine()
        yield engine
        engine.shutdown()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pipeline(tmp_path_factory.mktemp("models") / "tiny")


def remote(engine: Engine, folder: Path, devices: tuple[str, ...] = TWO, dtype: str = "default") -> RemoteVae:
    return RemoteVae(engine=engine, spec=VaeModel(devices=devices, vae=read_vae(folder, dtype)))


def latents(rows: int = 3) -> torch.Tensor:
    return torch.randn(rows, 16, 13, 20, generator=torch.Generator().manual_seed(3))


def ledgers(engine: Engine, vae: RemoteVae) -> list[dict[str, int]]:
    """What each rank of the VAE's group says about it."""
    groups = [group for group in engine.status() if group["devices"] == list(vae.spec.devices)]
    return [rank["models"].get(vae.spec.key, {}) for group in groups for rank in group["ranks"]]  # type: ignore[attr-defined]


def test_any_devices_give_the_bits_of_the_library(engine: Engine, folder: Path) -> None:
    plain = build_vae()
    pixels = torch.rand(3, 3, 104, 160, generator=torch.Generator().manual_seed(4)) * 2 - 1
    for tile in (None, TILE):
        plain.use_tiling = tile is not None  # the tiny VAE's own tiles are TILE
        with torch.inference_mode():
            decoded = torch.cat([plain.decode(row).sample for row in latents().split(1)])
            encoded = torch.cat([plain.encode(row).latent_dist.mode() for row in pixels.split(1)])
        for devices in (ONE, TWO):
            vae = remote(engine, folder, devices)
            assert torch.equal(vae.decode(latents(), tile), decoded), (tile, devices)
            assert torch.equal(vae.encode(pixels, tile), encoded), (tile, devices)


def test_half_precision_comes_back_as_float32(engine: Engine, folder: Path) -> None:
    ours = remote(engine, folder, dtype="bfloat16").decode(latents(1))
    with torch.inference_mode():
        expected = build_vae(dtype=torch.bfloat16).decode(latents(1).to(torch.bfloat16)).sample
    assert ours.dtype == torch.float32 and torch.equal(ours, expected.float())


def test_park_keeps_the_weights_in_host_memory(engine: Engine, folder: Path) -> None:
    vae = remote(engine, folder)
    before = vae.decode(latents())
    (resident, _) = ledgers(engine, vae)
    engine.park(vae.spec)
    assert ledgers(engine, vae) == [{"device_bytes": 0, "host_bytes": resident["device_bytes"]}] * 2
    assert torch.equal(vae.decode(latents()), before)
    assert ledgers(engine, vae) == [resident] * 2


def test_what_headers_tell_is_refused_without_ranks(folder: Path) -> None:
    engine = make_engine()
    vae = remote(engine, folder)
    with pytest.raises(UserError, match="has 4 channels, but this VAE .* decodes 16"):
        vae.decode(torch.zeros(1, 4, 8, 8))
    with pytest.raises(UserError, match="70 x 64 pixels"):
        vae.encode(torch.zeros(1, 3, 64, 70))
    assert engine.num_starts == 0


def test_weights_that_do_not_fit_are_refused_by_living_ranks(engine: Engine, tmp_path: Path) -> None:
    folder = write_vae(tmp_path / "vae")
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"layers_per_block": 1', '"layers_per_block": 2'))
    with pytest.raises(RankUserError, match="do not fit its config.json"):
        remote(engine, folder).decode(latents())
    assert engine.group(remote(engine, folder).spec.group).alive


def test_cancel_ends_between_pictures(engine: Engine, folder: Path) -> None:
    vae = remote(engine, folder)
    vae.decode(latents())
    starts, seen = engine.num_starts, []
    with pytest.raises(Cancelled):
        vae.decode(latents(8), TILE, poll=lambda: bool(seen), progress=lambda done, total: seen.append((done, total)))
    assert seen[0] == (2, 8) and len(seen) < 4
    assert torch.equal(vae.decode(latents()), vae.decode(latents(4)[:3])) and engine.num_starts == starts
