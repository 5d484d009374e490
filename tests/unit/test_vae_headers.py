"""What a single file's header tells: which VAE it is, and what it is refused for when it is none."""

from __future__ import annotations

import json
import struct
from math import prod
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from accelerate import init_empty_weights
from diffusers.loaders import single_file_utils

from parallel_core.errors import UserError
from parallel_core.vae_files import read_vae_file, vae_file_name
from parallel_core.vae_spec import read_vae
from tests.tiny_vae import TINY, build_vae
from tests.tiny_vae import original_weights as original_image_weights
from tests.tiny_video_vae import VARIANTS, build_video_vae, original_weights

REAL = {"block_out_channels": (128, 256, 512, 512), "layers_per_block": 2}
QUANT = {"use_quant_conv": True, "use_post_quant_conv": True, "latent_channels": 4}
IMAGE_KINDS: dict[str, dict[str, Any]] = {
    "tiny": {},
    "flux": REAL,
    "sd": {**REAL, **QUANT},
    "sd-upscaler": {"block_out_channels": (128, 256, 512), "layers_per_block": 2, **QUANT},
}


def write_header(file: Path, shapes: dict[str, tuple[int, ...]], dtype: str = "F16") -> Path:
    """A safetensors file with these tensors and nothing in them: the file is sparse."""
    width = {"F16": 2, "F32": 4, "F8_E4M3": 1, "I64": 8}[dtype]
    header, offset = {}, 0
    for name, shape in shapes.items():
        size = prod(shape) * width
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        stream.truncate(8 + len(text) + offset)
    return file


def shapes_of(weights: dict[str, torch.Tensor], prefix: str = "") -> dict[str, tuple[int, ...]]:
    return {prefix + name: tuple(tensor.shape) for name, tensor in weights.items()}


def image_vae(kind: str) -> Any:
    """Of the sizes of IMAGE_KINDS, without memory."""
    config = {**TINY, **IMAGE_KINDS[kind]}
    for side in ("down_block_types", "up_block_types"):
        config[side] = config[side][: len(config["block_out_channels"])]
    with init_empty_weights():
        return diffusers.AutoencoderKL(**config)


def video_vae(variant: str) -> Any:
    """Of the real sizes, without memory."""
    class_name, fields = VARIANTS[variant]
    real = {"base_dim": 160, "decoder_base_dim": 256} if variant == "Wan 2.2" else {"base_dim": 96}
    with init_empty_weights():
        return getattr(diffusers, class_name)(**{**fields, **real})


def agrees(file: Path, vae: Any) -> None:
    """The file's config builds `vae`, and its weights are that one's, neither more nor less."""
    checkpoint = read_vae_file(file)
    with init_empty_weights():
        built = getattr(diffusers, checkpoint.class_name).from_config(dict(checkpoint.config))
    expected = shapes_of(vae.state_dict())
    assert shapes_of(built.state_dict()) == expected
    stored = {vae_file_name(name, checkpoint.variant, checkpoint.config): prod(expected[name]) for name in expected}
    assert stored == {name: prod(info.shape) for name, info in checkpoint.tensors.items()}


# ----- what runs -----


@pytest.mark.parametrize("prefix", ["", "first_stage_model.", "vae."])
@pytest.mark.parametrize("kind", IMAGE_KINDS)
def test_image_vaes_in_the_original_layout(tmp_path: Path, kind: str, prefix: str) -> None:
    vae = image_vae(kind)
    shapes = shapes_of(original_image_weights(vae), prefix)
    if prefix:  # the rest of a checkpoint
        shapes["model.diffusion_model.input_blocks.0.0.weight"] = (4, 4, 3, 3)
    file = write_header(tmp_path / "any name.safetensors", shapes)
    agrees(file, vae)
    spec = read_vae(file)
    levels = len(vae.config.block_out_channels)
    assert (spec.latent_channels, spec.scale, spec.is_video) == (vae.config.latent_channels, 2 ** (levels - 1), False)
    fp32 = spec.latent_channels == 4  # SDXL's overflows in float16, and a header does not tell it from SD 1's
    assert spec.dtype == ("float32" if fp32 else "float16")
    numbers = sum(prod(shape) for shape in shapes_of(vae.state_dict()).values())
    assert spec.num_bytes == (4 if fp32 else 2) * numbers


@pytest.mark.parametrize("kind", IMAGE_KINDS)
def test_image_vaes_in_diffusers_layout(tmp_path: Path, kind: str) -> None:
    vae = image_vae(kind)
    agrees(write_header(tmp_path / "vae.safetensors", shapes_of(vae.state_dict())), vae)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("original", [True, False])
def test_video_vaes(tmp_path: Path, variant: str, original: bool) -> None:
    vae = video_vae(variant)
    weights = original_weights(vae) if original else vae.state_dict()
    file = write_header(tmp_path / "vae.safetensors", shapes_of(weights))
    agrees(file, vae)
    spec = read_vae(file)
    assert (spec.latent_channels, spec.scale) == ((48, 16) if variant == "Wan 2.2" else (16, 8))
    assert spec.is_video and spec.image_channels == 3 and spec.dtype == "float16"


def test_image_names_are_those_of_diffusers_own_converter() -> None:
    vae = build_vae(**QUANT)
    weights = original_image_weights(vae)
    theirs = single_file_utils.convert_ldm_vae_checkpoint(weights, dict(vae.config))
    assert set(theirs) == set(vae.state_dict())
    for name, tensor in theirs.items():
        stored = weights[vae_file_name(name, "Stable Diffusion or FLUX", vae.config)]
        assert torch.equal(stored.view(tensor.shape), tensor), name


def test_wan_names_are_those_of_diffusers_own_converter() -> None:
    vae = build_video_vae("Wan 2.1")
    weights = original_weights(vae)
    theirs = single_file_utils.convert_wan_vae_to_diffusers(weights)
    assert set(theirs) == set(vae.state_dict())
    for name, tensor in theirs.items():
        assert weights[vae_file_name(name, "Wan 2.1", vae.config)] is tensor, name


def test_what_training_left_in_the_file_is_no_part_of_it(tmp_path: Path) -> None:
    vae = image_vae("tiny")
    shapes = {**shapes_of(original_image_weights(vae)), "loss.logvar": (1,), "model_ema.num_updates": (1,)}
    agrees(write_header(tmp_path / "vae.safetensors", shapes), vae)


# ----- what is refused -----

KL = shapes_of(original_image_weights(image_vae("tiny")))
WAN = shapes_of(original_weights(build_video_vae("Wan 2.1")))


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        ([*KL, "bn.running_mean"], "FLUX.2's VAE"),
        (["taesd_decoder.1.weight"], "TAESD"),
        (["1.weight", "3.conv.0.weight"], "TAESD"),
        (["decoder.22.bias", "decoder.1.weight"], "TAEHV"),
        (["vquantizer.codebook.weight"], "Stable Cascade"),
        ([*KL, "decoder.mid.block_1.mix_factor"], "Stable Video Diffusion"),
        (["decoder.conv_in.conv.weight"], "HunyuanVideo"),
        (["vae.decoder.up_blocks.0.res_blocks.0.conv1.conv.weight"], "LTX-Video"),
        (["decoder.layers.1.layers.0.beta"], "audio"),
        ([*KL, "encoder.down.3.attn.0.q.weight"], "attention in its levels"),
        (["double_blocks.0.img_attn.qkv.weight"], "a FLUX or HunyuanVideo transformer"),
        (["model.diffusion_model.blocks.0.cross_attn.q.weight"], "a Wan transformer"),
        (["transformer_blocks.0.img_mod.1.weight"], "a Qwen-Image transformer"),
        (["transformer.transformer_blocks.0.attn.to_q.lora_A.weight"], "a LoRA"),
        (["transformer_blocks.0.attn.to_q.weight"], "a transformer in diffusers' layout"),
        (["model.diffusion_model.input_blocks.4.1.transformer_blocks.0.attn1.to_q.weight"], "a U-Net"),
        (["text_model.encoder.layers.0.mlp.fc1.weight"], "a CLIP text encoder"),
        (["what.is.this"], "not known"),
        ([], "holds no tensors"),
    ],
)
def test_other_files_are_named(tmp_path: Path, names: list[str], kind: str) -> None:
    known = {**KL, **WAN}
    file = write_header(tmp_path / "vae.safetensors", {name: known.get(name, (4,)) for name in names})
    with pytest.raises(UserError, match=kind) as refused:
        read_vae(file)
    assert "'vae.safetensors' holds no VAE that runs here" in str(refused.value)


def without(shapes: dict[str, tuple[int, ...]], start: str) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, shape in shapes.items() if not name.startswith(start)}


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        (without(KL, "encoder."), "It looks like a VAE"),
        (without(WAN, "encoder."), "looks like a Wan 2.1 VAE, but 'encoder.conv1.weight' is missing"),
    ],
)
def test_half_a_vae_is_refused(tmp_path: Path, shapes: dict[str, tuple[int, ...]], expected: str) -> None:
    file = write_header(tmp_path / "vae.safetensors", shapes)
    with pytest.raises(UserError, match=expected):
        read_vae(file)


def test_shapes_of_no_vae_are_refused(tmp_path: Path) -> None:
    shapes = {**KL, "decoder.conv_in.weight": (64, 16, 3, 3, 3)}
    with pytest.raises(UserError, match="has the names of a Stable Diffusion or FLUX VAE, but shapes that none has"):
        read_vae(write_header(tmp_path / "vae.safetensors", shapes))


def test_a_file_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    file = write_header(tmp_path / "vae.safetensors", KL)
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size - 1000)
    with pytest.raises(UserError, match="is cut off: its header describes"):
        read_vae(file)


@pytest.mark.parametrize("shapes", [KL, WAN])
def test_fp8_is_refused_by_name(tmp_path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    with pytest.raises(UserError, match="VAE in float8_e4m3fn; expected 16 or 32 bits"):
        read_vae(write_header(tmp_path / "vae.safetensors", shapes, "F8_E4M3"))


def test_a_fourth_channel_is_refused(tmp_path: Path) -> None:
    shapes = {**WAN, "encoder.conv1.weight": (8, 4, 3, 3, 3)}
    with pytest.raises(UserError, match="has 4 channels per pixel; only VAEs with 3"):
        read_vae(write_header(tmp_path / "vae.safetensors", shapes))
