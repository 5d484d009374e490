"""How FLUX.1 reads a prompt: which encoders and tokenizers its folder has, and under which ComfyUI keys their outputs
go.

Declarations only, importable on both sides. Knows no process, no weight, no node.
"""

from __future__ import annotations

from ..text_spec import TextFamily, TextPart
from .text_plans import CLIP_PLAN, T5_PLAN

FLUX_TEXT = TextFamily(
    name="flux",
    pipelines=(
        "FluxPipeline",
        "FluxImg2ImgPipeline",
        "FluxInpaintPipeline",
        "FluxFillPipeline",
        "FluxControlPipeline",
        "FluxKontextPipeline",
    ),
    # diffusers' order in FluxPipeline.encode_prompt: CLIP gives one vector for the prompt, T5 one per token.
    parts=(
        TextPart(
            label="CLIP",
            encoder="text_encoder",
            encoder_classes=("CLIPTextModel",),
            tokenizer="tokenizer",
            tokenizer_classes=("CLIPTokenizer", "CLIPTokenizerFast"),
            output="pooler_output",
            key="pooled_output",
            length="tokenizer",
            # transformers 4 wrote CLIP's text model one level deeper than transformers 5 has it.
            renames=(("text_model.", ""),),
            unused=("*.position_ids", "text_projection.weight", "logit_scale"),
            divided=("num_attention_heads", "intermediate_size"),
            tp_plan=CLIP_PLAN,
            small=True,
        ),
        TextPart(
            label="T5",
            encoder="text_encoder_2",
            encoder_classes=("T5EncoderModel",),
            tokenizer="tokenizer_2",
            tokenizer_classes=("T5TokenizerFast", "T5Tokenizer"),
            output="last_hidden_state",
            key="cross_attn",
            length="request",
            divided=("num_heads", "d_ff"),
            tp_plan=T5_PLAN,
        ),
    ),
    max_sequence_length=512,
)
