"""The reference itself: ComfyUI's Flux over a diffusers folder's weights gives what diffusers' FluxPipeline gives.

The other tests compare with the reference, so it is proven first, without the product.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from tests.comfyui.flux_pipeline import pipeline_latents, pipeline_workflow
from tests.comfyui.graphs import Graph
from tests.comfyui.harness import Comfy
from tests.comfyui.parity import distance, load_reference, run
from tests.comfyui.workflows import CASES, Case, ksampler


@pytest.mark.parametrize("model_name", ["tiny-flux", "tiny-schnell"])
def test_reference_equals_the_diffusers_pipeline(comfy: Comfy, models: Path, model_name: str) -> None:
    settings = {"sigmas": [1.0, 0.8, 0.55, 0.3, 0.0], "width": 96, "height": 160, "batch": 2, "guidance": 2.5}
    graph = Graph()
    made = comfy.latents(graph, pipeline_workflow(graph, load_reference(graph, model=model_name), **settings))
    assert distance(made, pipeline_latents(models / "diffusers" / model_name, **settings)) <= 1e-5


PLAIN = Case(name="plain", steps=8)
DIFFERENT = [
    replace(PLAIN, tokens=18),
    replace(PLAIN, cfg=3.0),
    replace(PLAIN, cfg=3.0, negative_tokens=18),
    replace(PLAIN, guidance=1.5),
    replace(PLAIN, sampler="dpmpp_2m"),
    replace(PLAIN, seed=12),
    replace(PLAIN, workflow="basic_guider"),
    replace(PLAIN, workflow="masked"),
    replace(PLAIN, workflow="reference_latent"),
    replace(PLAIN, workflow="indexed_references"),
    replace(PLAIN, disable_guidance=True),
    replace(PLAIN, workflow="easy_cache"),
]


def test_every_setting_matters(comfy: Comfy) -> None:
    """Settings that did not change the reference's result could not show that ours ignores them."""
    made = {case: run(comfy, case, load_reference) for case in [PLAIN, *DIFFERENT]}
    closest = {(a, b): distance(made[a], made[b]) for a, b in itertools.combinations(made, 2)}
    assert min(closest.values()) > 1e-2, [pair for pair, apart in closest.items() if apart <= 1e-2]


def test_every_case_runs_on_the_reference(comfy: Comfy) -> None:
    for case in CASES:
        assert run(comfy, case, load_reference).isfinite().all(), case


def test_free_memory_decides_how_comfyui_batches(comfy: Comfy) -> None:
    """What test_determinism varies does change what ComfyUI's own model is called with."""
    rows = {}
    for free in (1, 1 << 40):
        graph = Graph()
        model = graph.add("TestFreeMemory", model=load_reference(graph), bytes=free)
        model = graph.add("TestCountCalls", model=model, counter=f"free-{free}")
        comfy.latents(graph, ksampler(graph, model, Case(name="batching", cfg=3.0, steps=2)))
        rows[free] = comfy.state()["counters"][f"free-{free}"]
    assert rows == {1: [1, 1, 1, 1], 1 << 40: [2, 2]}
