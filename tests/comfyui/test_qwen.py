"""Qwen-Image and its edits: the latents that ComfyUI's own model makes of the same weights, whatever the plan.

The reference is ComfyUI's model class in ComfyUI's process, which is held to diffusers' pipeline first; only the loader
node differs between the two runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.comfyui.graphs import Graph, Node
from tests.comfyui.harness import Comfy
from tests.comfyui.parity import FP32_TOLERANCE, PLANS, distance
from tests.comfyui.qwen_pipeline import edited_latents, pipeline_latents, workflow
from tests.comfyui.qwen_workflows import (
    EDITS,
    TEXT_TO_IMAGE,
    TIMESTEP_ZERO,
    QwenCase,
    edit,
    has_timestep_zero,
    load_comfyuis,
    load_ours,
)

PARITY_PLANS = ("one rank", "replicas 2", "tensor 2")
Load = Callable[[Graph, QwenCase], Node]


def run(comfy: Comfy, case: QwenCase, load: Load) -> torch.Tensor:
    graph = Graph()
    return comfy.latents(graph, edit(graph, load(graph, case), case))


def on_plan(plan: str, **settings: Any) -> Load:
    return lambda graph, case: load_ours(graph, PLANS[plan], case, **settings)


@pytest.fixture(scope="session")
def reference(comfy: Comfy) -> Callable[[QwenCase], torch.Tensor]:
    """The latents that ComfyUI's own model makes of a case, computed once."""
    known: dict[QwenCase, torch.Tensor] = {}

    def latents(case: QwenCase) -> torch.Tensor:
        if case not in known:
            known[case] = run(comfy, case, load_comfyuis)
        return known[case]

    return latents


def _covering(cases: tuple[QwenCase, ...]) -> list[Any]:
    """Every case with every plan; the normal run takes every case on some plan."""
    rows = []
    for (number, plan), (place, case) in itertools.product(enumerate(PARITY_PLANS), enumerate(cases)):
        marks = () if place % len(PARITY_PLANS) == number else (pytest.mark.full,)
        rows.append(pytest.param(plan, case, id=f"{plan}-{case.name}", marks=marks))
    return rows


@pytest.mark.parametrize("references", [False, True], ids=["text-to-image", "edit"])
@pytest.mark.parametrize("whose", ["comfyui", "ours"])
def test_latents_equal_those_of_diffusers(comfy: Comfy, models: Path, whose: str, references: bool) -> None:
    """ComfyUI's own model too: that proves the reference of the other tests."""
    graph = Graph()
    case = QwenCase(name="pipeline")
    model = load_comfyuis(graph, case) if whose == "comfyui" else load_ours(graph, PLANS["one rank"], case)
    made = comfy.latents(graph, workflow(graph, model, references=references))
    theirs = edited_latents if references else pipeline_latents
    assert distance(made, theirs(models / "diffusers" / case.model)) <= 1e-5


@pytest.mark.parametrize(("plan", "case"), _covering(TEXT_TO_IMAGE + EDITS))
def test_latents_equal_those_of_comfyuis_own_model(
    comfy: Comfy, reference: Callable[[QwenCase], torch.Tensor], plan: str, case: QwenCase
) -> None:
    assert distance(run(comfy, case, on_plan(plan)), reference(case)) <= FP32_TOLERANCE


@pytest.mark.parametrize(("plan", "case"), _covering(TIMESTEP_ZERO))
def test_references_without_noise(
    comfy: Comfy, reference: Callable[[QwenCase], torch.Tensor], plan: str, case: QwenCase
) -> None:
    if not has_timestep_zero(comfy):
        pytest.skip("this ComfyUI does not have the method")
    assert distance(run(comfy, case, on_plan(plan)), reference(case)) <= FP32_TOLERANCE
