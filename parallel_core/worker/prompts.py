"""One prompt through one family's tokenizers and encoders: what diffusers' own pipeline makes of it.

Owns cleaning, templates, padding, cutting and what is said about it. Knows of a family what it declares; neither how
encoders were loaded nor where they lie.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError
from ..text_spec import TextFamily, TextPart


@dataclass(frozen=True, kw_only=True)
class EncodedPrompt:
    """One prompt's outputs by conditioning key (batch of one, the encoder's dtype, CPU), and the encoders that did
    not read all of it: (label, tokens of the prompt, tokens read)."""

    outputs: Mapping[str, Tensor]
    cut: Sequence[tuple[str, int, int]]


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """A prompt as an encoder reads it: ids [1, length]; `mask` [1, length] where padding is hidden from it.

    `counted` tokens of the prompt, of which `read` are read.
    """

    ids: Tensor
    mask: Tensor | None
    counted: int
    read: int


def encode_prompt(
    family: TextFamily, tokenizers: Mapping[str, Any], encoders: Mapping[str, Any], prompt: str, length: int
) -> EncodedPrompt:
    """What diffusers' own pipeline makes of the prompt: one forward per encoder. `length`: its max_sequence_length."""
    outputs: dict[str, Tensor] = {}
    cut: list[tuple[str, int, int]] = []
    with torch.inference_mode():
        for part in family.parts:
            tokenizer, encoder = tokenizers[part.tokenizer], encoders[part.encoder]
            tokens = _TOKENS[part.length](part, tokenizer, encoder, _clean(prompt) if part.clean else prompt, length)
            _check_ids(tokens.ids, part, encoder)
            if tokens.counted > tokens.read:
                cut.append((part.label, tokens.counted, tokens.read))
            output = _run(part, encoder, tokens)[:, part.template_tokens :]
            outputs[part.key] = output[:, :length] if part.length == "open" else output
    return EncodedPrompt(outputs=outputs, cut=cut)


def _run(part: TextPart, encoder: Any, tokens: Tokens) -> Tensor:
    device = _input_device(encoder)
    mask = {} if tokens.mask is None else {"attention_mask": tokens.mask.to(device)}
    output: Tensor = encoder(tokens.ids.to(device), **mask, output_hidden_states=False)[part.output]
    output = output.to(device="cpu", dtype=encoder.dtype)
    if not torch.isfinite(output).all():
        raise UserError(
            f"{part.encoder} gave values that are not finite in {encoder.dtype}. "
            "Use a folder or a file in bfloat16 or float32."
        )
    if part.zero_padding and tokens.mask is not None:
        output = output.masked_fill(tokens.mask[..., None] == 0, 0)
    return output


def _clean(prompt: str) -> str:
    """As WanPipeline does it where ftfy is not installed."""
    return re.sub(r"\s+", " ", html.unescape(html.unescape(prompt)).strip()).strip()


def _padded(part: TextPart, tokenizer: Any, prompt: str, length: int) -> Tokens:
    batch = tokenizer(
        prompt,
        padding="max_length",
        max_length=length,
        truncation=True,
        return_attention_mask=part.zero_padding,
        return_tensors="pt",
    )
    counted = len(tokenizer(prompt, verbose=False)["input_ids"])
    mask = batch["attention_mask"] if part.zero_padding else None
    return Tokens(ids=batch["input_ids"], mask=mask, counted=counted, read=min(counted, length))


def _by_tokenizer(part: TextPart, tokenizer: Any, encoder: Any, prompt: str, length: int) -> Tokens:
    """To the tokenizer's length, but no more than the encoder has positions for."""
    own = min(int(tokenizer.model_max_length), int(encoder.config.max_position_embeddings))
    return _padded(part, tokenizer, prompt, own)


def _by_request(part: TextPart, tokenizer: Any, encoder: Any, prompt: str, length: int) -> Tokens:
    return _padded(part, tokenizer, prompt, length)


def _open(part: TextPart, tokenizer: Any, encoder: Any, prompt: str, length: int) -> Tokens:
    """Inside the template. What is behind `length` is cut from the output: it is read, as diffusers does it."""
    text = part.template.format(prompt)
    most = part.most_tokens + part.template_tokens
    batch = tokenizer(text, max_length=most, truncation=True, return_attention_mask=True, return_tensors="pt")
    counted = len(tokenizer(text, verbose=False)["input_ids"]) - part.template_tokens
    return Tokens(
        ids=batch["input_ids"],
        mask=batch["attention_mask"],
        counted=counted,
        read=min(counted, part.most_tokens, length),
    )


_TOKENS = {"tokenizer": _by_tokenizer, "request": _by_request, "open": _open}


def _check_ids(ids: Tensor, part: TextPart, encoder: Any) -> None:
    known = encoder.config.vocab_size
    if int(ids.max()) >= known:
        raise UserError(
            f"{part.tokenizer} gives token {int(ids.max())}, but {part.encoder} knows {known}. "
            "They are not of one model."
        )


def _input_device(encoder: Any) -> torch.device:
    """Where token ids are read; an encoder whose embeddings lie elsewhere than they compute moves its inputs itself."""
    device: torch.device = encoder.get_input_embeddings().weight.device
    return torch.device("cpu") if device.type == "meta" else device
