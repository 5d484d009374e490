"""Load Parallel VAE and VAE Decode (Parallel) in a real ComfyUI, next to ComfyUI's own VAE with the same weights."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.comfyui.graphs import Graph, Node
from tests.comfyui.harness import Comfy, wait_until
from tests.tiny_vae import build_vae, write_pipeline, write_vae
from tools.comfy_client import Event, PromptRejected

TOLERANCE = 1e-4
FOLDER = "vae-tiny"
TILES = {"tile_size": 64, "overlap": 16}
FRAMES = {"temporal_size": 64, "temporal_overlap": 8}


@pytest.fixture(scope="module", autouse=True)
def vae_folders(models: Path) -> Path:
    """models/diffusers with VAEs in it: Flux's shape, one with quant_conv (SD's shape), and broken ones."""
    diffusers = models / "diffusers"
    write_pipeline(diffusers / FOLDER)
    write_pipeline(diffusers / "vae-quant", seed=1, use_quant_conv=True, use_post_quant_conv=True, latent_channels=4)
    write_vae(diffusers / "vae-unknown")
    config = diffusers / "vae-unknown" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "_class_name": "AutoencoderOobleck"}))
    write_vae(diffusers / "vae-misfit")
    config = diffusers / "vae-misfit" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "layers_per_block": 2}))
    weights = write_vae(diffusers / "vae-pickle") / "diffusion_pytorch_model.safetensors"
    weights.rename(weights.with_suffix(".bin"))
    return diffusers


def parallel(graph: Graph, devices: str = "cpu:2", model: str = FOLDER, dtype: str | None = None) -> Node:
    config = graph.add("PD_ParallelConfig", devices=devices, strategy="auto", replicas=1, ulysses=1, tensor=1)
    return graph.add("PD_LoadParallelVAE", model_name=model, dtype=dtype, parallel_config=config)


def reference(graph: Graph, model: str = FOLDER) -> Node:
    return graph.add("TestReferenceVAE", model_name=model)


def latent(graph: Graph, *, width: int = 104, height: int = 72, batch: int = 2, channels: int = 16) -> Node:
    return graph.add("TestLatent", width=width, height=height, batch=batch, seed=5, channels=channels)


def picture(graph: Graph, *, width: int = 104, height: int = 72, batch: int = 1) -> Node:
    return graph.add("TestPicture", width=width, height=height, batch=batch, seed=9)


def pictures_of(comfy: Comfy, graph: Graph, image: Node) -> torch.Tensor:
    """Runs the graph and returns `image` as the server had it."""
    name = uuid.uuid4().hex
    graph.add("TestSavePicture", image=image, name=name)
    comfy.run(graph)
    return comfy.saved(name)


def largest(difference: torch.Tensor) -> float:
    return float(difference.abs().max())


# ----- ComfyUI's own nodes -----


@pytest.mark.parametrize(("model", "channels"), [(FOLDER, 16), ("vae-quant", 4)])
def test_vae_decode_is_comfyuis(comfy: Comfy, model: str, channels: int) -> None:
    made = []
    for load in (reference, parallel):
        graph = Graph()
        samples = latent(graph, batch=3, channels=channels)
        image = graph.add("VAEDecode", samples=samples, vae=load(graph, model=model))
        made.append(pictures_of(comfy, graph, image))
    expected, ours = made
    assert expected.shape == (3, 72, 104, 3) and ours.dtype == torch.float32
    assert ((expected > 0) & (expected < 1)).float().mean() > 0.3  # not all of it is clamped away
    assert largest(ours - expected) <= TOLERANCE


@pytest.mark.parametrize(("width", "height"), [(104, 72), (107, 77)])
def test_vae_encode_is_comfyuis(comfy: Comfy, width: int, height: int) -> None:
    """Sides that are no multiple of eight are cropped in the middle, as ComfyUI does."""
    made = []
    for load in (reference, parallel):
        graph = Graph()
        pixels = picture(graph, width=width, height=height, batch=3)
        made.append(comfy.latents(graph, graph.add("VAEEncode", pixels=pixels, vae=load(graph))))
    expected, ours = made
    assert expected.shape == (3, 16, 9, 13)
    assert largest(ours - expected) <= TOLERANCE


def test_one_rank_and_two_give_the_same_bits(comfy: Comfy) -> None:
    made: list[list[torch.Tensor]] = []
    for devices in ("cpu:1", "cpu:2"):
        graph = Graph()
        vae, samples = parallel(graph, devices), latent(graph, batch=3)
        pixels = picture(graph, width=160, batch=3)
        whole = graph.add("VAEDecode", samples=samples, vae=vae)
        tiled = graph.add("PD_VAEDecode", samples=samples, vae=vae, tile_size=64, overlap=24)
        encoded = graph.add("VAEEncode", pixels=pixels, vae=vae)
        encoded_tiled = graph.add("VAEEncodeTiled", pixels=pixels, vae=vae, tile_size=64, overlap=32, **FRAMES)
        names = [uuid.uuid4().hex for _ in range(4)]
        for name, image in zip(names[:2], (whole, tiled), strict=True):
            graph.add("TestSavePicture", image=image, name=name)
        for name, latents in zip(names[2:], (encoded, encoded_tiled), strict=True):
            graph.add("TestSaveLatent", samples=latents, name=name)
        comfy.run(graph)
        made.append([comfy.saved(name) for name in names])
    assert all(torch.equal(one, two) for one, two in zip(*made, strict=True))
    assert largest(made[0][0] - made[0][1]) > 1e-3  # tiles are not the whole


def test_inpaint_nodes_get_comfyuis_latents(comfy: Comfy) -> None:
    made: list[list[torch.Tensor]] = []
    for load in (reference, parallel):
        graph = Graph()
        vae, pixels = load(graph), picture(graph)
        mask = graph.add("TestMask", width=104, height=72, seed=3)
        text = graph.add("TestConditioning", tokens=5, seed=1)
        inpaint = graph.add("VAEEncodeForInpaint", pixels=pixels, vae=vae, mask=mask, grow_mask_by=6)
        both = graph.add(
            "InpaintModelConditioning",
            positive=text, negative=text, vae=vae, pixels=pixels, mask=mask, noise_mask=True,
        )  # fmt: skip
        names = [uuid.uuid4().hex for _ in range(3)]
        concat = graph.add("TestConcatLatent", conditioning=both[0])
        for name, samples in zip(names, (inpaint, both[2], concat), strict=True):
            graph.add("TestSaveLatent", samples=samples, name=name)
        comfy.run(graph)
        made.append([comfy.saved(name) for name in names])
    for expected, ours in zip(*made, strict=True):
        assert largest(ours - expected) <= TOLERANCE
    assert largest(made[0][0] - made[0][1]) > 0.1  # the mask matters


# ----- tiles: diffusers' own tiled code, which ComfyUI's tiled code does not equal -----


@pytest.fixture
def tiled_vae() -> Iterator[Any]:
    """The tiny VAE after enable_tiling(): 64 pixel tiles that overlap by a quarter."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the ranks: the bits may depend on it
    vae = build_vae()
    vae.enable_tiling()
    with torch.inference_mode():
        yield vae
    torch.set_num_threads(threads)


def test_the_tiled_nodes_equal_diffusers_to_the_bit(comfy: Comfy, tiled_vae: Any) -> None:
    """Our node and ComfyUI's."""
    graph = Graph()
    samples = comfy.latents(graph, latent(graph, width=160, height=104))
    pixels = torch.cat([tiled_vae.decode(row).sample for row in samples.split(1)])
    expected = ((pixels + 1) / 2).clamp(0, 1).movedim(1, -1)
    for node, frames in (("PD_VAEDecode", {}), ("VAEDecodeTiled", FRAMES)):
        graph = Graph()
        samples = latent(graph, width=160, height=104)
        image = graph.add(node, samples=samples, vae=parallel(graph), **TILES, **frames)
        assert torch.equal(pictures_of(comfy, graph, image), expected), node


def test_encode_tiled_equals_diffusers_to_the_bit(comfy: Comfy, tiled_vae: Any) -> None:
    graph = Graph()
    pixels = pictures_of(comfy, graph, picture(graph, width=160, height=104)).movedim(-1, 1).contiguous()
    expected = tiled_vae.encode(pixels * 2 - 1).latent_dist.mode()
    graph = Graph()
    made = graph.add(
        "VAEEncodeTiled",
        pixels=picture(graph, width=160, height=104), vae=parallel(graph), **TILES, **FRAMES,
    )  # fmt: skip
    assert torch.equal(comfy.latents(graph, made), expected)


def test_with_a_stock_vae_it_is_vae_decode_tiled(comfy: Comfy) -> None:
    graph = Graph()
    samples, vae = latent(graph, width=160, height=104), reference(graph)
    stock = graph.add("VAEDecodeTiled", samples=samples, vae=vae, **TILES, **FRAMES)
    ours = graph.add("PD_VAEDecode", samples=samples, vae=vae, **TILES)
    graph.add("TestSavePicture", image=stock, name="stock-tiled")
    graph.add("TestSavePicture", image=ours, name="our-tiled")
    outcome = comfy.run(graph)
    assert torch.equal(comfy.saved("our-tiled"), comfy.saved("stock-tiled"))
    assert "nothing ran in parallel" in outcome.texts[ours.node_id][-1]


def test_the_nodes_say_what_ran_where(comfy: Comfy) -> None:
    graph = Graph()
    vae, samples = parallel(graph), latent(graph, width=160, height=104, batch=1)
    tiled = graph.add("PD_VAEDecode", samples=samples, vae=vae, **TILES)
    whole = graph.add("VAEDecode", samples=samples, vae=vae)
    for index, image in enumerate((tiled, whole)):
        graph.add("TestSavePicture", image=image, name=f"said-{index}")
    texts = comfy.run(graph).texts
    assert texts[vae.node_id][-1].startswith("2 ranks (cpu:0, cpu:1), each with the whole VAE\n4 MB in float32")
    assert texts[tiled.node_id][-1].startswith("1 picture, in tiles of 64 pixels, on 2 ranks (cpu:0, cpu:1): ")
    assert texts[whole.node_id][-1].startswith("1 picture, whole, on 1 rank (cpu:0): ")
    assert "the tiled nodes share it out over all 2" in texts[whole.node_id][-1]


def test_half_precision(comfy: Comfy) -> None:
    """bfloat16 on the ranks is float32 on the wire to ComfyUI, and no farther off than bfloat16 is."""
    made = []
    for load in (reference, lambda g: parallel(g, dtype="bfloat16")):
        graph = Graph()
        made.append(pictures_of(comfy, graph, graph.add("VAEDecode", samples=latent(graph), vae=load(graph))))
    assert made[1].dtype == torch.float32
    assert 1e-4 < largest(made[1] - made[0]) < 0.2


# ----- refusals -----


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("vae-unknown", "_class_name 'AutoencoderOobleck'; Load Parallel VAE can run AutoencoderKL"),
        ("vae-pickle", "only pickled weights"),
        ("bare-flux", "_class_name 'FluxTransformer2DModel'"),
        ("../diffusers/vae-tiny", "a model folder with a vae"),
        ("no-such-folder", "a model folder with a vae"),
    ],
)
def test_bad_folders_are_refused_before_the_prompt_runs(comfy: Comfy, model: str, message: str) -> None:
    graph = Graph()
    graph.add("PreviewImage", images=graph.add("VAEDecode", samples=latent(graph), vae=parallel(graph, model=model)))
    with pytest.raises(PromptRejected) as refused:
        comfy.client.queue(graph.prompt)
    assert message in str(refused.value)


def test_weights_that_do_not_fit_the_config_are_named(comfy: Comfy) -> None:
    """Every rank refuses them, so the ranks live."""
    graph = Graph()
    pictures_of(comfy, graph, graph.add("VAEDecode", samples=latent(graph), vae=parallel(graph)))
    ranks = comfy.ranks()
    graph = Graph()
    image = graph.add("VAEDecode", samples=latent(graph), vae=parallel(graph, model="vae-misfit"))
    graph.add("PreviewImage", images=image)
    assert "do not fit its config.json" in comfy.failure(graph)
    assert comfy.ranks() == ranks


def decode_with(graph: Graph, node: str = "PD_VAEDecode", channels: int = 16, **settings: Any) -> Graph:
    image = graph.add(node, samples=latent(graph, channels=channels), vae=parallel(graph), **settings)
    graph.add("PreviewImage", images=image)
    return graph


def test_latents_of_another_model_are_refused(comfy: Comfy) -> None:
    for node, settings in (("VAEDecode", {}), ("PD_VAEDecode", TILES)):
        text = comfy.failure(decode_with(Graph(), node, channels=4, **settings))
        assert "has 4 channels, but this VAE" in text and "decodes 16" in text


def test_an_overlap_as_large_as_the_tile_is_refused(comfy: Comfy) -> None:
    assert "the overlap must be smaller than the tile" in comfy.failure(decode_with(Graph(), tile_size=64, overlap=64))


def test_a_picture_smaller_than_a_latent_cell_is_refused(comfy: Comfy) -> None:
    graph = Graph()
    encoded = graph.add("VAEEncode", pixels=picture(graph, width=70, height=5), vae=parallel(graph))
    graph.add("TestSaveLatent", samples=encoded, name="too-small")
    assert "The picture is 70 x 5 pixels; this VAE needs at least 8 x 8" in comfy.failure(graph)


def test_saving_is_refused(comfy: Comfy) -> None:
    graph = Graph()
    graph.add("VAESave", vae=parallel(graph), filename_prefix="nothing")
    assert "cannot be saved from here" in comfy.failure(graph)


# ----- cancel and memory -----


def test_cancel_between_pictures_keeps_the_ranks(comfy: Comfy) -> None:
    def decode(batch: int) -> Graph:
        graph = Graph()
        samples = latent(graph, width=256, height=256, batch=batch)
        image = graph.add("PD_VAEDecode", samples=samples, vae=parallel(graph), **TILES)
        graph.add("TestSavePicture", image=image, name=f"batch-{batch}")
        return graph

    comfy.run(decode(1))
    ranks, before = comfy.ranks(), comfy.saved("batch-1")
    seen: list[int] = []

    def cancel(event: Event) -> None:
        if event.kind == "progress":
            seen.append(event.data["value"])
            comfy.client.interrupt()

    outcome = comfy.client.run(decode(64).prompt, on_progress=cancel)
    assert outcome.status == "interrupted" and max(seen) < 64
    comfy.run(decode(1))
    assert comfy.ranks() == ranks and torch.equal(comfy.saved("batch-1"), before)


def models_on_ranks(comfy: Comfy) -> list[int] | None:
    """Device bytes of each model on each rank; None while a rank is at work."""
    groups = comfy.client.get("/parallel_diffusion/status")["groups"]
    if any(group["busy"] for group in groups):
        return None
    ledgers = [rank["models"] for group in groups for rank in group["ranks"]]
    return [model["device_bytes"] for ledger in ledgers for model in ledger.values()]


def wait_freed(comfy: Comfy, models: list[int], what: str, **options: bool) -> None:
    """Asks until it is done: ComfyUI forgets a /free that comes while it collects garbage after a prompt."""

    def done() -> bool:
        comfy.client.free(**options)
        return models_on_ranks(comfy) == models

    wait_until(done, seconds=30, what=what)


def test_free_parks_and_the_last_reference_releases(comfy: Comfy) -> None:
    def decode() -> torch.Tensor:
        graph = Graph()
        return pictures_of(comfy, graph, graph.add("VAEDecode", samples=latent(graph), vae=parallel(graph)))

    before = decode()
    wait_freed(comfy, [0, 0], "both ranks parked the VAE", unload_models=True)
    assert torch.equal(decode(), before)
    wait_freed(comfy, [], "the ranks gave the VAE back", unload_models=True, free_memory=True)
