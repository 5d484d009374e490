"""The same inputs for diffusers' FluxPipeline and for a ComfyUI workflow.

Does not know: whose MODEL the workflow is given.
"""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

from tests.comfyui.graphs import Graph, Node

NOISE_SEED, TEXT_SEED, TOKENS = 5, 7, 17


def pipeline_latents(
    folder: Path,
    *,
    sigmas: list[float],
    guidance: float,
    width: int,
    height: int,
    batch: int,
) -> torch.Tensor:
    """What FluxPipeline makes: final latents [B, 16, H/8, W/8] in raw VAE space, as a ComfyUI LATENT has them.

    sigmas: falling, the last one 0.
    """
    pipe = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler.from_pretrained(folder / "scheduler"),
        transformer=FluxTransformer2DModel.from_pretrained(folder / "transformer"),
        vae=None,
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
    )
    pipe.set_progress_bar_config(disable=True)
    rows, columns = height // 16, width // 16
    noise = torch.randn(batch, 16, height // 8, width // 8, generator=torch.manual_seed(NOISE_SEED))
    packed = noise.view(batch, 16, rows, 2, columns, 2).permute(0, 2, 4, 1, 3, 5).reshape(batch, rows * columns, 64)
    made = pipe(
        prompt_embeds=torch.randn(1, TOKENS, 32, generator=torch.Generator().manual_seed(TEXT_SEED)),
        pooled_prompt_embeds=torch.randn(1, 16, generator=torch.Generator().manual_seed(TEXT_SEED + 1)),
        num_images_per_prompt=batch,
        latents=packed,
        sigmas=sigmas[:-1],
        num_inference_steps=len(sigmas) - 1,
        guidance_scale=guidance,
        width=width,
        height=height,
        output_type="latent",
    ).images
    made = made.view(batch, rows, columns, 16, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(noise.shape)
    return made / 0.3611 + 0.1159  # the scale and shift of Flux's VAE


def pipeline_workflow(
    graph: Graph, model: Node, *, sigmas: list[float], guidance: float, width: int, height: int, batch: int
) -> Node:
    """The workflow that must make the same latents."""
    text = graph.add("TestConditioning", tokens=TOKENS, seed=TEXT_SEED)
    text = graph.add("FluxGuidance", conditioning=text, guidance=guidance)
    return graph.add(
        "SamplerCustomAdvanced",
        noise=graph.add("RandomNoise", noise_seed=NOISE_SEED),
        guider=graph.add("BasicGuider", model=model, conditioning=text),
        sampler=graph.add("KSamplerSelect", sampler_name="euler"),
        sigmas=graph.add("TestSigmas", sigmas=", ".join(map(str, sigmas))),
        latent_image=graph.add("EmptySD3LatentImage", width=width, height=height, batch_size=batch),
    )
