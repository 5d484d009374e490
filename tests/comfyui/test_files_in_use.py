"""Single files in daily use: where they lie and what they are called, park and death of packed ones, wrong ones.

And ComfyUI's own Load Diffusion Model beside ours, for what it reads and makes right itself. That the files are read
right is in test_single_files.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from parallel_core.storage import FP8_CHOICES
from tests.comfyui.broken_models import other_weights
from tests.comfyui.graphs import Graph, Node
from tests.comfyui.harness import Comfy, kill
from tests.comfyui.parity import PLANS, distance, load_parallel
from tests.comfyui.test_memory import holdings
from tests.comfyui.workflows import Case, ksampler, sample
from tests.tiny_files import is_matrix, write_file
from tests.tiny_models import TINY_MODELS, family_of
from tools.comfy_client import Event

CASE = Case(name="files in use", cfg=3.0, steps=4)


@pytest.fixture(scope="module")
def write(models: Path) -> Callable[..., str]:
    """Writes a tiny Flux file under `models`; returns the name of the folder that has its config."""

    def make(place: str, layout: str, *, seed: int = 0) -> str:
        folder = models / "diffusers" / f"used-{seed}"
        if not folder.exists():
            TINY_MODELS["flux"].write(folder, seed=seed)
        write_file(models / place, folder, family_of("flux"), layout)
        return folder.name

    return make


def ours(comfy: Comfy, name: str, config_from: str, *, plan: str = "ulysses 2", dtype: str = "default") -> torch.Tensor:
    graph = Graph()
    model = load_parallel(graph, PLANS[plan], model=name, dtype=dtype, config_from=config_from)
    return comfy.latents(graph, ksampler(graph, model, CASE))


# ----- places and names -----


def test_of_two_files_with_the_same_name_the_first_folders_counts_as_in_comfyui(
    comfy: Comfy, write: Callable[..., str]
) -> None:
    """models/unet comes first; whatever a file is called, its tensors say what it is."""
    write("unet/wan-2.2.safetensors", "original", seed=0)
    write("diffusion_models/wan-2.2.safetensors", "original", seed=1)
    first = write("diffusion_models/first.safetensors", "original", seed=0)
    second = write("diffusion_models/sub/second.safetensors", "original", seed=1)
    expected = ours(comfy, "first.safetensors", first)
    assert torch.equal(ours(comfy, "wan-2.2.safetensors", first), expected)
    assert distance(ours(comfy, "sub/second.safetensors", second), expected) > 0.1


@pytest.mark.full
def test_a_file_that_is_replaced_is_read_again(comfy: Comfy, write: Callable[..., str]) -> None:
    before = ours(comfy, "replaced.safetensors", write("diffusion_models/replaced.safetensors", "old-scaled", seed=0))
    config = write("diffusion_models/replaced.safetensors", "old-scaled", seed=1)
    assert distance(ours(comfy, "replaced.safetensors", config), before) > 0.1


# ----- packed weights -----


@pytest.mark.parametrize("plan", [pytest.param("ulysses 2", marks=pytest.mark.full), "tensor 2"])
def test_packed_weights_are_parked_and_need_no_disk_again(
    comfy: Comfy, models: Path, write: Callable[..., str], plan: str
) -> None:
    config = write("diffusion_models/parked.safetensors", "old-scaled")
    before = ours(comfy, "parked.safetensors", config, plan=plan)
    loaded = holdings(comfy)
    assert all(device > 0 and host == 0 for device, host in loaded)
    parked = [(0, device) for device, _ in loaded]
    comfy.free_until(lambda: holdings(comfy) == parked, seconds=20, what="all bytes are in host memory")
    with other_weights(models / "diffusion_models" / "parked.safetensors"):
        assert torch.equal(ours(comfy, "parked.safetensors", config, plan=plan), before)


def test_packed_weights_take_the_files_bytes(comfy: Comfy, write: Callable[..., str]) -> None:
    config = write("diffusion_models/bytes.safetensors", "old-scaled")
    held = {}
    for dtype in ("default", "bfloat16"):
        ours(comfy, "bytes.safetensors", config, dtype=dtype)
        comfy.free_until(lambda: len(holdings(comfy)) == 2, seconds=30, what="one model is left", free_memory=False)
        held[dtype] = sum(sum(sizes) for sizes in holdings(comfy))
    assert held["default"] < 0.75 * held["bfloat16"]


@pytest.mark.full
def test_a_rank_dies_with_packed_weights(comfy: Comfy, write: Callable[..., str]) -> None:
    config = write("diffusion_models/dies.safetensors", "new-scaled")
    before = ours(comfy, "dies.safetensors", config)
    victim = comfy.ranks(group_of=2)[1]
    graph = Graph()
    model = load_parallel(graph, PLANS["ulysses 2"], model="dies.safetensors", dtype="default", config_from=config)
    graph.add("TestSaveLatent", samples=ksampler(graph, model, Case(name="long", steps=40)), name="never")

    def kill_in_the_second_step(event: Event) -> None:
        if event.kind == "progress" and event.data["value"] == 1:
            kill(victim)

    started = time.monotonic()
    outcome = comfy.client.run(graph.prompt, on_progress=kill_in_the_second_step, timeout=120)
    assert outcome.status == "error"
    assert "rank 1" in outcome.error_text
    assert time.monotonic() - started < 60
    assert torch.equal(ours(comfy, "dies.safetensors", config), before)


# ----- beside ComfyUI's own loader -----


@pytest.fixture(scope="module")
def full_wan(models: Path) -> Callable[[str], str]:
    """Writes a Wan of two real heads, which ComfyUI's own loader finds out about by itself; returns the listed name."""

    def make(layout: str) -> str:
        folder = models / "diffusers" / "full-wan"
        if not folder.exists():
            sizes = {"attention_head_dim": 128, "num_attention_heads": 2, "text_dim": 4096, "num_layers": 2}
            TINY_MODELS["wan"].write(folder, **sizes)
        file = models / "diffusion_models" / f"full-wan-{layout}.safetensors"
        write_file(file, folder, family_of("wan"), layout)
        return file.name

    return make


def video(comfy: Comfy, load: Callable[[Graph], Node]) -> torch.Tensor:
    graph = Graph()
    conditions = [graph.add("TestConditioning", tokens=17, seed=seed, dim=4096, pooled=0) for seed in (100, 200)]
    latent = graph.add("EmptyHunyuanLatentVideo", width=64, height=64, length=9, batch_size=1)
    return comfy.latents(graph, sample(graph, load(graph), CASE, *conditions, latent))


def stock(comfy: Comfy, name: str, dtype: str = "default") -> torch.Tensor:
    return video(comfy, lambda graph: graph.add("UNETLoader", unet_name=name, weight_dtype=dtype))


def parallel(comfy: Comfy, name: str, dtype: str = "default", plan: str = "ulysses 2") -> torch.Tensor:
    return video(comfy, lambda graph: load_parallel(graph, PLANS[plan], model=name, dtype=dtype))


@pytest.mark.parametrize("dtype", ["fp8_e4m3fn", pytest.param("fp8_e5m2", marks=pytest.mark.full)])
@pytest.mark.parametrize("plan", ["ulysses 2", pytest.param("tensor 2", marks=pytest.mark.full)])
def test_a_cast_to_fp8_loses_no_more_than_comfyuis(
    comfy: Comfy, models: Path, full_wan: Callable[[str], str], plan: str, dtype: str
) -> None:
    """The blocks' matrices become the nearest fp8 numbers, nothing else changes (ComfyUI casts nearly everything)."""
    name = full_wan("original")
    weights = load_file(models / "diffusion_models" / name)
    kind = getattr(torch, FP8_CHOICES[dtype])
    cast = {key: value.to(kind) if is_matrix(key, value) else value for key, value in weights.items()}
    save_file(cast, models / "diffusion_models" / f"cast-{dtype}.safetensors")
    made = parallel(comfy, name, dtype, plan)
    assert torch.equal(made, parallel(comfy, f"cast-{dtype}.safetensors", "bfloat16", plan))
    exact = parallel(comfy, name, "float32", plan)
    assert distance(made, exact) <= distance(stock(comfy, name, dtype), exact)


@pytest.mark.parametrize("layout", ["original", "fp8", "old-scaled", "new-scaled", "metadata-scaled"])
def test_comfyuis_own_loader_gives_the_same(comfy: Comfy, full_wan: Callable[[str], str], layout: str) -> None:
    if "scaled" in layout and not has_scaled_fp8(comfy):
        pytest.skip("this ComfyUI does not read scaled fp8 right")
    name = full_wan(layout)
    made, theirs = parallel(comfy, name, "float32"), stock(comfy, name)
    assert distance(made, theirs) <= 1e-5


def has_scaled_fp8(comfy: Comfy) -> bool:
    """0.3 reads the older layout with a large loss, and the newer one wrong in silence."""
    version = comfy.client.get("/system_stats")["system"]["comfyui_version"]
    return tuple(map(int, version.split(".")[:2])) >= (0, 4)
