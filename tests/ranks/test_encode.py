"""Text encoders as a rank loads and runs them: diffusers' own values, split over devices, and all memory given back."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from diffusers import FluxPipeline
from safetensors.torch import load_file, save_file
from torch import Tensor

from parallel_core.errors import UserError
from parallel_core.families.flux_text import FLUX_TEXT
from parallel_core.families.text_registry import TEXT_FAMILIES
from parallel_core.placement import PlacementPlan
from parallel_core.text_source import read_text_source
from parallel_core.worker import budgets
from parallel_core.worker.budgets import free_budgets
from parallel_core.worker.prompts import EncodedPrompt
from parallel_core.worker.prompts import encode_prompt as encode_with
from parallel_core.worker.text_loading import TextEncoders, load_text_encoders
from tests.tiny_text import build_t5, write_text

RANKS = ("cpu:0", "cpu:1")
PROMPTS = ("seven dogs, painted", "")
KB = 1000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("models") / "tiny-flux")


@pytest.fixture
def offload(tmp_path: Path) -> Path:
    return tmp_path / "offload"


def load(
    folder: Path, offload: Path, placement: str = "balanced", limits: Mapping[str, int] | None = None
) -> TextEncoders:
    source = read_text_source(folder, TEXT_FAMILIES)
    return load_text_encoders(source, devices=RANKS, placement=placement, limits=limits or {}, offload=offload)


def encode_prompt(loaded: TextEncoders, prompt: str, length: int) -> EncodedPrompt:
    return encode_with(loaded.family, loaded.tokenizers, loaded.encoders, prompt, length)


def plan_of(loaded: TextEncoders) -> PlacementPlan:
    assert loaded.plan is not None
    return loaded.plan


def by_diffusers(folder: Path, prompt: str, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(prompt embeddings, pooled embedding) of FluxPipeline.encode_prompt for the same folder."""
    pipe = FluxPipeline.from_pretrained(folder, transformer=None, vae=None, scheduler=None, torch_dtype=dtype)
    with torch.no_grad():
        tokens, pooled, _ = pipe.encode_prompt(prompt, max_sequence_length=length)
    return tokens, pooled


# ----- values -----


@pytest.mark.parametrize("length", [512, 77, 1])
@pytest.mark.parametrize("prompt", [*PROMPTS, "one two three " * 40])
def test_the_values_are_those_of_diffusers(folder: Path, offload: Path, prompt: str, length: int) -> None:
    loaded = load(folder, offload)
    outputs = encode_prompt(loaded, prompt, length).outputs
    tokens, pooled = by_diffusers(folder, prompt, length, torch.float32)
    assert outputs["cross_attn"].shape == (1, length, 32)
    assert outputs["pooled_output"].shape == (1, 16)
    assert torch.equal(outputs["cross_attn"], tokens)
    assert torch.equal(outputs["pooled_output"], pooled)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_folders_dtype_is_kept(tmp_path: Path, offload: Path, dtype: torch.dtype) -> None:
    folder = write_text(tmp_path / "half", dtype=dtype)
    loaded = load(folder, offload)
    outputs = encode_prompt(loaded, PROMPTS[0], 64).outputs
    tokens, pooled = by_diffusers(folder, PROMPTS[0], 64, dtype)
    assert outputs["cross_attn"].dtype == dtype
    assert torch.equal(outputs["cross_attn"], tokens)
    assert torch.equal(outputs["pooled_output"], pooled)
    assert_plan_is_what_was_loaded(loaded)


def assert_plan_is_what_was_loaded(loaded: TextEncoders) -> None:
    """Planned and loaded bytes agree (for float16 too, where transformers keeps T5's `wo` in float32)."""
    tensors = [tensor for encoder in loaded.encoders.values() for tensor in [*encoder.parameters(), *encoder.buffers()]]
    assert sum(plan_of(loaded).bytes_per_device.values()) == sum(tensor.nbytes for tensor in tensors)


def test_a_sharded_folder(tmp_path: Path, offload: Path, folder: Path) -> None:
    sharded = write_text(tmp_path / "sharded", max_shard_size="60KB")
    assert len(list((sharded / "text_encoder_2").glob("*.safetensors"))) > 1
    ours = encode_prompt(load(sharded, offload), PROMPTS[0], 32).outputs
    assert torch.equal(ours["cross_attn"], by_diffusers(folder, PROMPTS[0], 32, torch.float32)[0])


def test_clip_weights_as_transformers_4_named_them(tmp_path: Path, offload: Path, folder: Path) -> None:
    older = write_text(tmp_path / "older")
    file = older / "text_encoder" / "model.safetensors"
    save_file({f"text_model.{name}": tensor for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    ours = encode_prompt(load(older, offload), PROMPTS[0], 32).outputs
    assert torch.equal(ours["pooled_output"], by_diffusers(folder, PROMPTS[0], 32, torch.float32)[1])


def test_a_prompt_that_was_cut_is_told(folder: Path, offload: Path) -> None:
    loaded = load(folder, offload)
    assert encode_prompt(loaded, "a short one", 64).cut == []
    words = "word " * 30  # character tokens: 5 per word with the space mark for T5, 4 for CLIP
    cut = {label: (tokens, read) for label, tokens, read in encode_prompt(loaded, words, 100).cut}
    assert cut == {"CLIP": (122, 77), "T5": (151, 100)}


# ----- placement -----


@pytest.mark.parametrize("placement", ["balanced", "auto", "sequential", "single"])
def test_every_placement_gives_the_same_values(folder: Path, offload: Path, placement: str) -> None:
    loaded = load(folder, offload, placement)
    expected = by_diffusers(folder, PROMPTS[0], 64, torch.float32)[0]
    assert torch.equal(encode_prompt(loaded, PROMPTS[0], 64).outputs["cross_attn"], expected)
    used = set(plan_of(loaded).bytes_per_device)
    assert used == (set(RANKS) if placement == "balanced" else {"cpu:0"})
    assert_plan_is_what_was_loaded(loaded)


def test_layers_are_split_over_devices_and_shown(folder: Path, offload: Path) -> None:
    loaded = load(folder, offload, "sequential", {"cpu:0": 160 * KB, "cpu:1": 200 * KB})
    assert "text_encoder_2: blocks 0-" in plan_of(loaded).describe()
    assert set(plan_of(loaded).device_map("text_encoder_2").values()) == set(RANKS)


@pytest.mark.parametrize("on_ranks", [40, 90, 150])
def test_host_and_disk_come_last_and_give_the_same_values(folder: Path, offload: Path, on_ranks: int) -> None:
    """On CPU ranks the host is the same memory; what stays in the files is read from them while encoding."""
    limits = {"cpu:0": on_ranks * KB, "cpu:1": 20 * KB, "cpu": 60 * KB, "disk": 400 * KB}
    loaded = load(folder, offload, "balanced", limits)
    assert plan_of(loaded).bytes_per_device["disk"] > 0
    outside = [name for name, parameter in loaded.encoders["text_encoder_2"].named_parameters() if parameter.is_meta]
    assert outside
    for prompt in (*PROMPTS, PROMPTS[0]):  # again after another prompt: nothing of the first stays behind
        ours = encode_prompt(loaded, prompt, 64).outputs
        tokens, pooled = by_diffusers(folder, prompt, 64, torch.float32)
        assert torch.equal(ours["cross_attn"], tokens)
        assert torch.equal(ours["pooled_output"], pooled)


def test_cpu_ranks_share_the_hosts_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "host_memory", lambda: (1000, 2000))
    assert free_budgets(RANKS, {}) == {"cpu:0": 450, "cpu:1": 450, "cpu": 0}
    assert free_budgets(RANKS, {"cpu:0": 100}) == {"cpu:0": 100, "cpu:1": 800, "cpu": 0}
    assert free_budgets(RANKS, {"cpu:0": 100, "cpu:1": 200, "disk": 7}) == {
        "cpu:0": 100,
        "cpu:1": 200,
        "cpu": 600,
        "disk": 7,
    }


def test_gpus_keep_room_for_encoding_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    gigabyte = 1024**3
    monkeypatch.setattr(budgets, "host_memory", lambda: (10 * gigabyte, 20 * gigabyte))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: ([8 * gigabyte, gigabyte // 4][index], 16 * gigabyte))
    assert free_budgets(("cuda:2", "cuda:3"), {}) == {
        "cuda:2": int(7.5 * gigabyte),
        "cuda:3": 0,
        "cpu": 9 * gigabyte,
    }


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    ("limits", "used"),
    [
        ({}, {"cuda:0"}),
        ({"cuda:0": 150 * KB}, {"cuda:0", "cpu"}),
        ({"cuda:0": 150 * KB, "cpu": 60 * KB, "disk": 400 * KB}, {"cuda:0", "cpu", "disk"}),
    ],
)
def test_on_a_gpu_with_host_and_disk_behind_it(
    folder: Path, offload: Path, limits: dict[str, int], used: set[str]
) -> None:
    before = torch.cuda.memory_allocated()
    source = read_text_source(folder, TEXT_FAMILIES)
    loaded = load_text_encoders(source, devices=["cuda:0"], placement="balanced", limits=limits, offload=offload)
    assert set(plan_of(loaded).bytes_per_device) == used
    ours = encode_prompt(loaded, PROMPTS[0], 64).outputs
    tokens, pooled = by_diffusers(folder, PROMPTS[0], 64, torch.float32)
    torch.testing.assert_close(ours["cross_attn"], tokens, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours["pooled_output"], pooled, rtol=1e-4, atol=1e-4)
    loaded.close()
    assert torch.cuda.memory_allocated() == before


# ----- memory -----


def resident_bytes() -> int:
    """Of this process, anonymous and mapped from files: on a CPU transformers leaves weights in the mapped file."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile"))


@pytest.fixture(scope="module")
def large_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """About 200 MB of T5."""
    folder = write_text(tmp_path_factory.mktemp("large") / "flux")
    build_t5(d_model=512, d_ff=2048, d_kv=64, num_heads=8, num_layers=12).save_pretrained(folder / "text_encoder_2")
    assert (folder / "text_encoder_2" / "model.safetensors").stat().st_size > 190 * 1000**2
    gc.collect()
    yield folder


def test_all_memory_comes_back(large_folder: Path, folder: Path, offload: Path) -> None:
    warm = load(folder, offload)  # what libraries keep after their first use is not the encoders' memory
    encode_prompt(warm, PROMPTS[0], 128)
    warm.close()
    before = resident_bytes()

    loaded = load(large_folder, offload)
    outputs = encode_prompt(loaded, PROMPTS[0], 128).outputs
    assert resident_bytes() - before > 190 * 1000**2
    alive = [weakref.ref(parameter) for encoder in loaded.encoders.values() for parameter in encoder.parameters()]
    loaded.close()

    assert not any(reference() is not None for reference in alive)
    assert not any(output.requires_grad for output in outputs.values())
    assert resident_bytes() - before < 5 * 1000**2


# ----- refusals, before any weight is read -----


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as error:
        read_text_source(folder, TEXT_FAMILIES)
    return str(error.value)


def test_the_source_knows_its_bytes(folder: Path) -> None:
    source = read_text_source(folder, TEXT_FAMILIES)
    assert source.family is FLUX_TEXT
    assert set(source.encoders) == {"text_encoder", "text_encoder_2"}
    assert source.total_bytes == sum(encoder.num_bytes for encoder in source.encoders.values()) > 0


def test_a_bare_transformer_folder_has_no_encoders(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert "no model_index.json" in refusal(tmp_path)


def test_a_folder_of_another_family(folder: Path, tmp_path: Path) -> None:
    index = json.loads((folder / "model_index.json").read_text())
    (tmp_path / "model_index.json").write_text(json.dumps({**index, "_class_name": "StableDiffusionPipeline"}))
    assert "is a StableDiffusionPipeline" in refusal(tmp_path)
    assert "Supported: flux (FluxPipeline)" in refusal(tmp_path)


def test_a_folder_saved_without_encoders(folder: Path, tmp_path: Path) -> None:
    index = json.loads((folder / "model_index.json").read_text())
    for entry in ([None, None], ["transformers", "PickledThing"]):
        (tmp_path / "model_index.json").write_text(json.dumps({**index, "text_encoder_2": entry}))
        assert f"names {entry[1]!r} for text_encoder_2; expected T5EncoderModel" in refusal(tmp_path)


@pytest.mark.parametrize("missing", ["text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"])
def test_a_folder_that_lacks_a_part(tmp_path: Path, missing: str) -> None:
    folder = write_text(tmp_path / "flux")
    (folder / missing).rename(tmp_path / "elsewhere")
    assert f"has no {missing} folder" in refusal(folder)


def test_an_empty_tokenizer_folder(tmp_path: Path) -> None:
    folder = write_text(tmp_path / "flux")
    (folder / "tokenizer_2" / "tokenizer.json").unlink()
    assert "flux/tokenizer_2 holds no tokenizer" in refusal(folder)


def test_pickled_weights(tmp_path: Path) -> None:
    folder = write_text(tmp_path / "flux")
    (folder / "text_encoder_2" / "model.safetensors").rename(folder / "text_encoder_2" / "pytorch_model.bin")
    assert "text_encoder_2 holds only pickled weights (pytorch_model.bin)" in refusal(folder)


def test_a_file_that_transformers_would_not_find(tmp_path: Path) -> None:
    folder = write_text(tmp_path / "flux")
    (folder / "text_encoder" / "model.safetensors").rename(folder / "text_encoder" / "model.fp16.safetensors")
    assert "holds model.fp16.safetensors; expected model.safetensors" in refusal(folder)


def test_weights_that_do_not_fit_the_config(tmp_path: Path, offload: Path) -> None:
    folder = write_text(tmp_path / "flux")
    file = folder / "text_encoder_2" / "model.safetensors"
    tensors = load_file(file)
    lost = tensors.pop("encoder.block.3.layer.0.SelfAttention.q.weight")
    save_file({**tensors, "encoder.final_layer_norm.weight": lost.flatten()[:7].clone()}, file, {"format": "pt"})
    with pytest.raises(UserError) as error:
        load(folder, offload)
    assert "encoder.block.3.layer.0.SelfAttention.q.weight is missing" in str(error.value)
    assert "encoder.final_layer_norm.weight has shape [7], expected [32]" in str(error.value)


def test_a_tokenizer_that_cannot_be_read(tmp_path: Path, offload: Path) -> None:
    folder = write_text(tmp_path / "flux")
    (folder / "tokenizer" / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="flux/tokenizer cannot be read as a CLIPTokenizer"):
        load(folder, offload)


def test_a_tokenizer_of_another_model(tmp_path: Path, offload: Path) -> None:
    folder = write_text(tmp_path / "flux", t5={"vocab_size": 9})
    with pytest.raises(UserError, match=r"tokenizer_2 gives token \d+, but text_encoder_2 knows 9"):
        encode_prompt(load(folder, offload), PROMPTS[0], 64)


def test_encoders_that_do_not_fit(folder: Path, offload: Path) -> None:
    with pytest.raises(UserError) as error:
        load(folder, offload, "single", {"cpu:0": 100 * KB, "cpu:1": 150 * KB})
    assert "cpu:0 100 kB, cpu:1 150 kB" in str(error.value)
    with pytest.raises(UserError, match="It would fit without the limits in max_memory|more host memory"):
        load(folder, offload, "balanced", {"cpu:0": 10 * KB, "cpu:1": 15 * KB, "cpu": 20 * KB})


@pytest.mark.parametrize("length", [0, 513, -1])
def test_a_sequence_length_out_of_range(folder: Path, length: int) -> None:
    with pytest.raises(UserError, match=f"max_sequence_length is {length}; flux takes 1 to 512"):
        read_text_source(folder, TEXT_FAMILIES).check_length(length)
