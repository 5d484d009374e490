"""What `parallel_core.upstream` relies on in AutoencoderKL. A failure means: read the new version's tiled code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from parallel_core.upstream import VAE_BLEND_PREFIX, VAE_TILE_KNOBS, vae_tiles
from tests.tiny_vae import build_vae


@pytest.fixture
def vae() -> Any:
    return build_vae()


def test_the_knobs_exist_and_are_put_back(vae: Any) -> None:
    before = {name: getattr(vae, name) for name in VAE_TILE_KNOBS}
    with pytest.raises(ValueError, match="inside"), vae_tiles(vae, side=5, overlap=1):
        assert (vae.tile_sample_min_size, vae.tile_latent_min_size) == (40, 5)
        raise ValueError("inside")
    assert {name: getattr(vae, name) for name in VAE_TILE_KNOBS} == before


def test_the_blends_are_all_there_are(vae: Any) -> None:
    assert [name for name in dir(vae) if name.startswith(VAE_BLEND_PREFIX)] == ["blend_h", "blend_v"]


@pytest.mark.parametrize("coder", ["decoder", "encoder"])
def test_a_tile_is_one_call_with_one_tensor(vae: Any, coder: str) -> None:
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    module = getattr(vae, coder)
    module.register_forward_pre_hook(lambda _module, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    with torch.inference_mode(), vae_tiles(vae, side=8, overlap=2):
        if coder == "decoder":
            vae.decode(torch.zeros(1, 16, 16, 12))
        else:
            vae.encode(torch.zeros(1, 3, 128, 96))
    assert len(calls) == 3 * 2
    assert all(len(args) == 1 and isinstance(args[0], Tensor) and not kwargs for args, kwargs in calls)


def test_the_blends_write_into_the_second_tile(vae: Any) -> None:
    """Why they have to rest while tiles of other ranks are still empty."""
    above, tile = torch.zeros(1, 3, 8, 8), torch.ones(1, 3, 8, 8)
    assert vae.blend_v(above, tile, 4) is tile and tile.min() == 0
