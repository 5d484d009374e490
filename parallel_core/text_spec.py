"""What text encoders are, as far as both sides must agree on it.

Owns what a family declares about them, where they can come from, and the requests. Reads nothing, knows neither ComfyUI
nor how an encoder computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from .protocol import Request

PLACEMENTS = ("balanced", "auto", "sequential", "single")
"""balanced: spread by bytes over all devices. auto: as few devices as hold everything, those with most memory first.
sequential: fill the first device, then the next. single: the one device with most memory, nothing else."""

TENSOR = "tensor"
"""Not a placement of whole layers: one rank per device, each with a slice of every weight matrix."""

CHOICES = (*PLACEMENTS, TENSOR)
"""What a user can choose from."""


@dataclass(frozen=True, kw_only=True)
class TextPart:
    """One encoder with its tokenizer, by their folder names, and what becomes of its output."""

    label: str
    encoder: str
    encoder_classes: tuple[str, ...]
    tokenizer: str
    tokenizer_classes: tuple[str, ...]
    output: str
    """The field of the encoder's result."""
    key: str
    """Its place in a ComfyUI conditioning."""
    length: str
    """Prompts are padded and cut to the "tokenizer"'s own length, or to the "request"'s max_sequence_length. With
    "open" ones are never padded, and cut to max_sequence_length behind the template."""
    renames: tuple[tuple[str, str], ...] = ()
    """Where weight names start in files -> in the model that is loaded, where that is not the same; first match."""
    unused: tuple[str, ...] = ()
    """Globs of the file's weights that reading a prompt does not need: they are not loaded."""
    loaded_class: str = ""
    """The part of the encoder's class that reads prompts, where that is not all of it."""
    config_key: str = ""
    """The field of config.json with that part's own config."""
    template: str = ""
    """The text around a prompt ({}), and"""
    template_tokens: int = 0
    """how many tokens of what is before it do not count."""
    most_tokens: int = 0
    """With length "open": tokens of a prompt that are read at all."""
    zero_padding: bool = False
    """Padding is hidden from the encoder, and its output zero there."""
    clean: bool = False
    """HTML entities are resolved and white space is joined first."""
    divided: tuple[str, ...] = ()
    """Fields of the config that the number of ranks must divide with placement "tensor"."""
    tp_plan: Mapping[str, str] = field(default_factory=dict)
    """Module glob -> style of tensor parallelism, on top of what the class itself declares."""
    small: bool = False
    """Whole on every rank where it cannot be divided, for it takes little."""

    def rename(self, stored: str) -> str:
        """The loaded model's name of a file's weight."""
        return next((new + stored[len(old) :] for old, new in self.renames if stored.startswith(old)), stored)


@dataclass(frozen=True, kw_only=True)
class TextFamily:
    """How one model family reads prompts. `pipelines` are the `_class_name`s of model_index.json that read them so;
    `refused` those of the same family that do not, with what to do instead."""

    name: str
    pipelines: tuple[str, ...]
    parts: tuple[TextPart, ...]
    max_sequence_length: int
    refused: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TextPlace:
    """Where encoders are: a diffusers folder, or single files of a family with the folder of ComfyUI's tokenizers.

    Plain data that a request can carry; `files` in any order.
    """

    folder: str = ""
    files: tuple[str, ...] = ()
    family: str = ""
    tokenizers: str = ""


@dataclass(frozen=True, kw_only=True)
class LoadText(Request):
    """Loads text encoders under `key`; nothing when they are there already. Answers with `device_bytes`.

    `folder`, `files`, `family` and `tokenizers` are the fields of a `TextPlace`. On a placement group the encoders are
    placed over the devices, at most `max_memory` bytes per device name, "cpu" (host memory) and "disk"; on a mesh group
    `placement` is "tensor".
    """

    operation: ClassVar[str] = "load_text"
    key: str
    placement: str
    folder: str = ""
    files: list[str] = field(default_factory=list)
    family: str = ""
    tokenizers: str = ""
    max_memory: dict[str, int] = field(default_factory=dict)

    @property
    def place(self) -> TextPlace:
        """Where the encoders are."""
        return TextPlace(folder=self.folder, files=tuple(self.files), family=self.family, tokenizers=self.tokenizers)


@dataclass(frozen=True, kw_only=True)
class EncodeText(Request):
    """Encodes each of `prompts` by itself. Answers with `placement` (text), `load_seconds`, `seconds`; the first rank
    also with tensors "INDEX.KEY" (the family's conditioning keys) and `cut`: [prompt, label, tokens, tokens read] for
    each encoder that did not read all of a prompt."""

    operation: ClassVar[str] = "encode_text"
    key: str
    prompts: list[str]
    max_sequence_length: int
