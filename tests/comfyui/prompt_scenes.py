"""Scenes of one prompt per image: the prompts, what samples them, and the two ways to make the same batch.

A `Scene` is run with the node, or without it: once per prompt, with that prompt for every image. Does not know: which
MODEL it is given, pytest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from tests.comfyui.graphs import Graph, Node
from tests.comfyui.harness import Comfy
from tests.comfyui.parity import Loader
from tests.comfyui.workflows import Case, empty_latent, sample, sampler_custom

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


def masked_text(graph: Graph, index: int) -> Node:
    """For all of the picture, and another one for a soft mask."""
    masked = graph.add("TestConditioning", tokens=9 + index, seed=300 + 10 * index)
    mask = graph.add("TestMask", width=64, height=64, seed=index)
    masked = graph.add("ConditioningSetMask", conditioning=masked, mask=mask, strength=0.8, set_cond_area="default")
    return graph.add("ConditioningCombine", conditioning_1=text(graph, index), conditioning_2=masked)


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
    Scene(name="masks", num_prompts=2, prompt=masked_text, ragged=True, cfg=3.0),
    Scene(name="regional", num_prompts=2, prompt=regional_text, case=REGIONAL),
)
REGIONAL_CFG = Scene(name="regional-cfg", num_prompts=2, prompt=regional_text, case=REGIONAL, ragged=True, cfg=3.0)
