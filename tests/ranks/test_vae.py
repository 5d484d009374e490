"""The VAE on real ranks: what N ranks return has the bits of what the library computes alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from parallel_core.errors import UserError
from parallel_core.tile_parallel import PeerFailedError
from parallel_core.upstream import VAE_TILE_KNOBS, vae_tiles
from parallel_core.vae_spec import TileSize
from parallel_core.worker.vae import decode, encode, load_vae
from tests.ranks.gloo import run_on_ranks
from tests.tiny_vae import build_vae, write_vae

# (latent height, latent width), rows, tile side, overlap: even, odd, no overlap, mostly overlap, smaller than a tile
TILINGS = [
    ((16, 12), 1, 8, 2),
    ((13, 20), 2, 8, 3),
    ((17, 9), 2, 8, 0),
    ((9, 11), 1, 6, 4),
    ((7, 7), 3, 8, 2),
]


def inputs(size: tuple[int, int], rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents and the pixels of the same size."""
    generator = torch.Generator().manual_seed(3)
    latents = torch.randn(rows, 16, *size, generator=generator)
    pixels = torch.rand(rows, 3, size[0] * 8, size[1] * 8, generator=generator) * 2 - 1
    return latents.to(dtype), pixels.to(dtype)


def by_library(vae: Any, latents: torch.Tensor, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode and encode by diffusers alone, picture by picture."""
    with torch.inference_mode():
        decoded = [vae.decode(row).sample for row in latents.split(1)]
        encoded = [vae.encode(row).latent_dist.mode() for row in pixels.split(1)]
    return torch.cat(decoded), torch.cat(encoded)


def tiled(rank: int, world_size: int, size: list[int], rows: int, side: int, overlap: int, **config: Any) -> list[Any]:
    """[decode has the library's bits, encode has, decoder calls here]; None from a rank that returns nothing."""
    vae = build_vae(dtype=getattr(torch, config.pop("dtype", "float32")), **config)
    latents, pixels = inputs((size[0], size[1]), rows, vae.dtype)
    with vae_tiles(vae, side=side, overlap=overlap):
        expected = by_library(vae, latents, pixels)
    calls: list[str] = []
    vae.decoder.conv_in.register_forward_hook(lambda _m, _i, output: calls.append(output.device.type))
    tile = TileSize(side=side, overlap=overlap)
    got = decode(vae, latents, tile), encode(vae, pixels, tile)
    same = [None if g is None else torch.equal(g, e) for g, e in zip(got, expected, strict=True)]
    return [*same, calls.count("cpu")]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(("size", "rows", "side", "overlap"), TILINGS)
def test_tiles_have_the_same_bits_on_any_number_of_ranks(
    world_size: int, size: tuple[int, int], rows: int, side: int, overlap: int
) -> None:
    first, *others = run_on_ranks(world_size, "test_vae:tiled", size=list(size), rows=rows, side=side, overlap=overlap)
    assert first[:2] == [True, True]
    assert all(other[:2] == [None, None] for other in others)  # the first rank returns it; nobody sends it twice


@pytest.mark.parametrize(
    "config", [{"dtype": "bfloat16"}, {"use_quant_conv": True, "use_post_quant_conv": True, "latent_channels": 16}]
)
def test_half_precision_and_quant_conv(config: dict[str, Any]) -> None:
    """quant_conv runs after each encoder call, outside of what is shared."""
    first, _ = run_on_ranks(2, "test_vae:tiled", size=[13, 20], rows=2, side=8, overlap=2, **config)
    assert first[:2] == [True, True]


def test_the_ranks_divide_the_tiles() -> None:
    """16 x 12 cells in tiles of 8 that start every 6: 3 x 2 tiles."""
    results = run_on_ranks(2, "test_vae:tiled", size=[16, 12], rows=1, side=8, overlap=2)
    assert [result[2] for result in results] == [3, 3]


def test_tiles_are_those_of_the_library() -> None:
    """With a quarter of overlap, diffusers' own factor, it is enable_tiling() to the bit."""
    vae = build_vae()
    latents, pixels = inputs((13, 20), 1, torch.float32)
    vae.enable_tiling()
    expected = by_library(vae, latents, pixels)
    vae.disable_tiling()
    tile = TileSize(side=8, overlap=2)
    assert torch.equal(decode(vae, latents, tile), expected[0])
    assert torch.equal(encode(vae, pixels, tile), expected[1])


def test_every_tile_size_is_exact() -> None:
    """What diffusers works out from the factor. With a float, 48 cells with 20 shared would start every 27, not 28."""
    vae = build_vae().to("meta")
    for side in range(2, 97):
        for overlap in range(side):
            with vae_tiles(vae, side=side, overlap=overlap):
                stride = int(vae.tile_latent_min_size * (1 - vae.tile_overlap_factor))
                blend = int(vae.tile_sample_min_size * vae.tile_overlap_factor)
            assert (stride, blend) == (side - overlap, overlap * 8)


def whole(rank: int, world_size: int, rows: int) -> list[Any]:
    """[rows of this rank, decode has the library's bits, encode has]."""
    vae = build_vae()
    latents, pixels = inputs((9, 7), rows, torch.float32)
    expected = [tensor.tensor_split(world_size)[rank] for tensor in by_library(vae, latents, pixels)]
    got = decode(vae, latents, None), encode(vae, pixels, None)
    if got[0] is None:
        return [0, got[1] is None, len(expected[0]) == 0]
    return [len(got[0]), *(torch.equal(g, e) for g, e in zip(got, expected, strict=True))]


@pytest.mark.parametrize(("world_size", "rows", "shares"), [(2, 3, [2, 1]), (3, 2, [1, 1, 0]), (2, 1, [1, 0])])
def test_whole_pictures_are_shared_by_rows(world_size: int, rows: int, shares: list[int]) -> None:
    assert run_on_ranks(world_size, "test_vae:whole", rows=rows) == [[share, True, True] for share in shares]


def fails_once(rank: int, world_size: int) -> list[Any]:
    """Rank 1 runs out of memory in its first tile; then the same call again."""
    vae = build_vae()
    latents, _ = inputs((16, 12), 1, torch.float32)
    tile = TileSize(side=8, overlap=2)
    knobs = [getattr(vae, name) for name in VAE_TILE_KNOBS]
    forward = vae.decoder.mid_block.forward

    def no_memory(*_arguments: Any, **_named: Any) -> Any:
        raise torch.OutOfMemoryError("rank 1 is full")

    if rank == 1:
        vae.decoder.mid_block.forward = no_memory
    with pytest.raises((torch.OutOfMemoryError, PeerFailedError)) as caught:
        decode(vae, latents, tile)
    vae.decoder.mid_block.forward = forward
    restored = knobs == [getattr(vae, name) for name in VAE_TILE_KNOBS] and "blend_v" not in vae.__dict__
    again = decode(vae, latents, tile)
    with vae_tiles(vae, side=tile.side, overlap=tile.overlap):
        expected = vae.decode(latents).sample
    return [type(caught.value).__name__, str(caught.value), restored, again is None or torch.equal(again, expected)]


def test_a_failure_reaches_every_rank_and_leaves_them_usable() -> None:
    peer = "the tiles of rank 1 could not be computed: see that rank's error"
    assert run_on_ranks(2, "test_vae:fails_once") == [
        ["PeerFailedError", peer, True, True],
        ["OutOfMemoryError", "rank 1 is full", True, True],
    ]


# ----- loading -----

CPU = torch.device("cpu")


def test_load_gives_the_weights_of_the_folder(tmp_path: Path) -> None:
    folder = write_vae(tmp_path / "vae", seed=5)
    loaded, expected = load_vae(folder, torch.bfloat16, CPU), build_vae(seed=5).to(torch.bfloat16)
    assert loaded.dtype == torch.bfloat16 and not loaded.training
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), expected.parameters(), strict=True))


def test_load_reads_the_attention_names_of_old_files(tmp_path: Path) -> None:
    folder = write_vae(tmp_path / "vae", seed=5)
    file = folder / "diffusion_pytorch_model.safetensors"
    old = {".to_q.": ".query.", ".to_k.": ".key.", ".to_v.": ".value.", ".to_out.0.": ".proj_attn."}
    tensors = load_file(file)
    for new_part, old_part in old.items():
        tensors = {name.replace(new_part, old_part): tensor for name, tensor in tensors.items()}
    save_file(tensors, file)
    loaded, expected = load_vae(folder, torch.float32, CPU), build_vae(seed=5)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), expected.parameters(), strict=True))


def test_load_refuses_weights_that_do_not_fit(tmp_path: Path) -> None:
    folder = write_vae(tmp_path / "vae")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "latent_channels": 4}))
    with pytest.raises(UserError, match=r"decoder.conv_in.weight has shape \[64, 16, 3, 3\], expected \[64, 4, 3, 3\]"):
        load_vae(folder, torch.float32, CPU)
