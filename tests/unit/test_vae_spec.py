"""What a VAE folder is refused for, and how tiles in pixels become tiles in latent cells."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from parallel_core.errors import UserError
from parallel_core.vae_spec import TileSize, VaeSpec, read_vae

CONFIG = {"_class_name": "AutoencoderKL", "latent_channels": 16, "block_out_channels": [32, 32, 64, 64]}


def write_folder(folder: Path, *, dtype: str = "F32", **config: object) -> Path:
    """A VAE folder whose file holds one tensor of four elements."""
    width = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1}[dtype]
    header = json.dumps({"a": {"dtype": dtype, "shape": [4], "data_offsets": [0, 4 * width]}}).encode()
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    body = struct.pack("<Q", len(header)) + header + bytes(4 * width)
    (folder / "diffusion_pytorch_model.safetensors").write_bytes(body)
    return folder


def test_a_bare_vae_folder(tmp_path: Path) -> None:
    spec = read_vae(write_folder(tmp_path / "flux-vae"))
    assert (spec.latent_channels, spec.scale, spec.image_channels) == (16, 8, 3)
    assert (spec.dtype, spec.num_bytes) == ("float32", 16)


def test_the_vae_of_a_model_folder(tmp_path: Path) -> None:
    write_folder(tmp_path / "flux" / "vae")
    (tmp_path / "flux" / "model_index.json").write_text("{}")
    assert read_vae(tmp_path / "flux").folder == str(tmp_path / "flux" / "vae")


@pytest.mark.parametrize(
    ("stored", "force_upcast", "asked", "expected"),
    [
        ("BF16", True, "default", "bfloat16"),
        ("F16", False, "default", "float16"),
        ("F16", True, "default", "float32"),  # the config says that float16 overflows
        ("F16", True, "float16", "float16"),  # what the user asks for is done
        ("F32", True, "bfloat16", "bfloat16"),
    ],
)
def test_dtype(tmp_path: Path, stored: str, force_upcast: bool, asked: str, expected: str) -> None:
    folder = write_folder(tmp_path / "vae", dtype=stored, force_upcast=force_upcast)
    assert read_vae(folder, asked).dtype == expected


def test_a_replaced_file_has_another_fingerprint(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "vae")
    before = read_vae(folder)
    other = write_folder(tmp_path / "other", dtype="F16") / "diffusion_pytorch_model.safetensors"
    other.replace(folder / other.name)
    assert read_vae(folder).fingerprint != before.fingerprint


def test_refuses_a_folder_without_a_vae(tmp_path: Path) -> None:
    (tmp_path / "flux").mkdir()
    (tmp_path / "flux" / "model_index.json").write_text("{}")
    with pytest.raises(UserError, match="no 'vae' folder"):
        read_vae(tmp_path / "flux")


def test_refuses_an_unknown_class(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "vae", _class_name="AutoencoderDC")
    with pytest.raises(UserError, match="'AutoencoderDC'; Load Parallel VAE can run AutoencoderKL"):
        read_vae(folder)


def test_refuses_pickles(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "vae")
    (folder / "diffusion_pytorch_model.safetensors").rename(folder / "diffusion_pytorch_model.bin")
    with pytest.raises(UserError, match="only pickled weights"):
        read_vae(folder)


def test_refuses_quantised_weights(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="float8_e4m3fn"):
        read_vae(write_folder(tmp_path / "vae", dtype="F8_E4M3"))


def test_refuses_a_config_without_sizes(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="lacks block_out_channels or latent_channels"):
        read_vae(write_folder(tmp_path / "vae", block_out_channels=[]))


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"input_channels": 4}, "has 4 channels per pixel; only VAEs with 3"),
        ({"z_dim": "16"}, "no usable patch_size, in_channels or z_dim"),
        ({"patch_size": [2]}, "no usable patch_size, in_channels or z_dim"),
        ({"temperal_downsample": [True, True]}, r"has temperal_downsample \[True, True\]"),
        ({"temperal_downsample": 4}, "has temperal_downsample 4"),
    ],
)
def test_refuses_a_video_vae_of_other_sizes(tmp_path: Path, field: dict[str, object], message: str) -> None:
    sound = write_folder(tmp_path / "sound", _class_name="AutoencoderKLQwenImage")
    spec = read_vae(sound)
    assert (spec.latent_channels, spec.image_channels, spec.scale, spec.temporal) == (16, 3, 8, 4)
    folder = write_folder(tmp_path / "vae", _class_name="AutoencoderKLQwenImage", **field)
    with pytest.raises(UserError, match=message):
        read_vae(folder)


def spec() -> VaeSpec:
    return VaeSpec(
        folder="/models/flux/vae",
        dtype="float32",
        latent_channels=16,
        image_channels=3,
        temporal=0,
        scale=8,
        num_bytes=0,
        fingerprint="",
    )


def test_refuses_latents_of_another_model() -> None:
    spec().check_latents((2, 16, 9, 7))
    with pytest.raises(UserError, match="has 4 channels, but this VAE .* decodes 16"):
        spec().check_latents((1, 4, 8, 8))
    with pytest.raises(UserError, match=r"shape \[1, 16, 3, 8, 8\]"):
        spec().check_latents((1, 16, 3, 8, 8))


def test_refuses_pixels_that_are_no_whole_cells() -> None:
    spec().check_pixels((1, 3, 64, 72))
    with pytest.raises(UserError, match="70 x 64 pixels; .* multiples of 8"):
        spec().check_pixels((1, 3, 64, 70))
    with pytest.raises(UserError, match=r"expected \[batch, 3, height, width\]"):
        spec().check_pixels((1, 4, 64, 64))


@pytest.mark.parametrize(
    ("pixels", "cells"),
    [((512, 64), (64, 8)), ((500, 60), (62, 7)), ((64, 0), (8, 0)), ((65, 64), (8, 7))],
)
def test_tiles_are_rounded_down_to_latent_cells(pixels: tuple[int, int], cells: tuple[int, int]) -> None:
    tile = TileSize.from_pixels(*pixels, scale=8)
    assert (tile.side, tile.overlap) == cells


def test_refuses_an_overlap_as_large_as_the_tile() -> None:
    with pytest.raises(UserError, match="overlap is 512 pixels and tile_size is 512: .* Try 128"):
        TileSize.from_pixels(512, 512, scale=8)
    with pytest.raises(UserError, match="at least 8"):
        TileSize.from_pixels(4, 0, scale=8)
    with pytest.raises(UserError, match="tile of 8 latent cells with an overlap of 8"):
        TileSize(side=8, overlap=8)
