"""The second prompt finds the ranks and the weights where the first one left them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.comfyui.broken_models import WEIGHTS, other_weights
from tests.comfyui.harness import Comfy
from tests.comfyui.parity import FP32_TOLERANCE, PLANS, distance, load_parallel, load_reference, run
from tests.comfyui.workflows import Case

MODEL = "other-flux"
FIRST = Case(name="first", steps=2)
CHANGES: dict[str, dict[str, Any]] = {
    "seed": {"seed": 99},
    "steps": {"steps": 3},
    "cfg": {"cfg": 3.0},
    "sampler": {"sampler": "dpmpp_2m", "steps": 3},
    "prompt": {"tokens": 40},
    "size": {"width": 136, "height": 72},
    "batch": {"batch": 3},
    "workflow": {"workflow": "basic_guider"},
}


@pytest.fixture
def expected(comfy: Comfy) -> dict[Case, Any]:
    """What ComfyUI's own model makes of every case, from the true weights."""
    cases = [FIRST, *(replace(FIRST, **change) for change in CHANGES.values())]
    return {case: run(comfy, case, lambda graph: load_reference(graph, model=MODEL)) for case in cases}


def test_a_second_prompt_starts_no_process_and_loads_nothing(
    comfy: Comfy, models: Path, expected: dict[Case, Any]
) -> None:
    """After the first prompt the weight file holds zeros: nobody can have read it again and still be right."""

    def check(case: Case, plan: str) -> None:
        ours = run(comfy, case, lambda graph: load_parallel(graph, PLANS[plan], model=MODEL))
        assert distance(ours, expected[case]) <= FP32_TOLERANCE, (plan, case)

    check(FIRST, "ulysses 2")
    ranks = comfy.ranks(group_of=2)
    assert len(ranks) == 2
    with other_weights(models / "diffusers" / MODEL / "transformer" / WEIGHTS):
        for plan in ("ulysses 2", "replicas 2"):
            for change in CHANGES.values():
                check(replace(FIRST, **change), plan)
        check(FIRST, "ulysses 2")
        assert comfy.ranks(group_of=2) == ranks


def test_changed_weights_are_noticed(comfy: Comfy, models: Path) -> None:
    """The other side of the test above: a file that really was replaced, with a new time, is loaded again."""
    weights = models / "diffusers" / MODEL / "transformer" / WEIGHTS

    def sample() -> Any:
        return run(comfy, FIRST, lambda graph: load_parallel(graph, PLANS["ulysses 2"], model=MODEL))

    before = sample()
    with other_weights(weights):
        weights.touch()
        assert distance(sample(), before) > 0.1
    weights.touch()
    assert distance(sample(), before) == 0
