"""Writes tiny text encoders as the single files that ComfyUI's users have, in every quantisation, for tests.

Owns: what such files hold. Vocabularies are those of ComfyUI's own tokenizers, widths the smallest whose heads are
those of the real encoders. Does not know: ComfyUI, ranks.
"""

from __future__ import annotations

import io
from pathlib import Path

import sentencepiece
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from tests.tiny_files import FORMATS, Weights, described_in_metadata
from tests.tiny_text import CHARACTERS, build_clip, build_qwen, build_t5, build_umt5

LAYOUTS = ("original", "fp8", "old-scaled", "new-scaled", "metadata-scaled")
SPIECE_TOKENS = 78


def spiece_model() -> bytes:
    """A SentencePiece model with T5's special tokens, trained on nothing much."""
    written = io.BytesIO()
    words = ["seven", "dogs", "painted", "dark", "house", "by", "the", "sea"]
    sentences = [f"{a} {b} {c}" for a in words for b in words for c in CHARACTERS]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_writer=written,
        vocab_size=SPIECE_TOKENS,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        minloglevel=2,
    )
    return written.getvalue()


def file_clip(**config: object) -> PreTrainedModel:
    """clip_l: one head of 64 or less, ComfyUI's vocabulary, the published config's tokens."""
    fields = {"num_attention_heads": 1, "vocab_size": 49408, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1}
    return build_clip(**{**fields, **config})


def file_t5(**config: object) -> PreTrainedModel:
    """t5xxl."""
    return build_t5(**{"vocab_size": 32128, **config})


def file_umt5(**config: object) -> PreTrainedModel:
    """umt5_xxl."""
    return build_umt5(**{"vocab_size": SPIECE_TOKENS, **config})


def file_qwen(**config: object) -> PreTrainedModel:
    """qwen_2.5_vl_7b, with the 128 numbers per head that the real one has."""
    fields = {
        "hidden_size": 128,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "vocab_size": 151680,
        "num_hidden_layers": 2,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "rms_norm_eps": 1e-6,
    }
    return build_qwen(**{**fields, **config})


BUILD = {"clip": file_clip, "t5": file_t5, "umt5": file_umt5, "qwen": file_qwen}


def published(kind: str, encoder: PreTrainedModel) -> Weights:
    """An encoder's weights by the names of ComfyUI's files."""
    weights: Weights = dict(encoder.state_dict())
    if kind in ("t5", "umt5"):
        weights.pop("encoder.embed_tokens.weight", None)
    if kind == "clip":
        return {f"text_model.{name.removeprefix('text_model.')}": tensor for name, tensor in weights.items()}
    if kind == "qwen":
        moved = {name.replace("model.language_model.", "model."): tensor for name, tensor in weights.items()}
        return {name.replace("model.visual.", "visual."): tensor for name, tensor in moved.items()}
    return weights


def write_encoder(
    file: Path, kind: str, layout: str = "original", *, encoder: PreTrainedModel | None = None, tokenizer: bool = True
) -> Weights:
    """Writes `file` in one of `LAYOUTS`; returns what it holds. `kind`: clip, t5, umt5 (with its tokenizer) or qwen."""
    weights = FORMATS[layout](published(kind, encoder if encoder is not None else BUILD[kind]()))
    metadata: dict[str, str] | None = None
    if layout == "metadata-scaled":
        weights, metadata = described_in_metadata(weights)
    stored: dict[str, Tensor] = {name: tensor.contiguous() for name, tensor in weights.items()}
    if kind == "umt5" and tokenizer:
        stored["spiece_model"] = torch.frombuffer(bytearray(spiece_model()), dtype=torch.uint8)
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(stored, file, metadata=metadata)
    return weights
