"""The text encoders of one model: what they are, in bytes and sizes, read from json files and headers alone.

Owns `TextSource`, the reading of a diffusers folder and every refusal about one. Reads no weight, knows neither ComfyUI
nor how an encoder computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import gcd
from pathlib import Path
from typing import Any

from .checkpoint import Checkpoint, check_loadable, fingerprint, read_checkpoint, read_json
from .errors import UserError
from .text_spec import TextFamily, TextPart, TextPlace

WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
"""The names that transformers reads; other files in the folder (an fp16 variant, say) are not picked up by it."""


@dataclass(frozen=True, kw_only=True)
class TokenizerSource:
    """A tokenizer of the class `name`: its folder, or a SentencePiece model that is a tensor of a safetensors file."""

    name: str
    path: Path
    tensor: str = ""


@dataclass(frozen=True, kw_only=True)
class EncoderSource:
    """One encoder: the transformers class to load, its weights by that class's names, its tokenizer."""

    class_name: str
    config_class: str
    """The class whose config `checkpoint.config` is."""
    checkpoint: Checkpoint
    tokenizer: TokenizerSource

    @property
    def is_quantised(self) -> bool:
        """Whether some weights are stored in fp8."""
        return any(info.is_quantised for info in self.checkpoint.tensors.values())

    @property
    def dtype(self) -> str:
        """What the weights are held in: theirs, or bfloat16 for quantised ones, which are unpacked as they are read."""
        return "bfloat16" if self.is_quantised else self.checkpoint.dtype

    @property
    def num_bytes(self) -> int:
        """Of the weights as they are held."""
        return self.checkpoint.num_elements * 2 if self.is_quantised else self.checkpoint.num_bytes

    @property
    def is_file(self) -> bool:
        """Whether the weights come from a single file."""
        return not self.checkpoint.folder.is_dir()


@dataclass(frozen=True, kw_only=True)
class TextSource:
    """The encoders of one place, by the parts' names. `fingerprint` changes when a file is replaced."""

    place: TextPlace
    name: str
    """For messages."""
    family: TextFamily
    encoders: Mapping[str, EncoderSource] = field(hash=False)
    fingerprint: str

    @property
    def total_bytes(self) -> int:
        """Bytes of all encoders' weights."""
        return sum(encoder.num_bytes for encoder in self.encoders.values())

    def check_length(self, max_sequence_length: int) -> None:
        """Refuses a length that the family cannot serve."""
        most = self.family.max_sequence_length
        if not 1 <= max_sequence_length <= most:
            raise UserError(
                f"max_sequence_length is {max_sequence_length}; {self.family.name} takes 1 to {most}. "
                f"{min(max(max_sequence_length, 1), most)} is the nearest."
            )

    def divided_parts(self, num_ranks: int) -> tuple[TextPart, ...]:
        """The parts that are sliced over that many ranks; small ones may stay whole.

        `UserError` where a part's heads or its feed-forward's width cannot be dealt out equally.
        """
        found = []
        for part in self.family.parts:
            sizes = self._divided_sizes(part)
            if all(size % num_ranks == 0 for size in sizes.values()):
                found.append(part)
            elif not part.small:
                raise UserError(_does_not_divide(part, sizes, num_ranks))
        return tuple(found)

    def _divided_sizes(self, part: TextPart) -> dict[str, int]:
        config = self.encoders[part.encoder].checkpoint.config
        config = {**config, **config.get(part.config_key, {})}
        return {name: int(config[name]) for name in part.divided}


def _does_not_divide(part: TextPart, sizes: Mapping[str, int], num_ranks: int) -> str:
    odd = ", ".join(f"{name} {size}" for name, size in sizes.items() if size % num_ranks)
    works = [count for count in range(1, gcd(*sizes.values()) + 1) if not any(size % count for size in sizes.values())]
    nearest = min(works, key=lambda count: (abs(count - num_ranks), count))
    return (
        f"placement 'tensor' over {num_ranks} ranks does not fit {part.label}: {odd} cannot be dealt out equally. "
        f"The nearest number of devices that works is {nearest}; or choose placement 'balanced'."
    )


def read_text_source(folder: Path, families: tuple[TextFamily, ...]) -> TextSource:
    """The text encoders of a diffusers pipeline folder, checked as far as json files and headers allow.

    Raises `UserError` for a folder of another family, without encoders or tokenizers, or with weights that are pickled,
    quantised or damaged.
    """
    index = _read_index(folder)
    family = _find_family(folder, index, families)
    classes = {part.encoder: _check_classes(folder, index, part) for part in family.parts}
    encoders = {part.encoder: _read_part(folder, part, *classes[part.encoder]) for part in family.parts}
    return TextSource(
        place=TextPlace(folder=str(folder)),
        name=folder.name,
        family=family,
        encoders=encoders,
        fingerprint="|".join(
            [
                *(encoder.checkpoint.fingerprint for encoder in encoders.values()),
                *(fingerprint(sorted(encoder.tokenizer.path.iterdir())) for encoder in encoders.values()),
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
        if name in family.refused:
            raise UserError(
                f"{folder.name!r} is a {name}, whose prompts cannot be encoded here. {family.refused[str(name)]}"
            )
    known = ", ".join(f"{family.name} ({family.pipelines[0]})" for family in families)
    raise UserError(f"{folder.name!r} is a {name}, whose prompts cannot be encoded here. Supported: {known}.")


def _check_classes(folder: Path, index: Mapping[str, Any], part: TextPart) -> tuple[str, str]:
    """Of the encoder and its tokenizer."""
    return (
        check_class(folder, index, part.encoder, part.encoder_classes),
        check_class(folder, index, part.tokenizer, part.tokenizer_classes),
    )


def _read_part(folder: Path, part: TextPart, class_name: str, tokenizer: str) -> EncoderSource:
    return EncoderSource(
        class_name=part.loaded_class or class_name,
        config_class=class_name,
        checkpoint=_read_weights(folder, part),
        tokenizer=TokenizerSource(name=tokenizer, path=folder / part.tokenizer),
    )


def _read_weights(folder: Path, part: TextPart) -> Checkpoint:
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
    return by_loaded_names(checkpoint, part)


def by_loaded_names(checkpoint: Checkpoint, part: TextPart) -> Checkpoint:
    """The weights that are loaded, by the loaded model's names."""
    found = {}
    for info in checkpoint.without(part.unused).tensors.values():
        name = part.rename(info.name)
        found[name] = replace(info, name=name, stored_as=info.stored_name)
    return replace(checkpoint, tensors=found)


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
