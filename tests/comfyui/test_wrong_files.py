"""Wrong single files through a server: refused in plain words, before any rank starts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import wrong_files as wrong
from tests.comfyui.graphs import Graph
from tests.comfyui.harness import Comfy
from tests.comfyui.parity import load_parallel
from tests.comfyui.workflows import Case, ksampler
from tests.wrong_files import Tensors

CASE = Case(name="wrong file", steps=2)
NOT_STARTED = {"devices": "cpu:3", "replicas": 3}


def _bytes(data: bytes) -> Callable[[Path], object]:
    return lambda file: file.write_bytes(data)


def _tensors(tensors: Tensors) -> Callable[[Path], object]:
    return lambda file: wrong.write(file, tensors)


def _cut(file: Path) -> None:
    wrong.write(file, wrong.original_tensors("flux"))
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size - 5_000_000)


def _cut_gguf(file: Path) -> None:
    wrong.write_gguf(file, wrong.original_tensors("flux"))
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size - 1_000_000)


SOME = ("BF16", (8, 8))
FLUX = wrong.original_tensors("flux")
WRONG: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "page.safetensors": (_bytes(b"<!DOCTYPE html><html>" + bytes(99)), ("a web page",)),
    "pickle.safetensors": (_bytes(b"\x80\x02}q\x00X\x06\x00\x00\x00weightq\x01" + bytes(50)), ("pickled",)),
    "empty.safetensors": (_bytes(b""), ("0 bytes",)),
    "cut.safetensors": (_cut, ("cut off", "5.0 MB")),
    "cut.gguf": (_cut_gguf, ("cut off", "1.0 MB")),
    "lora.safetensors": (_tensors({"transformer.transformer_blocks.0.attn.to_q.lora_A.weight": SOME}), ("a LoRA",)),
    "checkpoints/sdxl.safetensors": (
        _tensors({"model.diffusion_model.input_blocks.0.0.weight": SOME}), ("SDXL", "flux, qwen-image, wan")
    ),
    "chroma.safetensors": (_tensors({**FLUX, "distilled_guidance_layer.in_proj.weight": SOME}), ("is Chroma",)),
    "svdquant.safetensors": (_tensors({**FLUX, "double_blocks.0.img_attn.qkv.wscales": SOME}), ("SVDQuant",)),
    "two-layouts.safetensors": (_tensors({**FLUX, **wrong.diffusers_tensors("flux")}), ("not part of",)),
    "one-missing.safetensors": (
        _tensors({name: info for name, info in FLUX.items() if name != "img_in.bias"}), ("img_in.bias", "missing")
    ),
    "gone.safetensors": (lambda file: file.symlink_to(file.parent / "nowhere"), ("not there",)),
}  # fmt: skip


def _path(models: Path, name: str) -> Path:
    return models / name if name.startswith("checkpoints/") else models / "diffusion_models" / name


@pytest.fixture(scope="module", autouse=True)
def _files(models: Path) -> None:
    for name, (make, _) in WRONG.items():
        _path(models, name).parent.mkdir(exist_ok=True)
        make(_path(models, name))
    (models / "diffusion_models" / "folder.safetensors").mkdir()
    wrong.write(models / "diffusion_models" / "sound-flux.safetensors", FLUX)


@pytest.fixture(autouse=True)
def _nothing_starts(comfy: Comfy) -> Iterator[None]:
    before = comfy.ranks()
    yield
    assert comfy.ranks() == before


def refuses(comfy: Comfy, model: str, *fragments: str, **more: str) -> None:
    graph = Graph()
    samples = ksampler(graph, load_parallel(graph, NOT_STARTED, model=model, dtype="default", **more), CASE)
    graph.add("TestSaveLatent", samples=samples, name="never")
    text = comfy.failure(graph)
    for fragment in fragments:
        assert re.search(re.escape(fragment), text, re.IGNORECASE), f"{fragment!r} is not in: {text}"
    assert "Traceback" not in text
    assert text.count("(PD_LoadParallelTransformer)") == 1, f"said more than once: {text}"


@pytest.mark.parametrize("name", WRONG)
def test_wrong_files_are_refused(comfy: Comfy, name: str) -> None:
    refuses(comfy, name, name.removeprefix("checkpoints/"), *WRONG[name][1])


def test_a_folder_with_a_files_name_is_not_listed(comfy: Comfy) -> None:
    refuses(comfy, "folder.safetensors", "folder.safetensors", "model_name")


def test_config_from_of_another_family(comfy: Comfy) -> None:
    refuses(comfy, "sound-flux.safetensors", "config_from", "QwenImageTransformer2DModel", config_from="tiny-qwen")


def test_config_from_that_is_not_there(comfy: Comfy) -> None:
    refuses(comfy, "sound-flux.safetensors", "config_from", "no-such-folder", config_from="no-such-folder")
