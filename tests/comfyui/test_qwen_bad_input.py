"""What does not fit Qwen-Image gives one clear error before any rank is started."""

from __future__ import annotations

from typing import Any

import pytest

from tests.comfyui.graphs import Graph, Node
from tests.comfyui.harness import Comfy
from tests.comfyui.qwen_workflows import QwenCase, edit, has_timestep_zero, load_ours
from tests.comfyui.workflows import empty_latent, sample

NOT_STARTED = {"devices": "cpu:3", "replicas": 3}
"""A group that no test starts: were the input not refused first, its ranks would appear."""
CASE = QwenCase(name="bad input", cfg=3.0, steps=2)


def refuses(comfy: Comfy, graph: Graph, output: Node, *fragments: str) -> None:
    """The run fails with one message that holds every fragment, and no rank appears."""
    before = comfy.ranks()
    graph.add("TestSaveLatent", samples=output, name="never")
    text = comfy.failure(graph)
    assert [fragment for fragment in fragments if fragment not in text] == [], text
    assert "Traceback" not in text
    assert comfy.ranks() == before


@pytest.mark.parametrize(
    ("model", "fragments"),
    [
        ("broken-qwen", ["proj_out.bias is missing"]),
        ("tiny-qwen-layered", ["use_additional_t_cond = True", "Qwen-Image-Edit"]),
    ],
)
def test_model_folders(comfy: Comfy, model: str, fragments: list[str]) -> None:
    graph = Graph()
    case = QwenCase(name="folder", model=model)
    refuses(comfy, graph, edit(graph, load_ours(graph, NOT_STARTED, case), case), *fragments)


def test_a_2511_model_needs_a_comfyui_that_has_it(comfy: Comfy) -> None:
    if has_timestep_zero(comfy):
        pytest.skip("this ComfyUI has it")
    graph = Graph()
    case = QwenCase(name="2511", model="tiny-qwen-2511")
    refuses(comfy, graph, edit(graph, load_ours(graph, NOT_STARTED, case), case), "zero_cond_t", "Update ComfyUI")


def test_a_tensor_degree_that_heads_cannot_serve(comfy: Comfy) -> None:
    graph = Graph()
    model = load_ours(graph, {"devices": "cpu:3", "tensor": 3}, CASE)
    refuses(comfy, graph, edit(graph, model, CASE), "tensor is 3", "4 attention heads")


def run_with(comfy: Comfy, fragments: list[str], *, wrong: str, **changed: Any) -> None:
    """CASE with another `wrong` prompt ("positive", "negative"), or else with another latent."""
    graph = Graph()
    model = load_ours(graph, NOT_STARTED, CASE)
    inputs = {name: graph.add("TestConditioning", tokens=5, seed=1) for name in ("positive", "negative")}
    inputs["latent"] = empty_latent(graph, CASE)
    if wrong == "latent":
        inputs["latent"] = graph.add("TestLatent", width=64, height=64, seed=0, **changed)
    elif "dim" in changed:
        inputs[wrong] = graph.add("TestConditioning", tokens=5, seed=0, **changed)
    else:
        latent = graph.add("TestLatent", width=64, height=64, seed=0, **changed)
        inputs[wrong] = graph.add("ReferenceLatent", conditioning=inputs[wrong], latent=latent)
    refuses(comfy, graph, sample(graph, model, CASE, **inputs), *fragments)


@pytest.mark.parametrize("wrong", ["positive", "negative"])
def test_the_prompt_of_another_family(comfy: Comfy, wrong: str) -> None:
    run_with(comfy, ["[1, 5, 64]", "[batch, tokens, 32]", "another model family"], wrong=wrong, dim=64)


def test_a_latent_of_another_family(comfy: Comfy) -> None:
    run_with(comfy, ["[1, 4, 1, 8, 8]", "16", "another model family"], wrong="latent", channels=4)


@pytest.mark.parametrize("wrong", ["positive", "negative"])
@pytest.mark.parametrize(
    ("latent", "shape"), [({}, "[1, 16, 8, 8]"), ({"frames": 1, "channels": 4}, "[1, 4, 1, 8, 8]")]
)
def test_a_reference_of_another_family(comfy: Comfy, wrong: str, latent: dict[str, int], shape: str) -> None:
    run_with(comfy, [shape, "reference latent", "Qwen-Image's own VAE"], wrong=wrong, **latent)


def test_a_reference_method_that_does_not_exist(comfy: Comfy) -> None:
    graph = Graph()
    case = QwenCase(name="method", references=((64, 64),), method="spiral")
    refuses(comfy, graph, edit(graph, load_ours(graph, NOT_STARTED, case), case), "spiral", "offset")
