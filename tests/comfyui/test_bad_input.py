"""Wrong input gives one clear error before any rank is started, and the server is fine after it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.comfyui.broken_models import BROKEN
from tests.comfyui.graphs import Graph, Node
from tests.comfyui.harness import Comfy
from tests.comfyui.parity import PLANS, load_parallel
from tests.comfyui.workflows import Case, empty_latent, ksampler, prompts, sample

CASE = Case(name="bad input", steps=2)
GOOD = PLANS["ulysses 2"]
NOT_STARTED = {"devices": "cpu:3", "replicas": 3}
"""A group that no test starts: were the input not refused first, its ranks would appear."""


def good(comfy: Comfy) -> torch.Tensor:
    graph = Graph()
    return comfy.latents(graph, ksampler(graph, load_parallel(graph, GOOD), CASE))


@pytest.fixture(scope="module")
def good_latents(comfy: Comfy) -> torch.Tensor:
    return good(comfy)


@pytest.fixture(autouse=True)
def _nothing_starts_and_the_server_is_fine(comfy: Comfy, good_latents: torch.Tensor) -> Iterator[None]:
    before = comfy.ranks()
    yield
    assert comfy.ranks() == before
    assert torch.equal(good(comfy), good_latents)
    assert comfy.ranks() == before


def refuses(comfy: Comfy, graph: Graph, output: Node, *fragments: str) -> None:
    """The run fails with one message that holds every fragment, and no stack of ours in it."""
    graph.add("TestSaveLatent", samples=output, name="never")
    text = comfy.failure(graph)
    for fragment in fragments:
        assert re.search(re.escape(fragment), text, re.IGNORECASE), f"{fragment!r} is not in: {text}"
    assert "Traceback" not in text
    assert not (comfy.base / "output" / "never.safetensors").exists()


@pytest.mark.parametrize(
    ("plan", "fragments"),
    [
        ({"devices": "cpu:2", "ulysses": 3}, ["ulysses 3", "2 devices"]),
        ({"devices": "cpu:2"}, ["= 1", "2 devices"]),
        ({"devices": "cpu:2", "replicas": 2, "tensor": 2}, ["= 4", "2 devices"]),
        ({"devices": "cpu:2", "strategy": "auto", "ulysses": 2}, ["auto", "ulysses 2"]),
        ({"devices": "cpu:3", "tensor": 3}, ["tensor is 3", "4 attention heads"]),
        ({"devices": "7"}, ["'7'", "cpu:2"]),
        ({"devices": "0,0"}, ["0"]),
        ({"devices": "cpu:0"}, ["cpu:0", "cpu:2"]),
        ({"devices": "cpu:9999"}, ["cpu:9999"]),
        ({"devices": "cpu:-1"}, ["cpu:-1"]),
        ({"devices": ""}, ["devices"]),
        ({"devices": "GPU-00000000-0000-0000-0000-000000000000"}, ["GPU-00000000"]),
        ({"devices": "cpu:1", "ulysses": 0}, ["ulysses", "0"]),
        ({"devices": "cpu:1", "strategy": "magic"}, ["magic"]),
        ({"devices": "cpu:3", "strategy": "device_map", "ulysses": 3}, ["device_map", "no degrees", "ulysses 3"]),
        ({"devices": "cpu:3", "strategy": "device_map", "max_memory": "7:1GB"}, ["'7'", "cpu:0, cpu:1, cpu:2"]),
        ({"devices": "cpu:3", "strategy": "device_map", "max_memory": "0:16"}, ["'16'", "16GB"]),
        ({"devices": "cpu:3", "strategy": "device_map", "compile": "default"}, ["compile", "device_map"]),
    ],
    ids=lambda value: ",".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_plans(comfy: Comfy, plan: dict[str, Any], fragments: list[str]) -> None:
    graph = Graph()
    refuses(comfy, graph, ksampler(graph, load_parallel(graph, plan), CASE), *fragments)


@pytest.mark.parametrize("breaking", BROKEN, ids=lambda breaking: breaking.__name__)
def test_model_folders(comfy: Comfy, breaking: Callable[[Path], None]) -> None:
    graph = Graph()
    model = load_parallel(graph, NOT_STARTED, model=f"broken-{breaking.__name__}")
    refuses(comfy, graph, ksampler(graph, model, CASE), *BROKEN[breaking])


@pytest.mark.parametrize("name", ["no-such-model", "../diffusers/tiny-flux", "tiny-flux/../tiny-flux", "", "."])
def test_model_names_outside_the_listing(comfy: Comfy, name: str) -> None:
    graph = Graph()
    refuses(comfy, graph, ksampler(graph, load_parallel(graph, NOT_STARTED, model=name), CASE), name, "model_name")


def test_an_absolute_model_name(comfy: Comfy, models: Path) -> None:
    graph = Graph()
    name = str(models / "diffusers" / "tiny-flux")
    refuses(comfy, graph, ksampler(graph, load_parallel(graph, NOT_STARTED, model=name), CASE), name, "model_name")


def test_an_unknown_dtype(comfy: Comfy) -> None:
    graph = Graph()
    refuses(comfy, graph, ksampler(graph, load_parallel(graph, NOT_STARTED, dtype="int3"), CASE), "int3", "bfloat16")


def test_a_latent_with_the_wrong_number_of_channels(comfy: Comfy) -> None:
    graph = Graph()
    model = load_parallel(graph, NOT_STARTED)
    latent = graph.add("TestLatent", width=64, height=64, seed=0, channels=4)
    refuses(comfy, graph, sample(graph, model, CASE, *prompts(graph, CASE), latent), "[1, 4, 8, 8]", "16")


@pytest.mark.parametrize(
    ("conditioning", "fragments"),
    [({"dim": 24}, ["24", "32"]), ({"pooled": 0}, ["pooled_output"]), ({"pooled": 8}, ["pooled_output", "8", "16"])],
    ids=["text-width", "no-pooled", "pooled-width"],
)
@pytest.mark.parametrize("which", ["positive", "negative"])
def test_conditioning_of_another_family(
    comfy: Comfy, which: str, conditioning: dict[str, int], fragments: list[str]
) -> None:
    graph = Graph()
    model = load_parallel(graph, NOT_STARTED)
    positive, negative = prompts(graph, CASE)
    wrong = graph.add("TestConditioning", tokens=5, seed=0, **conditioning)
    if which == "positive":
        positive = wrong
    else:
        negative = wrong
    case = Case(name="cfg", cfg=3.0, steps=2)
    refuses(comfy, graph, sample(graph, model, case, positive, negative, empty_latent(graph, case)), *fragments)


def test_a_reference_method_that_needs_code_inside_the_blocks(comfy: Comfy) -> None:
    """The method came after 0.3.75; the argument that it adds shows at the first call, on ranks that are up."""
    node = "FluxKontextMultiReferenceLatentMethod"
    if "index_timestep_zero" not in str(comfy.client.get(f"/object_info/{node}")):
        pytest.skip("this ComfyUI does not have the method")
    graph = Graph()
    positive, negative = prompts(graph, CASE)
    latent = graph.add("TestLatent", width=64, height=64, seed=1)
    positive = graph.add("ReferenceLatent", conditioning=positive, latent=latent)
    positive = graph.add(node, conditioning=positive, reference_latents_method="index_timestep_zero")
    model = load_parallel(graph, GOOD)
    latent = sample(graph, model, CASE, positive, negative, empty_latent(graph, CASE))
    refuses(comfy, graph, latent, "timestep_zero_index")


def test_a_control_net(comfy: Comfy) -> None:
    graph = Graph()
    model = load_parallel(graph, NOT_STARTED)
    positive, negative = prompts(graph, CASE)
    image = graph.add("EmptyImage", width=64, height=64, batch_size=1, color=0)
    control = graph.add("TestControlNet")
    positive = graph.add("ControlNetApply", conditioning=positive, control_net=control, image=image, strength=1.0)
    refuses(comfy, graph, sample(graph, model, CASE, positive, negative, empty_latent(graph, CASE)), "ControlNet")


@pytest.mark.parametrize(
    ("kind", "name"), [("replace", "dit"), ("post_input", "post_input"), ("attention", "attn1_patch")]
)
def test_patches_inside_the_blocks(comfy: Comfy, kind: str, name: str) -> None:
    graph = Graph()
    model = graph.add("TestBlockPatch", model=load_parallel(graph, NOT_STARTED), kind=kind)
    refuses(comfy, graph, ksampler(graph, model, CASE), name)


def test_an_option_of_a_node_we_do_not_know(comfy: Comfy) -> None:
    graph = Graph()
    model = load_parallel(graph, NOT_STARTED)
    model = graph.add("TestTransformerOption", model=model, key="sideways_attention", value="on")
    refuses(comfy, graph, ksampler(graph, model, CASE), "sideways_attention")


def test_a_keyword_of_a_newer_comfyui(comfy: Comfy) -> None:
    """It shows at the first call only, when the ranks are up: so it runs on those that are."""
    graph = Graph()
    model = graph.add("TestNewerComfyUI", model=load_parallel(graph, GOOD), tomorrow="1")
    refuses(comfy, graph, ksampler(graph, model, CASE), "tomorrow")


def test_a_keyword_of_a_newer_comfyui_that_is_none_changes_nothing(comfy: Comfy, good_latents: torch.Tensor) -> None:
    graph = Graph()
    model = graph.add("TestNewerComfyUI", model=load_parallel(graph, GOOD), tomorrow="None")
    assert torch.equal(comfy.latents(graph, ksampler(graph, model, CASE)), good_latents)
