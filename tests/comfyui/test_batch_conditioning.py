"""One Prompt per Image: image i is what the same batch gives when every image has prompt i, with any MODEL.

What the prompts give alone always comes from ComfyUI's own model and without the node.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.comfyui.graphs import Graph, Node
from tests.comfyui.harness import REPOSITORY, Comfy
from tests.comfyui.parity import FP32_TOLERANCE, PLANS, Loader, distance, load_parallel, load_reference
from tests.comfyui.workflows import EASY_CACHE, Case, empty_latent, sample, sampler_custom

LENGTHS = (17, 5, 77, 1, 40)
"""Tokens of the prompts, in order."""

Prompt = Callable[[Graph, int], Node]
Sampling = Callable[[Graph, Node, Case, Node, Node], Node]


def text(graph: Graph, index: int) -> Node:
    return graph.add("TestConditioning", tokens=LENGTHS[index], seed=100 + 10 * index)


def other_text(graph: Graph, index: int) -> Node:
    """For the negative: other words, and each of another length than the positive's."""
    return graph.add("TestConditioning", tokens=LENGTHS[-1 - index] + 2, seed=900 + 10 * index)


def short_text(graph: Graph, index: int) -> Node:
    return graph.add("TestConditioning", tokens=17, seed=100 + 10 * index)


def text_per_row(graph: Graph, index: int) -> Node:
    """One CONDITIONING that holds a text for each second image, as some encoders make it."""
    return graph.add("TestConditioning", tokens=LENGTHS[index], seed=100 + 10 * index, rows=2)


def text_with_images(graph: Graph, index: int) -> Node:
    """As many reference images as the prompt's number, each another one for each second image of the batch."""
    prompt = text(graph, index)
    for image in range(index):
        size = {"width": 48, "height": 64 + 16 * image}
        latent = graph.add("TestLatent", **size, seed=600 + 10 * index + image, batch=2)
        prompt = graph.add("ReferenceLatent", conditioning=prompt, latent=latent)
    return prompt


def regional_text(graph: Graph, index: int) -> Node:
    """For all of the picture, for a mask with a row per image, and for an area that is the same in each prompt."""
    everywhere = text(graph, index)
    masks = [graph.add("TestMask", width=128, height=112, seed=row + 10 * index) for row in range(2)]
    mask = graph.add("TestStackMasks", first=masks[0], second=masks[1])
    masked = graph.add("TestConditioning", tokens=9 + index, seed=300 + 10 * index)
    masked = graph.add("ConditioningSetMask", conditioning=masked, mask=mask, strength=0.8, set_cond_area="default")
    there = graph.add("TestConditioning", tokens=33 - index, seed=500 + 10 * index)
    area = {"width": 64, "height": 96, "x": 48, "y": 0, "strength": 1.5}
    there = graph.add("ConditioningSetArea", conditioning=there, **area)
    for more in (masked, there):
        everywhere = graph.add("ConditioningCombine", conditioning_1=everywhere, conditioning_2=more)
    return everywhere


def scheduled_text(graph: Graph, index: int) -> Node:
    """One prompt for the beginning, another one, of another length, for the rest."""
    early, late = text(graph, index), other_text(graph, index)
    middle = 0.3 + 0.2 * index
    early = graph.add("ConditioningSetTimestepRange", conditioning=early, start=0.0, end=middle)
    late = graph.add("ConditioningSetTimestepRange", conditioning=late, start=middle, end=1.0)
    return graph.add("ConditioningCombine", conditioning_1=early, conditioning_2=late)


def ksampler(graph: Graph, model: Node, case: Case, positive: Node, negative: Node) -> Node:
    return sample(graph, model, case, positive, negative, empty_latent(graph, case))


def inpainting(graph: Graph, model: Node, case: Case, positive: Node, negative: Node) -> Node:
    """Over pictures that are there, with a mask of its own for the noise of each second image."""
    size: dict[str, Any] = {"width": case.width, "height": case.height}
    latent = graph.add("TestLatent", **size, seed=400, batch=case.batch)
    masks = [graph.add("TestMask", **size, seed=seed) for seed in (500, 501)]
    mask = graph.add("TestStackMasks", first=masks[0], second=masks[1])
    latent = graph.add("SetLatentNoiseMask", samples=latent, mask=mask)
    return sample(graph, model, case, positive, negative, latent)


def basic_guider(graph: Graph, model: Node, case: Case, positive: Node, negative: Node) -> Node:
    guider = graph.add("BasicGuider", model=model, conditioning=positive)
    return sampler_custom(graph, model, case, guider)


def cfg_guider(graph: Graph, model: Node, case: Case, positive: Node, negative: Node) -> Node:
    guider = graph.add("CFGGuider", model=model, positive=positive, negative=negative, cfg=case.cfg)
    return sampler_custom(graph, model, case, guider)


def dual_cfg_guider(graph: Graph, model: Node, case: Case, positive: Node, negative: Node) -> Node:
    guider = graph.add(
        "DualCFGGuider",
        model=model,
        cond1=positive,
        cond2=graph.add("TestConditioning", tokens=20, seed=300),
        negative=negative,
        cfg_conds=case.cfg,
        cfg_cond2_negative=case.cfg,
        style="regular",
    )
    return sampler_custom(graph, model, case, guider)


def two_ksamplers(graph: Graph, model: Node, case: Case, positive: Node, negative: Node) -> Node:
    common = {"model": model, "positive": positive, "negative": negative, "noise_seed": case.seed, "cfg": case.cfg}
    common |= {"steps": case.steps, "sampler_name": case.sampler, "scheduler": "simple"}
    first = {"add_noise": "enable", "return_with_leftover_noise": "enable", "start_at_step": 0, "end_at_step": 2}
    latent = graph.add("KSamplerAdvanced", latent_image=empty_latent(graph, case), **common, **first)
    rest = {"add_noise": "disable", "return_with_leftover_noise": "disable", "start_at_step": 2, "end_at_step": 100}
    return graph.add("KSamplerAdvanced", latent_image=latent, **common, **rest)


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What every image is made with. `ragged`: the negative too has a prompt per image."""

    name: str
    num_prompts: int
    prompt: Prompt = text
    ragged: bool = False
    sampling: Sampling = ksampler
    cfg: float = 1.0
    case: Case = Case(name="batch")

    def settings(self) -> Case:
        return replace(self.case, cfg=self.cfg, batch=max(self.case.batch, self.num_prompts))

    def latents(self, comfy: Comfy, load: Loader, positive: Prompt, negative: Prompt) -> torch.Tensor:
        graph = Graph()
        model = load(graph)
        return comfy.latents(
            graph, self.sampling(graph, model, self.settings(), positive(graph, 0), negative(graph, 0))
        )

    def alone(self, comfy: Comfy, load: Loader, index: int) -> torch.Tensor:
        """The batch whose every image has prompt `index`."""
        shown = index if self.ragged else 0
        return self.latents(comfy, load, lambda g, _: self.prompt(g, index), lambda g, _: other_text(g, shown))

    def expected(self, comfy: Comfy, load: Loader) -> torch.Tensor:
        """Each image from the batch in which all have its prompt."""
        batches = [self.alone(comfy, load, index) for index in range(self.num_prompts)]
        return torch.stack([batches[row % self.num_prompts][row] for row in range(self.settings().batch)])

    def together(self, comfy: Comfy, load: Loader) -> torch.Tensor:
        """One batch with the node."""
        positive = partial(one_per_image, prompt=self.prompt, count=self.num_prompts)
        negative = partial(one_per_image, prompt=other_text, count=self.num_prompts) if self.ragged else other_text
        return self.latents(comfy, load, positive, negative)


def one_per_image(graph: Graph, _: int, *, prompt: Prompt, count: int) -> Node:
    prompts = {f"conditioning_{index + 1}": prompt(graph, index) for index in range(count)}
    return graph.add("PD_BatchConditioning", **prompts)


REGIONAL = Case(name="regional", width=128, height=112, batch=2)
SCENES = (
    Scene(name="one", num_prompts=1),
    Scene(name="two-of-one-length", num_prompts=2, prompt=short_text),
    Scene(name="three", num_prompts=3),
    Scene(name="four-cfg", num_prompts=4, cfg=3.0),
    Scene(name="five", num_prompts=5),
    Scene(name="three-ragged-negative", num_prompts=3, ragged=True, cfg=3.0),
    Scene(name="repeated", num_prompts=2, case=Case(name="batch", batch=4), ragged=True, cfg=3.0),
    Scene(name="inpainting", num_prompts=2, sampling=inpainting, cfg=3.0, case=Case(name="i", denoise=0.6, batch=4)),
    Scene(name="reference-latents", num_prompts=3, prompt=text_with_images, case=Case(name="r", batch=6)),
    Scene(name="text-per-row", num_prompts=3, prompt=text_per_row, case=Case(name="t", batch=6)),
    Scene(name="scheduled", num_prompts=3, prompt=scheduled_text, case=Case(name="h", steps=6)),
    Scene(name="basic-guider", num_prompts=2, sampling=basic_guider),
    Scene(name="cfg-guider", num_prompts=3, sampling=cfg_guider, ragged=True, cfg=3.0),
    Scene(name="dual-cfg", num_prompts=3, sampling=dual_cfg_guider, cfg=3.0),
    Scene(name="two-ksamplers", num_prompts=2, sampling=two_ksamplers, cfg=3.0, case=Case(name="s", steps=4)),
    Scene(name="regional", num_prompts=2, prompt=regional_text, case=REGIONAL),
)
REGIONAL_CFG = Scene(name="regional-cfg", num_prompts=2, prompt=regional_text, case=REGIONAL, ragged=True, cfg=3.0)


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
