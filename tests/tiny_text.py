"""Writes tiny text encoders and tokenizers in diffusers' layout, for tests: FLUX (CLIP and T5), Qwen-Image, Wan.

Owns: what `text_encoder`, `text_encoder_2`, `tokenizer` and `tokenizer_2` look like on disk, with seeded random
weights and character-level vocabularies built in code. Needs transformers, so it runs in the ranks' interpreter.
Does not know: ComfyUI, ranks, the transformer's side of the folder (that is `tiny_flux` and its like).
"""

from __future__ import annotations

import json
import string
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    T5Config,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
)
from transformers import T5Tokenizer as T5TokenizerFast

CHARACTERS = string.ascii_lowercase + string.digits + string.punctuation

# joint_attention_dim 32 and pooled_projection_dim 16 are what tiny_flux.TINY reads.
TINY_CLIP = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 77,
    "projection_dim": 16,
}
TINY_T5 = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 6,
    "num_heads": 4,
    "feed_forward_proj": "gated-gelu",
    "is_encoder_decoder": False,
    "use_cache": False,
}

TINY_UMT5 = {**TINY_T5, "num_layers": 4}

# joint_attention_dim 32 is what tiny_qwen.TINY reads.
TINY_QWEN = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rope_theta": 1e6,
    "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
}
TINY_EYES = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}


def clip_tokenizer() -> CLIPTokenizer:
    """Byte-level characters, each also with the end-of-word suffix, and CLIP's two special tokens."""
    pieces = [*CHARACTERS, *(f"{character}</w>" for character in CHARACTERS), "<|startoftext|>", "<|endoftext|>"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    return CLIPTokenizer(vocab=vocab, merges=[], model_max_length=77)


def t5_tokenizer() -> T5TokenizerFast:
    """Unigram characters after T5's three special tokens."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -2.0)]
    pieces += [(character, -3.0) for character in CHARACTERS]
    return T5TokenizerFast(vocab=pieces, extra_ids=0, model_max_length=512)


def qwen_tokenizer() -> Qwen2Tokenizer:
    """Byte-level characters and Qwen's special tokens."""
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Qwen2Tokenizer(vocab=vocab, merges=[])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    return tokenizer


def _randomise(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """Seeded weights that are far from their initial values, so that a lost or swapped one shows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if parameter.ndim == 1 else noise / parameter.shape[-1] ** 0.5)
    return model.eval()


def build_clip(*, seed: int = 1, **config: object) -> CLIPTextModel:
    """A seeded random CLIP text encoder; `config` overrides fields of TINY_CLIP."""
    tokenizer = clip_tokenizer()
    fields = {
        **TINY_CLIP,
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **config,
    }
    return _randomise(CLIPTextModel(CLIPTextConfig(**fields)), seed)


def build_t5(*, seed: int = 2, **config: object) -> T5EncoderModel:
    """A seeded random T5 encoder; `config` overrides fields of TINY_T5."""
    fields = {**TINY_T5, "vocab_size": len(t5_tokenizer()), **config}
    return _randomise(T5EncoderModel(T5Config(**fields)), seed)


def write_text(
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "10GB",
    clip: dict[str, object] | None = None,
    t5: dict[str, object] | None = None,
) -> Path:
    """Writes both encoders and both tokenizers into a FLUX folder and names them in its model_index.json.

    `clip` and `t5` override fields of the configs. The index is created when the folder has none yet.
    """
    build_clip(**(clip or {})).to(dtype).save_pretrained(folder / "text_encoder", max_shard_size=max_shard_size)
    build_t5(**(t5 or {})).to(dtype).save_pretrained(folder / "text_encoder_2", max_shard_size=max_shard_size)
    clip_tokenizer().save_pretrained(folder / "tokenizer")
    t5_tokenizer().save_pretrained(folder / "tokenizer_2")
    path = folder / "model_index.json"
    index = json.loads(path.read_text()) if path.exists() else {"_class_name": "FluxPipeline"}
    index |= {
        "text_encoder": ["transformers", "CLIPTextModel"],
        "text_encoder_2": ["transformers", "T5EncoderModel"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "tokenizer_2": ["transformers", "T5TokenizerFast"],
    }
    path.write_text(json.dumps(index, indent=2))
    return folder


def build_umt5(*, seed: int = 3, **config: object) -> UMT5EncoderModel:
    """A seeded random UMT5 encoder; `config` overrides fields of TINY_UMT5."""
    fields = {**TINY_UMT5, "vocab_size": len(t5_tokenizer()), **config}
    return _randomise(UMT5EncoderModel(UMT5Config(**fields)), seed)


def build_qwen(*, seed: int = 4, **config: object) -> Qwen2_5_VLForConditionalGeneration:
    """A seeded random Qwen2.5-VL, eyes included; `config` overrides fields of TINY_QWEN."""
    text = {**TINY_QWEN, "vocab_size": len(qwen_tokenizer()), "tie_word_embeddings": False, **config}
    eyes = {**TINY_EYES, "out_hidden_size": text["hidden_size"]}
    return _randomise(Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=eyes)), seed)


def write_wan_text(folder: Path, *, dtype: torch.dtype = torch.float32, **umt5: object) -> Path:
    """Writes UMT5 and its tokenizer into a Wan folder; `umt5` overrides fields of the config."""
    build_umt5(**umt5).to(dtype).save_pretrained(folder / "text_encoder")
    t5_tokenizer().save_pretrained(folder / "tokenizer")
    return _name_in_index(folder, "WanPipeline", "UMT5EncoderModel", "T5TokenizerFast")


def write_qwen_text(
    folder: Path, *, dtype: torch.dtype = torch.float32, pipeline: str = "QwenImagePipeline", **qwen: object
) -> Path:
    """Writes Qwen2.5-VL and its tokenizer into a Qwen-Image folder; `qwen` overrides fields of the text config."""
    build_qwen(**qwen).to(dtype).save_pretrained(folder / "text_encoder")
    qwen_tokenizer().save_pretrained(folder / "tokenizer")
    return _name_in_index(folder, pipeline, "Qwen2_5_VLForConditionalGeneration", "Qwen2Tokenizer")


def _name_in_index(folder: Path, pipeline: str, encoder: str, tokenizer: str) -> Path:
    path = folder / "model_index.json"
    index = json.loads(path.read_text()) if path.exists() else {"_class_name": pipeline}
    index |= {"text_encoder": ["transformers", encoder], "tokenizer": ["transformers", tokenizer]}
    path.write_text(json.dumps(index, indent=2))
    return folder
