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
from .file_kinds import describe_start, is_safetensors

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
_MOST_TENSORS, _MOST_ELEMENTS, _MOST_BYTES = 100_000, 1_000_000, 64_000_000
"""Tensors or entries, elements of an array, bytes of a whole header: far more than any model has."""

_ARCHITECTURE = "general.architecture"
_ORIGINAL_SHAPE = "comfy.gguf.orig_shape."
"""Entries (and the tensor's name) that say what was flattened, since GGUF has four dimensions at most."""


_KEPT = ("general.", _ORIGINAL_SHAPE)


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
    if not file.is_file():
        raise UserError(f"{label} is not there, or no file. Is it a link to something that was moved?")
    try:
        with file.open("rb") as stream:
            header = _Parser(stream, file, label).parse()
    except OSError as error:
        raise UserError(f"{label} cannot be read: {error.strerror}.") from None
    except (EOFError, UnicodeDecodeError, RecursionError):
        raise UserError(f"{label} has a damaged GGUF header. Was the download complete?") from None
    size = file.stat().st_size
    ends = [header.offsets[name] + info.num_bytes for name, info in header.tensors.items()]
    needed = max(ends, default=0)
    if size < needed:
        raise UserError(
            f"{label} is cut off: its header describes {needed} bytes, the file has {size} "
            f"({(needed - size) / 1e6:.1f} MB are missing). Download it again."
        )
    return header


class _Parser:
    def __init__(self, stream: BinaryIO, file: Path, label: str) -> None:
        self._stream = stream
        self._file = file
        self._label = label
        self._left = _MOST_BYTES

    def parse(self) -> GgufHeader:
        begin = self._stream.read(64)
        self._stream.seek(0)
        magic, version = self._read(4), self._number("I")
        if magic != b"GGUF" or version not in (2, 3):
            kind = "a safetensors file. Let its name end in .safetensors." if is_safetensors(begin) else ""
            kind = kind or ("" if magic == b"GGUF" else describe_start(begin))
            if kind:
                raise UserError(f"{self._label} is not a GGUF file but {kind}")
            raise UserError(f"{self._label} is no GGUF file of version 2 or 3: it begins with {magic!r}, {version}.")
        num_tensors, num_entries = self._number("Q"), self._number("Q")
        if max(num_tensors, num_entries) > _MOST_TENSORS:
            raise self._damaged(f"it claims {num_tensors} tensors and {num_entries} entries")
        entries = self._entries(num_entries)
        raw = [self._tensor() for _ in range(num_tensors)]
        if len({name for name, *_ in raw}) < len(raw):
            raise self._damaged("two tensors have the same name")
        alignment = entries.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= 1 << 16:
            raise self._damaged(f"general.alignment is {alignment!r}")
        start = -(-self._stream.tell() // alignment) * alignment
        tensors = {name: self._info(name, kind, shape, entries) for name, kind, shape, _ in raw}
        offsets = {name: start + offset for name, _, _, offset in raw}
        self._refuse_overlap(tensors, offsets)
        return GgufHeader(tensors, offsets, str(entries.get(_ARCHITECTURE, "")))

    def _entries(self, number: int) -> dict[str, Any]:
        """Those that are looked at; a language model's word list, say, is let go at once."""
        found: dict[str, Any] = {}
        for _ in range(number):
            key = self._string()
            value = self._value(self._number("I"))
            if key.startswith(_KEPT):
                found[key] = value
        return found

    def _refuse_overlap(self, tensors: dict[str, TensorInfo], offsets: dict[str, int]) -> None:
        position = 0
        for name in sorted(tensors, key=lambda name: (offsets[name], tensors[name].num_bytes)):
            if offsets[name] < position:
                raise self._damaged(f"{name!r} and the tensor before it overlap")
            position = offsets[name] + tensors[name].num_bytes

    def _damaged(self, what: str) -> UserError:
        return UserError(f"{self._label} has a damaged GGUF header: {what}. Was the download complete?")

    def _info(self, name: str, kind: int, stored: tuple[int, ...], entries: dict[str, Any]) -> TensorInfo:
        dtype = _TYPES.get(kind, f"GGUF type {kind}")
        block, size = GGUF_BLOCKS.get(dtype) or _PLAIN.get(dtype) or (0, 0)
        if not block:
            raise UserError(
                f"{self._label}: {name!r} is packed as {dtype}, which cannot be read. Known: {', '.join(GGUF_BLOCKS)}. "
                f"(The file calls its model {entries.get(_ARCHITECTURE)!r}.)"
            )
        original = entries.get(_ORIGINAL_SHAPE + name, list(stored))
        if not isinstance(original, list) or not all(type(size) is int and size >= 0 for size in original):
            raise self._damaged(f"the shape of {name!r} is {original!r}")
        shape = tuple(original)
        if prod(shape) != prod(stored) or (stored and stored[-1] % block):
            raise UserError(f"{self._label}: the shape {list(shape)} of {name!r} does not fit its blocks of {block}.")
        return TensorInfo(name=name, dtype=dtype, shape=shape, num_bytes=prod(stored) // block * size, file=self._file)

    def _tensor(self) -> tuple[str, int, tuple[int, ...], int]:
        name = self._string()
        num_dims = self._number("I")
        if num_dims > 4:
            raise self._damaged(f"{name!r} has {num_dims} dimensions")
        dims = [self._number("Q") for _ in range(num_dims)]
        return name, self._number("I"), tuple(reversed(dims)), self._number("Q")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            of, length = self._number("I"), self._number("Q")
            if length > _MOST_ELEMENTS:
                raise self._damaged(f"an array of {length} entries")
            if of in _SCALARS:
                code = f"<{length}{_SCALARS[of]}"
                return list(struct.unpack(code, self._read(struct.calcsize(code))))
            return [self._value(of) for _ in range(length)]
        if kind not in _SCALARS:
            raise self._damaged(f"an entry of type {kind}")
        return self._number(_SCALARS[kind])

    def _number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._read(struct.calcsize(f"<{code}")))[0]

    def _string(self) -> str:
        length = self._number("Q")
        if length > 1 << 20:
            raise self._damaged(f"a text of {length} bytes")
        return self._read(length).decode("utf-8")

    def _read(self, size: int) -> bytes:
        self._left -= size
        if self._left < 0:
            raise self._damaged(f"it is longer than {_MOST_BYTES} bytes")
        data = self._stream.read(size)
        if len(data) < size:
            raise EOFError
        return data
