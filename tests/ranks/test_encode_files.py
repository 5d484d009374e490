"""Text encoders from single files: told by their headers, unpacked, the values of diffusers, refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxPipeline, QwenImagePipeline, WanPipeline
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CLIPTokenizer, PreTrainedModel, Qwen2Tokenizer, T5Tokenizer

from parallel_core.errors import UserError
from parallel_core.families.text_registry import TEXT_FAMILIES
from parallel_core.text_files import open_place
from parallel_core.text_source import TextSource
from parallel_core.text_spec import TextPlace
from parallel_core.worker.prompts import encode_prompt
from parallel_core.worker.text_loading import TextEncoders, load_text_encoders
from tests.ranks.gloo import run_on_ranks
from tests.tiny_files import dequantised
from tests.tiny_text_files import BUILD, LAYOUTS, file_t5, file_umt5, published, spiece_model, write_encoder

COMFY = Path(__file__).resolve().parents[2] / ".dev" / "comfyui" / "comfy"
RANKS = ("cpu:0", "cpu:1")
PROMPT = "seven dogs, painted by the sea"
KINDS = {"flux": ("clip", "t5"), "qwen-image": ("qwen",), "wan": ("umt5",)}

pytestmark = pytest.mark.skipif(not COMFY.is_dir(), reason="needs ComfyUI's tokenizers (make dev)")


@pytest.fixture(scope="module")
def file_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Each file is written once."""
    root = tmp_path_factory.mktemp("text_encoders")

    def make(kind: str, layout: str) -> Path:
        file = root / f"{kind}-{layout}.safetensors"
        if not file.exists():
            write_encoder(file, kind, layout)
        return file

    return make


def place_of(family: str, *files: Path) -> TextPlace:
    return TextPlace(files=tuple(map(str, files)), family=family, tokenizers=str(COMFY))


def read(family: str, *files: Path) -> TextSource:
    return open_place(place_of(family, *files), TEXT_FAMILIES)


def load(source: TextSource, offload: Path, placement: str = "balanced", **limits: int) -> TextEncoders:
    named = {name.replace("_", ":"): size for name, size in limits.items()}
    return load_text_encoders(source, devices=RANKS, placement=placement, limits=named, offload=offload)


def encode(loaded: TextEncoders, length: int = 64) -> dict[str, Tensor]:
    return dict(encode_prompt(loaded.family, loaded.tokenizers, loaded.encoders, PROMPT, length).outputs)


def rebuilt(kind: str, file: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The encoder with the numbers that the file stands for, by plain arithmetic."""
    stored = {name: tensor for name, tensor in load_file(file).items() if name != "spiece_model"}
    whole, encoder = dequantised(stored), BUILD[kind]()
    by_name = published(kind, encoder)
    with torch.no_grad():
        for name, tensor in by_name.items():
            tensor.copy_(whole[name].to(dtype))
    for parameter in encoder.parameters():  # not .to(dtype), which takes rotary frequencies along
        parameter.data = parameter.data.to(dtype)
    return encoder


def by_diffusers(family: str, files: dict[str, Path], dtype: torch.dtype, folder: Path) -> dict[str, Tensor]:
    encoders = {kind: rebuilt(kind, file, dtype) for kind, file in files.items()}
    rest: dict[str, Any] = {"transformer": None, "vae": None, "scheduler": None}
    with torch.no_grad():
        if family == "flux":
            flux = FluxPipeline(
                text_encoder=encoders["clip"],
                tokenizer=CLIPTokenizer.from_pretrained(COMFY / "sd1_tokenizer", model_max_length=77),
                text_encoder_2=encoders["t5"],
                tokenizer_2=T5Tokenizer.from_pretrained(COMFY / "text_encoders" / "t5_tokenizer"),
                **rest,
            )
            tokens, pooled, _ = flux.encode_prompt(PROMPT, max_sequence_length=64, device="cpu")
            return {"cross_attn": tokens, "pooled_output": pooled}
        if family == "wan":
            (folder / "spiece.model").write_bytes(spiece_model())
            wan = WanPipeline(text_encoder=encoders["umt5"], tokenizer=T5Tokenizer.from_pretrained(folder), **rest)
            tokens, _ = wan.encode_prompt(
                PROMPT, do_classifier_free_guidance=False, max_sequence_length=64, device="cpu"
            )
            return {"cross_attn": tokens}
        tokenizer = Qwen2Tokenizer.from_pretrained(COMFY / "text_encoders" / "qwen25_tokenizer")
        qwen = QwenImagePipeline(text_encoder=encoders["qwen"], tokenizer=tokenizer, **rest)
        tokens, _ = qwen.encode_prompt(PROMPT, max_sequence_length=64, device="cpu")
        return {"cross_attn": tokens}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", KINDS)
def test_the_values_are_those_of_diffusers(
    file_of: Callable[[str, str], Path], tmp_path: Path, family: str, layout: str
) -> None:
    files = {kind: file_of(kind, layout) for kind in KINDS[family]}
    source = read(family, *reversed(files.values()))
    dtype = torch.float32 if layout == "original" else torch.bfloat16
    loaded = load(source, tmp_path / "offload")
    ours = encode(loaded)
    assert {encoder.dtype for encoder in loaded.encoders.values()} == {dtype}
    expected = by_diffusers(family, files, dtype, tmp_path)
    assert set(ours) == set(expected)
    for key, tensor in expected.items():
        assert torch.equal(ours[key], tensor), key
    assert loaded.plan is not None
    assert sum(loaded.plan.bytes_per_device.values()) >= source.total_bytes > 0


def test_fp8_files_are_held_in_bfloat16(file_of: Callable[[str, str], Path]) -> None:
    plain, packed = (read("flux", file_of("t5", layout), file_of("clip", layout)) for layout in ("original", "fp8"))
    assert {encoder.dtype for encoder in packed.encoders.values()} == {"bfloat16"}
    assert packed.total_bytes * 2 == plain.total_bytes


@pytest.mark.parametrize("placement", ["auto", "sequential", "single"])
def test_every_placement_gives_the_same_values(
    file_of: Callable[[str, str], Path], tmp_path: Path, placement: str
) -> None:
    source = read("wan", file_of("umt5", "old-scaled"))
    expected = encode(load(source, tmp_path / "a"))["cross_attn"]
    assert torch.equal(encode(load(source, tmp_path / "b", placement))["cross_attn"], expected)


def test_host_and_disk_come_last(file_of: Callable[[str, str], Path], tmp_path: Path) -> None:
    source = read("wan", file_of("umt5", "old-scaled"))
    expected = encode(load(source, tmp_path / "a"))["cross_attn"]
    size = source.total_bytes
    loaded = load(source, tmp_path / "b", cpu_0=size // 2, cpu_1=size // 5, cpu=size // 10, disk=2 * size)
    assert loaded.plan is not None and loaded.plan.bytes_per_device["disk"] > 0
    assert torch.equal(encode(loaded)["cross_attn"], expected)
    loaded.close()
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("layout", ["original", "old-scaled", "new-scaled"])
@pytest.mark.parametrize("family", ["flux", "wan"])
def test_slices_over_two_ranks(file_of: Callable[[str, str], Path], family: str, layout: str) -> None:
    files = [str(file_of(kind, layout)) for kind in KINDS[family]]
    place = {"files": files, "family": family, "tokenizers": str(COMFY)}
    results = run_on_ranks(2, "text_ranks:compare", place=place, prompts=[PROMPT], length=64)
    for result in results:
        for error, rounding in result["errors"]:
            assert error < max(1e-5, 2 * rounding)
        assert result["bytes"] < 0.8 * result["whole"]


# ----- refusals -----


def refusal(family: str, *files: Path) -> str:
    with pytest.raises(UserError) as error:
        read(family, *files)
    return str(error.value)


def test_wrong_and_missing_encoders(file_of: Callable[[str, str], Path]) -> None:
    clip, t5, umt5, qwen = (file_of(kind, "original") for kind in ("clip", "t5", "umt5", "qwen"))
    missing = refusal("flux", t5)
    assert "type flux reads prompts with CLIP and T5 (one file each, in any order), but 't5-original" in missing
    assert missing.endswith("looks like T5.")
    assert "'umt5-original.safetensors' looks like UMT5; 'clip-original.safetensors' looks like CLIP." in refusal(
        "flux", umt5, clip
    )
    assert "type wan reads prompts with UMT5 (one file; text_encoder_2 is then 'none')" in refusal("wan", t5)
    assert "looks like Qwen2.5-VL" in refusal("wan", qwen)
    assert "looks like T5; 't5-original.safetensors' looks like T5" in refusal("flux", t5, t5)
    assert "type is 'sdxl'; expected one of flux, qwen-image, wan" in refusal("sdxl", clip)


def test_files_that_are_something_else(tmp_path: Path) -> None:
    file = tmp_path / "clip_g.safetensors"
    save_file(
        {
            "text_model.embeddings.token_embedding.weight": torch.zeros(2, 1280),
            "text_model.encoder.layers.0.mlp.fc1.weight": torch.zeros(2, 1280),
        },
        file,
    )
    assert "'clip_g.safetensors' looks like CLIP-G, of SDXL" in refusal("flux", file)
    save_file({"decoder.up.0.weight": torch.zeros(2)}, file)
    assert "looks like a VAE" in refusal("flux", file)
    save_file({"something": torch.zeros(2)}, file)
    assert "What it holds is not known" in refusal("wan", file)


def test_umt5_without_its_tokenizer(tmp_path: Path) -> None:
    write_encoder(tmp_path / "umt5.safetensors", "umt5", tokenizer=False)
    assert "'umt5.safetensors' has no tensor 'spiece_model', its tokenizer" in refusal(
        "wan", tmp_path / "umt5.safetensors"
    )


def test_a_scale_that_is_missing(tmp_path: Path) -> None:
    file = tmp_path / "t5.safetensors"
    weights = write_encoder(file, "umt5", "old-scaled", encoder=file_umt5())
    name = next(name for name in weights if name.endswith("scale_weight"))
    kept = load_file(file)
    del kept[name]
    save_file(kept, file)
    assert "has no scale_weight" in refusal("wan", file)


def test_a_weight_that_is_missing_or_of_another_shape(tmp_path: Path) -> None:
    file = tmp_path / "umt5.safetensors"
    weights = write_encoder(file, "umt5")
    spiece = load_file(file)["spiece_model"]
    for name, value, words in (
        ("encoder.final_layer_norm.weight", None, "encoder.final_layer_norm.weight is missing"),
        ("encoder.block.1.layer.1.DenseReluDense.wo.weight", torch.zeros(3, 3), r"wo.weight has shape \[3, 3\]"),
        ("encoder.block.0.new.weight", torch.zeros(3), "encoder.block.0.new.weight is not part of a UMT5EncoderModel"),
    ):
        changed = {**weights, "spiece_model": spiece}
        changed.pop(name, None)
        if value is not None:
            changed[name] = value
        save_file(changed, file)
        with pytest.raises(UserError, match=f"do not fit what they look like: .*{words}"):
            load(read("wan", file), tmp_path / "offload")


def test_t5_from_an_older_file_with_both_names_of_its_table(tmp_path: Path) -> None:
    encoder = file_t5()
    weights = published("t5", encoder)
    one, both = tmp_path / "one.safetensors", tmp_path / "both.safetensors"
    clip = tmp_path / "clip.safetensors"
    write_encoder(clip, "clip")
    save_file(weights, one)
    save_file({**weights, "encoder.embed_tokens.weight": weights["shared.weight"].clone()}, both)
    first, second = (encode(load(read("flux", clip, file), tmp_path / "o"))["cross_attn"] for file in (one, both))
    assert torch.equal(first, second)
