"""Other nodes of ComfyUI that change a MODEL, a sampler or a condition do with ours what they do with ComfyUI's own.

Each is run on the reference and on two ranks; test_parity has the workflows that the product is made for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.comfyui.graphs import Graph, Node
from tests.comfyui.harness import Comfy
from tests.comfyui.parity import FP32_TOLERANCE, PLANS, Loader, distance, load_parallel, load_reference
from tests.comfyui.workflows import EASY_CACHE, Case, empty_latent, ksampler, masked, prompts, sample

CASE = Case(name="more", cfg=3.0, negative_tokens=5, batch=2, steps=6)

Workflow = Callable[[Graph, Node], Node]


def with_model(node: str, case: Case = CASE, **settings: Any) -> Workflow:
    """KSampler over a MODEL that `node` has changed."""
    return lambda graph, model: ksampler(graph, graph.add(node, model=model, **settings), case)


def with_sampler(name: str) -> Workflow:
    return lambda graph, model: ksampler(graph, model, replace(CASE, sampler=name))


def differential_diffusion(graph: Graph, model: Node) -> Node:
    return masked(graph, graph.add("DifferentialDiffusion", model=model), replace(CASE, denoise=0.8))


def perp_neg(graph: Graph, model: Node) -> Node:
    positive, negative = prompts(graph, CASE)
    empty = graph.add("TestConditioning", tokens=11, seed=300)
    guider = graph.add(
        "PerpNegGuider",
        model=model,
        positive=positive,
        negative=negative,
        empty_conditioning=empty,
        cfg=3.0,
        neg_scale=1.0,
    )
    return graph.add(
        "SamplerCustomAdvanced",
        noise=graph.add("RandomNoise", noise_seed=1),
        guider=guider,
        sampler=graph.add("KSamplerSelect", sampler_name="euler"),
        sigmas=graph.add("BasicScheduler", model=model, scheduler="simple", steps=4, denoise=1.0),
        latent_image=empty_latent(graph, CASE),
    )


def regional_prompts(graph: Graph, model: Node) -> Node:
    """Three positive prompts of different lengths: for all, for a mask, for an area and half of the run."""
    case = replace(CASE, width=128, height=112)
    positive, negative = prompts(graph, case)
    here = graph.add("TestConditioning", tokens=9, seed=301)
    mask = graph.add("TestMask", width=128, height=112, seed=5)
    here = graph.add("ConditioningSetMask", conditioning=here, mask=mask, strength=0.8, set_cond_area="default")
    there = graph.add("TestConditioning", tokens=40, seed=302)
    area = {"width": 64, "height": 96, "x": 48, "y": 0, "strength": 1.0}
    there = graph.add("ConditioningSetArea", conditioning=there, **area)
    there = graph.add("ConditioningSetTimestepRange", conditioning=there, start=0.0, end=0.5)
    for more in (here, there):
        positive = graph.add("ConditioningCombine", conditioning_1=positive, conditioning_2=more)
    return sample(graph, model, case, positive, negative, empty_latent(graph, case))


def split_sigmas(graph: Graph, model: Node) -> Node:
    """The first half of the steps with one guider, the second with another."""
    positive, negative = prompts(graph, CASE)
    sigmas = graph.add("BasicScheduler", model=model, scheduler="simple", steps=4, denoise=1.0)
    halves = graph.add("SplitSigmas", sigmas=sigmas, step=2)
    euler = graph.add("KSamplerSelect", sampler_name="euler")
    first = graph.add(
        "SamplerCustomAdvanced",
        noise=graph.add("RandomNoise", noise_seed=1),
        guider=graph.add("CFGGuider", model=model, positive=positive, negative=negative, cfg=3.0),
        sampler=euler,
        sigmas=halves[0],
        latent_image=empty_latent(graph, CASE),
    )
    return graph.add(
        "SamplerCustomAdvanced",
        noise=graph.add("DisableNoise"),
        guider=graph.add("BasicGuider", model=model, conditioning=positive),
        sampler=euler,
        sigmas=halves[1],
        latent_image=first,
    )


WORKFLOWS: dict[str, Workflow] = {
    "LazyCache": with_model("LazyCache", **EASY_CACHE),
    "ScaleROPE": with_model("ScaleROPE", scale_x=1.5, shift_x=2.0, scale_y=0.5, shift_y=-1.0, scale_t=1.0, shift_t=0.5),
    "context windows": with_model(
        "ContextWindowsManual",
        replace(CASE, height=160, batch=1),
        context_length=8,
        context_overlap=2,
        context_schedule="standard_static",
        context_stride=1,
        closed_loop=False,
        fuse_method="pyramid",
        dim=2,
        # what came after 0.3.75, which ignores it
        latent_retain_index_list="",
        cond_retain_index_list="",
        freenoise=False,
        causal_window_fix=False,
        split_conds_to_windows=False,
    ),
    "RescaleCFG": with_model("RescaleCFG", multiplier=0.7),
    "CFGZeroStar": with_model("CFGZeroStar"),
    "DifferentialDiffusion": differential_diffusion,
    "PerpNegGuider": perp_neg,
    "regional prompts": regional_prompts,
    "SplitSigmas": split_sigmas,
    "heun": with_sampler("heun"),
    "dpmpp_2m_sde": with_sampler("dpmpp_2m_sde"),
    "uni_pc": with_sampler("uni_pc"),
    "euler_ancestral": with_sampler("euler_ancestral"),
    "euler_cfg_pp": with_sampler("euler_cfg_pp"),
}


@pytest.mark.parametrize("plan", ["ulysses 2", "replicas 2"])
@pytest.mark.parametrize("workflow", WORKFLOWS)
def test_it_does_what_it_does_with_comfyuis_own_model(comfy: Comfy, workflow: str, plan: str) -> None:
    def latents(load: Loader) -> torch.Tensor:
        graph = Graph()
        return comfy.latents(graph, WORKFLOWS[workflow](graph, load(graph)))

    expected = latents(load_reference)
    assert distance(latents(lambda graph: load_parallel(graph, PLANS[plan])), expected) <= FP32_TOLERANCE
