"""The same weights and the same seed give the videos that ComfyUI's own Wan gives, for every variant of it.

The reference is ComfyUI's model class in ComfyUI's process; only the loader node differs between the two runs.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.comfyui.graphs import Graph, Node
from tests.comfyui.harness import Comfy
from tests.comfyui.parity import FP32_TOLERANCE, PLANS, Loader, distance, load_parallel
from tests.comfyui.wan_workflows import CASES, WORKFLOWS, WanCase

WAN_PLANS = ("one rank", "replicas 2")


def load_reference(graph: Graph, model: str, dtype: str = "float32") -> Node:
    return graph.add("TestReferenceWan", model_name=model, dtype=dtype)


def run(comfy: Comfy, case: WanCase, load: Loader) -> torch.Tensor:
    graph = Graph()
    return comfy.latents(graph, WORKFLOWS[case.workflow](graph, load(graph), case))


@pytest.fixture(scope="session")
def wan_reference(comfy: Comfy) -> Callable[[WanCase], torch.Tensor]:
    """The latents that ComfyUI's own model makes of a case, computed once."""
    known: dict[WanCase, torch.Tensor] = {}

    def latents(case: WanCase) -> torch.Tensor:
        if case not in known:
            known[case] = run(comfy, case, lambda graph: load_reference(graph, case.model))
        return known[case]

    return latents


@pytest.mark.parametrize("plan", WAN_PLANS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_videos_equal_those_of_comfyuis_own_model(
    comfy: Comfy, wan_reference: Callable[[WanCase], torch.Tensor], plan: str, case: WanCase
) -> None:
    ours = run(comfy, case, lambda graph: load_parallel(graph, PLANS[plan], model=case.model))
    assert distance(ours, wan_reference(case)) <= FP32_TOLERANCE
