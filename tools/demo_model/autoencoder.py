"""Trains the demo model's VAE: 8x smaller latents of 16 channels on the scale that Flux's two numbers expect.

The loss also asks that ComfyUI's fixed Flux preview factors turn a latent into a small picture of it, so that live
previews of the demo show what is being drawn.
"""

from __future__ import annotations

import logging

import torch
from diffusers import AutoencoderKL
from torch.nn import functional

from .pictures import DigitPainter

logger = logging.getLogger(__name__)

BATCH_SIZE = 16
SCALING_FACTOR = 0.3611  # FLUX.1's own, which ComfyUI's latent format fixes
SHIFT_FACTOR = 0.1159
LOG_VARIANCE = -4.0  # of the posterior, in raw latents: constant, since nothing here needs it learned
PREVIEW_CONTRAST = 0.7
RIM = 4  # pixels
RANK = 6  # of the 16 channels carry something: pictures this plain need no more, and the transformer learns it sooner
# ComfyUI's latent_formats.Flux: what its previewer multiplies 16 latent channels by to get red, green and blue.
PREVIEW_FACTORS = (
    *((-0.0346, 0.0244, 0.0681), (0.0034, 0.0210, 0.0687), (0.0275, -0.0668, -0.0433), (-0.0174, 0.0160, 0.0617)),
    *((0.0859, 0.0721, 0.0329), (0.0004, 0.0383, 0.0115), (0.0405, 0.0861, 0.0915), (-0.0236, -0.0185, -0.0259)),
    *((-0.0245, 0.0250, 0.1180), (0.1008, 0.0755, -0.0421), (-0.0515, 0.0201, 0.0011), (0.0428, -0.0012, -0.0036)),
    *((0.0817, 0.0765, 0.0749), (-0.1264, -0.0522, -0.1103), (-0.0280, -0.0881, -0.0499), (-0.1262, -0.0982, -0.0778)),
)
PREVIEW_BIAS = (-0.0329, -0.0718, -0.0851)


def build_autoencoder() -> AutoencoderKL:
    """An untrained VAE from torch's global random state."""
    return AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        block_out_channels=(16, 24, 32, 32),
        layers_per_block=1,
        latent_channels=16,
        norm_num_groups=8,
        sample_size=64,
        scaling_factor=SCALING_FACTOR,
        shift_factor=SHIFT_FACTOR,
        use_quant_conv=False,
        use_post_quant_conv=False,
        force_upcast=False,
    )


def encode(vae: AutoencoderKL, pixels: torch.Tensor) -> torch.Tensor:
    """Latents [n, 16, height / 8, width / 8] in model space of pixels in -1..1."""
    return (vae.encode(pixels).latent_dist.mode() - SHIFT_FACTOR) * SCALING_FACTOR


def decode(vae: AutoencoderKL, latents: torch.Tensor) -> torch.Tensor:
    """Pixels of latents in model space."""
    return vae.decode(latents / SCALING_FACTOR + SHIFT_FACTOR).sample


def train_autoencoder(vae: AutoencoderKL, painter: DigitPainter, steps: int, seed: int) -> None:
    """Trains in place on fresh pictures; latents get noise of random strength, as sampling will leave some in them."""
    generator = torch.Generator().manual_seed(seed)
    basis = latent_basis(generator)
    vae.to(memory_format=torch.channels_last).train()
    optimizer = torch.optim.AdamW(vae.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        _confine(vae, basis)
        pixels = painter.draw(BATCH_SIZE).pixels.contiguous(memory_format=torch.channels_last)
        latents = encode(vae, pixels)
        strength = torch.rand(BATCH_SIZE, 1, 1, 1, generator=generator) * 0.35
        noisy = latents + strength * torch.randn(latents.shape, generator=generator)
        reconstruction = decode(vae, noisy)
        loss = (
            _picture_loss(reconstruction, pixels)
            + 0.05 * _scale_loss(latents, basis)
            + 0.4 * _preview_loss(latents, pixels)
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            logger.info(
                *("VAE: step %d of %d, loss %.4f, mean error of a pixel %.4f, latents' std %.3f", step, steps),
                *(loss.item(), (reconstruction - pixels).abs().mean().item(), latents.std().item()),
            )
    _confine(vae, basis)
    vae.to(memory_format=torch.contiguous_format).eval()


def latent_basis(generator: torch.Generator) -> torch.Tensor:
    """Orthonormal directions [16, RANK] in which latents vary; the first three span what the preview shows."""
    others = torch.randn(16, RANK - 3, generator=generator)
    return torch.linalg.qr(torch.cat([torch.tensor(PREVIEW_FACTORS), others], dim=1))[0]


@torch.no_grad()
def _confine(vae: AutoencoderKL, basis: torch.Tensor) -> None:
    """Makes the encoder write, and the decoder read, the directions of ``basis`` alone, with a constant variance."""
    projector = basis @ basis.T
    last, first = vae.encoder.conv_out, vae.decoder.conv_in
    last.weight[:16] = torch.einsum("oc,cihw->oihw", projector, last.weight[:16])
    last.bias[:16] = projector @ (last.bias[:16] - SHIFT_FACTOR) + SHIFT_FACTOR
    last.weight[16:] = 0
    last.bias[16:] = LOG_VARIANCE
    first.weight.copy_(torch.einsum("ochw,ci->oihw", first.weight, projector))


def _picture_loss(reconstruction: torch.Tensor, pixels: torch.Tensor) -> torch.Tensor:
    """Distance of pixels and edges; edges keep strokes crisp, and the canvas' rim counts more, where padding shows."""
    distance = (reconstruction - pixels).abs()
    loss = functional.mse_loss(reconstruction, pixels) + 0.5 * distance.mean()
    for dim in (-1, -2):
        loss = loss + functional.l1_loss(reconstruction.diff(dim=dim), pixels.diff(dim=dim))
        for start in (0, pixels.shape[dim] - RIM):
            loss = loss + 0.1 * distance.narrow(dim, start, RIM).mean()
    return loss


def _scale_loss(latents: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """Zero when every direction of the basis has mean 0 and deviation 1, the scale on which noise is mixed in."""
    directions = torch.einsum("nchw,cd->dnhw", latents, basis).flatten(1)
    return directions.mean(1).square().mean() + (directions.std(1) - 1).square().mean()


def _preview_loss(latents: torch.Tensor, pixels: torch.Tensor) -> torch.Tensor:
    """Distance of ComfyUI's preview of the latents from the picture at an eighth of its size."""
    preview = torch.einsum("nchw,cr->nrhw", latents, torch.tensor(PREVIEW_FACTORS))
    preview = preview + torch.tensor(PREVIEW_BIAS)[:, None, None]
    return functional.mse_loss(preview, PREVIEW_CONTRAST * functional.avg_pool2d(pixels, 8))
