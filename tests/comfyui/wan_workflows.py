"""The workflows of the Wan parity tests: everything behind the loader, as a user of ComfyUI builds it.

Does not know: which MODEL it is given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.comfyui.graphs import Graph, Node
from tests.comfyui.workflows import EASY_CACHE, sample, sample_part


@dataclass(frozen=True, kw_only=True)
class WanCase:
    """One set of settings. Sizes in pixels, `length` in frames, text lengths in tokens."""

    name: str
    model: str = "wan-t2v"
    workflow: str = "text_to_video"
    width: int = 64
    height: int = 64
    length: int = 9
    batch: int = 1
    tokens: int = 17
    negative_tokens: int = 17
    cfg: float = 3.0
    sampler: str = "euler"
    steps: int = 4
    denoise: float = 1.0
    seed: int = 11
    image_tokens: int = 257
    """Of the CLIP vision output; 0: none."""


def prompts(graph: Graph, case: WanCase) -> tuple[Node, Node]:
    """The positive and the negative conditioning, without pooled outputs."""
    positive = graph.add("TestConditioning", tokens=case.tokens, seed=100, pooled=0)
    negative = graph.add("TestConditioning", tokens=case.negative_tokens, seed=200, pooled=0)
    return positive, negative


def _size(case: WanCase) -> dict[str, int]:
    return {"width": case.width, "height": case.height, "length": case.length, "batch_size": case.batch}


def _picture(graph: Graph, width: int = 64, height: int = 64, frames: int = 1) -> Node:
    return graph.add("EmptyImage", width=width, height=height, batch_size=frames, color=0)


def _seen(graph: Graph, case: WanCase, seed: int) -> Node | None:
    return (
        graph.add("TestClipVision", tokens=case.image_tokens, seed=seed, channels=1280) if case.image_tokens else None
    )


def empty_latent(graph: Graph, case: WanCase) -> Node:
    return graph.add("EmptyHunyuanLatentVideo", **_size(case))


def text_to_video(graph: Graph, model: Node, case: WanCase) -> Node:
    return sample(graph, model, case, *prompts(graph, case), empty_latent(graph, case))


def distributed(graph: Graph, model: Node, case: WanCase) -> Node:
    """Distributed Sampler, which is KSampler for a stock MODEL."""
    positive, negative = prompts(graph, case)
    latent = empty_latent(graph, case)
    settings = {"seed": case.seed, "steps": case.steps, "cfg": case.cfg, "sampler_name": case.sampler}
    conditions = {"positive": positive, "negative": negative, "latent_image": latent}
    more = {"scheduler": "simple", "denoise": 1.0}
    return graph.add("PD_DistributedSampler", model=model, **conditions, **settings, **more)


def shifted(graph: Graph, model: Node, case: WanCase) -> Node:
    """ModelSamplingSD3, as the stock Wan workflows have it."""
    return text_to_video(graph, graph.add("ModelSamplingSD3", model=model, shift=5.0), case)


def image_to_video(graph: Graph, model: Node, case: WanCase) -> Node:
    """A start image in concatenated channels and, for Wan 2.1, as a CLIP vision output."""
    positive, negative = prompts(graph, case)
    made = graph.add(
        "WanImageToVideo",
        positive=positive,
        negative=negative,
        vae=graph.add("TestVideoVAE", channels=16, scale=8),
        clip_vision_output=_seen(graph, case, 300),
        start_image=_picture(graph),
        **_size(case),
    )
    return sample(graph, model, case, made[0], made[1], made[2])


def image_in_one_prompt(graph: Graph, model: Node, case: WanCase) -> Node:
    """The positive prompt has the image, the negative has none."""
    positive, negative = prompts(graph, case)
    vae = graph.add("TestVideoVAE", channels=16, scale=8)
    settings: dict[str, Any] = {"vae": vae, "clip_vision_output": _seen(graph, case, 300), **_size(case)}
    pictures = {"positive": positive, "negative": positive, "start_image": _picture(graph)}
    made = graph.add("WanImageToVideo", **pictures, **settings)
    return sample(graph, model, case, made[0], negative, made[2])


def no_start_image(graph: Graph, model: Node, case: WanCase) -> Node:
    """ComfyUI fills the concatenated channels with zeros."""
    positive, negative = prompts(graph, case)
    vae = graph.add("TestVideoVAE", channels=16, scale=8)
    settings: dict[str, Any] = {"vae": vae, "clip_vision_output": _seen(graph, case, 300), **_size(case)}
    made = graph.add("WanImageToVideo", positive=positive, negative=negative, **settings)
    return sample(graph, model, case, made[0], made[1], made[2])


def first_last_frame(graph: Graph, model: Node, case: WanCase) -> Node:
    positive, negative = prompts(graph, case)
    made = graph.add(
        "WanFirstLastFrameToVideo",
        positive=positive,
        negative=negative,
        vae=graph.add("TestVideoVAE", channels=16, scale=8),
        clip_vision_start_image=_seen(graph, case, 300),
        clip_vision_end_image=_seen(graph, case, 301),
        start_image=_picture(graph),
        end_image=_picture(graph),
        **_size(case),
    )
    return sample(graph, model, case, made[0], made[1], made[2])


def start_image_5b(graph: Graph, model: Node, case: WanCase) -> Node:
    """The start image lies in the latent; a noise mask holds it, so that its frames have time 0."""
    vae = graph.add("TestVideoVAE", channels=48, scale=16)
    latent = graph.add("Wan22ImageToVideoLatent", vae=vae, start_image=_picture(graph), **_size(case))
    return sample(graph, model, case, *prompts(graph, case), latent)


def empty_5b(graph: Graph, model: Node, case: WanCase) -> Node:
    vae = graph.add("TestVideoVAE", channels=48, scale=16)
    latent = graph.add("Wan22ImageToVideoLatent", vae=vae, **_size(case))
    return sample(graph, model, case, *prompts(graph, case), latent)


def subjects(graph: Graph, model: Node, case: WanCase) -> Node:
    """Phantom: pictures of subjects as further frames of the video that is denoised."""
    positive, negative = prompts(graph, case)
    made = graph.add(
        "WanPhantomSubjectToVideo",
        positive=positive,
        negative=negative,
        vae=graph.add("TestVideoVAE", channels=16, scale=8),
        images=_picture(graph, frames=2),
        **_size(case),
    )
    return sample(graph, model, case, made[0], made[1], made[3])


def scaled_positions(graph: Graph, model: Node, case: WanCase) -> Node:
    scales = {"scale_x": 1.5, "shift_x": 2.0, "scale_y": 0.5, "shift_y": -1.0, "scale_t": 2.0, "shift_t": 0.5}
    return text_to_video(graph, graph.add("ScaleROPE", model=model, **scales), case)


def context_windows(graph: Graph, model: Node, case: WanCase) -> Node:
    """Long videos in overlapping windows of frames."""
    windows = {
        "context_length": 9,
        "context_overlap": 4,
        "context_schedule": "standard_static",
        "context_stride": 1,
        "closed_loop": False,
        "fuse_method": "pyramid",
        # what came after 0.3.75, which ignores it
        "retain_first_frame": False,
        "latent_retain_index_list": "",
        "cond_retain_index_list": "",
        "freenoise": False,
        "causal_window_fix": False,
        "split_conds_to_windows": False,
    }
    return text_to_video(graph, graph.add("WanContextWindowsManual", model=model, **windows), case)


def masked(graph: Graph, model: Node, case: WanCase) -> Node:
    """Inpainting by a soft mask over an existing video."""
    positive, negative = prompts(graph, case)
    vae = graph.add("TestVideoVAE", channels=16, scale=8)
    latent = graph.add("VAEEncode", vae=vae, pixels=_picture(graph, case.width, case.height, case.length))
    mask = graph.add("TestMask", width=case.width, height=case.height, seed=500)
    latent = graph.add("SetLatentNoiseMask", samples=latent, mask=mask)
    return sample(graph, model, case, positive, negative, latent)


def masked_5b(graph: Graph, model: Node, case: WanCase) -> Node:
    """A soft mask over a start image: every frame has a time of its own between 0 and the step's."""
    vae = graph.add("TestVideoVAE", channels=48, scale=16)
    latent = graph.add("Wan22ImageToVideoLatent", vae=vae, start_image=_picture(graph), **_size(case))
    mask = graph.add("TestMask", width=case.width, height=case.height, seed=500)
    latent = graph.add("SetLatentNoiseMask", samples=latent, mask=mask)
    return sample(graph, model, case, *prompts(graph, case), latent)


def easy_cache(graph: Graph, model: Node, case: WanCase) -> Node:
    """ComfyUI skips the transformer in steps that change little.

    The shift is set here too: EasyCache reads the sampling of the run before where a workflow sets none of its own, so
    that its picture, with any MODEL, would depend on what ran before.
    """
    model = graph.add("ModelSamplingSD3", model=model, shift=5.0)
    return text_to_video(graph, graph.add("EasyCache", model=model, **EASY_CACHE), case)


def two_experts(graph: Graph, models: tuple[Node, Node], case: WanCase) -> Node:
    """Wan 2.2: the first half of the steps by one transformer, the second by the other."""
    both, middle = prompts(graph, case), case.steps // 2
    high = sample_part(graph, models[0], case, both, empty_latent(graph, case), 0, middle, first=True)
    return sample_part(graph, models[1], case, both, high, middle, 10000, first=False)


WORKFLOWS = {
    workflow.__name__: workflow
    for workflow in (
        text_to_video,
        distributed,
        shifted,
        image_to_video,
        image_in_one_prompt,
        no_start_image,
        first_last_frame,
        start_image_5b,
        empty_5b,
        subjects,
        scaled_positions,
        context_windows,
        masked,
        masked_5b,
        easy_cache,
    )
}

I2V = {"model": "wan-i2v", "workflow": "image_to_video"}
I2V_22 = {"model": "wan-i2v-2.2", "workflow": "image_to_video"}
FLF = {"model": "wan-flf2v", "workflow": "first_last_frame"}
FIVE_B = {"model": "wan-5b", "workflow": "start_image_5b"}

CASES = (
    WanCase(name="t2v"),
    WanCase(name="t2v-distributed-batch-3", workflow="distributed", batch=3, negative_tokens=5),
    WanCase(name="t2v-one-frame", length=1, cfg=1.0),
    WanCase(name="t2v-odd-72x56-uneven-1-600", width=72, height=56, length=13, tokens=1, negative_tokens=600),
    WanCase(name="t2v-odd-batch-2-uneven-77", width=136, height=72, length=17, batch=2, tokens=77, negative_tokens=5),
    WanCase(name="t2v-shifted-dpmpp", workflow="shifted", sampler="dpmpp_2m", tokens=512, negative_tokens=512),
    WanCase(name="t2v-scaled-positions", workflow="scaled_positions", width=72, negative_tokens=3),
    WanCase(name="t2v-easy-cache", workflow="easy_cache", steps=8, negative_tokens=7),
    WanCase(name="t2v-context-windows", workflow="context_windows", length=25, negative_tokens=5),
    WanCase(name="t2v-masked", workflow="masked", negative_tokens=5),
    WanCase(name="t2v-subjects", workflow="subjects", width=80, batch=2),
    WanCase(name="i2v-77", **I2V, tokens=77, negative_tokens=77),
    WanCase(name="i2v-uneven-batch-2", **I2V, tokens=600, negative_tokens=1, width=80, height=48, length=13, batch=2),
    WanCase(name="i2v-no-clip-vision", **I2V, image_tokens=0, negative_tokens=9),
    WanCase(name="i2v-image-in-one-prompt", model="wan-i2v", workflow="image_in_one_prompt", width=80),
    WanCase(name="i2v-no-start-image", model="wan-i2v", workflow="no_start_image", length=5),
    WanCase(name="flf2v", **FLF, image_tokens=6, negative_tokens=5),
    WanCase(name="flf2v-more-tokens-than-positions", **FLF, image_tokens=9),
    WanCase(name="i2v-2.2", **I2V_22, image_tokens=0, negative_tokens=600),
    WanCase(name="i2v-2.2-clip-vision-unread", **I2V_22, batch=2, width=80, length=13),
    WanCase(name="5b-start-image", **FIVE_B, width=160, height=96, negative_tokens=5),
    WanCase(name="5b-start-image-batch-2", **FIVE_B, width=96, height=64, length=17, batch=2, sampler="uni_pc"),
    WanCase(name="5b-masked", model="wan-5b", workflow="masked_5b", width=96, negative_tokens=3),
    WanCase(name="5b-empty", model="wan-5b", workflow="empty_5b", width=160, height=96, tokens=77, negative_tokens=77),
)
