"""Somebody dies: a rank, while it loads, samples or idles; ComfyUI itself. And a normal end leaves nothing behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.comfyui.broken_models import WEIGHTS
from tests.comfyui.graphs import Graph
from tests.comfyui.harness import Comfy, alive, kill, mapped_files, wait_until
from tests.comfyui.parity import PLANS, load_parallel
from tests.comfyui.workflows import Case, ksampler
from tools.comfy_client import Event, Outcome, ServerDied

QUICK = Case(name="quick", steps=4)
LONG = Case(name="long", width=1024, height=768, steps=40)
PLAN = "ulysses 2"
SECONDS = 5.0
"""From the death to the failed prompt, and from ComfyUI's death to that of the last rank."""


def sample(comfy: Comfy, case: Case = QUICK) -> torch.Tensor:
    graph = Graph()
    return comfy.latents(graph, ksampler(graph, load_parallel(graph, PLANS[PLAN]), case))


def two(comfy: Comfy) -> list[int]:
    """The two ranks of PLAN: none when they are gone."""
    return comfy.ranks(group_of=2)


def in_process_table(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def long_prompt(model: str = "tiny-flux") -> Graph:
    graph = Graph()
    latent = ksampler(graph, load_parallel(graph, PLANS[PLAN], model=model), LONG)
    graph.add("TestSaveLatent", samples=latent, name="never")
    return graph


def assert_failed_with_the_cause(outcome: Outcome, died: float, comfy: Comfy) -> None:
    """The prompt that was running says who died, where, of what and while doing what; the other ranks are gone."""
    waited = time.monotonic() - died
    assert outcome.status == "error"
    assert "rank 1" in outcome.error_text
    assert "cpu:1" in outcome.error_text
    assert "SIGKILL" in outcome.error_text
    assert waited < SECONDS
    assert two(comfy) == []


def test_a_rank_dies_while_sampling(comfy: Comfy) -> None:
    before = sample(comfy)
    _, second = two(comfy)
    died: list[float] = []

    def kill_in_the_third_step(event: Event) -> None:
        if event.kind == "progress" and event.data["value"] == 2:
            kill(second)
            died.append(time.monotonic())

    outcome = comfy.client.run(long_prompt().prompt, on_progress=kill_in_the_third_step)
    assert_failed_with_the_cause(outcome, died[0], comfy)
    assert torch.equal(sample(comfy), before)


def test_a_rank_dies_while_loading(comfy: Comfy, models: Path) -> None:
    before = sample(comfy)
    _, second = two(comfy)
    weights = models / "diffusers" / "hollow-flux" / "transformer" / WEIGHTS
    prompt_id = comfy.client.queue(long_prompt("hollow-flux").prompt)
    wait_until(lambda: str(weights) in mapped_files(second), seconds=60, what="rank 1 reads the weights")
    kill(second)
    died = time.monotonic()
    outcome = comfy.client.wait(prompt_id)
    assert_failed_with_the_cause(outcome, died, comfy)
    assert "loading" in outcome.error_text
    assert torch.equal(sample(comfy), before)


def test_a_rank_dies_while_starting(comfy: Comfy) -> None:
    before = sample(comfy)
    ranks = two(comfy)
    for rank in ranks:
        kill(rank)
    # reaped, not only dead: a process whose last threads are still ending can be taken for a living one
    wait_until(lambda: not any(map(in_process_table, ranks)), seconds=SECONDS, what="the ranks have been reaped")
    prompt_id = comfy.client.queue(long_prompt().prompt)
    _, second = wait_until(lambda: len(two(comfy)) == 2 and two(comfy), seconds=60, what="two new ranks")
    kill(second)
    died = time.monotonic()
    assert_failed_with_the_cause(comfy.client.wait(prompt_id), died, comfy)
    assert torch.equal(sample(comfy), before)


def test_a_rank_dies_while_weights_are_parked(comfy: Comfy) -> None:
    """ComfyUI parks between two prompts, where nobody waits for an error: it must not end ComfyUI's own worker."""
    before = sample(comfy)
    logged = len(comfy.log())
    first, _ = two(comfy)
    os.kill(first, signal.SIGSTOP)
    comfy.client.free(unload_models=True, free_memory=False)
    time.sleep(1.0)  # the rank cannot answer: the park is under way
    kill(first)
    wait_until(lambda: "parking" in comfy.log()[logged:], seconds=SECONDS, what="the log says that parking failed")
    assert not torch.equal(sample(comfy, replace(QUICK, seed=99)), before), "another seed: no cache can answer it"
    assert torch.equal(sample(comfy), before)


def test_a_rank_dies_while_idle(comfy: Comfy) -> None:
    before = sample(comfy)
    first, second = two(comfy)
    logged = len(comfy.log())
    kill(second)
    wait_until(lambda: "SIGKILL" in comfy.log()[logged:], seconds=SECONDS, what="the log says that a rank was killed")
    wait_until(lambda: not in_process_table(first), seconds=SECONDS, what="the other rank has been ended")
    assert torch.equal(sample(comfy), before)


def test_comfyui_dies_while_sampling(new_comfy: Callable[..., Comfy]) -> None:
    with new_comfy() as comfy:
        pid = comfy.server.pid
        assert pid is not None
        family: list[int] = []
        died: list[float] = []

        def kill_comfyui(event: Event) -> None:
            if event.kind == "progress" and event.data["value"] == 2:
                family.extend(two(comfy))
                kill(pid)
                died.append(time.monotonic())

        with pytest.raises(ServerDied):
            comfy.client.run(long_prompt().prompt, on_progress=kill_comfyui)
        assert len(family) == 2
        left = died[0] + SECONDS - time.monotonic()
        wait_until(lambda: not any(map(alive, family)), seconds=left, what="no rank lives")
        wait_until(lambda: not list(comfy.temporary.iterdir()), seconds=SECONDS, what="the temp folder is empty")


def test_ctrl_c_leaves_nothing(new_comfy: Callable[..., Comfy]) -> None:
    """SIGINT, as from a terminal. SIGTERM, as from a service manager, is how all servers of these tests are stopped."""
    with new_comfy() as comfy:
        sample(comfy)
        assert len(two(comfy)) == 2
        assert list(comfy.temporary.iterdir())
        comfy.stop(signal.SIGINT)
