"""What the text encoders of a model folder are, as far as both sides must agree on it.

Owns what a family declares about them, `TextSource` (read from json files and headers alone, with every refusal about a
folder), and the requests. Reads no weight, knows neither ComfyUI nor how an encoder computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from .checkpoint import Checkpoint, check_loadable, fingerprint, read_checkpoint, read_json
from .errors import UserError
from .protocol import Request

PLACEMENTS = ("balanced", "auto", "sequential", "single")
"""balanced: spread by bytes over all devices. auto: as few devices as hold everything, those with most memory first.
sequential: fill the first device, then the next. single: the one device with most memory, nothing else."""

WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
"""The names that transformers reads; other files in the folder (an fp16 variant, say) are not picked up by it."""


@dataclass(frozen=True, kw_only=True)
class TextPart:
    """One encoder with its tokenizer, by their folder names, and what becomes of its output.

    `output` names the field of the encoder's result, `key` the place in a ComfyUI conditioning. `length`: prompts are
    padded and cut to the "tokenizer"'s own length, or to the "request"'s max_sequence_length. `prefixes` may stand
    before weight names in files of older libraries.
    """

    label: str
    encoder: str
    encoder_classes: tuple[str, ...]
    tokenizer: str
    tokenizer_classes: tuple[str, ...]
    output: str
    key: str
    length: str
    prefixes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TextFamily:
    """How one model family reads prompts. `pipelines` are the `_class_name`s of model_index.json that read them so."""

    name: str
    pipelines: tuple[str, ...]
    parts: tuple[TextPart, ...]
    max_sequence_length: int


@dataclass(frozen=True, kw_only=True)
class TextSource:
    """The encoders of one folder. `num_bytes` of weights per encoder; `fingerprint` changes when a file is replaced."""

    folder: str
    family: TextFamily
    num_bytes: Mapping[str, int] = field(hash=False)
    fingerprint: str

    @property
    def total_bytes(self) -> int:
        """Bytes of all encoders' weights."""
        return sum(self.num_bytes.values())

    def check_length(self, max_sequence_length: int) -> None:
        """Refuses a length that the family cannot serve."""
        most = self.family.max_sequence_length
        if not 1 <= max_sequence_length <= most:
            raise UserError(
                f"max_sequence_length is {max_sequence_length}; {self.family.name} takes 1 to {most}. "
                f"{min(max(max_sequence_length, 1), most)} is the nearest."
            )


def read_text_source(folder: Path, families: tuple[TextFamily, ...]) -> TextSource:
    """The text encoders of a diffusers pipeline folder, checked as far as json files and headers allow.

    Raises `UserError` for a folder of another family, without encoders or tokenizers, or with weights that are pickled,
    quantised or damaged.
    """
    index = _read_index(folder)
    family = _find_family(folder, index, families)
    for part in family.parts:
        check_class(folder, index, part.encoder, part.encoder_classes)
        check_class(folder, index, part.tokenizer, part.tokenizer_classes)
    checkpoints = {part.encoder: _read_part(folder, part) for part in family.parts}
    return TextSource(
        folder=str(folder),
        family=family,
        num_bytes={name: checkpoint.num_bytes for name, checkpoint in checkpoints.items()},
        fingerprint="|".join(
            [
                *(checkpoint.fingerprint for checkpoint in checkpoints.values()),
                *(fingerprint(sorted((folder / part.tokenizer).iterdir())) for part in family.parts),
            ]
        ),
    )


def _read_index(folder: Path) -> dict[str, Any]:
    if not (folder / "model_index.json").is_file():
        raise UserError(
            f"{folder.name!r} has no model_index.json, so no text encoders can be found in it. Expected a whole "
            "diffusers model folder: model_index.json, text_encoder/, tokenizer/ ..."
        )
    return read_json(folder / "model_index.json")


def _find_family(folder: Path, index: Mapping[str, Any], families: tuple[TextFamily, ...]) -> TextFamily:
    name = index.get("_class_name")
    for family in families:
        if name in family.pipelines:
            return family
    known = ", ".join(f"{family.name} ({family.pipelines[0]})" for family in families)
    raise UserError(f"{folder.name!r} is a {name}, whose prompts cannot be encoded here. Supported: {known}.")


def _read_part(folder: Path, part: TextPart) -> Checkpoint:
    """Checks the files of one encoder and its tokenizer."""
    for name in (part.encoder, part.tokenizer):
        if not (folder / name).is_dir():
            raise UserError(
                f"{folder.name!r} has no {name} folder, which its model_index.json names. Was the download complete? "
                "To use encoders from other files, take ComfyUI's own CLIP loaders."
            )
    if not any((folder / part.tokenizer / name).is_file() for name in _TOKENIZER_FILES):
        raise UserError(
            f"{folder.name}/{part.tokenizer} holds no tokenizer; expected one of {', '.join(_TOKENIZER_FILES)}."
        )
    checkpoint = read_checkpoint(folder, part.encoder)
    check_loadable(checkpoint)
    if not any((checkpoint.folder / name).is_file() for name in WEIGHTS):
        raise UserError(
            f"{folder.name}/{part.encoder} holds {checkpoint.files[0].name}; expected {' or '.join(WEIGHTS)}. "
            "Rename the file, or download the folder without a variant."
        )
    return checkpoint


_TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "spiece.model")


def check_class(folder: Path, index: Mapping[str, Any], component: str, known: tuple[str, ...]) -> str:
    """The class that model_index.json names for `component`; `UserError` when there is none or it is not in `known`."""
    entry = index.get(component)
    name = entry[1] if isinstance(entry, list) and len(entry) == 2 else None
    if name not in known:
        raise UserError(
            f"{folder.name}/model_index.json names {name!r} for {component}; expected {' or '.join(known)}."
            + ("" if name else " A folder that was saved without text encoders cannot encode prompts.")
        )
    return str(name)


@dataclass(frozen=True, kw_only=True)
class LoadText(Request):
    """Loads a folder's text encoders under `key`, placed over the group's devices; nothing when they are there already.

    `max_memory`: bytes per device name, "cpu" (host memory) and "disk". Answers with `device_bytes`.
    """

    operation: ClassVar[str] = "load_text"
    key: str
    folder: str
    placement: str
    max_memory: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class EncodeText(Request):
    """Encodes each of `prompts` by itself. Answers with tensors "INDEX.KEY" (the family's conditioning keys),
    `placement` (text), `load_seconds`, `seconds`, and `cut`: [prompt, label, tokens, tokens read] for each encoder
    that did not read all of a prompt."""

    operation: ClassVar[str] = "encode_text"
    key: str
    prompts: list[str]
    max_sequence_length: int
