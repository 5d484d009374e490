"""Trains the two text encoders of the demo model: a tiny CLIP text model and a tiny T5 encoder.

Both learn one thing, to say which digit and which ink a prompt asks for; the heads that say it are thrown away. Every
T5 position has to know it, padding included, so that the transformer is not disturbed by how long a prompt is padded.
"""

from __future__ import annotations

import logging
import random
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

from .prompts import NO_COLOUR, NO_DIGIT, Prompt, build_clip_tokenizer, build_t5_tokenizer, random_prompt

logger = logging.getLogger(__name__)

BATCH_SIZE = 64
CLIP_TOKENS = 24  # causal: the pooled output does not depend on the padding that a longer input would have
T5_LENGTHS = (10, 16, 32, 32, 64, 128, 256, 512)


@dataclass(frozen=True, kw_only=True)
class TextEncoders:
    """The encoders with their tokenizers."""

    clip: CLIPTextModel
    clip_tokenizer: CLIPTokenizer
    t5: T5EncoderModel
    t5_tokenizer: T5Tokenizer

    def pooled(self, texts: list[str]) -> torch.Tensor:
        """CLIP's pooled output [n, 32]."""
        tokens = self.clip_tokenizer(
            texts, padding="max_length", max_length=CLIP_TOKENS, truncation=True, return_tensors="pt"
        )
        return self.clip(tokens.input_ids).pooler_output

    def sequence(self, texts: list[str], length: int) -> torch.Tensor:
        """T5's hidden states [n, length, 64]; no mask, as in Flux."""
        tokens = self.t5_tokenizer(texts, padding="max_length", max_length=length, truncation=True, return_tensors="pt")
        return self.t5(tokens.input_ids).last_hidden_state


def build_encoders() -> TextEncoders:
    """Untrained encoders from torch's global random state."""
    clip_tokenizer, t5_tokenizer = build_clip_tokenizer(), build_t5_tokenizer()
    clip_config = CLIPTextConfig(
        vocab_size=len(clip_tokenizer),
        hidden_size=32,
        intermediate_size=64,
        projection_dim=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=77,
        hidden_act="quick_gelu",
        bos_token_id=clip_tokenizer.bos_token_id,
        eos_token_id=clip_tokenizer.eos_token_id,
        pad_token_id=clip_tokenizer.pad_token_id,
    )
    t5_config = T5Config(
        vocab_size=len(t5_tokenizer),
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
        pad_token_id=0,
        eos_token_id=1,
        is_encoder_decoder=False,
        use_cache=False,
    )
    return TextEncoders(
        clip=CLIPTextModel(clip_config),
        clip_tokenizer=clip_tokenizer,
        t5=T5EncoderModel(t5_config),
        t5_tokenizer=t5_tokenizer,
    )


def train_encoders(encoders: TextEncoders, steps: int, seed: int) -> None:
    """Trains in place until both encoders can name the digit and the ink of a prompt; logs how often they are right."""
    rng = random.Random(seed)
    classes = (NO_DIGIT + 1) + (NO_COLOUR + 1)
    clip_head, t5_head = nn.Linear(32, classes), nn.Linear(64, classes)
    modules = nn.ModuleList([encoders.clip, encoders.t5, clip_head, t5_head]).train()
    optimizer = torch.optim.AdamW(modules.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=steps)
    for step in range(steps):
        length = rng.choice(T5_LENGTHS)
        batch = [random_prompt(rng, noise=0.4) for _ in range(max(8, BATCH_SIZE * 16 // length))]
        texts = [prompt.text for prompt in batch]
        pooled_loss, _ = _judge(clip_head(encoders.pooled(texts)), batch)
        sequence_loss, _ = _judge(t5_head(encoders.sequence(texts, length)), batch)
        optimizer.zero_grad()
        (pooled_loss + sequence_loss).backward()
        nn.utils.clip_grad_norm_(modules.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 250 == 0:
            logger.info("text encoders: step %d of %d, loss %.4f", step, steps, (pooled_loss + sequence_loss).item())
    modules.eval()
    batch = [random_prompt(rng, noise=0.4) for _ in range(256)]
    texts = [prompt.text for prompt in batch]
    with torch.no_grad():
        _, clip_right = _judge(clip_head(encoders.pooled(texts)), batch)
        _, t5_right = _judge(t5_head(encoders.sequence(texts, 64)), batch)
    logger.info("text encoders: CLIP right on %.1f %%, T5 on %.1f %% of new prompts", clip_right * 100, t5_right * 100)


def _judge(logits: torch.Tensor, batch: list[Prompt]) -> tuple[torch.Tensor, float]:
    """Cross entropy, and the share of fully right answers, of logits [n, (positions,) classes]."""
    if logits.dim() == 2:
        logits = logits[:, None]
    positions = logits.shape[1]
    digits = torch.tensor([prompt.digit for prompt in batch]).repeat_interleave(positions)
    colours = torch.tensor([prompt.colour for prompt in batch]).repeat_interleave(positions)
    for_digits, for_colours = logits.flatten(0, 1).split([NO_DIGIT + 1, NO_COLOUR + 1], dim=-1)
    loss = functional.cross_entropy(for_digits, digits) + functional.cross_entropy(for_colours, colours)
    right = (for_digits.argmax(-1) == digits) & (for_colours.argmax(-1) == colours)
    return loss, float(right.float().mean())
