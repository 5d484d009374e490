"""The workflows of Qwen-Image's parity tests: prompts with images in them, padded text, everything behind the loader.

Does not know: which MODEL it is given.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.comfyui.graphs import Graph, Node
from tests.comfyui.harness import Comfy
from tests.comfyui.parity import load_parallel
from tests.comfyui.workflows import EASY_CACHE, Case, empty_latent, sample

REFERENCE_METHOD_NODE = "FluxKontextMultiReferenceLatentMethod"


@dataclass(frozen=True, kw_only=True)
class QwenCase(Case):
    """What a Case has, and an edit's images."""

    model: str = "tiny-qwen"
    references: tuple[tuple[int, int], ...] = ()
    """Width and height in pixels of each image that the prompts refer to."""
    negative_references: bool = True
    method: str | None = None
    """How the images are placed; None: no node says so."""
    padding: int = 0
    """How many of the negative prompt's tokens a mask hides."""
    masked: bool = False
    """Inpainting by mask over an existing latent."""
    easy_cache: bool = False
    shift: float | None = None
    """As in the stock workflow, ModelSamplingAuraFlow with it and CFGNorm; None: neither node."""


def load_ours(graph: Graph, plan: dict[str, object], case: QwenCase, *, dtype: str = "float32") -> Node:
    return load_parallel(graph, plan, model=case.model, dtype=dtype)


def load_comfyuis(graph: Graph, case: QwenCase, *, dtype: str = "float32") -> Node:
    return graph.add("TestReferenceQwen", model_name=case.model, dtype=dtype)


def edit(graph: Graph, model: Node, case: QwenCase, *, counter: str | None = None) -> Node:
    """KSampler, with whatever the case asks for in front of it; `counter` notes the calls that reach the model."""
    positive = graph.add("TestConditioning", tokens=case.tokens, seed=100)
    negative = graph.add("TestConditioning", tokens=case.negative_tokens, seed=200, padding=case.padding)
    positive = _with_references(graph, positive, case)
    negative = _with_references(graph, negative, case) if case.negative_references else negative
    if case.shift is not None:
        model = graph.add("ModelSamplingAuraFlow", model=model, shift=case.shift)
        model = graph.add("CFGNorm", model=model, strength=0.9)
    if case.easy_cache:
        model = graph.add("EasyCache", model=model, **EASY_CACHE)
    if counter is not None:
        model = graph.add("TestCountCalls", model=model, counter=counter)
    latent = _masked_latent(graph, case) if case.masked else empty_latent(graph, case)
    return sample(graph, model, case, positive, negative, latent)


def _with_references(graph: Graph, conditioning: Node, case: QwenCase) -> Node:
    for seed, (width, height) in enumerate(case.references, start=600):
        latent = graph.add("TestLatent", width=width, height=height, seed=seed, frames=1)
        conditioning = graph.add("ReferenceLatent", conditioning=conditioning, latent=latent)
    if case.method is not None:
        conditioning = graph.add(REFERENCE_METHOD_NODE, conditioning=conditioning, reference_latents_method=case.method)
    return conditioning


def _masked_latent(graph: Graph, case: QwenCase) -> Node:
    latent = graph.add("TestLatent", width=case.width, height=case.height, seed=400, batch=case.batch)
    mask = graph.add("TestMask", width=case.width, height=case.height, seed=500)
    return graph.add("SetLatentNoiseMask", samples=latent, mask=mask)


def has_timestep_zero(comfy: Comfy) -> bool:
    """Whether this ComfyUI runs Qwen-Image-Edit-2511 (0.3.75 does not)."""
    return "index_timestep_zero" in str(comfy.client.get(f"/object_info/{REFERENCE_METHOD_NODE}"))


TEXT_TO_IMAGE = (
    QwenCase(name="plain", steps=4),
    QwenCase(name="one-token-of-text", tokens=1, steps=4),
    QwenCase(name="cfg-3-text-300-96x160", cfg=3.0, tokens=300, negative_tokens=300, width=96, height=160, steps=4),
    QwenCase(name="odd-tokens-72x56-batch-3", width=72, height=56, batch=3, tokens=13, cfg=2.0, steps=4),
    QwenCase(name="odd-latent-136x72", width=136, height=72, tokens=5, cfg=3.0, sampler="dpmpp_2m", steps=4),
    QwenCase(name="cfg-3-batch-2-uneven", cfg=3.0, batch=2, tokens=17, negative_tokens=90, steps=4),
    QwenCase(name="padded-text", cfg=3.0, tokens=9, negative_tokens=17, padding=6, batch=2, steps=4),
    QwenCase(name="masked", masked=True, denoise=0.6, steps=4, cfg=3.0, negative_tokens=3, batch=2, width=72),
    QwenCase(name="shift-and-cfg-norm", shift=3.1, cfg=2.5, negative_tokens=11, steps=4),
    QwenCase(name="easy-cache", easy_cache=True, steps=8, cfg=3.0, negative_tokens=7, batch=2),
)

EDITS = (
    QwenCase(name="one-reference", references=((48, 80),), cfg=3.0, steps=4),
    QwenCase(name="larger-reference-batch-2", references=((136, 96),), cfg=3.0, batch=2, width=72, steps=4),
    QwenCase(
        name="reference-in-one-prompt", references=((64, 64),), negative_references=False, cfg=3.0, tokens=7, steps=4
    ),
    QwenCase(name="two-references", references=((48, 80), (72, 56)), cfg=3.0, negative_tokens=5, steps=4),
    QwenCase(name="two-by-offset", references=((48, 80), (72, 56)), method="offset", cfg=3.0, steps=4),
    QwenCase(
        name="three-by-uxo-batch-2", references=((64, 64), (80, 48), (72, 104)), method="uxo/uno", batch=2, steps=4
    ),
    QwenCase(name="masked-edit", references=((64, 64),), masked=True, denoise=0.7, cfg=3.0, steps=4),
)

TIMESTEP_ZERO = (
    QwenCase(name="2511-without-references", model="tiny-qwen-2511", cfg=3.0, steps=4),
    QwenCase(name="2511-two-references", model="tiny-qwen-2511", references=((48, 80), (72, 56)), cfg=3.0, steps=4),
    QwenCase(
        name="2511-reference-in-one-prompt",
        model="tiny-qwen-2511",
        references=((72, 56),),
        negative_references=False,
        cfg=3.0,
        batch=2,
        steps=4,
    ),
    QwenCase(name="2511-by-index", model="tiny-qwen-2511", references=((48, 80),), method="index", cfg=3.0, steps=4),
    QwenCase(name="by-timestep-zero", references=((48, 80),), method="index_timestep_zero", cfg=3.0, steps=4),
)
"""Of versions of ComfyUI that have it: references at time zero, by the model's config or by the prompt."""
