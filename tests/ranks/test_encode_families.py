"""Prompts of Qwen-Image and Wan: diffusers' own values, in every placement, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from diffusers import QwenImagePipeline, WanPipeline
from safetensors.torch import load_file, save_file
from torch import Tensor

from parallel_core.errors import UserError
from parallel_core.families.text_registry import TEXT_FAMILIES
from parallel_core.text_source import read_text_source
from parallel_core.worker.prompts import EncodedPrompt, encode_prompt
from parallel_core.worker.text_loading import TextEncoders, load_text_encoders
from tests.tiny_text import write_qwen_text, write_wan_text

RANKS = ("cpu:0", "cpu:1")
PROMPTS = ("seven dogs, painted", "", "one two three " * 40, "  a &amp;lt;b&gt;\n\t c {x} ")
WRITE = {"qwen-image": write_qwen_text, "wan": write_wan_text}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: write(root / name) for name, write in WRITE.items()}


def load(folder: Path, offload: Path, placement: str = "balanced", **limits: int) -> TextEncoders:
    source = read_text_source(folder, TEXT_FAMILIES)
    named = {name.replace("_", ":"): size for name, size in limits.items()}
    return load_text_encoders(source, devices=RANKS, placement=placement, limits=named, offload=offload)


def encode(loaded: TextEncoders, prompt: str, length: int) -> EncodedPrompt:
    return encode_prompt(loaded.family, loaded.tokenizers, loaded.encoders, prompt, length)


def by_diffusers(folder: Path, prompt: str, length: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The embeddings that the folder's own pipeline passes to its transformer for one prompt."""
    name = json.loads((folder / "model_index.json").read_text())["_class_name"]
    if name == "WanPipeline":
        pipe = WanPipeline.from_pretrained(folder, transformer=None, vae=None, scheduler=None, dtype=dtype)
        with torch.no_grad():
            found, _ = pipe.encode_prompt(
                prompt, do_classifier_free_guidance=False, max_sequence_length=length, device="cpu"
            )
        return found
    pipe = QwenImagePipeline.from_pretrained(folder, transformer=None, vae=None, scheduler=None, dtype=dtype)
    with torch.no_grad():
        found, mask = pipe.encode_prompt(prompt, max_sequence_length=length, device="cpu")
    assert mask is None, "one prompt has no padding, so ComfyUI needs no mask"
    return found


@pytest.mark.parametrize("family", WRITE)
@pytest.mark.parametrize("length", [512, 64])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_values_are_those_of_diffusers(
    folders: dict[str, Path], tmp_path: Path, family: str, prompt: str, length: int
) -> None:
    outputs = encode(load(folders[family], tmp_path), prompt, length).outputs
    assert list(outputs) == ["cross_attn"]
    expected = by_diffusers(folders[family], prompt, length)
    assert torch.equal(outputs["cross_attn"], expected)
    assert expected.abs().sum() > 0 and expected.shape[1] <= length


def test_a_very_long_prompt_of_qwen_is_cut_as_diffusers_cuts_it(folders: dict[str, Path], tmp_path: Path) -> None:
    loaded = load(folders["qwen-image"], tmp_path)
    prompt = "word " * 300
    encoded = encode(loaded, prompt, 1024)
    assert torch.equal(encoded.outputs["cross_attn"], by_diffusers(folders["qwen-image"], prompt, 1024))
    ((label, tokens, read),) = encoded.cut
    assert (label, read) == ("Qwen2.5-VL", 1024) and tokens > 1500
    assert encode(loaded, "short", 1024).cut == []


@pytest.mark.parametrize("family", WRITE)
@pytest.mark.parametrize("placement", ["balanced", "auto", "sequential", "single"])
def test_every_placement_gives_the_same_values(
    folders: dict[str, Path], tmp_path: Path, family: str, placement: str
) -> None:
    loaded = load(folders[family], tmp_path, placement)
    ours = encode(loaded, PROMPTS[0], 64).outputs["cross_attn"]
    assert torch.equal(ours, by_diffusers(folders[family], PROMPTS[0], 64))
    assert loaded.plan is not None
    assert set(loaded.plan.bytes_per_device) == (set(RANKS) if placement == "balanced" else {"cpu:0"})


@pytest.mark.parametrize("family", WRITE)
def test_host_and_disk_come_last_and_give_the_same_values(
    folders: dict[str, Path], tmp_path: Path, family: str
) -> None:
    size = read_text_source(folders[family], TEXT_FAMILIES).total_bytes
    loaded = load(folders[family], tmp_path, cpu_0=size // 2, cpu_1=size // 5, cpu=size // 10, disk=2 * size)
    assert loaded.plan is not None and loaded.plan.bytes_per_device["disk"] > 0
    ours = encode(loaded, PROMPTS[0], 64).outputs["cross_attn"]
    assert torch.equal(ours, by_diffusers(folders[family], PROMPTS[0], 64))


@pytest.mark.parametrize("family", WRITE)
def test_bfloat16(tmp_path: Path, family: str) -> None:
    folder = WRITE[family](tmp_path / "half", dtype=torch.bfloat16)
    ours = encode(load(folder, tmp_path), PROMPTS[0], 64).outputs["cross_attn"]
    assert ours.dtype == torch.bfloat16
    assert torch.equal(ours, by_diffusers(folder, PROMPTS[0], 64, torch.bfloat16))


def test_qwen_is_loaded_without_its_eyes_and_its_mouth(folders: dict[str, Path], tmp_path: Path) -> None:
    loaded = load(folders["qwen-image"], tmp_path, "single")
    names = {name.split(".")[0] for name, _ in loaded.encoders["text_encoder"].named_parameters()}
    assert names == {"embed_tokens", "layers", "norm"}
    source = read_text_source(folders["qwen-image"], TEXT_FAMILIES)
    held = sum(parameter.nbytes for parameter in loaded.encoders["text_encoder"].parameters())
    assert source.total_bytes == held


def test_qwen_weights_as_other_versions_of_transformers_name_them(folders: dict[str, Path], tmp_path: Path) -> None:
    expected = by_diffusers(folders["qwen-image"], PROMPTS[0], 64)
    for number, (old, new) in enumerate(
        [("model.language_model.", "model."), ("model.visual.", "visual."), ("model.", "model.language_model.")]
    ):
        folder = write_qwen_text(tmp_path / str(number))
        file = folder / "text_encoder" / "model.safetensors"
        weights = {
            new + name.removeprefix(old) if name.startswith(old) else name: tensor
            for name, tensor in load_file(file).items()
        }
        save_file(weights, file, {"format": "pt"})
        ours = encode(load(folder, tmp_path / "offload"), PROMPTS[0], 64).outputs["cross_attn"]
        assert torch.equal(ours, expected), (old, new)


def test_a_weight_that_is_not_known_is_told(tmp_path: Path) -> None:
    folder = write_wan_text(tmp_path / "wan")
    file = folder / "text_encoder" / "model.safetensors"
    save_file({**load_file(file), "encoder.block.0.extra.weight": torch.zeros(2)}, file, {"format": "pt"})
    with pytest.raises(UserError, match=r"encoder.block.0.extra.weight is not part of a UMT5EncoderModel"):
        load(folder, tmp_path / "offload")


@pytest.mark.parametrize("pipeline", ["QwenImageEditPipeline", "QwenImageEditPlusPipeline"])
def test_edit_pipelines_are_refused_by_name(tmp_path: Path, pipeline: str) -> None:
    with pytest.raises(UserError, match=f"is a {pipeline}.*TextEncodeQwenImageEdit "):
        read_text_source(write_qwen_text(tmp_path / "edit", pipeline=pipeline), TEXT_FAMILIES)


def test_lengths_of_the_families(folders: dict[str, Path]) -> None:
    with pytest.raises(UserError, match="max_sequence_length is 513; wan takes 1 to 512"):
        read_text_source(folders["wan"], TEXT_FAMILIES).check_length(513)
    read_text_source(folders["qwen-image"], TEXT_FAMILIES).check_length(1024)
