"""Single files give what ComfyUI's own model gives with the same weights, in every layout, quantisation and mode.

Of quantised files the reference is the numbers that they stand for, unpacked by plain arithmetic in the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.comfyui.graphs import Graph, Node
from tests.comfyui.harness import Comfy
from tests.comfyui.parity import PLANS, distance, load_parallel
from tests.comfyui.qwen_workflows import QwenCase, edit
from tests.comfyui.wan_workflows import WORKFLOWS as WAN_WORKFLOWS
from tests.comfyui.wan_workflows import WanCase
from tests.comfyui.workflows import Case, ksampler
from tests.tiny_files import dequantised, unpacked_gguf, write_file
from tests.tiny_models import TINY_MODELS, family_of

TOLERANCE = 1e-4
"""float32, of the largest value, after the whole run."""

LAYOUTS = (
    "original",
    "diffusers",
    "prefixed",
    "fp8",
    "fp8-e5m2",
    "old-scaled",
    "new-scaled",
    "metadata-scaled",
    "gguf",
)
FILE_PLANS = ("one rank", "ulysses 2", "tensor 2")

Workflow = Callable[[Graph, Node], Node]
SAMPLED: dict[str, Workflow] = {
    "flux": lambda graph, model: ksampler(graph, model, Case(name="file", cfg=3.0)),
    "qwen": lambda graph, model: edit(graph, model, QwenCase(name="file", cfg=3.0)),
    "wan": lambda graph, model: WAN_WORKFLOWS["text_to_video"](graph, model, WanCase(name="file")),
    "wan-i2v": lambda graph, model: WAN_WORKFLOWS["image_to_video"](graph, model, WanCase(name="file")),
    "wan-5b": lambda graph, model: WAN_WORKFLOWS["empty_5b"](graph, model, WanCase(name="file")),
}

FULL_HEADS: dict[str, dict[str, Any]] = {
    "flux": {"attention_head_dim": 128, "num_attention_heads": 2, "axes_dims_rope": [16, 56, 56], "num_layers": 1,
             "num_single_layers": 1},
    "qwen": {"attention_head_dim": 128, "num_attention_heads": 2, "axes_dims_rope": [16, 56, 56], "num_layers": 1},
    "wan": {"attention_head_dim": 128, "num_attention_heads": 2, "num_layers": 1},
}  # fmt: skip
"""What makes the tiny models' heads those of the real ones."""


def _place(models: Path, name: str, layout: str) -> tuple[Path, str]:
    """Where a file lies, and how Load Parallel Transformer lists it."""
    if layout == "prefixed":
        return models / "checkpoints" / f"{name}-{layout}.safetensors", f"checkpoints/{name}-{layout}.safetensors"
    file = f"{name}-{layout}.{'gguf' if layout == 'gguf' else 'safetensors'}"
    return models / "diffusion_models" / file, file


@pytest.fixture(scope="session")
def write(models: Path) -> Callable[[str, str], str]:
    """Writes a tiny model's file and the unpacked weights beside it, once; returns the file's listed name."""

    def make(name: str, layout: str) -> str:
        folder = models / "diffusers" / f"file-{name}"
        config = FULL_HEADS[name.removesuffix("-heads")] if name.endswith("-heads") else {}
        tiny = name.removesuffix("-heads")
        if not folder.exists():
            TINY_MODELS[tiny].write(folder, **config)
        file, listed = _place(models, name, layout)
        if not file.exists():
            write_file(file, folder, family_of(tiny), layout)
            weights = unpacked_gguf(file) if layout == "gguf" else dequantised(load_file(file))
            if layout == "diffusers":  # ComfyUI's classes read the original names
                write_file(_reference(models, name, layout), folder, family_of(tiny), "original")
            else:
                save_file(weights, _reference(models, name, layout))
        return listed

    return make


def _reference(models: Path, name: str, layout: str) -> Path:
    return models / "unpacked" / f"{name}-{layout}.safetensors"


@pytest.fixture(scope="session", autouse=True)
def folders(models: Path) -> None:
    for name in ("diffusion_models", "checkpoints", "unpacked"):
        (models / name).mkdir(exist_ok=True)


def reference(comfy: Comfy, name: str, layout: str, dtype: str = "float32") -> torch.Tensor:
    graph, tiny = Graph(), name.removesuffix("-heads")
    model = graph.add(
        "TestReferenceFile",
        family=tiny.partition("-")[0],
        file=f"unpacked/{name}-{layout}.safetensors",
        config=f"file-{name}",
        dtype=dtype,
    )
    return comfy.latents(graph, SAMPLED[tiny](graph, model))


def ours(comfy: Comfy, name: str, file: str, plan: str, weight_dtype: str, config: bool = True) -> torch.Tensor:
    graph, tiny = Graph(), name.removesuffix("-heads")
    more = {"config_from": f"file-{name}"} if config else {}
    model = load_parallel(graph, PLANS[plan], model=file, dtype=weight_dtype, **more)
    return comfy.latents(graph, SAMPLED[tiny](graph, model))


def _cells() -> list[Any]:
    cells = []
    for name in SAMPLED:
        for layout in LAYOUTS:
            for plan in FILE_PLANS:
                if name == "wan-i2v" and layout not in ("original", "new-scaled", "gguf"):
                    continue
                if name == "wan-5b" and layout not in ("original", "old-scaled"):
                    continue
                chosen = plan == "tensor 2" and layout in ("original", "new-scaled", "gguf")
                chosen = chosen or (plan == "one rank" and name in ("flux", "wan") and "-" not in layout)
                marks = () if chosen else (pytest.mark.full,)
                cells.append(pytest.param(name, layout, plan, id=f"{name}-{layout}-{plan}", marks=marks))
    return cells


@pytest.mark.parametrize(("name", "layout", "plan"), _cells())
def test_a_file_gives_what_comfyuis_own_model_gives(
    comfy: Comfy, write: Callable[[str, str], str], name: str, layout: str, plan: str
) -> None:
    file = write(name, layout)
    made = ours(comfy, name, file, plan, "float32")
    assert distance(made, reference(comfy, name, layout)) <= TOLERANCE


@pytest.mark.parametrize("layout", ["fp8", "old-scaled", "new-scaled", "gguf"])
@pytest.mark.parametrize("name", ["flux", "qwen", "wan"])
def test_packed_weights_give_the_same_bits_as_unpacked_ones(
    comfy: Comfy, write: Callable[[str, str], str], name: str, layout: str
) -> None:
    """And they are as near to ComfyUI's float32 as ComfyUI's own bfloat16 is."""
    file = write(name, layout)
    packed = ours(comfy, name, file, "ulysses 2", "default")
    assert torch.equal(packed, ours(comfy, name, file, "ulysses 2", "bfloat16"))
    exact = reference(comfy, name, layout)
    rounding = distance(reference(comfy, name, layout, "bfloat16"), exact)
    assert distance(packed, exact) <= 1.5 * rounding


@pytest.mark.parametrize("name", ["flux-heads", "qwen-heads", "wan-heads"])
def test_the_presets_are_right_for_heads_of_the_real_size(
    comfy: Comfy, write: Callable[[str, str], str], name: str
) -> None:
    file = write(name, "original")
    made = ours(comfy, name, file, "ulysses 2", "float32", config=False)
    assert distance(made, reference(comfy, name, "original")) <= TOLERANCE
