"""Single files of VAEs: what their headers tell, and what is refused before a weight is read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from parallel_core.errors import UserError
from parallel_core.vae_files import LAYOUTS, read_vae_file
from parallel_core.vae_spec import read_vae
from parallel_core.worker.vae import load_vae
from tests.tiny_vae import build_vae, write_original
from tests.tiny_video_vae import build_video_vae, write_video_vae_file

LDM = "Stable Diffusion or FLUX"
CPU = torch.device("cpu")


@pytest.mark.parametrize("prefix", ["", "vae.", "first_stage_model."])
def test_an_image_vae_is_recognised_and_loaded(tmp_path: Path, prefix: str) -> None:
    file = write_original(tmp_path / "a video vae by its name.safetensors", prefix=prefix)
    spec = read_vae(file)
    assert (spec.latent_channels, spec.image_channels, spec.scale, spec.is_video) == (16, 3, 8, False)
    loaded, expected = load_vae(file, torch.float32, CPU).state_dict(), build_vae().state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(("variant", "channels", "scale"), [("Wan 2.1", 16, 8), ("Wan 2.2", 48, 16)])
def test_a_video_vae_is_recognised_and_loaded(tmp_path: Path, variant: str, channels: int, scale: int) -> None:
    file = write_video_vae_file(tmp_path / "x.safetensors", variant)
    spec = read_vae(file)
    assert (spec.latent_channels, spec.image_channels, spec.scale, spec.temporal) == (channels, 3, scale, 4)
    assert read_vae_file(file).variant == variant
    loaded, expected = load_vae(file, torch.float32, CPU).state_dict(), build_video_vae(variant).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


def test_nothing_of_the_file_stays_mapped(tmp_path: Path) -> None:
    file = write_original(tmp_path / "vae.safetensors")
    vae = load_vae(file, torch.float32, CPU)
    assert str(file) not in Path("/proc/self/maps").read_text()
    assert not vae.training


def test_every_layout_can_be_told_apart() -> None:
    assert len({layout.label for layout in LAYOUTS}) == len(LAYOUTS)


def refusal(file: Path) -> str:
    with pytest.raises(UserError) as error:
        load_vae(file, torch.float32, CPU)
    return str(error.value)


@pytest.mark.parametrize(
    ("names", "looks_like"),
    [
        (["double_blocks.0.img_attn.qkv.weight", "img_in.weight"], "a FLUX or HunyuanVideo transformer"),
        (["lora_unet_x.lora_down.weight"], "a LoRA"),
        (["model.layers.0.self_attn.q_proj.weight"], "a language model"),
        (["text_model.encoder.layers.0.mlp.fc1.weight"], "a CLIP text encoder"),
        (["decoder.layers.1.weight", "encoder.layers.0.weight"], "a TAESD preview VAE"),
        ([], "no tensors at all"),
    ],
)
def test_another_file_is_refused_with_what_it_looks_like(tmp_path: Path, names: list[str], looks_like: str) -> None:
    file = tmp_path / "x.safetensors"
    save_file({name: torch.zeros(2, 2) for name in names}, file)
    assert looks_like in refusal(file) and "Load VAE" in refusal(file)


@pytest.mark.parametrize("variant", [LDM, "Wan 2.1"])
def test_a_damaged_vae_is_refused_by_the_tensor(tmp_path: Path, variant: str) -> None:
    file = tmp_path / "x.safetensors"
    _ = write_original(file) if variant == LDM else write_video_vae_file(file, variant)
    sound = load_file(file)
    name = next(name for name in sound if name.startswith("encoder.mid") and name.endswith("weight"))
    save_file({key: tensor for key, tensor in sound.items() if key != name}, file)
    assert f"{name} is missing" in refusal(file)
    save_file({**sound, name: torch.zeros(3, 3)}, file)
    assert f"{name} has shape [3, 3], expected" in refusal(file)
    save_file({**sound, "encoder.more.weight": torch.zeros(3)}, file)
    assert "encoder.more.weight is not part of" in refusal(file)
    save_file({key: tensor.to(torch.float8_e4m3fn) for key, tensor in sound.items()}, file)
    assert "float8_e4m3fn" in refusal(file)
    file.write_bytes(file.read_bytes()[:-100])
    assert "cut off" in refusal(file)
