"""Cancel, progress and previews while two ranks sample."""

from __future__ import annotations

import time

import pytest
import torch

from tests.comfyui.graphs import Graph
from tests.comfyui.harness import Comfy, alive, wait_until
from tests.comfyui.parity import PLANS, load_parallel
from tests.comfyui.workflows import Case, ksampler
from tools.comfy_client import Event

SLOW = Case(name="slow", width=1024, height=1024, steps=40)
"""4096 image tokens: a few hundred milliseconds a step, all of them on the ranks."""
MESSAGES = 0.5
"""Seconds for the request and the events on a busy machine."""
QUICK = Case(name="quick", steps=4)


def sample(comfy: Comfy, plan: str) -> torch.Tensor:
    graph = Graph()
    return comfy.latents(graph, ksampler(graph, load_parallel(graph, PLANS[plan]), QUICK))


@pytest.mark.parametrize("plan", ["ulysses 2", "tensor 2", "replicas 2"])
def test_cancel_ends_within_two_steps_and_keeps_the_ranks(comfy: Comfy, plan: str) -> None:
    before = sample(comfy, plan)
    ranks = comfy.ranks(group_of=2)
    graph = Graph()
    latent = ksampler(graph, load_parallel(graph, PLANS[plan]), SLOW)
    graph.add("TestSaveLatent", samples=latent, name=f"cancelled-{plan}")
    steps: list[float] = []
    cancelled: list[float] = []

    def cancel_after_five_steps(event: Event) -> None:
        if event.kind == "progress":
            steps.append(time.monotonic())
            if event.data["value"] == 5:
                comfy.client.interrupt()
                cancelled.append(time.monotonic())

    outcome = comfy.client.run(graph.prompt, on_progress=cancel_after_five_steps)
    waited = time.monotonic() - cancelled[0]
    assert outcome.status == "interrupted"
    assert waited <= 2 * max(later - earlier for earlier, later in zip(steps, steps[1:], strict=False)) + MESSAGES
    assert comfy.ranks(group_of=2) == ranks
    assert torch.equal(sample(comfy, plan), before)
    assert comfy.ranks(group_of=2) == ranks


@pytest.mark.full
def test_cancel_while_the_ranks_start(comfy: Comfy) -> None:
    before = sample(comfy, "ulysses 2")
    known = comfy.ranks(group_of=2)
    graph = Graph()
    latent = ksampler(graph, load_parallel(graph, {"devices": "cpu:3", "replicas": 3}), QUICK)
    graph.add("TestSaveLatent", samples=latent, name="cancelled-start")
    prompt_id = comfy.client.queue(graph.prompt)
    started = wait_until(lambda: set(comfy.ranks(group_of=3)) - set(known), seconds=60, what="a rank of the new group")
    comfy.client.interrupt()
    cancelled = time.monotonic()
    assert comfy.client.wait(prompt_id).status == "interrupted"
    assert time.monotonic() - cancelled < 2
    assert not any(map(alive, started))
    assert torch.equal(sample(comfy, "ulysses 2"), before)


def test_progress_and_previews_are_comfyuis_own(comfy: Comfy) -> None:
    graph = Graph()
    latent = ksampler(graph, load_parallel(graph, PLANS["ulysses 2"]), Case(name="preview", steps=5, seed=77))
    graph.add("TestSaveLatent", samples=latent, name="previewed")
    events: list[Event] = []
    comfy.run(graph, on_progress=events.append)
    progress = [(event.data["value"], event.data["max"]) for event in events if event.kind == "progress"]
    assert progress == [(step, 5) for step in range(1, 6)]
    assert sum(event.kind == "preview" for event in events) == 5
