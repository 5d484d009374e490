"""Distributed Sampler is KSampler, and says on the node what ran where; `auto` says what it chose and why."""

from __future__ import annotations

import pytest
import torch

from tests.comfyui.graphs import Graph, Node
from tests.comfyui.harness import Comfy
from tests.comfyui.parity import PLANS, load_parallel, load_reference
from tests.comfyui.workflows import Case, empty_latent, ksampler, prompts

UNEVEN = Case(name="uneven", cfg=3.0, negative_tokens=5, batch=2, steps=3)
ONE_ROW = Case(name="one row", steps=2)


def distributed_sampler(graph: Graph, model: Node, case: Case, **changes: str) -> Node:
    positive, negative = prompts(graph, case)
    settings = {"sampler_name": case.sampler, "scheduler": "simple", **changes}
    return graph.add(
        "PD_DistributedSampler",
        model=model,
        positive=positive,
        negative=negative,
        latent_image=empty_latent(graph, case),
        seed=case.seed,
        steps=case.steps,
        cfg=case.cfg,
        denoise=case.denoise,
        **settings,
    )


def sampled(comfy: Comfy, graph: Graph, sampler: Node, name: str) -> tuple[torch.Tensor, str]:
    """The latents, and the last text that the sampler's node showed."""
    graph.add("TestSaveLatent", samples=sampler, name=name)
    outcome = comfy.run(graph)
    return comfy.saved(name), outcome.texts[sampler.node_id][-1]


@pytest.mark.parametrize("plan", ["ulysses 2", "replicas 2", "tensor 2"])
def test_it_gives_ksamplers_bits_and_an_account(comfy: Comfy, plan: str) -> None:
    graph = Graph()
    expected = comfy.latents(graph, ksampler(graph, load_parallel(graph, PLANS[plan]), UNEVEN))
    graph = Graph()
    sampler = distributed_sampler(graph, load_parallel(graph, PLANS[plan]), UNEVEN)
    ours, text = sampled(comfy, graph, sampler, f"distributed-{plan}")
    assert torch.equal(ours, expected)
    for part in (plan, "3 evaluations", "s each", "peak on cpu:0", "peak on cpu:1"):
        assert part in text


def test_with_a_stock_model_it_is_ksampler_and_says_that_nothing_is_parallel(comfy: Comfy) -> None:
    graph = Graph()
    expected = comfy.latents(graph, ksampler(graph, load_reference(graph), UNEVEN))
    graph = Graph()
    ours, text = sampled(comfy, graph, distributed_sampler(graph, load_reference(graph), UNEVEN), "distributed-stock")
    assert torch.equal(ours, expected)
    assert "nothing ran in parallel" in text


@pytest.mark.parametrize(
    ("case", "chosen"),
    [(UNEVEN, ["replicas 2", "4 rows"]), (ONE_ROW, ["ulysses 2", "one row"])],
    ids=["rows-to-replicas", "one-row-to-ulysses"],
)
def test_auto_says_what_it_chose_and_why(comfy: Comfy, case: Case, chosen: list[str]) -> None:
    graph = Graph()
    sampler = distributed_sampler(graph, load_parallel(graph, PLANS["auto 2"]), case)
    _, text = sampled(comfy, graph, sampler, f"auto-{case.name}")
    for part in chosen:
        assert part in text


@pytest.mark.parametrize("wrong", [{"sampler_name": "guesser"}, {"scheduler": "someday"}], ids=str)
def test_an_unknown_sampler_or_scheduler_is_refused(comfy: Comfy, wrong: dict[str, str]) -> None:
    graph = Graph()
    sampler = distributed_sampler(graph, load_parallel(graph, PLANS["ulysses 2"]), ONE_ROW, **wrong)
    graph.add("TestSaveLatent", samples=sampler, name="never")
    text = comfy.failure(graph)
    assert all(part in text for part in (*wrong, *wrong.values()))
