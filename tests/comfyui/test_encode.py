"""Encode on device_map in a workflow: prompts reach the sampler, text says what happened, errors come first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.comfyui.graphs import Graph, Node
from tests.comfyui.harness import Comfy, wait_until
from tests.comfyui.parity import load_parallel
from tests.tiny_flux import write_pipeline
from tests.tiny_text import write_text

ONE_RANK = {"devices": "cpu:1"}


@pytest.fixture(scope="module")
def comfy(new_comfy: Callable[..., Comfy], models: Path) -> Iterator[Comfy]:
    """A server whose models folder also has a Flux with text encoders, and one whose encoder is pickled."""
    for name in ("text-flux", "pickled-text"):
        write_text(write_pipeline(models / "diffusers" / name))
    encoder = models / "diffusers" / "pickled-text" / "text_encoder_2"
    (encoder / "model.safetensors").rename(encoder / "pytorch_model.bin")
    with new_comfy() as comfy:
        yield comfy


def encode(graph: Graph, positive: str, **inputs: Any) -> Node:
    config = graph.add("PD_ParallelConfig", devices="cpu:2", strategy="auto", replicas=1, ulysses=1, tensor=1)
    settings = {"model_name": "text-flux", "placement": "balanced", "negative": "", **inputs}
    return graph.add("PD_EncodeOnDeviceMap", positive=positive, parallel_config=config, **settings)


def sample(graph: Graph, encoded: Node) -> Node:
    return graph.add(
        "KSampler",
        model=load_parallel(graph, ONE_RANK, model="text-flux"),
        positive=encoded,
        negative=encoded[1],
        latent_image=graph.add("EmptyLatentImage", width=64, height=64, batch_size=1),
        seed=1,
        steps=2,
        cfg=3.0,
        sampler_name="euler",
        scheduler="simple",
        denoise=1.0,
    )


def picture(comfy: Comfy, positive: str, **inputs: Any) -> torch.Tensor:
    graph = Graph()
    return comfy.latents(graph, sample(graph, encode(graph, positive, **inputs)))


def text(comfy: Comfy, positive: str, **inputs: Any) -> str:
    graph = Graph()
    encoded = encode(graph, positive, **inputs)
    graph.add("TestSaveLatent", samples=sample(graph, encoded), name="encoded")
    return "\n".join(comfy.run(graph).texts[encoded.node_id])


def test_the_picture_follows_the_prompt_and_not_the_placement(comfy: Comfy) -> None:
    seven = picture(comfy, "seven")
    assert not torch.equal(picture(comfy, "eight"), seven)
    assert not torch.equal(picture(comfy, "seven", negative="dark"), seven)
    for placement in ("auto", "sequential", "single"):
        assert torch.equal(picture(comfy, "seven", placement=placement), seven)
    assert torch.equal(picture(comfy, "seven", keep_loaded=True), seven)
    assert torch.equal(picture(comfy, "seven", max_memory="0:100KB,1:100KB,disk:1MB"), seven)


def test_the_node_says_what_lay_where(comfy: Comfy) -> None:
    shown = text(comfy, "one", max_memory="0:150KB,1:300KB", placement="sequential")
    assert "text_encoder: cpu:0; text_encoder_2: blocks 0-" in shown
    assert "kB on cpu:0 + " in shown
    assert "memory given back" in shown


def test_the_node_says_what_was_not_read(comfy: Comfy) -> None:
    shown = text(comfy, "a (cat:1.4) " * 30, max_sequence_length=100)
    assert "positive: CLIP read 77 of " in shown
    assert "positive: T5 read 100 of " in shown
    assert "positive: ComfyUI's '(cat:1.4)' is read as plain text" in shown


def test_kept_encoders_are_not_loaded_again(comfy: Comfy) -> None:
    assert "loaded in" in text(comfy, "two", keep_loaded=True)
    assert "were loaded" in text(comfy, "three", keep_loaded=True)
    assert "memory given back" in text(comfy, "four")
    assert "loaded in" in text(comfy, "five")


def test_free_reaches_kept_encoders(comfy: Comfy) -> None:
    text(comfy, "six", keep_loaded=True)
    assert kept_models(comfy) == ["text encoders of text-flux"]
    comfy.client.free(unload_models=True)
    wait_until(lambda: kept_models(comfy) == [], seconds=10, what="the encoders were given back")
    assert "loaded in" in text(comfy, "seven")


def kept_models(comfy: Comfy) -> list[str]:
    """What the placement groups hold on their devices."""
    groups = comfy.client.get("/parallel_diffusion/status")["groups"]
    models = [model for group in groups if group["kind"] == "placement" for model in group["models"]]
    return [model["label"] for model in models if model["resident"]]


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"model_name": "tiny-flux"}, "not a model folder with a text_encoder"),
        ({"model_name": "../text-flux"}, "not a model folder with a text_encoder"),
        ({"model_name": "pickled-text"}, "text_encoder_2 holds only pickled weights"),
        ({"max_memory": "0=16GB"}, "'0=16GB', which is not 'device:size'"),
        ({"max_memory": "gpu:16GB"}, "max_memory names device 'gpu', but this group has cpu:0, cpu:1"),
        ({"max_sequence_length": 513}, "513"),
        ({"placement": "sliced"}, "placement is 'sliced'; expected one of balanced, auto, sequential, single, tensor"),
        ({"placement": "tensor", "max_memory": "0:1GB"}, "max_memory has no meaning with placement 'tensor'"),
    ],
)
def test_wrong_input_is_refused_before_anything_is_loaded(comfy: Comfy, inputs: dict[str, Any], words: str) -> None:
    graph = Graph()
    graph.add("TestSaveLatent", samples=sample(graph, encode(graph, "one", **inputs)), name="never")
    ranks = comfy.ranks()
    assert words in comfy.failure(graph)
    assert comfy.ranks() == ranks, "nothing was started for it"


def test_a_device_that_is_not_in_the_group(comfy: Comfy) -> None:
    graph = Graph()
    graph.add("TestSaveLatent", samples=sample(graph, encode(graph, "one", max_memory="3:1GB")), name="never")
    assert "max_memory names device '3', but this group has cpu:0, cpu:1" in comfy.failure(graph)


def test_encoders_that_do_not_fit(comfy: Comfy) -> None:
    graph = Graph()
    encoded = encode(graph, "one", max_memory="0:1KB,1:2KB", placement="single")
    graph.add("TestSaveLatent", samples=sample(graph, encoded), name="never")
    failure = comfy.failure(graph)
    assert "text_encoder and text_encoder_2 do not fit" in failure
    assert "cpu:0 1 kB, cpu:1 2 kB" in failure
    assert "placement 'balanced' would fit" in failure
