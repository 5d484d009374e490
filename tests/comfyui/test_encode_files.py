"""Prompts of every family end to end, against ComfyUI's own model with ComfyUI's own text encoders.

Stock CLIPTextEncode over ComfyUI's CLIP classes, and Encode from Files, through Load Parallel Transformer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import tiny_flux, tiny_qwen
from tests.comfyui.graphs import Graph, Node
from tests.comfyui.harness import Comfy
from tests.comfyui.parity import distance, load_parallel
from tests.tiny_text_files import write_encoder
from tests.tiny_wan import write_pipeline as write_wan

TOLERANCE = 1e-4
"""float32, of the largest value, after the whole run."""

TWO = {"devices": "cpu:2", "ulysses": 2}
POSITIVE, NEGATIVE = "seven dogs, painted by the sea", "dark"

FAMILIES: dict[str, dict[str, Any]] = {
    "flux": {"files": ["clip", "t5"], "reference": "TestReferenceFlux", "latent": {}, "length": 256},
    "qwen-image": {"files": ["qwen"], "reference": "TestReferenceQwen", "latent": {"frames": 1}, "length": 512},
    "wan": {"files": ["umt5"], "reference": "TestReferenceWan", "latent": {"frames": 3}, "length": 512},
}
"""`length`: the tokens that ComfyUI pads a prompt to, where it does."""


@pytest.fixture(scope="module")
def comfy(new_comfy: Callable[..., Comfy], models: Path) -> Iterator[Comfy]:
    """A server with a tiny transformer per family whose text width is that of the tiny encoder files."""
    for kind in ("clip", "t5", "umt5", "qwen"):
        write_encoder(models / "text_encoders" / f"{kind}.safetensors", kind)
    write_encoder(models / "text_encoders" / "umt5-scaled.safetensors", "umt5", "old-scaled")
    tiny_flux.write_pipeline(models / "diffusers" / "file-text-flux")
    tiny_qwen.write_pipeline(models / "diffusers" / "file-text-qwen-image", joint_attention_dim=128)
    write_wan(models / "diffusers" / "file-text-wan")
    with new_comfy() as comfy:
        yield comfy


def stock_prompts(graph: Graph, family: str) -> tuple[Node, Node]:
    files = ",".join(f"{kind}.safetensors" for kind in FAMILIES[family]["files"])
    clip = graph.add("TestReferenceText", files=files, kind=family)
    first, second = (graph.add("CLIPTextEncode", clip=clip, text=text) for text in (POSITIVE, NEGATIVE))
    return first, second


def encode(graph: Graph, family: str, **inputs: Any) -> Node:
    one, two = [*(f"{kind}.safetensors" for kind in FAMILIES[family]["files"]), "none"][:2]
    config = graph.add("PD_ParallelConfig", strategy="auto", devices="cpu:2", replicas=1, ulysses=1, tensor=1)
    settings = {"text_encoder_1": one, "text_encoder_2": two, "type": family, "placement": "balanced", **inputs}
    return graph.add("PD_EncodeFromFiles", positive=POSITIVE, negative=NEGATIVE, parallel_config=config, **settings)


def our_prompts(graph: Graph, family: str, **inputs: Any) -> tuple[Node, Any]:
    encoded = encode(graph, family, max_sequence_length=FAMILIES[family]["length"], **inputs)
    return encoded, encoded[1]


def ours(graph: Graph, family: str) -> Node:
    return load_parallel(graph, TWO, model=f"file-text-{family}")


def reference(graph: Graph, family: str) -> Node:
    return graph.add(FAMILIES[family]["reference"], model_name=f"file-text-{family}", dtype="float32")


def sample(graph: Graph, family: str, model: Node, prompts: tuple[Any, Any]) -> Node:
    return graph.add(
        "KSampler",
        model=model,
        positive=prompts[0],
        negative=prompts[1],
        latent_image=graph.add("TestLatent", width=64, height=64, seed=3, **FAMILIES[family]["latent"]),
        seed=1,
        steps=2,
        cfg=3.0,
        sampler_name="euler",
        scheduler="simple",
        denoise=1.0,
    )


def run(comfy: Comfy, family: str, model: Any, prompts: Any, **inputs: Any) -> torch.Tensor:
    graph = Graph()
    return comfy.latents(graph, sample(graph, family, model(graph, family), prompts(graph, family, **inputs)))


@pytest.mark.parametrize("family", FAMILIES)
def test_stock_clip_and_encode_from_files_match_comfyui(comfy: Comfy, family: str) -> None:
    expected = run(comfy, family, reference, stock_prompts)
    assert distance(run(comfy, family, ours, stock_prompts), expected) < TOLERANCE
    assert distance(run(comfy, family, ours, our_prompts), expected) < TOLERANCE
    assert distance(run(comfy, family, reference, our_prompts), expected) < TOLERANCE
    if family != "qwen-image":  # whose tiny file has one head
        assert distance(run(comfy, family, ours, our_prompts, placement="tensor"), expected) < TOLERANCE


def text(comfy: Comfy, family: str, **inputs: Any) -> str:
    graph = Graph()
    encoded = encode(graph, family, **inputs)
    latent = sample(graph, family, ours(graph, family), (encoded, encoded[1]))
    graph.add("TestSaveLatent", samples=latent, name="encoded")
    return "\n".join(comfy.run(graph).texts[encoded.node_id])


def test_slices_share_the_transformers_ranks_and_are_kept(comfy: Comfy) -> None:
    shown = text(comfy, "wan", placement="tensor", keep_loaded=True)
    assert "text_encoder in slices over 2 ranks; " in shown
    assert "kB on cpu:0 + " in shown and "kB on cpu:1" in shown
    groups = comfy.client.get("/parallel_diffusion/status")["groups"]
    (mesh,) = (group for group in groups if group["kind"] == "mesh")
    labels = {model["label"] for model in mesh["models"]}
    assert labels == {"text encoders of umt5.safetensors", "wan transformer file-text-wan"}
    graph = Graph()
    again = encode(graph, "wan", placement="tensor", keep_loaded=True, max_sequence_length=64)
    graph.add("TestSaveLatent", samples=sample(graph, "wan", ours(graph, "wan"), (again, again[1])), name="kept")
    assert "were loaded" in "\n".join(comfy.run(graph).texts[again.node_id])


@pytest.mark.parametrize(
    ("family", "inputs", "words"),
    [
        ("flux", {"text_encoder_2": "none"}, "type flux reads prompts with CLIP and T5"),
        ("wan", {"text_encoder_1": "t5.safetensors"}, "'t5.safetensors' looks like T5"),
        ("wan", {"text_encoder_1": "../umt5.safetensors"}, "text_encoder_1"),
        ("qwen-image", {"placement": "tensor"}, "over 2 ranks does not fit Qwen2.5-VL: num_attention_heads 1"),
        ("wan", {"placement": "tensor", "max_memory": "0:1GB"}, "max_memory has no meaning with placement 'tensor'"),
        ("wan", {"max_sequence_length": 600}, "max_sequence_length is 600; wan takes 1 to 512"),
    ],
)
def test_wrong_input_is_refused_before_anything_is_loaded(
    comfy: Comfy, family: str, inputs: dict[str, Any], words: str
) -> None:
    graph = Graph()
    encoded = encode(graph, family, **inputs)
    latent = sample(graph, family, ours(graph, family), (encoded, encoded[1]))
    graph.add("TestSaveLatent", samples=latent, name="never")
    ranks = comfy.ranks()
    assert words in comfy.failure(graph)
    assert comfy.ranks() == ranks, "nothing was started for it"
