"""Load Parallel VAE with Wan's and Qwen-Image's VAEs, next to ComfyUI's own Load VAE with the same file.

ComfyUI's class takes the width of Wan 2.1's VAE from the file, so a tiny file is read by its own loader.
"""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.comfyui.graphs import Graph, Node
from tests.comfyui.harness import Comfy
from tests.comfyui.test_vae import pictures_of
from tests.tiny_vae import write_original, write_vae
from tests.tiny_video_vae import build_video_vae, write_video_vae, write_video_vae_file

TOLERANCE = 1e-4
FILE = "tiny-wan-vae.safetensors"
FILE22 = "tiny-wan22-vae.safetensors"
DEVICES = ("cpu:1", "cpu:2", "cpu:3")


@pytest.fixture(scope="module", autouse=True)
def vaes(models: Path) -> None:
    write_video_vae_file(models / "vae" / FILE, "Wan 2.1")
    write_video_vae_file(models / "vae" / FILE22, "Wan 2.2")
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


@pytest.mark.parametrize("temporal", [8, pytest.param(64, marks=pytest.mark.full)])
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
        (FILE22, "Wan 2.2", 48, 16),
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


# ----- what other nodes see; Wan 2.2, of whose widths ComfyUI's class is told by the test -----

LOADERS: tuple[Any, Any] = (
    lambda graph, file: graph.add("TestReferenceVideoVAE", model_name=file),
    lambda graph, file: parallel(graph, model=file),
)


@pytest.mark.parametrize("file", [FILE, FILE22])
def test_other_nodes_read_the_same_from_it(comfy: Comfy, file: str) -> None:
    texts = []
    for load in LOADERS:
        graph = Graph()
        shown = graph.add("TestVaeTraits", vae=load(graph, file))
        texts.append(comfy.run(graph).outputs[shown.node_id]["text"])
    assert texts[0] == texts[1]


def test_wan22_is_comfyuis(comfy: Comfy) -> None:
    """Whole and in tiles over time, height and width."""
    tiles = {**TILES, "tile_size": 96, "temporal_size": 12}
    made: list[list[torch.Tensor]] = []
    for load in LOADERS:
        graph = Graph()
        vae, pixels = load(graph, FILE22), video(graph, width=144, height=112)
        samples = graph.add("TestLatent", width=80, height=56, batch=1, seed=5, channels=48, frames=5)
        encoded = [
            graph.add("VAEEncode", pixels=pixels, vae=vae),
            graph.add("VAEEncodeTiled", pixels=pixels, vae=vae, **{**tiles, "tile_size": 64, "temporal_size": 8}),
        ]
        decoded = [
            graph.add("VAEDecode", samples=samples, vae=vae),
            graph.add("VAEDecodeTiled", samples=samples, vae=vae, **tiles),
        ]
        names = [uuid.uuid4().hex for _ in range(4)]
        for name, latents in zip(names[:2], encoded, strict=True):
            graph.add("TestSaveLatent", samples=latents, name=name)
        for name, image in zip(names[2:], decoded, strict=True):
            graph.add("TestSavePicture", image=image, name=name)
        comfy.run(graph)
        made.append([comfy.saved(name) for name in names])
    for theirs, ours in zip(*made, strict=True):
        assert largest(ours, theirs) <= TOLERANCE * max(1.0, float(theirs.abs().max()))
    assert largest(made[0][0], made[0][1]) > 1e-3 and largest(made[0][2], made[0][3]) > 1e-3  # tiles do change it


def test_start_images_and_pictures_to_edit_are_encoded_as_by_comfyui(comfy: Comfy) -> None:
    made: list[list[torch.Tensor]] = []
    for load in LOADERS:
        graph = Graph()
        picture = video(graph, frames=1, width=99, height=64)
        size = {"width": 96, "height": 64, "length": 9, "batch_size": 1}
        start = graph.add("Wan22ImageToVideoLatent", vae=load(graph, FILE22), start_image=picture, **size)
        edit = graph.add("TestImageEditLatent", vae=load(graph, FILE), image=picture)
        names = [uuid.uuid4().hex for _ in range(2)]
        for name, latents in zip(names, (start, edit), strict=True):
            graph.add("TestSaveLatent", samples=latents, name=name)
        comfy.run(graph)
        made.append([comfy.saved(name) for name in names])
    for theirs, ours in zip(*made, strict=True):
        assert theirs.ndim == 5 and largest(ours, theirs) <= TOLERANCE * max(1.0, float(theirs.abs().max()))


def test_the_nodes_say_what_ran_where(comfy: Comfy) -> None:
    graph = Graph()
    vae = parallel(graph)
    encoded = graph.add("VAEEncode", pixels=video(graph, frames=7), vae=vae)
    graph.add("TestSaveLatent", samples=encoded, name="video-said-encode")
    image = graph.add("PD_VAEDecode", samples=latent(graph, frames=5), vae=vae, **TILES)
    graph.add("TestSavePicture", image=image, name="video-said-decode")
    texts = comfy.run(graph).texts
    first, second, third = texts[encoded.node_id][-1].splitlines()
    assert first.startswith("1 video on 1 rank (cpu:0): ") and "the tiled nodes share it out over all 2" in second
    assert third == "The last frames (2) do not fill a latent frame and were left out."
    assert " tiles on 2 ranks (cpu:0, cpu:1): " in texts[image.node_id][-1]


def test_a_picture_smaller_than_a_cell_is_refused(comfy: Comfy) -> None:
    graph = Graph()
    encoded = graph.add("VAEEncode", pixels=video(graph, frames=1, width=70, height=5), vae=parallel(graph))
    graph.add("TestSaveLatent", samples=encoded, name="video-too-small")
    assert "this VAE needs at least 8 x 8" in comfy.failure(graph)


# ----- pictures -----


@pytest.mark.parametrize("prefix", ["", "first_stage_model."])
@pytest.mark.parametrize("quant", [False, True])
def test_a_single_file_of_an_image_vae_is_its_folder(comfy: Comfy, models: Path, prefix: str, quant: bool) -> None:
    config = {"use_quant_conv": quant, "use_post_quant_conv": quant}
    name = f"ldm-{prefix or 'bare.'}{quant}".rstrip(".")
    write_original(models / ("checkpoints" if prefix else "vae") / f"{name}.safetensors", prefix=prefix, **config)
    write_vae(models / "diffusers" / f"{name}-folder", **config)
    made = []
    for model in (f"{name}-folder", f"{'checkpoints/' if prefix else ''}{name}.safetensors"):
        graph = Graph()
        samples = graph.add("TestLatent", width=104, height=72, batch=2, seed=5, channels=16)
        made.append(
            pictures_of(comfy, graph, graph.add("VAEDecode", samples=samples, vae=parallel(graph, model=model)))
        )
    assert torch.equal(*made)
