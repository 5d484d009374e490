"""The same weights and the same seed give the videos that ComfyUI's own Wan gives, for every variant of it.

The reference is ComfyUI's model class in ComfyUI's process; only the loader node differs between the two runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.comfyui.broken_models import WEIGHTS, other_weights
from tests.comfyui.graphs import Graph, Node
from tests.comfyui.harness import Comfy
from tests.comfyui.parity import FP32_TOLERANCE, PLANS, Loader, distance, load_parallel
from tests.comfyui.wan_pipeline import pipeline_latents, pipeline_workflow
from tests.comfyui.wan_workflows import (
    CASES,
    WORKFLOWS,
    WanCase,
    empty_latent,
    prompts,
    sample,
    text_to_video,
    two_experts,
)
from tests.comfyui.workflows import EASY_CACHE

WAN_PLANS = ("one rank", "replicas 2", "ulysses 2", "tensor 2", "ring 2")
EXPERTS = ("wan-experts", "wan-experts/transformer_2")


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


def _covering() -> list[Any]:
    """Every case with every plan; the normal run takes all on one rank and, of the other plans, a part each."""
    rows = []
    for number, plan in enumerate(WAN_PLANS):
        for place, case in enumerate(CASES):
            chosen = number == 0 or place % 3 == number % 3
            marks = () if chosen else (pytest.mark.full,)
            rows.append(pytest.param(plan, case, id=f"{plan}-{case.name}", marks=marks))
    return rows


@pytest.mark.parametrize(("plan", "case"), _covering())
def test_videos_equal_those_of_comfyuis_own_model(
    comfy: Comfy, wan_reference: Callable[[WanCase], torch.Tensor], plan: str, case: WanCase
) -> None:
    ours = run(comfy, case, lambda graph: load_parallel(graph, PLANS[plan], model=case.model))
    assert distance(ours, wan_reference(case)) <= FP32_TOLERANCE


T2V, I2V, FIVE_B = (next(case for case in CASES if case.name == name) for name in ("t2v", "i2v-77", "5b-start-image"))
DIFFERENT = [
    [T2V, replace(T2V, tokens=18), replace(T2V, negative_tokens=18), replace(T2V, workflow="shifted")],
    [T2V, replace(T2V, workflow="scaled_positions"), replace(T2V, workflow="subjects"), replace(T2V, seed=12)],
    [replace(T2V, length=25), replace(T2V, length=25, workflow="context_windows")],
    [replace(T2V, steps=8), replace(T2V, steps=8, workflow="easy_cache"), replace(T2V, steps=8, workflow="masked")],
    [I2V, replace(I2V, image_tokens=0), replace(I2V, image_tokens=9), replace(I2V, workflow="no_start_image")],
    [FIVE_B, replace(FIVE_B, workflow="empty_5b"), replace(FIVE_B, workflow="masked_5b")],
]


@pytest.mark.parametrize("cases", DIFFERENT, ids=lambda cases: cases[-1].workflow)
def test_every_setting_matters(wan_reference: Callable[[WanCase], torch.Tensor], cases: list[WanCase]) -> None:
    """Settings that did not change the reference's result could not show that ours ignores them."""
    for one, other in itertools.combinations(cases, 2):
        assert distance(wan_reference(one), wan_reference(other)) > 1e-2, (one, other)


# -- two experts -------------------------------------------------------------------------------------------------------


def experts_run(comfy: Comfy, case: WanCase, load: Callable[[Graph, str], Node]) -> torch.Tensor:
    graph = Graph()
    high, low = (load(graph, name) for name in EXPERTS)
    return comfy.latents(graph, two_experts(graph, (high, low), case))


@pytest.mark.parametrize("plan", WAN_PLANS)
def test_two_experts_stay_loaded(comfy: Comfy, models: Path, plan: str) -> None:
    """After the first prompt both weight files hold zeros: nobody can have read them again and still be right."""
    cases = [WanCase(name="experts", negative_tokens=5, seed=seed, batch=2) for seed in (1, 2, 3)]
    expected = [experts_run(comfy, case, load_reference) for case in cases]

    def ours(case: WanCase) -> torch.Tensor:
        return experts_run(comfy, case, lambda graph, model: load_parallel(graph, PLANS[plan], model=model))

    made, ranks = [ours(cases[0])], comfy.ranks()
    with ExitStack() as stack:
        for name in ("transformer", "transformer_2"):
            stack.enter_context(other_weights(models / "diffusers" / "wan-experts" / name / WEIGHTS))
        made += [ours(case) for case in cases[1:]]
    assert comfy.ranks() == ranks
    assert max(map(distance, made, expected)) <= FP32_TOLERANCE
    assert distance(run(comfy, cases[0], lambda graph: load_reference(graph, EXPERTS[1])), expected[0]) > 0.1


def test_both_experts_are_offered_and_no_other_folder(comfy: Comfy) -> None:
    """`models/diffusers` has more than Wan; the names of everything else stay what they were."""
    node = comfy.client.get("/object_info/PD_LoadParallelTransformer")["PD_LoadParallelTransformer"]
    kind, *options = node["input"]["required"]["model_name"]
    names = options[0]["options"] if kind == "COMBO" else kind
    assert [name for name in names if "wan-experts" in name or "tiny-flux" in name] == [
        *("tiny-flux", "tiny-flux-sharded"),
        *EXPERTS,
    ]


# -- other claims ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["one rank"])
@pytest.mark.parametrize("experts", [1, 2])
def test_one_rank_equals_the_diffusers_pipeline(comfy: Comfy, models: Path, experts: int, plan: str) -> None:
    folder = models / "diffusers" / "wan-experts"
    expected = pipeline_latents(folder, experts=experts)
    graph = Graph()
    loaded = tuple(load_parallel(graph, PLANS[plan], model=name) for name in EXPERTS[:experts])
    assert distance(comfy.latents(graph, pipeline_workflow(graph, loaded, folder)), expected) <= 1e-5


BF16 = {
    "t2v": WanCase(name="bf16", width=96, batch=2, cfg=1.0, tokens=77),
    "i2v": WanCase(name="bf16", model="wan-i2v", workflow="image_to_video", cfg=1.0, tokens=77, width=80),
    "5b": WanCase(name="bf16", model="wan-5b", workflow="start_image_5b", cfg=1.0, width=160, height=96),
}


@pytest.mark.parametrize("plan", ["one rank"])
@pytest.mark.parametrize("variant", BF16)
def test_bf16_is_as_near_to_fp32_as_comfyuis_own_bf16(comfy: Comfy, variant: str, plan: str) -> None:
    """Several runs: over a single one chance decides."""
    cases = [replace(BF16[variant], seed=seed) for seed in range(4)]

    def runs(load: Callable[[Graph, WanCase], Node]) -> torch.Tensor:
        return torch.stack([run(comfy, case, lambda graph, case=case: load(graph, case)) for case in cases])

    exact = runs(lambda graph, case: load_reference(graph, case.model))
    theirs = runs(lambda graph, case: load_reference(graph, case.model, "bfloat16"))
    ours = runs(lambda graph, case: load_parallel(graph, PLANS[plan], model=case.model, dtype="bfloat16"))

    def rms(difference: torch.Tensor) -> float:
        return float(difference.square().mean().sqrt())

    assert rms(ours - exact) <= 1.05 * rms(theirs - exact)


@pytest.mark.parametrize("plan", WAN_PLANS)
def test_easy_cache_skips_the_same_steps(comfy: Comfy, plan: str) -> None:
    """As many rows reach the transformer as with ComfyUI's own model, and fewer than without EasyCache."""
    case = WanCase(name="count", steps=8)
    rows = {}
    loaders: dict[str, Any] = {
        "theirs": lambda graph: load_reference(graph, "wan-t2v"),
        "ours": lambda graph: load_parallel(graph, PLANS[plan], model="wan-t2v"),
    }
    for cached, whose in itertools.product((True, False), loaders):
        graph = Graph()
        model, counter = loaders[whose](graph), f"wan-{whose}-{plan}-{cached}"
        if cached:
            model = graph.add("EasyCache", model=model, **EASY_CACHE)
        model = graph.add("TestCountCalls", model=model, counter=counter)
        comfy.latents(graph, text_to_video(graph, model, case))
        rows[whose, cached] = sum(comfy.state()["counters"][counter])
    assert rows["ours", True] == rows["theirs", True] < rows["theirs", False] == rows["ours", False] == 16


# -- refusals ----------------------------------------------------------------------------------------------------------

NOT_STARTED = {"devices": "cpu:3", "replicas": 3}
"""A group that no test starts: were the input not refused first, its ranks would appear."""


def reference_latents(graph: Graph, positive: Node, negative: Node) -> tuple[Any, Any, Any]:
    latent = graph.add("TestLatent", width=64, height=64, seed=1)
    positive = graph.add("ReferenceLatent", conditioning=positive, latent=latent)
    return positive, negative, empty_latent(graph, T2V)


def vace(graph: Graph, positive: Node, negative: Node) -> tuple[Any, Any, Any]:
    size = {"width": 64, "height": 64, "length": 5, "batch_size": 1}
    vae = graph.add("TestVideoVAE", channels=16, scale=8)
    conditions = {"positive": positive, "negative": negative}
    made = graph.add("WanVaceToVideo", vae=vae, strength=1.0, **conditions, **size)
    return made[0], made[1], made[2]


def other_text(graph: Graph, positive: Node, negative: Node) -> tuple[Any, Any, Any]:
    wrong = graph.add("TestConditioning", tokens=5, seed=0, dim=24, pooled=0)
    return positive, wrong, empty_latent(graph, T2V)


def other_channels(graph: Graph, positive: Node, negative: Node) -> tuple[Any, Any, Any]:
    return positive, negative, graph.add("TestLatent", width=64, height=64, seed=0, channels=4)


def control_net(graph: Graph, positive: Node, negative: Node) -> tuple[Any, Any, Any]:
    image, control = graph.add("EmptyImage", width=64, height=64, batch_size=1, color=0), graph.add("TestControlNet")
    positive = graph.add("ControlNetApply", conditioning=positive, control_net=control, image=image, strength=1.0)
    return positive, negative, empty_latent(graph, T2V)


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        (reference_latents, "wan family does not know the conditioning entry 'reference_latents'"),
        (vace, "'vace_frames', 'vace_mask', 'vace_strength'"),
        (other_text, "shape [1, 5, 24]; this Wan model expects [batch, tokens, 32]"),
        (other_channels, "[1, 4, 1, 8, 8]; a wan model expects [batch, 16, frames, height, width]"),
        (control_net, "ControlNet"),
    ],
)
def test_what_cannot_be_honoured_is_refused_before_anything_starts(
    comfy: Comfy, inputs: Callable[[Graph, Node, Node], tuple[Any, Any, Any]], says: str
) -> None:
    before = comfy.ranks()
    graph = Graph()
    model = load_parallel(graph, NOT_STARTED, model="wan-t2v")
    graph.add("TestSaveLatent", samples=sample(graph, model, T2V, *inputs(graph, *prompts(graph, T2V))), name="never")
    text = comfy.failure(graph)
    assert says in text and "Traceback" not in text
    assert comfy.ranks() == before


def test_another_clip_vision_model_is_refused(comfy: Comfy) -> None:
    graph = Graph()
    model = load_parallel(graph, NOT_STARTED, model="wan-i2v")
    seen = graph.add("TestClipVision", tokens=7, seed=0, channels=768)
    positive, negative = prompts(graph, I2V)
    made = graph.add(
        "WanImageToVideo",
        positive=positive,
        negative=negative,
        vae=graph.add("TestVideoVAE", channels=16, scale=8),
        clip_vision_output=seen,
        **{"width": 64, "height": 64, "length": 5, "batch_size": 1},
    )
    graph.add("TestSaveLatent", samples=sample(graph, model, I2V, made[0], made[1], made[2]), name="never")
    assert "clip_vision_output has 768 channels; this Wan model expects 1280" in comfy.failure(graph)


def with_keyword(value: str) -> Graph:
    graph = Graph()
    model = load_parallel(graph, PLANS["one rank"], model="wan-t2v")
    model = graph.add("TestNewerComfyUI", model=model, tomorrow=value)
    graph.add("TestSaveLatent", samples=text_to_video(graph, model, T2V), name=f"tomorrow-{value}")
    return graph


def test_a_keyword_of_a_newer_comfyui_is_refused_unless_it_is_none(comfy: Comfy) -> None:
    """ComfyUI's own Wan takes any keyword and leaves it unread."""
    assert "wan family does not know the argument 'tomorrow'" in comfy.failure(with_keyword("1"))
    comfy.run(with_keyword("None"))
