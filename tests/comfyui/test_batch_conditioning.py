"""One Prompt per Image: image i is what the same batch gives when every image has prompt i, with any MODEL.

What the prompts give alone comes without the node, and from ComfyUI's own model where bits are not compared.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.comfyui.graphs import Graph, Node
from tests.comfyui.harness import REPOSITORY, Comfy
from tests.comfyui.parity import FP32_TOLERANCE, PLANS, Loader, distance, load_parallel, load_reference
from tests.comfyui.prompt_scenes import (
    REGIONAL_CFG,
    SCENES,
    Prompt,
    Scene,
    ksampler,
    one_per_image,
    other_text,
    text,
)
from tests.comfyui.workflows import EASY_CACHE, Case, empty_latent


@pytest.fixture(scope="module")
def expected(comfy: Comfy) -> Callable[[Scene], torch.Tensor]:
    """What ComfyUI's own model gives without the node, computed once."""
    known: dict[str, torch.Tensor] = {}

    def latents(scene: Scene) -> torch.Tensor:
        if scene.name not in known:
            known[scene.name] = scene.expected(comfy, load_reference)
        return known[scene.name]

    return latents


def by_name(scene: Scene) -> str:
    return scene.name


def _covering() -> list[Any]:
    """Every scene with every plan; every second pair is for the full run only."""
    pairs = []
    for number, plan in enumerate(["one rank", "ulysses 2", "replicas 2", "auto 2", "replicas 4"]):
        for place, scene in enumerate([*SCENES, REGIONAL_CFG]):
            marks = () if (number + place) % 2 == 0 else (pytest.mark.full,)
            pairs.append(pytest.param(plan, scene, id=f"{plan}-{scene.name}", marks=marks))
    return pairs


@pytest.mark.parametrize(("plan", "scene"), _covering())
def test_each_image_is_that_of_its_prompt(
    comfy: Comfy, expected: Callable[[Scene], torch.Tensor], plan: str, scene: Scene
) -> None:
    ours = scene.together(comfy, lambda graph: load_parallel(graph, PLANS[plan]))
    assert distance(ours, expected(scene)) <= FP32_TOLERANCE


@pytest.mark.parametrize("scene", SCENES, ids=by_name)
def test_a_stock_model_gives_the_same_pictures(
    comfy: Comfy, expected: Callable[[Scene], torch.Tensor], scene: Scene
) -> None:
    assert distance(scene.together(comfy, load_reference), expected(scene)) <= FP32_TOLERANCE


@pytest.mark.parametrize("scene", SCENES, ids=by_name)
def test_the_images_differ(expected: Callable[[Scene], torch.Tensor], comfy: Comfy, scene: Scene) -> None:
    """Prompts that did not matter could not show that images have got one another's."""
    for index in range(scene.num_prompts if scene.num_prompts > 1 else 0):
        same = scene.alone(comfy, load_reference, index)
        for row, image in enumerate(expected(scene)):
            if row % scene.num_prompts != index:
                assert distance(same[row], image) > 10 * FP32_TOLERANCE


@pytest.mark.parametrize(("plan", "scene"), [("one rank", SCENES[1]), ("replicas 4", SCENES[3])], ids=["one", "four"])
def test_it_is_the_same_to_the_bit_where_the_ranks_do_the_same(comfy: Comfy, plan: str, scene: Scene) -> None:
    """A batch of one length, or one row per replica: nothing is left but what the node does, which must be exact."""
    scene = replace(scene, cfg=1.0)
    load = partial(load_parallel, plan=PLANS[plan])
    assert torch.equal(scene.together(comfy, load), scene.expected(comfy, load))


def test_a_stock_model_is_exact_too(comfy: Comfy) -> None:
    """Prompts of one length make batches of as many rows as there are alone, only more of them."""
    scene = SCENES[1]
    assert distance(scene.together(comfy, load_reference), scene.expected(comfy, load_reference)) <= 1e-6


def test_stock_models_of_other_kinds_of_latents_too(comfy_tree: Path, host_python: Path) -> None:
    """Video and sound, of which there is no small model here: ComfyUI's evaluation with a function for the model."""
    script = Path(__file__).with_name("kinds_of_latents.py")
    modules = {"PYTHONPATH": os.environ["COMFYUI_PYTHONPATH"]} if "COMFYUI_PYTHONPATH" in os.environ else {}
    done = subprocess.run(
        [host_python, script, comfy_tree, REPOSITORY],
        env={**os.environ, **modules},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    exact = json.loads(done.stdout.splitlines()[-1])
    assert exact == {"sound": True, "image": True, "one frame": True, "as many frames": True}


def behind(node: str, load: Loader, **settings: Any) -> Loader:
    """The MODEL with another node's code around it, so that ComfyUI evaluates the conditions as it always does."""
    return lambda graph: graph.add(node, model=load(graph), **settings)


REPLICAS = partial(load_parallel, plan=PLANS["replicas 2"])


def test_under_code_of_other_nodes_the_strengths_choose(comfy: Comfy) -> None:
    load = behind("TestCountCalls", REPLICAS, counter="prompts")
    assert distance(REGIONAL_CFG.together(comfy, load), REGIONAL_CFG.expected(comfy, load_reference)) <= FP32_TOLERANCE
    entries = 3 + 2  # everywhere, mask and area; in the negative everywhere and, by ComfyUI, the area
    assert sum(comfy.state()["counters"]["prompts"]) == 2 * 2 * entries * REGIONAL_CFG.case.steps, "prompts x images"


def test_easy_cache_skips_what_it_skips_with_comfyuis_own_model(comfy: Comfy) -> None:
    scene = Scene(name="cached", num_prompts=3, cfg=3.0, ragged=True, case=Case(name="cached", steps=8))
    ours = scene.together(comfy, behind("EasyCache", REPLICAS, **EASY_CACHE))
    theirs = scene.together(comfy, behind("EasyCache", load_reference, **EASY_CACHE))
    assert distance(ours, theirs) <= FP32_TOLERANCE
    assert distance(scene.together(comfy, REPLICAS), theirs) > 10 * FP32_TOLERANCE, "it skipped nothing"


@pytest.mark.parametrize("ragged", [False, True], ids=["plain-negative", "ragged-negative"])
def test_each_prompt_reaches_the_transformer_for_its_image_only(comfy: Comfy, ragged: bool) -> None:
    """4 images at cfg 3 are 8 rows, whatever their prompts. `auto` says how many rows it had to share out."""
    graph = Graph()
    model, negative = load_parallel(graph, PLANS["auto 2"]), other_text(graph, 0)
    if ragged:
        negative = one_per_image(graph, 0, prompt=other_text, count=4)
    settings = {"seed": 1, "steps": 2, "cfg": 3.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0}
    sampler = graph.add(
        "PD_DistributedSampler",
        model=model,
        positive=one_per_image(graph, 0, prompt=text, count=4),
        negative=negative,
        latent_image=empty_latent(graph, Case(name="rows", batch=4)),
        **settings,
    )
    graph.add("TestSaveLatent", samples=sampler, name=f"rows-{ragged}")
    shown = comfy.run(graph).texts[sampler.node_id][-1]
    assert "(8 rows to share out)" in shown and "2 evaluations" in shown


def gaps(graph: Graph, _: int) -> Node:
    """Prompts 0 and 1 on other inputs, the second one first in the request."""
    return graph.add("PD_BatchConditioning", conditioning_11=text(graph, 1), conditioning_3=text(graph, 0))


def test_the_inputs_numbers_give_the_order(comfy: Comfy, expected: Callable[[Scene], torch.Tensor]) -> None:
    scene = Scene(name="two", num_prompts=2)
    assert distance(scene.latents(comfy, REPLICAS, gaps, other_text), expected(scene)) <= FP32_TOLERANCE


def with_more(graph: Graph, which: int, prompt: Prompt) -> Node:
    more = graph.add("TestConditioning", tokens=12, seed=700)
    return graph.add("ConditioningCombine", conditioning_1=prompt(graph, which), conditioning_2=more)


@pytest.mark.parametrize("load", [REPLICAS, load_reference, behind("TestCountCalls", REPLICAS, counter="more")])
def test_a_prompt_that_is_combined_with_them_is_for_every_image(comfy: Comfy, load: Loader) -> None:
    added = Scene(name="added", num_prompts=2, prompt=partial(with_more, prompt=text))
    two = partial(one_per_image, prompt=text, count=2)
    ours = added.latents(comfy, load, partial(with_more, prompt=two), other_text)
    assert distance(ours, added.expected(comfy, load_reference)) <= FP32_TOLERANCE


def weighted(graph: Graph, which: int, prompt: Prompt, area: dict[str, float]) -> Node:
    """The prompt weaker than another one, in an area or everywhere."""
    node = "ConditioningSetAreaPercentage" if area else "ConditioningSetAreaStrength"
    weaker = graph.add(node, conditioning=prompt(graph, which), strength=0.7, **area)
    return with_more(graph, which, lambda graph, which: weaker)


@pytest.mark.parametrize("area", [{}, {"width": 0.5, "height": 1.0, "x": 0.0, "y": 0.0}], ids=["strength", "area"])
@pytest.mark.parametrize("load", [REPLICAS, behind("TestCountCalls", REPLICAS, counter="area")], ids=["own", "watched"])
def test_a_strength_may_be_set_for_all_prompts_at_once(comfy: Comfy, load: Loader, area: dict[str, float]) -> None:
    """With our MODEL: ComfyUI's nodes put it in the place of the strength that chooses the images."""
    case = Case(name="halves", width=128, height=128, batch=2)
    alone = Scene(name="halves", num_prompts=2, prompt=partial(weighted, prompt=text, area=area), case=case, cfg=3.0)
    two = partial(one_per_image, prompt=text, count=2)
    ours = alone.latents(comfy, load, partial(weighted, prompt=two, area=area), other_text)
    assert distance(ours, alone.expected(comfy, load_reference)) <= FP32_TOLERANCE


# ----- what is refused -----


def refused(comfy: Comfy, load: Loader, positive: Prompt, *, batch: int) -> str:
    """The message; no rank may have been started for it."""
    graph = Graph()
    case = Case(name="refused", batch=batch)
    samples = ksampler(graph, load(graph), case, positive(graph, 0), other_text(graph, 0))
    graph.add("TestSaveLatent", samples=samples, name="never")
    before = comfy.ranks()
    message = comfy.failure(graph)
    assert comfy.ranks() == before
    return message


NOT_STARTED = partial(load_parallel, plan={"devices": "cpu:3", "replicas": 3})


@pytest.mark.parametrize("load", [NOT_STARTED, load_reference], ids=["ours", "stock"])
@pytest.mark.parametrize(("batch", "nearest"), [(1, 3), (4, 3), (5, 6), (8, 9)])
def test_a_batch_into_which_the_prompts_do_not_go(comfy: Comfy, load: Loader, batch: int, nearest: int) -> None:
    message = refused(comfy, load, partial(one_per_image, prompt=text, count=3), batch=batch)
    for part in (f"3 prompts for a batch of {batch} images", f"batch_size to {nearest}", f"connect {batch} prompts"):
        assert part in message


def nothing(graph: Graph, _: int) -> Node:
    return graph.add("PD_BatchConditioning")


def nested(graph: Graph, _: int) -> Node:
    two = partial(one_per_image, prompt=text, count=2)
    return one_per_image(graph, 0, prompt=two, count=2)


def with_default(graph: Graph, index: int) -> Node:
    prompt, default = text(graph, index), text(graph, 4)
    return graph.add("ConditioningSetDefaultCombine", cond=prompt, cond_DEFAULT=default)


def with_old_control_net(graph: Graph, index: int) -> Node:
    image = graph.add("EmptyImage", width=64, height=64, batch_size=1, color=0)
    control = {"control_net": graph.add("TestControlNet"), "image": image, "strength": 1.0}
    return graph.add("ControlNetApply", conditioning=text(graph, index), **control)


@pytest.mark.parametrize(
    ("positive", "part"),
    [
        (nothing, "No prompt is connected"),
        (nested, "conditioning_1 already holds one prompt per image"),
        (partial(one_per_image, prompt=with_default, count=2), "a default prompt (Cond Set Default Combine)"),
        (partial(one_per_image, prompt=with_old_control_net, count=2), "Apply ControlNet (Old)"),
    ],
    ids=["nothing", "nested", "default", "old-control-net"],
)
def test_what_cannot_be_one_images_prompt(comfy: Comfy, positive: Prompt, part: str) -> None:
    assert part in refused(comfy, load_reference, positive, batch=2)


def test_context_windows_over_the_batch(comfy: Comfy) -> None:
    windows = {"context_length": 2, "context_overlap": 0, "context_schedule": "standard_static", "context_stride": 1}
    windows |= {"closed_loop": False, "fuse_method": "pyramid", "dim": 0}
    later = {"latent_retain_index_list": "", "cond_retain_index_list": "", "freenoise": False}
    later |= {"causal_window_fix": False, "split_conds_to_windows": False}  # what came after 0.3.75, which ignores it
    load = behind("ContextWindowsManual", NOT_STARTED, **windows, **later)
    message = refused(comfy, load, partial(one_per_image, prompt=text, count=4), batch=4)
    assert "Context windows over dimension 0" in message
