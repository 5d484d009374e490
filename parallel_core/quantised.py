"""Quantised weights as headers describe them: which are known, which tensor is whose scale, what cannot be read.

Two layouts of scaled fp8 are known: the older (a `scaled_fp8` marker, `*.scale_weight`) and ComfyUI's `comfy_quant`
(`*.weight_scale`, with the format as json beside each layer or in the file's metadata). fp8 without any of these is
plain numbers. Whatever else a name or a dtype speaks of is refused by its name: read as if it were known, it would give
pictures that are wrong in silence. Reads no weight; knows neither families nor ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from .checkpoint import LOADABLE_DTYPES, TensorInfo
from .errors import UserError
from .gguf_header import GGUF_BLOCKS
from .safetensors_header import parse_safetensors, read_small

FP8_DTYPES = ("float8_e4m3fn", "float8_e5m2")

_FOREIGN = {
    "*.smooth_factor*": "SVDQuant (Nunchaku)",
    "*.wscales": "SVDQuant (Nunchaku)",
    "*.proj_down": "SVDQuant (Nunchaku)",
    "*.quant_state.bitsandbytes__nf4": "bitsandbytes NF4",
    "*.quant_state.bitsandbytes__fp4": "bitsandbytes FP4",
    "*.absmax": "bitsandbytes",
    "*.SCB": "bitsandbytes int8",
    "*.qzeros": "GPTQ or AWQ (4-bit integers)",
    "*.qweight": "GPTQ, AWQ or SVDQuant (4-bit integers)",
    "*.weight_packed": "compressed-tensors",
    "*.weight_scale_inv": "fp8 with a scale per block",
    "*.weight_scale_2": "nvfp4",
    "*.pre_quant_scale": "fp8 or nvfp4 with scaled inputs",
    "*._data": "quanto",
    "*.weight._data": "quanto",
    "*.weight_qdata": "torchao",
}
"""Names that only quantised files of layouts that are not read have."""

_MARKER = "scaled_fp8"
_OLD_SCALES = (".scale_weight", ".scale_input")
_NEW_SCALES = (".weight_scale", ".input_scale", ".comfy_quant")
_FORMATS = {"float8_e4m3fn": "float8_e4m3fn", "float8_e5m2": "float8_e5m2"}
"""comfy_quant's format -> the dtype its weights must have."""

_METADATA = "_quantization_metadata"


def resolve_quantisation(tensors: Mapping[str, TensorInfo], label: str) -> dict[str, TensorInfo]:
    """`tensors` of one model (file names, without a prefix) with each weight's scale noted; scales are gone from it.

    Scales of activations (`scale_input`, `input_scale`) are left out: weights alone are taken for fp8, activations stay
    in the compute dtype, which is the more exact way. `UserError`, which starts with `label`, for scales that are
    missing or of a shape that is not one number, and for quantisations that are not known.
    """
    refuse_foreign(tensors, label)
    layers = _comfy_layers(tensors, label)
    if _MARKER in tensors:
        found = _with_old_scales(tensors, label)
    elif layers:
        found = _with_new_scales(tensors, layers, label)
    else:
        odd = next((name for name in tensors if name.endswith((*_OLD_SCALES, ".weight_scale"))), None)
        if odd is not None:
            raise UserError(
                f"{label} has scales ({odd}) but neither a {_MARKER!r} marker nor comfy_quant entries, so how they are "
                "meant is unknown. Use a file in ComfyUI's own fp8 layouts, or the unquantised model."
            )
        found = dict(tensors)
    for info in found.values():
        _refuse_dtype(info, label)
    return found


def refuse_foreign(tensors: Iterable[str], label: str) -> None:
    """`UserError` that names a quantisation that is not read, where the tensors' names show one."""
    for name in tensors:
        for glob, kind in _FOREIGN.items():
            if fnmatchcase(name, glob):
                raise UserError(f"{label} is quantised as {kind} (it has {name!r}), which is not supported. {_ADVICE}")


_ADVICE = (
    "Supported: fp8 (plain, or scaled in ComfyUI's layouts) and GGUF; or use the 16-bit file with weight_dtype "
    "fp8_e4m3fn."
)


def _refuse_dtype(info: TensorInfo, label: str) -> None:
    if info.dtype in (*LOADABLE_DTYPES, *FP8_DTYPES, *GGUF_BLOCKS):
        return
    kind = {"int8": "int8", "uint8": "4 or 8 bits of a format that the file does not name"}.get(info.dtype, info.dtype)
    raise UserError(f"{label}: {info.stored_name!r} is stored as {info.dtype} ({kind}), which is not known. {_ADVICE}")


# ----- the older layout -----


def _with_old_scales(tensors: Mapping[str, TensorInfo], label: str) -> dict[str, TensorInfo]:
    found: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        if name == _MARKER or name.endswith(_OLD_SCALES):
            continue
        scale = tensors.get(f"{name.removesuffix('.weight')}.scale_weight") if name.endswith(".weight") else None
        if scale is None and info.dtype in FP8_DTYPES:
            raise UserError(f"{label} is scaled fp8, but {name!r} has no scale_weight. {_DAMAGED}")
        found[name] = _scaled(info, scale, label)
    _refuse_strays(tensors, found, ".scale_weight", label)
    return found


_DAMAGED = "Was the file converted or pruned by a tool that does not know the layout? Use another copy of it."


# ----- comfy_quant -----


def _comfy_layers(tensors: Mapping[str, TensorInfo], label: str) -> dict[str, dict[str, Any]]:
    """The layers that ComfyUI's entries describe: layer name -> its entry."""
    files = {info.file for info in tensors.values()}
    layers: dict[str, dict[str, Any]] = {}
    for file in files:
        if file.suffix == ".gguf":
            continue
        header = parse_safetensors(file)
        text = header.metadata.get(_METADATA)
        if text is not None:
            prefixes = {info.stored_name.removesuffix(name) for name, info in tensors.items() if info.file == file}
            for name, entry in _described_layers(text, label).items():
                layers.update({name.removeprefix(prefix): entry for prefix in prefixes if name.startswith(prefix)})
        for name, info in tensors.items():
            if info.file == file and name.endswith(".comfy_quant"):
                data = read_small(file, header, info.stored_name, _LONGEST_ENTRY)
                text = "" if data is None else data.decode("utf-8", errors="replace")
                layers[name.removesuffix(".comfy_quant")] = _parse(text, name, label)
    return layers


_LONGEST_ENTRY = 1 << 16
"""Bytes of a comfy_quant tensor: more is no entry."""


def _described_layers(text: str, label: str) -> dict[str, dict[str, Any]]:
    layers = _parse(text, _METADATA, label).get("layers", {})
    if not isinstance(layers, dict) or not all(isinstance(entry, dict) for entry in layers.values()):
        raise UserError(f"{label}: the quantisation entry {_METADATA!r} holds no table of layers. {_DAMAGED}")
    return layers


def _parse(text: str, where: str, label: str) -> dict[str, Any]:
    try:
        entry = json.loads(text)
    except (ValueError, RecursionError):
        entry = None
    if not isinstance(entry, dict):
        raise UserError(f"{label}: the quantisation entry {where!r} is not a json object. {_DAMAGED}")
    return entry


def _with_new_scales(
    tensors: Mapping[str, TensorInfo], layers: Mapping[str, Mapping[str, Any]], label: str
) -> dict[str, TensorInfo]:
    found: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        if name.endswith(_NEW_SCALES):
            continue
        layer = name.removesuffix(".weight")
        if not name.endswith(".weight") or layer not in layers:
            found[name] = info
            continue
        kind = layers[layer].get("format")
        if not isinstance(kind, str) or kind not in _FORMATS:
            raise UserError(
                f"{label}: {name!r} is quantised as {kind} (comfy_quant), which is not supported. {_ADVICE}"
            )
        if info.dtype != _FORMATS[kind]:
            raise UserError(f"{label}: {name!r} is said to be {kind}, but it is stored as {info.dtype}. {_DAMAGED}")
        scale = tensors.get(f"{layer}.weight_scale")
        if scale is None:
            raise UserError(f"{label}: {name!r} is scaled fp8 (comfy_quant), but it has no weight_scale. {_DAMAGED}")
        found[name] = _scaled(info, scale, label)
    _refuse_strays(tensors, found, ".weight_scale", label)
    missing = [layer for layer in layers if f"{layer}.weight" not in tensors]
    if missing:
        raise UserError(f"{label} has quantisation entries for layers without weights: {', '.join(missing[:3])}.")
    return found


# ----- both -----


def _scaled(info: TensorInfo, scale: TensorInfo | None, label: str) -> TensorInfo:
    if scale is None:
        return info
    if scale.dtype not in LOADABLE_DTYPES or any(size != 1 for size in scale.shape):
        raise UserError(
            f"{label}: the scale {scale.stored_name!r} has shape {list(scale.shape)} and dtype {scale.dtype}; expected "
            "one floating-point number per weight."
        )
    return replace(info, scale=scale.stored_name)


def _refuse_strays(tensors: Iterable[str], found: Mapping[str, TensorInfo], suffix: str, label: str) -> None:
    strays = [
        name
        for name in tensors
        if name.endswith(suffix) and not found.get(f"{name.removesuffix(suffix)}.weight", _NO_SCALE).scale
    ]
    if strays:
        raise UserError(f"{label} has scales that belong to no weight: {', '.join(strays[:3])}. {_DAMAGED}")


_NO_SCALE = TensorInfo(name="", dtype="", shape=(), num_bytes=0, file=Path())
