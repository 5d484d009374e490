"""The workflows of the parity tests: everything behind the loader, as a user of ComfyUI builds it.

`Case` names the settings; `WORKFLOWS` are functions (graph, model, case) -> LATENT node. The same function serves the
reference MODEL and ours, since only the loader differs. Does not know: which MODEL it is given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from tests.comfyui.graphs import Graph, Node

EASY_CACHE: dict[str, Any] = {"reuse_threshold": 2.0, "start_percent": 0.1, "end_percent": 0.95, "verbose": False}
"""Skips about half the steps of the tiny random model."""


class Sampling(Protocol):
    """What the samplers take of a case of any family."""

    seed: int
    steps: int
    cfg: float
    sampler: str
    denoise: float


@dataclass(frozen=True, kw_only=True)
class Case:
    """One set of settings. Sizes in pixels, text lengths in tokens."""

    name: str
    workflow: str = "ksampler"
    width: int = 64
    height: int = 64
    batch: int = 1
    tokens: int = 17
    negative_tokens: int = 17
    cfg: float = 1.0
    sampler: str = "euler"
    steps: int = 3
    guidance: float | None = None
    """None: no FluxGuidance node, so ComfyUI's own 3.5."""
    disable_guidance: bool = False
    denoise: float = 1.0
    seed: int = 11


def prompts(graph: Graph, case: Case) -> tuple[Node, Node]:
    """The positive and the negative conditioning."""
    positive = graph.add("TestConditioning", tokens=case.tokens, seed=100)
    negative = graph.add("TestConditioning", tokens=case.negative_tokens, seed=200)
    if case.guidance is not None:
        positive = graph.add("FluxGuidance", conditioning=positive, guidance=case.guidance)
        negative = graph.add("FluxGuidance", conditioning=negative, guidance=case.guidance)
    if case.disable_guidance:
        positive = graph.add("FluxDisableGuidance", conditioning=positive)
        negative = graph.add("FluxDisableGuidance", conditioning=negative)
    return positive, negative


def empty_latent(graph: Graph, case: Case) -> Node:
    # EmptyLatentImage takes any size that 8 divides (EmptySD3LatentImage: 16); ComfyUI gives it Flux's 16 channels.
    return graph.add("EmptyLatentImage", width=case.width, height=case.height, batch_size=case.batch)


def sample(graph: Graph, model: Node, case: Sampling, positive: Node, negative: Node, latent: Node) -> Node:
    """KSampler with the settings of `case`."""
    return graph.add(
        "KSampler",
        model=model,
        positive=positive,
        negative=negative,
        latent_image=latent,
        seed=case.seed,
        steps=case.steps,
        cfg=case.cfg,
        sampler_name=case.sampler,
        scheduler="simple",
        denoise=case.denoise,
    )


def sample_part(
    graph: Graph,
    model: Node,
    case: Sampling,
    prompts: tuple[Node, Node],
    latent: Node,
    start: int,
    end: int,
    *,
    first: bool,
) -> Node:
    """KSamplerAdvanced for some of the steps; all but the first part go on from a noisy latent."""
    return graph.add(
        "KSamplerAdvanced",
        model=model,
        positive=prompts[0],
        negative=prompts[1],
        latent_image=latent,
        add_noise="enable" if first else "disable",
        return_with_leftover_noise="enable" if first else "disable",
        noise_seed=case.seed,
        steps=case.steps,
        cfg=case.cfg,
        sampler_name=case.sampler,
        scheduler="simple",
        start_at_step=start,
        end_at_step=end,
    )


def ksampler(graph: Graph, model: Node, case: Case) -> Node:
    return sample(graph, model, case, *prompts(graph, case), empty_latent(graph, case))


def ksampler_advanced(graph: Graph, model: Node, case: Case) -> Node:
    """Two KSamplers that share the steps: the second goes on from the first one's noisy latent."""
    both = prompts(graph, case)
    noisy = sample_part(graph, model, case, both, empty_latent(graph, case), 0, 2, first=True)
    return sample_part(graph, model, case, both, noisy, 2, 10000, first=False)


def sampler_custom(graph: Graph, model: Node, case: Case, guider: Node) -> Node:
    """SamplerCustomAdvanced with the settings of `case`."""
    return graph.add(
        "SamplerCustomAdvanced",
        noise=graph.add("RandomNoise", noise_seed=case.seed),
        guider=guider,
        sampler=graph.add("KSamplerSelect", sampler_name=case.sampler),
        sigmas=graph.add("BasicScheduler", model=model, scheduler="beta", steps=case.steps, denoise=case.denoise),
        latent_image=empty_latent(graph, case),
    )


def _shifted(graph: Graph, model: Node, case: Case) -> Node:
    size: dict[str, Any] = {"width": case.width, "height": case.height}
    return graph.add("ModelSamplingFlux", model=model, max_shift=1.15, base_shift=0.5, **size)


def basic_guider(graph: Graph, model: Node, case: Case) -> Node:
    """The stock Flux workflow: ModelSamplingFlux, FluxGuidance, BasicGuider, BasicScheduler, SamplerCustomAdvanced."""
    positive, _ = prompts(graph, case)
    model = _shifted(graph, model, case)
    guider = graph.add("BasicGuider", model=model, conditioning=positive)
    return sampler_custom(graph, model, case, guider)


def cfg_guider(graph: Graph, model: Node, case: Case) -> Node:
    positive, negative = prompts(graph, case)
    guider = graph.add("CFGGuider", model=model, positive=positive, negative=negative, cfg=case.cfg)
    return sampler_custom(graph, model, case, guider)


def dual_cfg_guider(graph: Graph, model: Node, case: Case) -> Node:
    """Three conditions, three lengths, every step."""
    positive, negative = prompts(graph, case)
    middle = graph.add("TestConditioning", tokens=case.tokens + 3, seed=300)
    guider = graph.add(
        "DualCFGGuider",
        model=model,
        cond1=positive,
        cond2=middle,
        negative=negative,
        cfg_conds=case.cfg,
        cfg_cond2_negative=case.cfg,
        style="regular",
    )
    return sampler_custom(graph, model, case, guider)


def masked(graph: Graph, model: Node, case: Case) -> Node:
    """Inpainting by mask: SetLatentNoiseMask over an existing latent."""
    size: dict[str, Any] = {"width": case.width, "height": case.height}
    latent = graph.add("TestLatent", **size, seed=400, batch=case.batch)
    mask = graph.add("TestMask", **size, seed=500)
    latent = graph.add("SetLatentNoiseMask", samples=latent, mask=mask)
    return sample(graph, model, case, *prompts(graph, case), latent)


def reference_latent(graph: Graph, model: Node, case: Case) -> Node:
    """An image in the prompt, as Kontext takes it."""
    positive, negative = prompts(graph, case)
    latent = graph.add("TestLatent", width=48, height=80, seed=600)
    positive = graph.add("ReferenceLatent", conditioning=positive, latent=latent)
    return sample(graph, model, case, positive, negative, empty_latent(graph, case))


def indexed_references(graph: Graph, model: Node, case: Case) -> Node:
    """Two images in both prompts, told apart by index."""
    latents = [graph.add("TestLatent", width=size, height=64, seed=size) for size in (48, 80)]

    def with_references(conditioning: Node) -> Node:
        for latent in latents:
            conditioning = graph.add("ReferenceLatent", conditioning=conditioning, latent=latent)
        method = "FluxKontextMultiReferenceLatentMethod"
        return graph.add(method, conditioning=conditioning, reference_latents_method="index")

    positive, negative = map(with_references, prompts(graph, case))
    return sample(graph, model, case, positive, negative, empty_latent(graph, case))


def easy_cache(graph: Graph, model: Node, case: Case) -> Node:
    """ComfyUI skips the transformer in steps that change little."""
    model = graph.add("EasyCache", model=model, **EASY_CACHE)
    return sample(graph, model, case, *prompts(graph, case), empty_latent(graph, case))


WORKFLOWS = {
    workflow.__name__: workflow
    for workflow in (
        ksampler,
        ksampler_advanced,
        basic_guider,
        cfg_guider,
        dual_cfg_guider,
        masked,
        reference_latent,
        indexed_references,
        easy_cache,
    )
}

CASES = (
    Case(name="plain"),
    Case(name="one-token-of-text", tokens=1),
    Case(name="text-77-batch-2", tokens=77, batch=2),
    Case(name="text-511-96x160", tokens=511, width=96, height=160),
    Case(name="text-512-guidance", tokens=512, guidance=1.5),
    Case(name="odd-tokens-72x56-batch-3", width=72, height=56, batch=3, tokens=13),
    Case(name="odd-latent-136x72", width=136, height=72, tokens=5, guidance=6.0),
    Case(name="cfg-3", cfg=3.0, sampler="dpmpp_2m", steps=4),
    Case(name="cfg-3-uneven-prompts", cfg=3.0, tokens=77, negative_tokens=1),
    Case(name="cfg-3-batch-2-uneven", cfg=3.0, batch=2, tokens=17, negative_tokens=511, guidance=2.0),
    Case(name="cfg-3-batch-3", cfg=3.0, batch=3, width=72, height=56, tokens=7, negative_tokens=9),
    Case(name="two-ksamplers", workflow="ksampler_advanced", steps=4, cfg=3.0, sampler="dpmpp_2m"),
    Case(name="basic-guider", workflow="basic_guider", width=96, height=96, guidance=3.5, tokens=256),
    Case(name="cfg-guider", workflow="cfg_guider", cfg=3.0, negative_tokens=5, batch=2),
    Case(name="dual-cfg-guider", workflow="dual_cfg_guider", cfg=3.0, negative_tokens=4),
    Case(name="masked", workflow="masked", denoise=0.6, steps=4, batch=2),
    Case(name="masked-cfg-3", workflow="masked", denoise=0.6, steps=4, cfg=3.0, negative_tokens=3, width=72),
    Case(name="reference-latent", workflow="reference_latent", guidance=2.5),
    Case(name="reference-latent-cfg-3", workflow="reference_latent", cfg=3.0, batch=2, width=72, height=56),
    Case(name="indexed-references", workflow="indexed_references", cfg=3.0, negative_tokens=5, tokens=31),
    Case(name="guidance-off", disable_guidance=True, batch=2, width=96, tokens=33),
    Case(name="easy-cache", workflow="easy_cache", steps=8),
    Case(name="easy-cache-cfg-3", workflow="easy_cache", steps=8, cfg=3.0, negative_tokens=7, batch=2),
)
