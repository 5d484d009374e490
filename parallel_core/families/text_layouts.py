"""What text encoders look like in single files as ComfyUI's users have them, and the configs that such files lack.

Owns per encoder the marks by which it is told, what its shapes show, and the rest from the published config. Knows
neither files nor tensors; which family needs which encoder is declared with the families.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .layout import Shape

Shapes = Mapping[str, Shape]
"""By the file's own names."""


@dataclass(frozen=True, kw_only=True)
class TextLayout:
    """One encoder in a single file. `marks` are all there, `absent` are not; `tokenizer` is a folder below ComfyUI's
    own package, or the name of a tensor of the file that holds a SentencePiece model."""

    encoder_class: str
    marks: tuple[str, ...]
    config: Callable[[Shapes], dict[str, Any]]
    """The config of `encoder_class`. KeyError for a tensor that is not there."""
    tokenizer_class: str
    tokenizer: str
    in_file: bool = False
    absent: tuple[str, ...] = ()
    refused_widths: Mapping[int, str] = field(default_factory=dict)
    """Widths of other encoders with the same names: width -> what it is."""
    width: Callable[[Shapes], int] = lambda shapes: 0


_BIAS = "encoder.block.{}.layer.0.SelfAttention.relative_attention_bias.weight"


def _count(shapes: Shapes, pattern: str) -> int:
    number = 0
    while pattern.format(number) in shapes:
        number += 1
    return number


def _t5_config(shapes: Shapes) -> dict[str, Any]:
    """google/t5-v1_1-xxl and google/umt5-xxl but for sizes."""
    vocabulary = shapes["shared.weight" if "shared.weight" in shapes else "encoder.embed_tokens.weight"]
    buckets, heads = shapes[_BIAS.format(0)]
    inner = shapes["encoder.block.0.layer.0.SelfAttention.q.weight"][0]
    gate = "encoder.block.0.layer.1.DenseReluDense.wi_0.weight"
    is_gated = gate in shapes
    hidden = shapes[gate if is_gated else "encoder.block.0.layer.1.DenseReluDense.wi.weight"]
    return {
        "vocab_size": vocabulary[0],
        "d_model": vocabulary[1],
        "d_kv": inner // heads,
        "d_ff": hidden[0],
        "num_layers": _count(shapes, "encoder.block.{}.layer.0.SelfAttention.q.weight"),
        "num_heads": heads,
        "relative_attention_num_buckets": buckets,
        "relative_attention_max_distance": 128,
        "feed_forward_proj": "gated-gelu" if is_gated else "relu",
        "layer_norm_epsilon": 1e-6,
        "is_encoder_decoder": False,
        "use_cache": False,
        "pad_token_id": 0,
        "eos_token_id": 1,
    }


_CLIP_HEAD = 64


def _clip_config(shapes: Shapes) -> dict[str, Any]:
    """openai/clip-vit-large-patch14 but for sizes."""
    vocabulary, width = shapes["text_model.embeddings.token_embedding.weight"]
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": shapes["text_model.encoder.layers.0.mlp.fc1.weight"][0],
        "num_hidden_layers": _count(shapes, "text_model.encoder.layers.{}.mlp.fc1.weight"),
        "num_attention_heads": max(1, width // _CLIP_HEAD),
        "max_position_embeddings": shapes["text_model.embeddings.position_embedding.weight"][0],
        "hidden_act": "quick_gelu",
        "layer_norm_eps": 1e-5,
        "projection_dim": width,
        "bos_token_id": 0,
        "pad_token_id": 1,
        "eos_token_id": 2,  # as published: transformers then takes the highest token for the end, which it is
    }


_QWEN_HEAD = 128


def _qwen_config(shapes: Shapes) -> dict[str, Any]:
    """Qwen/Qwen2.5-VL-7B-Instruct but for sizes."""
    vocabulary, width = shapes["model.embed_tokens.weight"]
    text = {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": shapes["model.layers.0.mlp.gate_proj.weight"][0],
        "num_hidden_layers": _count(shapes, "model.layers.{}.self_attn.q_proj.weight"),
        "num_attention_heads": shapes["model.layers.0.self_attn.q_proj.weight"][0] // _QWEN_HEAD,
        "num_key_value_heads": shapes["model.layers.0.self_attn.k_proj.weight"][0] // _QWEN_HEAD,
        "hidden_act": "silu",
        "max_position_embeddings": 128000,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    }
    return {"model_type": "qwen2_5_vl", "text_config": text}


TEXT_LAYOUTS: dict[str, TextLayout] = {
    "UMT5": TextLayout(
        encoder_class="UMT5EncoderModel",
        marks=(_BIAS.format(0), _BIAS.format(1)),
        config=_t5_config,
        tokenizer_class="T5Tokenizer",
        tokenizer="spiece_model",
        in_file=True,
    ),
    "T5": TextLayout(
        encoder_class="T5EncoderModel",
        marks=(_BIAS.format(0),),
        absent=(_BIAS.format(1),),  # T5 has it in the first layer alone
        config=_t5_config,
        tokenizer_class="T5Tokenizer",
        tokenizer="text_encoders/t5_tokenizer",
    ),
    "CLIP": TextLayout(
        encoder_class="CLIPTextModel",
        marks=("text_model.embeddings.token_embedding.weight", "text_model.encoder.layers.0.mlp.fc1.weight"),
        config=_clip_config,
        tokenizer_class="CLIPTokenizer",
        tokenizer="sd1_tokenizer",
        refused_widths={1280: "CLIP-G, of SDXL", 1024: "CLIP-H, of Stable Diffusion 2"},
        width=lambda shapes: shapes["text_model.embeddings.token_embedding.weight"][1],
    ),
    "Qwen2.5-VL": TextLayout(
        encoder_class="Qwen2_5_VLForConditionalGeneration",
        marks=("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.bias"),
        config=_qwen_config,
        tokenizer_class="Qwen2Tokenizer",
        tokenizer="text_encoders/qwen25_tokenizer",
    ),
}
"""By the label of the encoder in the families' declarations."""
