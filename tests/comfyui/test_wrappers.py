"""Code that other nodes put around the model or its conditions runs as ComfyUI runs it, with the same picture."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.comfyui.graphs import Graph, Node
from tests.comfyui.harness import Comfy
from tests.comfyui.parity import FP32_TOLERANCE, PLANS, distance, load_parallel, load_reference
from tests.comfyui.workflows import Case, ksampler

CASE = Case(name="wrapped", cfg=3.0, tokens=17, negative_tokens=5)


def wrapped(comfy: Comfy, load: Callable[[Graph], Node], node: str) -> torch.Tensor:
    graph = Graph()
    return comfy.latents(graph, ksampler(graph, graph.add(node, model=load(graph)), CASE))


@pytest.mark.parametrize("node", ["TestMixingGuidance", "TestSteeredModel"])
def test_wrappers_of_other_nodes_see_what_comfyui_shows_them(comfy: Comfy, node: str) -> None:
    expected = wrapped(comfy, load_reference, node)
    ours = wrapped(comfy, lambda graph: load_parallel(graph, PLANS["replicas 2"]), node)
    assert distance(ours, expected) <= FP32_TOLERANCE


def test_guidance_that_skips_layers_in_the_middle_of_a_step_is_refused(comfy: Comfy) -> None:
    """It adds its patches after sampling has begun, so only the call itself can notice."""
    graph = Graph()
    settings = {"double_layers": "0", "single_layers": "0", "start_percent": 0.0, "end_percent": 1.0}
    model = load_parallel(graph, PLANS["one rank"])
    skipping = graph.add("SkipLayerGuidanceDiT", model=model, scale=3.0, rescaling_scale=0.0, **settings)
    graph.add("TestSaveLatent", samples=ksampler(graph, skipping, CASE), name="never")
    assert "puts its own code into the model's blocks (patches_replace: dit" in comfy.failure(graph)


def test_code_in_the_place_of_the_seam_is_refused(comfy: Comfy) -> None:
    graph = Graph()
    replaced = graph.add("TestOwnForward", model=load_parallel(graph, PLANS["one rank"]))
    graph.add("TestSaveLatent", samples=ksampler(graph, replaced, CASE), name="never")
    assert "runs the model's blocks with its own code in ComfyUI's process" in comfy.failure(graph)


def test_a_compute_dtype_of_another_node_is_refused(comfy: Comfy) -> None:
    graph = Graph()
    changed = graph.add("ModelComputeDtype", model=load_parallel(graph, PLANS["one rank"]), dtype="bf16")
    graph.add("TestSaveLatent", samples=ksampler(graph, changed, CASE), name="never")
    assert "weight_dtype sets what the ranks compute in" in comfy.failure(graph)
