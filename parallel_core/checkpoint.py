"""What a model is, from its json files and safetensors headers alone.

Owns finding a component's files, reading and checking headers, and naming what is wrong with a folder. Reads no weight,
starts nothing, and knows neither families nor ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import Any

from .errors import UserError
from .safetensors_header import parse_safetensors

LOADABLE_DTYPES = ("float64", "float32", "float16", "bfloat16")
"""Plain floating-point weights. Other dtypes mean a quantised file, which would load wrong without its scales."""

_PICKLES = (".bin", ".ckpt", ".pt", ".pth", ".pkl")


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """One weight: a tensor of a file, or some of its rows. `dtype` is torch's name for how the numbers are stored, or
    a GGUF type (Q4_K).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    """In numbers, whatever they are packed in."""
    num_bytes: int
    """As stored."""
    file: Path
    stored_as: str = ""
    """The tensor's name in the file, where that is another."""
    rows: tuple[tuple[int, int], ...] | None = None
    """The rows (dim 0) of the stored tensor that are this weight, in its order; None for all of them."""
    scale: str = ""
    """The tensor of the same file (one float) that the stored numbers are multiplied by."""

    @property
    def stored_name(self) -> str:
        """The tensor's name in the file."""
        return self.stored_as or self.name

    @property
    def is_quantised(self) -> bool:
        """Whether the stored numbers are not plain floating point of 16 bits or more."""
        return self.dtype not in LOADABLE_DTYPES


@dataclass(frozen=True)
class Checkpoint:
    """One component (transformer, vae, text encoder) of a diffusers folder, or what a single file holds of it."""

    folder: Path
    """Or the single file."""
    class_name: str
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    config_file: Path | None = None
    """Where the config comes from; None where it is `folder`'s config.json, or nothing but the file and a preset."""
    variant: str = ""
    """The preset that a single file's config comes from."""

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of all tensors as they are stored."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    @cached_property
    def num_elements(self) -> int:
        """Number of weights."""
        return sum(_count(tensor.shape) for tensor in self.tensors.values())

    @cached_property
    def dtype(self) -> str:
        """The dtype that most bytes have: what "default" means on a loader node."""
        totals: dict[str, int] = {}
        for tensor in self.tensors.values():
            totals[tensor.dtype] = totals.get(tensor.dtype, 0) + tensor.num_bytes
        return max(totals, key=lambda name: totals[name])

    @property
    def files(self) -> tuple[Path, ...]:
        """The safetensors files, each once."""
        return tuple(sorted({tensor.file for tensor in self.tensors.values()}))

    def without(self, patterns: Sequence[str]) -> Checkpoint:
        """The checkpoint without the tensors whose names match one of the globs."""
        kept = {name: info for name, info in self.tensors.items() if not any(fnmatch(name, p) for p in patterns)}
        return replace(self, tensors=kept)

    @property
    def fingerprint(self) -> str:
        """Changes when a file of this component, its config.json included, is replaced."""
        config = self.folder / "config.json" if self.folder.is_dir() else self.config_file
        return fingerprint([*([config] if config else []), *self.files])


def fingerprint(files: Iterable[Path]) -> str:
    """Names, sizes and modification times of `files`."""
    stats = [(file.name, file.stat()) for file in files]
    return ";".join(f"{name}:{stat.st_size}:{stat.st_mtime_ns}" for name, stat in stats)


def component_folder(folder: Path, component: str) -> Path:
    """`folder/component` of a pipeline (model_index.json), or `folder` itself when it is a bare component."""
    if (folder / "model_index.json").is_file():
        path = folder / component
        if not path.is_dir():
            raise UserError(
                f"The model folder {folder.name!r} has a model_index.json but no {component!r} folder in it. "
                "Expected the layout of diffusers: model_index.json, transformer/, vae/, text_encoder/ ..."
            )
        return path
    if (folder / "config.json").is_file():
        return folder
    raise UserError(
        f"The folder {folder.name!r} has neither model_index.json nor config.json, so what it holds is unknown. "
        "Expected a diffusers model folder, or the transformer folder of one."
    )


def read_json(path: Path) -> dict[str, Any]:
    """A json object from `path`; `UserError` that names the file when it is missing or broken."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path.parent.name}/{path.name} is missing.") from None
    except OSError as error:
        raise UserError(f"{path.parent.name}/{path.name} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path.parent.name}/{path.name} is not valid json: {error}.") from None
    if not isinstance(data, dict):
        raise UserError(f"{path.parent.name}/{path.name} holds a {type(data).__name__}; expected a json object.")
    return data


def read_checkpoint(folder: Path, component: str) -> Checkpoint:
    """Reads config.json and every safetensors header of one component of a diffusers folder.

    Raises `UserError` for a folder without config or weights, with only pickled weights, or with a damaged file.
    """
    path = component_folder(folder, component)
    if not (path / "config.json").is_file():
        raise UserError(f"{path.name}/config.json is missing in {folder.name!r}, so the model's sizes are unknown.")
    config = read_json(path / "config.json")
    architectures = config.get("architectures")
    class_name = config.get("_class_name") or (architectures[0] if architectures and type(architectures) is list else 0)
    if not isinstance(class_name, str):
        raise UserError(f"{path.name}/config.json has no _class_name, so what kind of model it is cannot be told.")
    tensors: dict[str, TensorInfo] = {}
    for file in weight_files(path):
        tensors.update((info.name, info) for info in read_header(file))
    return Checkpoint(folder=path, class_name=class_name, config=config, tensors=tensors)


def weight_files(path: Path) -> Sequence[Path]:
    """The safetensors files of a component folder: those an index names, or the single one there."""
    indexes = sorted(path.glob("*.safetensors.index.json"))
    if indexes:
        return _indexed_files(indexes[0])
    files = [file for file in sorted(path.glob("*.safetensors")) if file.name in _SINGLE_NAMES] or sorted(
        path.glob("*.safetensors")
    )
    if len(files) > 1:
        raise UserError(
            f"{path.name} holds {len(files)} safetensors files and no index: {', '.join(f.name for f in files[:4])}. "
            "Keep one, or add the .safetensors.index.json that names them."
        )
    if files:
        return files
    pickles = sorted(file.name for file in path.iterdir() if file.suffix in _PICKLES)
    if pickles:
        raise UserError(
            f"{path.name} holds only pickled weights ({', '.join(pickles[:3])}), which can run code when opened and "
            "are not read. Convert them to .safetensors (diffusers: save_pretrained(..., safe_serialization=True))."
        )
    raise UserError(f"{path.name} holds no .safetensors file.")


_SINGLE_NAMES = ("diffusion_pytorch_model.safetensors", "model.safetensors")


def _indexed_files(index: Path) -> Sequence[Path]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index.parent.name}/{index.name} has no weight_map.")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name:
            raise UserError(f"{index.parent.name}/{index.name} names {name!r}, which is outside the model's folder.")
        if not (index.parent / name).is_file():
            raise UserError(f"{index.parent.name}/{name} is missing; {index.name} lists it. Was the download complete?")
    return [index.parent / name for name in names]


def read_header(file: Path) -> Sequence[TensorInfo]:
    """The tensors that a safetensors file declares; refusals as in `parse_safetensors`."""
    return [
        TensorInfo(name=name, dtype=dtype, shape=shape, num_bytes=end - begin, file=file)
        for name, (dtype, shape, begin, end) in parse_safetensors(file).tensors.items()
    ]


def check_shapes(checkpoint: Checkpoint, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Compares names and shapes with what the config implies; `UserError` lists the first few that differ."""
    have = checkpoint.tensors
    problems = [f"{name} is missing" for name in expected if name not in have]
    problems += [
        f"{name} has shape {list(have[name].shape)}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in have and have[name].shape != shape
    ]
    problems += [f"{name} is not part of a {checkpoint.class_name}" for name in have if name not in expected]
    if problems:
        more = f" (and {len(problems) - 4} more)" if len(problems) > 4 else ""
        what = f"what they look like ({checkpoint.variant})" if checkpoint.variant else "its config.json"
        raise UserError(
            f"The weights in {checkpoint.folder.name!r} do not fit {what}: {'; '.join(problems[:4])}{more}."
        )


def check_loadable(checkpoint: Checkpoint) -> None:
    """Refuses dtypes that are only right together with scales that a plain load would drop."""
    odd = {tensor.dtype for tensor in checkpoint.tensors.values()} - set(LOADABLE_DTYPES)
    if odd:
        raise UserError(
            f"{checkpoint.folder.name!r} holds {', '.join(sorted(odd))} weights (a quantised model); "
            f"expected {', '.join(LOADABLE_DTYPES)}. Use the unquantised model."
        )


def _count(shape: Sequence[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
