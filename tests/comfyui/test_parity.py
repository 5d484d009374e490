"""The same weights and the same seed give the latents that ComfyUI's own Flux gives, whatever the plan.

The reference is ComfyUI's model class in ComfyUI's process (see test_reference.py); only the loader node differs
between the two runs. The normal run takes for every plan some cases, together all of them; `-m full` takes every case
with every plan.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.comfyui.flux_pipeline import pipeline_latents, pipeline_workflow
from tests.comfyui.graphs import Graph
from tests.comfyui.harness import Comfy
from tests.comfyui.parity import FP32_TOLERANCE, PLANS, Loader, distance, load_parallel, load_reference, run
from tests.comfyui.workflows import CASES, EASY_CACHE, Case, ksampler

DTYPES = ("float32", "bfloat16")


@pytest.fixture(scope="session")
def reference(comfy: Comfy) -> Callable[[Case], torch.Tensor]:
    """The latents that ComfyUI's own model makes of a case, computed once."""
    known: dict[Case, torch.Tensor] = {}

    def latents(case: Case) -> torch.Tensor:
        if case not in known:
            known[case] = run(comfy, case, load_reference)
        return known[case]

    return latents


def _covering() -> list[Any]:
    """Every case with every plan; those that only the full run takes are marked so."""
    rows = []
    for number, plan in enumerate(PLANS):
        for place, case in enumerate(CASES):
            chosen = place % 5 == number % 5
            marks = () if chosen else (pytest.mark.full,)
            rows.append(pytest.param(plan, case, id=f"{plan}-{case.name}", marks=marks))
    return rows


@pytest.mark.parametrize(("plan", "case"), _covering())
def test_latents_equal_those_of_comfyuis_own_model(
    comfy: Comfy, reference: Callable[[Case], torch.Tensor], plan: str, case: Case
) -> None:
    ours = run(comfy, case, lambda graph: load_parallel(graph, PLANS[plan]))
    assert distance(ours, reference(case)) <= FP32_TOLERANCE


@pytest.mark.parametrize("model", ["tiny-schnell", "bare-flux", "tiny-flux-sharded"])
def test_other_folders_load_the_same_weights(comfy: Comfy, model: str) -> None:
    """Without guidance, a bare transformer folder, several weight files; tensor ranks read only their slices."""
    case = Case(name=model, cfg=3.0, negative_tokens=3)
    expected = run(comfy, case, lambda graph: load_reference(graph, model=model))
    for plan in ("ulysses 2", "tensor 2"):
        ours = run(comfy, case, lambda graph, plan=plan: load_parallel(graph, PLANS[plan], model=model))
        assert distance(ours, expected) <= FP32_TOLERANCE, plan


def bf16_runs(comfy: Comfy, plan: str, *, guidance: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """ComfyUI's latents in fp32, its own in bf16, ours in bf16. Several runs: over a single one chance decides."""
    cases = [Case(name="bf16", seed=seed, guidance=guidance, width=96, batch=2, steps=4) for seed in range(6)]

    def runs(load: Loader) -> torch.Tensor:
        return torch.stack([run(comfy, case, load) for case in cases])

    exact, theirs = (runs(lambda graph, dtype=dtype: load_reference(graph, dtype=dtype)) for dtype in DTYPES)
    return exact, theirs, runs(lambda graph: load_parallel(graph, PLANS[plan], dtype="bfloat16"))


def rms(difference: torch.Tensor) -> float:
    return float(difference.square().mean().sqrt())


@pytest.mark.parametrize("plan", ["one rank", "ulysses 2", "tensor 2"])
def test_bf16_is_as_near_to_fp32_as_comfyuis_own_bf16(comfy: Comfy, plan: str) -> None:
    """1000 x 4.0 is exact in bf16, so only rounding differs: as large as ComfyUI's, give or take 5 % of chance."""
    exact, theirs, ours = bf16_runs(comfy, plan, guidance=4.0)
    assert rms(ours - exact) <= 1.05 * rms(theirs - exact)


@pytest.mark.parametrize("plan", ["one rank", "ulysses 2", "tensor 2"])
def test_bf16_rounds_guidance_as_comfyui_does(comfy: Comfy, plan: str) -> None:
    """1000 x 3.5 becomes 3504 in bf16 before ComfyUI embeds it, which changes the picture more than rounding does."""
    exact, theirs, ours = bf16_runs(comfy, plan, guidance=3.5)
    assert rms(ours - theirs) <= 0.1 * rms(theirs - exact)


@pytest.mark.parametrize("plan", ["one rank", "ulysses 2"])
def test_easy_cache_skips_the_same_steps(comfy: Comfy, plan: str) -> None:
    """As many rows reach the transformer as with ComfyUI's own model, and fewer than without EasyCache."""
    case = Case(name="count", steps=8, cfg=3.0)
    rows = {}
    for cached in (True, False):
        for whose, load in {"theirs": load_reference, "ours": lambda g: load_parallel(g, PLANS[plan])}.items():
            graph = Graph()
            model, counter = load(graph), f"{whose}-{plan}-{cached}"
            if cached:
                model = graph.add("EasyCache", model=model, **EASY_CACHE)
            model = graph.add("TestCountCalls", model=model, counter=counter)
            comfy.latents(graph, ksampler(graph, model, case))
            rows[whose, cached] = sum(comfy.state()["counters"][counter])
    assert rows["ours", True] == rows["theirs", True] < rows["theirs", False] == rows["ours", False] == 16


@pytest.mark.parametrize("plan", ["one rank"])
def test_one_rank_equals_the_diffusers_pipeline(comfy: Comfy, models: Path, plan: str) -> None:
    graph = Graph()
    settings = {"sigmas": [1.0, 0.8, 0.55, 0.3, 0.0], "width": 96, "height": 160, "batch": 2, "guidance": 2.5}
    ours = comfy.latents(graph, pipeline_workflow(graph, load_parallel(graph, PLANS[plan]), **settings))
    assert distance(ours, pipeline_latents(models / "diffusers" / "tiny-flux", **settings)) <= 1e-5
