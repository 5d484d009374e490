"""The same prompt gives the same bits: again, after a restart, and whatever memory ComfyUI believes to be free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.comfyui.graphs import Graph
from tests.comfyui.harness import Comfy
from tests.comfyui.parity import PLANS, load_parallel
from tests.comfyui.workflows import Case, ksampler

CASE = Case(name="same bits", cfg=3.0, negative_tokens=5, batch=2, width=72, height=56, sampler="dpmpp_2m", steps=4)
TWO_RANKS = ["ulysses 2", "replicas 2", "tensor 2"]


def latents(comfy: Comfy, plan: str, *, case: Case = CASE, free_memory: int | None = None) -> torch.Tensor:
    graph = Graph()
    model = load_parallel(graph, PLANS[plan])
    if free_memory is not None:
        model = graph.add("TestFreeMemory", model=model, bytes=free_memory)
    return comfy.latents(graph, ksampler(graph, model, case))


@pytest.mark.parametrize("plan", TWO_RANKS)
def test_twice(comfy: Comfy, plan: str) -> None:
    first = latents(comfy, plan)
    assert not torch.equal(latents(comfy, plan, case=replace(CASE, seed=12)), first)
    assert torch.equal(latents(comfy, plan), first)


@pytest.mark.parametrize("plan", TWO_RANKS)
def test_whatever_memory_comfyui_believes_to_be_free(comfy: Comfy, plan: str) -> None:
    """ComfyUI puts the conditions of a step into one batch only if it thinks that they fit its own device."""
    assert torch.equal(latents(comfy, plan, free_memory=1), latents(comfy, plan, free_memory=1 << 40))


def test_after_a_restart(comfy: Comfy, new_comfy: Callable[..., Comfy]) -> None:
    before = {plan: latents(comfy, plan) for plan in TWO_RANKS}
    with new_comfy() as restarted:
        for plan, expected in before.items():
            assert torch.equal(latents(restarted, plan), expected), plan
        restarted.stop()
