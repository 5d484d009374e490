"""The header of a GGUF file: which tensors it holds, how they are packed and where they lie.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (version 2 and 3, little-endian). Owns parsing and its
refusals; reads no weight and does not know how packed numbers are read.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from .checkpoint import TensorInfo
from .errors import UserError
from .file_starts import describe_start

GGUF_BLOCKS: dict[str, tuple[int, int]] = {
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
}
"""Packed types that can be read: (numbers in a block, bytes of a block). Blocks run along the last dimension."""

_TYPES = {
    0: "float32", 1: "float16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K",
    11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "bfloat16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
_PLAIN = {"float32": (1, 4), "float16": (1, 2), "bfloat16": (1, 2)}

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST = 1_000_000  # tensors, entries, elements of an array, bytes of a text in a header
_MOST_BYTES = 50_000_000  # of a header; a language model's vocabulary takes 10 MB
_MOST_DIMS = 4

_ORIGINAL_SHAPE = "comfy.gguf.orig_shape."
"""Entries that say what was flattened, since GGUF has four dimensions at most."""


@dataclass(frozen=True)
class GgufHeader:
    """`offsets[name]`: where a tensor's bytes begin in the file. `architecture`: what the file calls its model."""

    tensors: dict[str, TensorInfo]
    offsets: dict[str, int]
    architecture: str


def read_gguf_header(file: Path) -> list[TensorInfo]:
    """The tensors that a GGUF file declares; see `parse_gguf`."""
    return list(parse_gguf(file).tensors.values())


def parse_gguf(file: Path) -> GgufHeader:
    """The whole header, after checking that the file really holds the tensors' bytes.

    Raises `UserError` for another or a newer format, damage, a cut-off file and packed types that cannot be read.
    """
    label = f"{file.parent.name}/{file.name}"
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            header = _Parser(stream, file, label).parse()
    except OSError as error:
        raise UserError(f"{label} cannot be read: {error.strerror}.") from None
    except (struct.error, UnicodeDecodeError, RecursionError):
        raise UserError(f"{label} has a damaged GGUF header. Was the download complete?") from None
    _check_places(label, header, size)
    return header


def _check_places(label: str, header: GgufHeader, size: int) -> None:
    """Every tensor has bytes of its own, and the file has them."""
    end = 0
    for name, begin in sorted(header.offsets.items(), key=lambda item: item[1]):
        if begin < end:
            raise UserError(f"{label} has a damaged GGUF header: {name!r} lies over another tensor. Download it again.")
        end = begin + header.tensors[name].num_bytes
    if size < end:
        raise UserError(
            f"{label} is cut off: its header describes {end} bytes, the file has {size} "
            f"({(end - size) / 1e6:.1f} MB are missing). Download it again."
        )


class _Parser:
    def __init__(self, stream: BinaryIO, file: Path, label: str) -> None:
        self._stream = stream
        self._file = file
        self._label = label
        self._left = _MOST_BYTES

    def parse(self) -> GgufHeader:
        magic = self._read(4)
        if magic != b"GGUF":
            hint = describe_start(magic + self._stream.read(64))
            raise UserError(f"{self._label} is no GGUF file: it begins with {magic!r}.{hint}")
        version = self._number("I")
        if version not in (2, 3):
            raise UserError(f"{self._label} is GGUF of version {version}; expected version 2 or 3, little-endian.")
        num_tensors, num_entries = self._number("Q"), self._number("Q")
        if max(num_tensors, num_entries) > _MOST:
            raise self._damaged(f"it claims {num_tensors} tensors and {num_entries} entries")
        entries = {self._string(): self._value(self._number("I")) for _ in range(num_entries)}
        raw = [self._tensor() for _ in range(num_tensors)]
        alignment = entries.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= 1 << 20:
            raise self._damaged(f"its alignment is {alignment!r}")
        start = -(-self._stream.tell() // alignment) * alignment
        tensors = {name: self._info(name, kind, shape, entries) for name, kind, shape, _ in raw}
        if len(tensors) < len(raw):
            raise self._damaged("it has two tensors of the same name")
        offsets = {name: start + offset for name, _, _, offset in raw}
        return GgufHeader(tensors, offsets, str(entries.get("general.architecture", "")))

    def _info(self, name: str, kind: int, stored: tuple[int, ...], entries: dict[str, Any]) -> TensorInfo:
        dtype = _TYPES.get(kind, f"GGUF type {kind}")
        block, size = GGUF_BLOCKS.get(dtype) or _PLAIN.get(dtype) or (0, 0)
        if not block:
            raise UserError(
                f"{self._label}: {name!r} is packed as {dtype}, which cannot be read. Known: {', '.join(GGUF_BLOCKS)}."
            )
        original = entries.get(_ORIGINAL_SHAPE + name, stored)
        shape = tuple(original) if isinstance(original, (list, tuple)) else ()
        if any(type(size) is not int or size < 0 for size in shape) or prod(shape) != prod(stored):
            raise self._damaged(f"{name!r} has {list(stored)} numbers, said to be {original!r}")
        if block > 1 and not (stored and shape and stored[-1] % block == shape[-1] % block == 0):
            raise UserError(f"{self._label}: the shape {list(shape)} of {name!r} does not fit its blocks of {block}.")
        return TensorInfo(name=name, dtype=dtype, shape=shape, num_bytes=prod(stored) // block * size, file=self._file)

    def _tensor(self) -> tuple[str, int, tuple[int, ...], int]:
        name = self._string()
        num_dims = self._number("I")
        if num_dims > _MOST_DIMS:
            raise self._damaged(f"{name!r} has {num_dims} dimensions")
        dims = [self._number("Q") for _ in range(num_dims)]
        return name, self._number("I"), tuple(reversed(dims)), self._number("Q")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            of, length = self._number("I"), self._number("Q")
            if length > _MOST:
                raise self._damaged(f"an array of {length} entries")
            return [self._value(of) for _ in range(length)]
        if kind not in _SCALARS:
            raise self._damaged(f"an entry of type {kind}")
        return self._number(_SCALARS[kind])

    def _number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._read(struct.calcsize(f"<{code}")))[0]

    def _string(self) -> str:
        length = self._number("Q")
        if length > _MOST:
            raise self._damaged(f"a text of {length} bytes")
        return self._read(length).decode("utf-8")

    def _read(self, size: int) -> bytes:
        self._left -= size
        if self._left < 0:
            raise self._damaged(f"it is longer than {_MOST_BYTES} bytes")
        return self._stream.read(size)

    def _damaged(self, what: str) -> UserError:
        return UserError(f"{self._label} has a damaged GGUF header: {what}. Download it again.")
