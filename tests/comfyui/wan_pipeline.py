"""The same inputs for diffusers' WanPipeline and for a ComfyUI workflow.

Does not know: whose MODELs the workflow is given.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel

from tests.comfyui.graphs import Graph, Node

NOISE_SEED, TEXT_SEEDS, TOKENS, STEPS, CFG = 5, (7, 8), 31, 5, 3.0
FRAMES, HEIGHT, WIDTH = 9, 48, 80
BOUNDARY = 0.95
"""Times from this share of the first one on belong to the first expert: 3 of the steps."""


def sigmas(folder: Path) -> list[float]:
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(folder / "scheduler")
    scheduler.set_timesteps(STEPS)
    values: list[float] = scheduler.sigmas.tolist()
    return values


def pipeline_latents(folder: Path, *, experts: int) -> torch.Tensor:
    """What WanPipeline makes: [1, 16, frames, height, width] in raw VAE space, as a ComfyUI LATENT has them."""
    names = ["transformer", "transformer_2"][:experts]
    models = {name: WanTransformer3DModel.from_pretrained(folder / name) for name in names}
    pipe = WanPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler.from_pretrained(folder / "scheduler"),
        vae=None,
        text_encoder=None,
        tokenizer=None,
        boundary_ratio=BOUNDARY if experts == 2 else None,
        **models,
    )
    pipe.set_progress_bar_config(disable=True)
    positive, negative = (
        torch.randn(1, TOKENS, 32, generator=torch.Generator().manual_seed(seed)) for seed in TEXT_SEEDS
    )
    shape = (1, 16, (FRAMES - 1) // 4 + 1, HEIGHT // 8, WIDTH // 8)
    made = pipe(
        prompt_embeds=positive,
        negative_prompt_embeds=negative,
        num_frames=FRAMES,
        height=HEIGHT,
        width=WIDTH,
        num_inference_steps=STEPS,
        guidance_scale=CFG,
        latents=torch.randn(shape, generator=torch.manual_seed(NOISE_SEED)),
        output_type="latent",
    ).frames
    defaults = inspect.signature(AutoencoderKLWan.__init__).parameters
    mean, std = (torch.tensor(defaults[f"latents_{name}"].default).view(1, 16, 1, 1, 1) for name in ("mean", "std"))
    return made * std + mean


def pipeline_workflow(graph: Graph, models: tuple[Node, ...], folder: Path) -> Node:
    """The workflow that must make the same latents."""
    positive, negative = (graph.add("TestConditioning", tokens=TOKENS, seed=seed, pooled=0) for seed in TEXT_SEEDS)
    steps = sigmas(folder)
    size = {"width": WIDTH, "height": HEIGHT, "length": FRAMES, "batch_size": 1}
    latent: Any = graph.add("EmptyHunyuanLatentVideo", **size)
    split = sum(sigma >= BOUNDARY for sigma in steps) if len(models) == 2 else STEPS
    parts = [steps[: split + 1], steps[split:]][: len(models)]
    for index, (model, part) in enumerate(zip(models, parts, strict=True)):
        noise = {"noise_seed": NOISE_SEED}
        latent = graph.add(
            "SamplerCustomAdvanced",
            noise=graph.add("RandomNoise", **noise) if index == 0 else graph.add("DisableNoise"),
            guider=graph.add("CFGGuider", model=model, positive=positive, negative=negative, cfg=CFG),
            sampler=graph.add("KSamplerSelect", sampler_name="euler"),
            sigmas=graph.add("TestSigmas", sigmas=", ".join(map(repr, part))),
            latent_image=latent,
        )
    return latent
