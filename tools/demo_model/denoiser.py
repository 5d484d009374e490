"""Trains the demo model's transformer by flow matching on latents of the pictures, with the encoders frozen.

x_t = (1 - t) * x_0 + t * noise, and the transformer answers with the velocity noise - x_0 (Lipman et al. 2023,
"Flow Matching for Generative Modeling"; the convention of FLUX.1).
"""

from __future__ import annotations

import copy
import logging
import math
import random
from dataclasses import dataclass

import torch
from diffusers import AutoencoderKL, FluxTransformer2DModel
from torch.nn import functional

from .autoencoder import encode
from .encoders import TextEncoders
from .pictures import DigitPainter
from .prompts import NO_COLOUR, NO_DIGIT, write_prompt

logger = logging.getLogger(__name__)

SIZES = {(64, 64): 8192, (64, 96): 384, (96, 64): 384, (96, 96): 384, (96, 160): 384, (128, 128): 384}
SQUARE_CHANCE = 0.85  # of a batch to be 64x64; the other sizes share the rest
TEXT_LENGTHS = (10, 10, 10, 10, 10, 10, 16, 16, 32, 32, 64, 128, 256, 512)  # the longest plain prompt has 9 tokens
TOKENS_PER_BATCH = 768
NEIGHBOURS = (  # rows and columns
    *((-1, 0), (1, 0), (0, -1), (0, 1), (-1, -1), (-1, 1), (1, -1), (1, 1), (-2, 0), (2, 0), (0, -2), (0, 2)),
    *((-1, 0), (1, 0), (0, -1), (0, 1), (-3, 0), (3, 0), (0, 0), (0, 0)),
)
EMA_DECAY = 0.998


@dataclass(frozen=True, kw_only=True)
class LatentSet:
    """Packed latents [n, tokens, 64] of one size with what they show, and their position ids [tokens, 3]."""

    latents: torch.Tensor
    digits: list[int]
    inks: list[int]
    positions: torch.Tensor


def build_transformer() -> FluxTransformer2DModel:
    """An untrained Flux transformer: 4 heads of 24, one double and four single blocks, no guidance embedding."""
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=64,
        num_layers=1,
        num_single_layers=4,
        attention_head_dim=24,
        num_attention_heads=4,
        joint_attention_dim=64,
        pooled_projection_dim=32,
        guidance_embeds=False,
        axes_dims_rope=(4, 10, 10),
    )
    for name, module in transformer.named_modules():
        # adaLN-Zero (Peebles and Xie 2022): every block starts as the identity.
        if isinstance(module, torch.nn.Linear) and (".norm" in name or name in ("norm_out.linear", "proj_out")):
            torch.nn.init.zeros_(module.weight)
            torch.nn.init.zeros_(module.bias)
    _look_at_neighbours(transformer)
    return transformer


@torch.no_grad()
def _look_at_neighbours(transformer: FluxTransformer2DModel) -> None:
    """Starts each head of each block with a preference for the token at one offset, as a convolution looks there.

    A Flux token learns where it is from rotary embeddings alone, which takes long at this size. With a bias of (1, 0)
    on the keys and (cos d, sin d) on the queries of an axis' fastest pair (1 radian per token), attention peaks at
    the offset d.
    """
    attentions = [block.attn for block in (*transformer.transformer_blocks, *transformer.single_transformer_blocks)]
    heads, axes = transformer.config.num_attention_heads, transformer.config.axes_dims_rope
    for layer, attention in enumerate(attentions):
        for head in range(heads):
            offset = NEIGHBOURS[(layer * heads + head) % len(NEIGHBOURS)]
            start = head * transformer.config.attention_head_dim + axes[0]
            for axis, distance in enumerate(offset):
                pair = slice(start + axis * axes[1], start + axis * axes[1] + 2)
                attention.to_k.bias[pair] = torch.tensor([2.0, 0.0])
                attention.to_q.bias[pair] = 2 * torch.tensor([math.cos(distance), math.sin(distance)])
        attention.norm_q.weight.fill_(1.4)
        attention.norm_k.weight.fill_(1.4)


def pack(latents: torch.Tensor) -> torch.Tensor:
    """[n, c, h, w] to tokens [n, h/2 * w/2, 4c], each of one 2x2 patch, channel outermost, as Flux does."""
    count, channels, height, width = latents.shape
    patches = latents.view(count, channels, height // 2, 2, width // 2, 2)
    return patches.permute(0, 2, 4, 1, 3, 5).reshape(count, height * width // 4, channels * 4)


@torch.no_grad()
def build_latent_sets(vae: AutoencoderKL, painter: DigitPainter) -> list[LatentSet]:
    """Fresh pictures of every training size, encoded; the first set is the 64x64 one."""
    sets = []
    for (height, width), count in SIZES.items():
        batches = [painter.draw(64, height, width) for _ in range(count // 64)]
        rows, columns = torch.meshgrid(torch.arange(height // 16), torch.arange(width // 16), indexing="ij")
        positions = torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).view(-1, 3).float()
        sets.append(
            LatentSet(
                latents=torch.cat([pack(encode(vae, batch.pixels)) for batch in batches]),
                digits=torch.cat([batch.digits for batch in batches]).tolist(),
                inks=torch.cat([batch.inks for batch in batches]).tolist(),
                positions=positions,
            )
        )
    return sets


def train_transformer(
    transformer: FluxTransformer2DModel, encoders: TextEncoders, sets: list[LatentSet], steps: int, seed: int
) -> FluxTransformer2DModel:
    """Trains and returns the moving average of the weights."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    average = copy.deepcopy(transformer).eval()
    transformer.train()
    optimizers = _optimizers(transformer)
    warm_up, total = max(1, steps // 20), steps
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / warm_up, 0.5 + 0.5 * math.cos(math.pi * step / total))
        )
        for optimizer in optimizers
    ]
    recent = 0.0
    for step in range(steps):
        data = sets[0] if rng.random() < SQUARE_CHANCE else rng.choice(sets[1:])
        loss = _batch_loss(transformer, encoders, data, rng, generator)
        transformer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(transformer.parameters(), 1.0)
        for stepper in (*optimizers, *schedules):
            stepper.step()
        decay = min(EMA_DECAY, (1 + step) / (10 + step))
        with torch.no_grad():
            for kept, current in zip(average.parameters(), transformer.parameters(), strict=True):
                kept.lerp_(current, 1 - decay)
        recent += (loss.item() - recent) * max(0.01, 1 / (step + 1))
        if step % 250 == 0:
            logger.info("transformer: step %d of %d, loss %.4f", step, steps, recent)
    return average


def _optimizers(transformer: FluxTransformer2DModel) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the blocks, AdamW for all else; Muon needs about half as many steps."""
    named = list(transformer.named_parameters())
    matrices = [value for name, value in named if "transformer_blocks." in name and value.dim() == 2]
    others = [value for name, value in named if "transformer_blocks." not in name or value.dim() != 2]
    return [
        torch.optim.Muon(matrices, lr=8e-3, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=2e-3, betas=(0.9, 0.99), weight_decay=0.01),
    ]


def _batch_loss(
    transformer: FluxTransformer2DModel,
    encoders: TextEncoders,
    data: LatentSet,
    rng: random.Random,
    generator: torch.Generator,
) -> torch.Tensor:
    """Flow matching loss of one batch whose prompts name what its pictures show, or only part of it, or nothing."""
    length = rng.choice(TEXT_LENGTHS)
    size = min(64, max(2, TOKENS_PER_BATCH // (length + data.latents.shape[1])))
    index = [rng.randrange(len(data.digits)) for _ in range(size)]
    texts = [_describe(rng, data.digits[i], data.inks[i]) for i in index]
    with torch.no_grad():
        pooled = encoders.pooled([text if rng.random() < 0.9 else "" for text in texts])
        sequence = encoders.sequence([text if rng.random() < 0.9 else "" for text in texts], length)
    clean = data.latents[index]
    noise = torch.randn(clean.shape, generator=generator)
    time = torch.sigmoid(torch.randn(size, generator=generator))
    uniform = torch.rand(size, generator=generator)
    time = torch.where(torch.rand(size, generator=generator) < 0.5, uniform, time)
    velocity = transformer(
        hidden_states=torch.lerp(clean, noise, time[:, None, None]),
        encoder_hidden_states=sequence,
        pooled_projections=pooled,
        timestep=time,
        img_ids=data.positions,
        txt_ids=torch.zeros(length, 3),
    ).sample
    return functional.mse_loss(velocity, noise - clean)


def _describe(rng: random.Random, digit: int, ink: int) -> str:
    if rng.random() < 0.1:
        return ""
    digit = digit if rng.random() < 0.95 else NO_DIGIT
    return write_prompt(rng, digit, ink if rng.random() < 0.65 else NO_COLOUR).text
