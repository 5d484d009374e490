"""Text encoders in single files, as ComfyUI's loaders read them: which file is which, told from names and shapes alone.

Owns the way from files to a `TextSource`, on both sides, with every refusal about them. Reads no weight and starts
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from .checkpoint import Checkpoint, TensorInfo, fingerprint, read_header
from .errors import UserError
from .families.text_layouts import TEXT_LAYOUTS, TextLayout
from .file_kinds import describe_file
from .quantised import resolve_quantisation
from .text_source import EncoderSource, TextSource, TokenizerSource, by_loaded_names, read_text_source
from .text_spec import TextFamily, TextPart, TextPlace

_NO_WEIGHTS = ("spiece_model", "*.position_ids")
"""Tensors of whole numbers that are no weights."""


def open_place(place: TextPlace, families: tuple[TextFamily, ...]) -> TextSource:
    """The encoders of a folder or of files, checked as far as headers and json allow. Raises `UserError`."""
    if place.folder:
        return read_text_source(Path(place.folder), families)
    family = next((family for family in families if family.name == place.family), None)
    if family is None:
        known = ", ".join(family.name for family in families)
        raise UserError(f"type is {place.family!r}; expected one of {known}.")
    return _read_files(place, family)


def _read_files(place: TextPlace, family: TextFamily) -> TextSource:
    paths = [Path(name) for name in place.files]
    headers = {path: {info.name: info for info in read_header(path)} for path in paths}
    kinds = {path: _kind(names) for path, names in headers.items()}
    _check_set(family, headers, kinds, paths)
    file_of = {kind: path for path, kind in kinds.items()}
    encoders = {
        part.encoder: _read_encoder(part, file_of[part.label], headers[file_of[part.label]], Path(place.tokenizers))
        for part in family.parts
    }
    return TextSource(
        place=place,
        name=", ".join(path.name for path in paths),
        family=family,
        encoders=encoders,
        fingerprint=fingerprint(sorted(paths)),
    )


def _kind(names: Mapping[str, TensorInfo]) -> str:
    """The label of the encoder that a file holds; "" for none that is known."""
    shapes = {name: info.shape for name, info in names.items()}
    for label, layout in TEXT_LAYOUTS.items():
        if all(mark in names for mark in layout.marks) and not any(mark in names for mark in layout.absent):
            return "" if layout.width(shapes) in layout.refused_widths else label
    return ""


def _looks_like(names: Mapping[str, TensorInfo], kind: str) -> str:
    if kind:
        return kind
    shapes = {name: info.shape for name, info in names.items()}
    for layout in TEXT_LAYOUTS.values():
        if layout.refused_widths and all(mark in names for mark in layout.marks):
            return layout.refused_widths[layout.width(shapes)]
    return describe_file(names).removeprefix("It looks like ").removesuffix(".")


def _check_set(
    family: TextFamily,
    headers: Mapping[Path, Mapping[str, TensorInfo]],
    kinds: Mapping[Path, str],
    paths: Sequence[Path],
) -> None:
    """Each encoder of the family once, and nothing else."""
    wanted = [part.label for part in family.parts]
    if sorted(kinds[path] for path in paths) == sorted(wanted):
        return
    found = "; ".join(f"{path.name!r} looks like {_looks_like(headers[path], kinds[path])}" for path in paths)
    needs = " and ".join(wanted)
    where = "one file each, in any order" if len(wanted) > 1 else "one file; text_encoder_2 is then 'none'"
    raise UserError(f"type {family.name} reads prompts with {needs} ({where}), but {found}.")


def _read_encoder(part: TextPart, file: Path, names: Mapping[str, TensorInfo], tokenizers: Path) -> EncoderSource:
    layout, label = TEXT_LAYOUTS[part.label], repr(file.name)
    weights = {name: info for name, info in names.items() if not any(fnmatchcase(name, glob) for glob in _NO_WEIGHTS)}
    weights = resolve_quantisation(weights, label)
    try:
        config = layout.config({name: info.shape for name, info in weights.items()})
    except KeyError as error:
        raise UserError(f"{label} looks like {part.label}, but {error.args[0]!r} is missing. {_CUT}") from None
    except (ValueError, IndexError, ZeroDivisionError):
        raise UserError(f"{label} has the names of {part.label}, but shapes that no such model has.") from None
    checkpoint = Checkpoint(folder=file, class_name=layout.encoder_class, config=config, tensors=weights)
    return EncoderSource(
        class_name=part.loaded_class or layout.encoder_class,
        config_class=layout.encoder_class,
        checkpoint=by_loaded_names(checkpoint, part),
        tokenizer=_tokenizer(layout, file, names, tokenizers),
    )


_CUT = "Was it cut out of a larger file, or is it a part of several?"


def _tokenizer(layout: TextLayout, file: Path, names: Mapping[str, TensorInfo], tokenizers: Path) -> TokenizerSource:
    if layout.in_file:
        info = names.get(layout.tokenizer)
        if info is None or info.dtype not in ("uint8", "int8"):
            raise UserError(
                f"{file.name!r} has no tensor {layout.tokenizer!r}, its tokenizer, which ComfyUI's own files of this "
                "encoder hold. Use umt5_xxl_fp16.safetensors or umt5_xxl_fp8_e4m3fn_scaled.safetensors, or a diffusers "
                "folder with Encode on device_map."
            )
        return TokenizerSource(name=layout.tokenizer_class, path=file, tensor=layout.tokenizer)
    folder = tokenizers / layout.tokenizer
    if not folder.is_dir():
        raise UserError(
            f"This ComfyUI has no {layout.tokenizer} beside its code ({folder} is missing), which holds the tokenizer. "
            "Update ComfyUI, or use a diffusers folder with Encode on device_map."
        )
    return TokenizerSource(name=layout.tokenizer_class, path=folder)
