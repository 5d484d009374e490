"""The same inputs for diffusers' Qwen-Image and for a ComfyUI workflow.

Sizes are multiples of 32 pixels: for odd numbers of patches diffusers and ComfyUI centre the positions differently, and
ComfyUI's count. Does not know: whose MODEL the workflow is given.
"""

from __future__ import annotations

import inspect
from itertools import pairwise
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)

from tests.comfyui.graphs import Graph, Node

NOISE_SEED, TEXT_SEED, REFERENCE_SEED, TOKENS, BATCH = 5, 7, 600, 17, 2
SIGMAS = [1.0, 0.8, 0.55, 0.3, 0.0]
WIDTH, HEIGHT = 96, 160
REFERENCES = ((64, 96), (96, 64))
"""None larger than the target: diffusers starts the text behind the largest image, ComfyUI behind the target."""


def pipeline_latents(folder: Path) -> torch.Tensor:
    """What QwenImagePipeline makes: final latents [B, 16, 1, H/8, W/8] in raw VAE space, as ComfyUI has them."""
    pipe = QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler.from_pretrained(folder / "scheduler"),
        transformer=QwenImageTransformer2DModel.from_pretrained(folder / "transformer"),
        vae=None,
        text_encoder=None,
        tokenizer=None,
    )
    pipe.set_progress_bar_config(disable=True)
    made = pipe(
        prompt_embeds=_text(),
        num_images_per_prompt=BATCH,
        latents=_packed(_noise()),
        sigmas=SIGMAS[:-1],
        num_inference_steps=len(SIGMAS) - 1,
        true_cfg_scale=1.0,
        width=WIDTH,
        height=HEIGHT,
        output_type="latent",
    ).images
    return _raw(made)


def edited_latents(folder: Path) -> torch.Tensor:
    """As pipeline_latents, with references in the prompt: Euler steps over diffusers' transformer itself."""
    model = QwenImageTransformer2DModel.from_pretrained(folder / "transformer")
    images = [_packed(_normalised(_reference(seed))) for seed in range(len(REFERENCES))]
    shapes = [(1, height // 16, width // 16) for width, height in ((WIDTH, HEIGHT), *REFERENCES)]
    latents = _packed(_noise())
    for sigma, following in pairwise(SIGMAS):
        with torch.inference_mode():
            velocity = model(
                hidden_states=torch.cat([latents, *(image.repeat(BATCH, 1, 1) for image in images)], dim=1),
                encoder_hidden_states=_text().repeat(BATCH, 1, 1),
                timestep=torch.full((BATCH,), sigma),
                img_shapes=[shapes] * BATCH,
                return_dict=False,
            )[0]
        latents = latents + (following - sigma) * velocity[:, : latents.shape[1]]
    return _raw(latents)


def workflow(graph: Graph, model: Node, *, references: bool) -> Node:
    """The workflow that must make the same latents."""
    text = graph.add("TestConditioning", tokens=TOKENS, seed=TEXT_SEED)
    for index, (width, height) in enumerate(REFERENCES if references else ()):
        latent = graph.add("TestLatent", width=width, height=height, seed=REFERENCE_SEED + index, frames=1)
        text = graph.add("ReferenceLatent", conditioning=text, latent=latent)
    return graph.add(
        "SamplerCustomAdvanced",
        noise=graph.add("RandomNoise", noise_seed=NOISE_SEED),
        guider=graph.add("BasicGuider", model=model, conditioning=text),
        sampler=graph.add("KSamplerSelect", sampler_name="euler"),
        sigmas=graph.add("TestSigmas", sigmas=", ".join(map(str, SIGMAS))),
        latent_image=graph.add("EmptySD3LatentImage", width=WIDTH, height=HEIGHT, batch_size=BATCH),
    )


def _text() -> torch.Tensor:
    return torch.randn(1, TOKENS, 32, generator=torch.Generator().manual_seed(TEXT_SEED))


def _noise() -> torch.Tensor:
    return torch.randn(BATCH, 16, 1, HEIGHT // 8, WIDTH // 8, generator=torch.manual_seed(NOISE_SEED))


def _reference(index: int) -> torch.Tensor:
    width, height = REFERENCES[index]
    generator = torch.Generator().manual_seed(REFERENCE_SEED + index)
    return 3 * torch.randn(1, 16, 1, height // 8, width // 8, generator=generator)


def _packed(latents: torch.Tensor) -> torch.Tensor:
    """[B, 16, 1, h, w] -> patches [B, h/2 * w/2, 64]."""
    batch, channels, _, height, width = latents.shape
    patches = latents.view(batch, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return patches.reshape(batch, height * width // 4, channels * 4)


def _statistics() -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation of the VAE's channels: what its class has by default."""
    defaults = inspect.signature(AutoencoderKLQwenImage.__init__).parameters
    mean, std = (torch.tensor(defaults[name].default) for name in ("latents_mean", "latents_std"))
    return mean.view(1, 16, 1, 1, 1), std.view(1, 16, 1, 1, 1)


def _normalised(latents: torch.Tensor) -> torch.Tensor:
    mean, std = _statistics()
    return (latents - mean) / std


def _raw(packed: torch.Tensor) -> torch.Tensor:
    mean, std = _statistics()
    patches = packed.view(BATCH, HEIGHT // 16, WIDTH // 16, 16, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return patches.reshape(BATCH, 16, 1, HEIGHT // 8, WIDTH // 8) * std + mean
