"""Which transformer a model is: a diffusers folder, or a single file whose family, variant and sizes its header shows.

Owns the way from a path to a `Checkpoint` in diffusers' names and its family, on both sides: names, shapes and json
alone, never the file's name. Reads no weight and starts nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import Any

from .checkpoint import (
    Checkpoint,
    TensorInfo,
    check_shapes,
    component_folder,
    read_checkpoint,
    read_header,
    read_json,
)
from .errors import UserError
from .families.base import Family
from .families.layout import MissingWeightError, Original, Shapes
from .families.registry import FAMILIES, find_family
from .file_kinds import describe_file, known_kind
from .gguf_header import read_gguf_header
from .quantised import refuse_foreign, resolve_quantisation

_PREFIXES = ("model.diffusion_model.", "diffusion_model.", "transformer.", "model.", "net.", "")
"""Where a transformer's names start in single files: ComfyUI's own and those that it takes too."""


@dataclass(frozen=True)
class ModelSource:
    """Where a transformer comes from: a diffusers folder or a single file.

    `config_from`: a diffusers folder whose transformer's config takes the place of a single file's preset.
    """

    path: Path
    config_from: Path | None = None


def read_transformer(source: ModelSource) -> tuple[Checkpoint, Family]:
    """The transformer of `source`, with its family, fully checked from headers and json.

    Raises `UserError` for whatever is not understood, with what was recognised and what is missing.
    """
    path, config_from = source.path, source.config_from
    if not path.is_dir():
        return _read_single_file(path, config_from)
    if config_from is not None:
        raise UserError(f"config_from is set, but {path.name!r} is a diffusers folder with a config of its own.")
    checkpoint = read_checkpoint(path, "transformer")
    family = find_family(checkpoint)
    tensors = resolve_quantisation(checkpoint.tensors, repr(checkpoint.folder.name))
    checkpoint = replace(checkpoint, tensors=tensors).without(family.unused_weights)
    check_shapes(checkpoint, _expected_shapes(checkpoint, family))
    return checkpoint, family


def check_model(path: Path) -> None:
    """`UserError` for a model that cannot be read whatever `config_from` is: a folder that is not right, a file without
    a transformer that runs here or with weights of an unknown kind."""
    if path.is_dir():
        read_transformer(ModelSource(path))
    else:
        _open_single_file(path)


def _expected_shapes(checkpoint: Checkpoint, family: Family) -> dict[str, tuple[int, ...]]:
    """What the config implies, by diffusers names; `UserError` for a config that the family does not run."""
    label = repr(checkpoint.folder.name)
    config = family.full_config(checkpoint.config)
    try:
        for name in ("num_layers", "num_single_layers"):
            if int(config.get(name, 0)) > _MOST_LAYERS:
                raise UserError(f"{name} is {config[name]}; no model has more than {_MOST_LAYERS}.")
        if family.check_config is not None:
            family.check_config(config)
        return family.expected_shapes(config)
    except UserError as error:
        raise UserError(f"{label}: {error}") from None
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        raise UserError(
            f"{label}: the config of this {family.class_name} has a value of a wrong kind ({error}). Compare its "
            "config.json with the original model's."
        ) from None


_MOST_LAYERS = 1000
"""So that a damaged config does not have a list of billions of weights made."""


# ----- single files -----


@dataclass(frozen=True, kw_only=True)
class _Match:
    """A transformer of `family` in a file: its tensors by their names without the prefix; `is_diffusers` layout or the
    original one."""

    family: Family
    is_diffusers: bool
    tensors: Mapping[str, TensorInfo]

    def name_of(self, diffusers_name: str) -> str:
        """The name in the file, without a prefix."""
        return diffusers_name if self.is_diffusers else self.family.files.rename(diffusers_name)

    @property
    def weights(self) -> dict[str, TensorInfo]:
        """`tensors` without marks that are no weights and without weights that no model reads."""
        unused = [self.name_of(glob) for glob in self.family.unused_weights]
        return {
            name: info
            for name, info in self.tensors.items()
            if name not in self.family.files.flags and not any(fnmatchcase(name, glob) for glob in unused)
        }

    @property
    def shapes(self) -> Shapes:
        """By diffusers names."""
        return Shapes({name: info.shape for name, info in self.tensors.items()}, self.name_of)


def _open_single_file(file: Path) -> _Match:
    infos = read_gguf_header(file) if file.suffix == ".gguf" else read_header(file)
    match = _recognise(file, {info.name: info for info in infos})
    return replace(match, tensors=resolve_quantisation(match.tensors, repr(file.name)))


def _read_single_file(file: Path, config_from: Path | None) -> tuple[Checkpoint, Family]:
    match = _open_single_file(file)
    layout, family, label = match.family.files, match.family, repr(file.name)
    try:
        variant = layout.variant(match.shapes)
        preset = {**layout.presets[variant], **_config_of(config_from, family)}
        structure = layout.structure(match.shapes, preset)
        _check_structure(variant, preset, structure)
    except MissingWeightError as error:
        raise UserError(
            f"{label} looks like a {family.name} transformer, but {error.args[0]!r} is missing. Was it cut out of a "
            "larger file, or is it a part of several?"
        ) from None
    except UserError as error:
        raise UserError(f"{label}: {error}") from None
    except (TypeError, ValueError, IndexError, ZeroDivisionError):
        settings = f" with the settings of config_from {config_from.name!r}" if config_from else ""
        raise UserError(
            f"{label} has the names of a {family.name} transformer, but shapes that no such model has{settings}."
        ) from None
    config: dict[str, Any] = {**preset, **structure}
    for name, fields in layout.flags.items():
        config.update(fields if name in match.tensors else {})
    if config_from is not None:
        _refuse_contradiction(label, config_from, preset, structure)
    config["_class_name"] = family.class_name
    checkpoint = Checkpoint(
        folder=file,
        class_name=family.class_name,
        config=config,
        tensors=match.weights,
        config_file=config_from / "config.json" if config_from else None,
        variant=variant,
    )
    return replace(checkpoint, tensors=_in_diffusers_names(match, checkpoint)), family


def _check_structure(variant: str, preset: Mapping[str, Any], structure: Mapping[str, Any]) -> None:
    """`ValueError` for sizes that no model has, `UserError` for those that need another config than the preset."""
    if any(type(size) is int and size == 0 for size in structure.values()):
        raise ValueError("a size is zero")
    head, axes = structure.get("attention_head_dim"), preset.get("axes_dims_rope")
    if head and axes and sum(axes) != head:
        raise UserError(
            f"the weights have heads of {head} channels, but the settings for {variant} are for {sum(axes)} "
            f"(axes_dims_rope {list(axes)}). Set config_from to the diffusers folder of the model that this was made "
            "from."
        )


def _recognise(file: Path, names: Mapping[str, TensorInfo]) -> _Match:
    """The one transformer in the file; `UserError` that says what the file looks like where there is none."""
    partly: list[tuple[int, str]] = []
    for match in _candidates(names):
        layout = match.family.files
        wanted = [match.name_of(name) for name in layout.marks]
        there = [name for name in wanted if name in match.tensors]
        for glob, kind in layout.refused.items():
            if there and any(fnmatchcase(name, glob) for name in match.tensors):
                raise UserError(
                    f"{file.name!r} is {kind}, which does not run here; it only looks like {match.family.name}. "
                    "Use ComfyUI's own Load Diffusion Model."
                )
        if len(there) == len(wanted):
            return match
        missing = [name for name in wanted if name not in match.tensors]
        if len(there) > len(missing):
            looks = f"It looks like a {match.family.name} transformer, but {missing[0]!r} is missing."
            partly.append((len(missing), looks))
    is_known = bool(known_kind(names))
    nearly = next((looks for number, looks in partly if number == 1 or not is_known), "")
    if nearly or not is_known:
        refuse_foreign(names, repr(file.name))
    known = ", ".join(family.name for family in FAMILIES)
    raise UserError(
        f"{file.name!r} holds no transformer that runs here. {nearly or describe_file(names)} "
        f"Expected a transformer of {known}, in the original, ComfyUI's or diffusers' layout."
    )


def _candidates(names: Mapping[str, TensorInfo]) -> Iterator[_Match]:
    for prefix in _PREFIXES:
        if not any(name.startswith(prefix) for name in names):
            continue
        within = {
            name[len(prefix) :]: replace(info, stored_as=info.name)
            for name, info in names.items()
            if name.startswith(prefix)
        }
        for family in FAMILIES:
            original = {family.files.canonical(name): info for name, info in within.items()}
            yield _Match(family=family, is_diffusers=False, tensors=original)
            yield _Match(family=family, is_diffusers=True, tensors=within)


def _config_of(folder: Path | None, family: Family) -> dict[str, Any]:
    """The config in `folder`, of a transformer of the same class."""
    if folder is None:
        return {}
    config = read_json(component_folder(folder, "transformer") / "config.json")
    if config.get("_class_name") != family.class_name:
        raise UserError(
            f"config_from {folder.name!r} holds a {config.get('_class_name')}, but the file is a {family.class_name}."
        )
    return family.full_config({name: value for name, value in config.items() if not name.startswith("_")})


def _refuse_contradiction(label: str, folder: Path, preset: Mapping[str, Any], structure: Mapping[str, Any]) -> None:
    for name, value in structure.items():
        said = preset.get(name)
        said = tuple(said) if isinstance(said, list) else said
        if name in preset and said != value:
            raise UserError(
                f"config_from {folder.name!r} says {name} = {preset[name]!r}, but the weights in {label} show "
                f"{value!r}. Choose the folder of the model that the file was made from."
            )


def _in_diffusers_names(match: _Match, checkpoint: Checkpoint) -> dict[str, TensorInfo]:
    """The weights by diffusers names, after `check_shapes` by the names in the file; `checkpoint` has those."""
    layout, family = match.family.files, match.family
    config = family.full_config(checkpoint.config)
    shapes = _expected_shapes(checkpoint, family)
    places = layout.weights(shapes, config) if not match.is_diffusers else {name: Original(name) for name in shapes}
    stored: dict[str, tuple[int, ...]] = {}
    for name, place in places.items():
        if place.rows is None:
            stored[place.name] = shapes[name]
        else:  # a part: the stored tensor ends where the last of its parts does
            ends = [stop for _, stop in place.rows] + [stored.get(place.name, (0,))[0]]
            stored[place.name] = (max(ends), *shapes[name][1:])
    check_shapes(checkpoint, stored)
    return {name: _part(match.tensors[place.name], name, shapes[name], place) for name, place in places.items()}


def _part(info: TensorInfo, name: str, shape: tuple[int, ...], place: Original) -> TensorInfo:
    """The weight `name` of that shape: a stored tensor, or some rows of it."""
    if place.rows is None:
        return replace(info, name=name)
    return replace(
        info, name=name, shape=shape, rows=place.rows, num_bytes=info.num_bytes * prod(shape) // prod(info.shape)
    )
