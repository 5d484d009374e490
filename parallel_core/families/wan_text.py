"""How Wan reads a prompt: UMT5, 512 tokens, zeros behind the prompt.

Declarations only, importable on both sides. Knows no process, no weight, no node.
"""

from __future__ import annotations

from ..text_spec import TextFamily, TextPart
from .text_plans import T5_PLAN

WAN_TEXT = TextFamily(
    name="wan",
    pipelines=("WanPipeline", "WanImageToVideoPipeline", "WanVideoToVideoPipeline", "WanVACEPipeline"),
    parts=(
        TextPart(
            label="UMT5",
            encoder="text_encoder",
            encoder_classes=("UMT5EncoderModel",),
            tokenizer="tokenizer",
            tokenizer_classes=("T5TokenizerFast", "T5Tokenizer"),
            output="last_hidden_state",
            key="cross_attn",
            length="request",
            clean=True,
            zero_padding=True,
            divided=("num_heads", "d_ff"),
            tp_plan=T5_PLAN,
        ),
    ),
    max_sequence_length=512,
)
