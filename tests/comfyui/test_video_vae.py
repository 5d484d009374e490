"""Load Parallel VAE with Wan's and Qwen-Image's VAEs, next to ComfyUI's own Load VAE with the same file.

ComfyUI's class takes the width of Wan 2.1's VAE from the file, so a tiny file is read by its own loader.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.comfyui.graphs import Graph, Node
from tests.comfyui.harness import Comfy
from tests.comfyui.test_vae import pictures_of
from tests.tiny_vae import TINY, build_vae, write_vae
from tests.tiny_video_vae import build_video_vae, write_video_vae, write_video_vae_file

TOLERANCE = 1e-4
FILE = "tiny-wan-vae.safetensors"
DEVICES = ("cpu:1", "cpu:2", "cpu:3")


@pytest.fixture(scope="module", autouse=True)
def vaes(models: Path) -> None:
    write_video_vae_file(models / "vae" / FILE, "Wan 2.1")
    write_video_vae_file(models / "vae" / "tiny-wan22-vae.safetensors", "Wan 2.2")
    write_video_vae(models / "diffusers" / "tiny-wan-vae", "Wan 2.1")
    write_video_vae(models / "diffusers" / "tiny-qwen-vae", "Qwen-Image")


def parallel(graph: Graph, devices: str = "cpu:2", model: str = FILE) -> Node:
    config = graph.add("PD_ParallelConfig", devices=devices, strategy="auto", replicas=1, ulysses=1, tensor=1)
    return graph.add("PD_LoadParallelVAE", model_name=model, dtype="float32", parallel_config=config)


def reference(graph: Graph) -> Node:
    return graph.add("VAELoader", vae_name=FILE)


def latent(graph: Graph, *, frames: int = 3, width: int = 104, height: int = 72, batch: int = 1) -> Node:
    return graph.add("TestLatent", width=width, height=height, batch=batch, seed=5, channels=16, frames=frames)


def video(graph: Graph, *, frames: int = 9, width: int = 104, height: int = 72) -> Node:
    return graph.add("TestPicture", width=width, height=height, batch=frames, seed=9)


TILES: dict[str, Any] = {"tile_size": 64, "overlap": 16, "temporal_size": 8, "temporal_overlap": 4}


def decoded(comfy: Comfy, load: Any, kind: str, tiles: dict[str, Any] | None = None, **size: int) -> torch.Tensor:
    graph = Graph()
    return pictures_of(comfy, graph, graph.add(kind, samples=latent(graph, **size), vae=load(graph), **(tiles or {})))


def encoded(comfy: Comfy, load: Any, kind: str, tiles: dict[str, Any] | None = None, **size: int) -> torch.Tensor:
    graph = Graph()
    return comfy.latents(graph, graph.add(kind, pixels=video(graph, **size), vae=load(graph), **(tiles or {})))


def largest(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max())


@pytest.mark.parametrize("frames", [1, 3])
def test_decode_and_encode_are_comfyuis(comfy: Comfy, frames: int) -> None:
    ours, theirs = (decoded(comfy, load, "VAEDecode", frames=frames, batch=2) for load in (parallel, reference))
    assert largest(ours, theirs) <= TOLERANCE
    ours, theirs = (encoded(comfy, load, "VAEEncode", frames=4 * frames - 3) for load in (parallel, reference))
    assert largest(ours, theirs) <= TOLERANCE * float(theirs.abs().max())


@pytest.mark.parametrize("temporal", [8, 64])
def test_tiles_over_time_height_and_width_are_comfyuis(comfy: Comfy, temporal: int) -> None:
    tiles = {**TILES, "temporal_size": temporal}
    theirs = decoded(comfy, reference, "VAEDecodeTiled", tiles, frames=5)
    assert largest(theirs, decoded(comfy, reference, "VAEDecode", frames=5)) > 1e-3  # tiles do change the result
    made = [decoded(comfy, lambda graph, d=d: parallel(graph, d), "VAEDecodeTiled", tiles, frames=5) for d in DEVICES]
    assert largest(made[0], theirs) <= TOLERANCE
    assert torch.equal(made[0], made[1]) and torch.equal(made[0], made[2])
    assert torch.equal(made[0], decoded(comfy, parallel, "PD_VAEDecode", tiles, frames=5))
    theirs = encoded(comfy, reference, "VAEEncodeTiled", tiles, frames=17)
    made = [encoded(comfy, lambda graph, d=d: parallel(graph, d), "VAEEncodeTiled", tiles, frames=17) for d in DEVICES]
    assert largest(made[0], theirs) <= TOLERANCE * float(theirs.abs().max())
    assert torch.equal(made[0], made[1]) and torch.equal(made[0], made[2])


def test_a_start_image_is_encoded_as_by_comfyui(comfy: Comfy) -> None:
    made = []
    for load in (reference, parallel):
        graph = Graph()
        prompt = graph.add("TestConditioning", tokens=5, seed=100, pooled=0)
        vae = load(graph)
        size = {"width": 64, "height": 64, "length": 9, "batch_size": 1}
        picture = video(graph, frames=1, width=64, height=64)
        start = graph.add("WanImageToVideo", positive=prompt, negative=prompt, vae=vae, start_image=picture, **size)
        model = graph.add("TestReferenceWan", model_name="wan-i2v-2.2", dtype="float32")
        settings = {"seed": 1, "steps": 2, "cfg": 1.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0}
        sampled = graph.add("KSampler", model=model, positive=start[0], negative=start[1], latent_image=start[2],
                            **settings)  # fmt: skip
        made.append(comfy.latents(graph, sampled))
    assert largest(made[1], made[0]) <= TOLERANCE * float(made[0].abs().max())


@pytest.mark.parametrize(
    ("model", "variant", "channels", "scale"),
    [
        ("tiny-wan-vae", "Wan 2.1", 16, 8),
        ("tiny-qwen-vae", "Qwen-Image", 16, 8),
        ("tiny-wan22-vae.safetensors", "Wan 2.2", 48, 16),
    ],
)
def test_decode_is_diffusers(comfy: Comfy, model: str, variant: str, channels: int, scale: int) -> None:
    graph = Graph()
    samples = graph.add("TestLatent", width=104, height=72, batch=1, seed=5, channels=channels, frames=3)
    latents = comfy.latents(graph, samples)
    graph = Graph()
    samples = graph.add("TestLatent", width=104, height=72, batch=1, seed=5, channels=channels, frames=3)
    ours = pictures_of(comfy, graph, graph.add("VAEDecode", samples=samples, vae=parallel(graph, model=model)))
    with torch.inference_mode():
        pixels = build_video_vae(variant).decode(latents).sample
    theirs = ((pixels + 1) / 2).clamp(0, 1).movedim(1, -1).flatten(0, 1)
    assert theirs.shape[1] == latents.shape[-2] * scale
    assert largest(ours, theirs) <= TOLERANCE


# ----- pictures -----


@pytest.mark.parametrize("prefix", ["", "first_stage_model."])
@pytest.mark.parametrize("quant", [False, True])
def test_a_single_file_of_an_image_vae_is_its_folder(comfy: Comfy, models: Path, prefix: str, quant: bool) -> None:
    from safetensors.torch import save_file

    from parallel_core.vae_files import vae_file_name

    config = {"use_quant_conv": quant, "use_post_quant_conv": quant}
    name = f"ldm-{prefix or 'bare.'}{quant}".rstrip(".")
    weights = {}
    for key, tensor in build_vae(**config).state_dict().items():
        stored = vae_file_name(key, "Stable Diffusion or FLUX", TINY)
        is_matrix = ".attn_1." in stored and tensor.ndim == 2
        weights[prefix + stored] = tensor[:, :, None, None].contiguous() if is_matrix else tensor
    category = "checkpoints" if prefix else "vae"
    (models / category).mkdir(exist_ok=True)
    save_file(weights, models / category / f"{name}.safetensors")
    write_vae(models / "diffusers" / f"{name}-folder", **config)
    made = []
    for model in (f"{name}-folder", f"{'checkpoints/' if prefix else ''}{name}.safetensors"):
        graph = Graph()
        samples = graph.add("TestLatent", width=104, height=72, batch=2, seed=5, channels=16)
        made.append(
            pictures_of(comfy, graph, graph.add("VAEDecode", samples=samples, vae=parallel(graph, model=model)))
        )
    assert torch.equal(*made)
