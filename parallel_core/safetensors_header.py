"""The header of a safetensors file: which tensors it holds, of which dtype and shape, and where their bytes lie.

Format: https://github.com/huggingface/safetensors#format (8 bytes little-endian header length, json, data). Owns
parsing and its refusals: what passes here, the library opens too. Reads no weight; knows neither models nor ranks.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NoReturn

from .errors import UserError
from .file_kinds import describe_start

DTYPES: dict[str, tuple[str, int]] = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
"""safetensors dtype -> (torch's name, bytes per element)."""

_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library itself
_LARGEST = 1 << 63


@dataclass(frozen=True)
class SafetensorsHeader:
    """`tensors`: name -> (torch's dtype, shape, first byte, one past the last), counted from `start`, where the data
    begins. `metadata`: free text by names."""

    tensors: Mapping[str, tuple[str, tuple[int, ...], int, int]]
    metadata: Mapping[str, str]
    start: int


def parse_safetensors(file: Path) -> SafetensorsHeader:
    """The whole header, after checking that the file really holds the bytes that it describes.

    Raises `UserError` for another format, damage and a cut-off file.
    """
    label = f"{file.parent.name}/{file.name}"
    if not file.is_file():
        raise UserError(f"{label} is not there, or no file. Is it a link to something that was moved?")
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            begin = stream.read(64)
            length = struct.unpack("<Q", begin[:8])[0] if len(begin) >= 8 else -1
            if not 0 < length <= min(size - 8, _MAX_HEADER_BYTES):
                _refuse_start(label, begin, size, length)
            stream.seek(8)
            text = stream.read(length)
    except OSError as error:
        raise UserError(f"{label} cannot be read: {error.strerror}.") from None
    header = _json(label, text)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise UserError(f"{label} has a damaged safetensors header: its __metadata__ is no table of texts.")
    tensors = {name: _entry(label, name, entry) for name, entry in header.items()}
    _check_bytes(label, tensors, 8 + length, size)
    return SafetensorsHeader(tensors, metadata, 8 + length)


def read_small(file: Path, header: SafetensorsHeader, name: str, most: int) -> bytes | None:
    """The bytes of a tensor of `file`, whose header that is; None where they are more than `most`."""
    _, _, begin, end = header.tensors[name]
    if end - begin > most:
        return None
    with file.open("rb") as stream:
        stream.seek(header.start + begin)
        return stream.read(end - begin)


def _refuse_start(label: str, begin: bytes, size: int, length: int) -> NoReturn:
    kind = describe_start(begin)
    if kind:
        raise UserError(f"{label} is not a safetensors file but {kind}")
    raise UserError(
        f"{label} is not a whole safetensors file: it has {size} bytes and its header claims {max(length, 0)}. "
        "Was the download complete?"
    )


def _json(label: str, text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text.decode("utf-8"), parse_constant=_no_constant)
        if isinstance(header, dict):
            "".join(header).encode("utf-8")  # half of a surrogate pair is no name
            return header
    except (ValueError, RecursionError):  # UnicodeError, JSONDecodeError, a number of thousands of digits
        pass
    raise UserError(f"{label} has a damaged safetensors header (it is not json). Download it again.")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not json")


def _entry(label: str, name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """Refuses entries whose numbers do not agree."""
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = [*shape, begin, end]
    except (TypeError, KeyError, ValueError):
        numbers = [None]
    if not all(type(number) is int and 0 <= number < _LARGEST for number in numbers) or not isinstance(shape, list):
        raise UserError(f"{label} has a damaged header entry for {name!r}. Download it again.")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise UserError(f"{label}: tensor {name!r} has dtype {dtype}, which is not known. Known: {', '.join(DTYPES)}.")
    torch_name, width = DTYPES[dtype]
    if end - begin != prod(shape) * width:
        raise UserError(
            f"{label}: tensor {name!r} claims shape {shape} of {dtype} but {end - begin} bytes; "
            f"expected {prod(shape) * width}."
        )
    return torch_name, tuple(shape), begin, end


def _check_bytes(
    label: str, tensors: Mapping[str, tuple[str, tuple[int, ...], int, int]], start: int, size: int
) -> None:
    """The tensors must lie one behind the other and fill the file."""
    position = 0
    for name, (_, _, begin, end) in sorted(tensors.items(), key=lambda item: item[1][2:]):
        if begin != position:
            raise UserError(
                f"{label} has a damaged safetensors header: {name!r} begins at byte {begin} of the data, where "
                f"{position} was expected ({'two tensors overlap' if begin < position else 'there is a gap'}). "
                "Download it again."
            )
        position = end
    needed = start + position
    if size < needed:
        raise UserError(
            f"{label} is cut off: its header describes {needed} bytes, the file has {size} "
            f"({(needed - size) / 1e6:.1f} MB are missing). Download it again."
        )
    if size > needed:
        raise UserError(f"{label} has {size} bytes, {size - needed} more than its header describes. Download it again.")
