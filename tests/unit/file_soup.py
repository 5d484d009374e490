"""Sound tiny model files and what damages them, byte by byte. Does not know: how the product reads them."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Header = dict[str, Any]


def write_names(file: Path, *names: str, **tensors: torch.Tensor) -> Path:
    """A safetensors file with a small tensor for each name."""
    save_file({**{name: torch.zeros(4, 4) for name in names}, **tensors}, file)
    return file


def write_header(file: Path, header: bytes | Mapping[str, Any], data: bytes = b"") -> Path:
    """A safetensors file of exactly this header and data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return file


def read_parts(file: Path) -> tuple[Header, bytes]:
    """The header and the data of a sound safetensors file."""
    data = file.read_bytes()
    end = 8 + int(struct.unpack("<Q", data[:8])[0])
    return json.loads(data[8:end]), data[end:]


def header_length(file: Path) -> int:
    """Bytes before the first tensor, about: of a GGUF file the part where its names are."""
    data = file.read_bytes()
    return 4096 if data[:4] == b"GGUF" else 8 + int(struct.unpack("<Q", data[:8])[0])


def damaged(sound: bytes, length: int, rng: random.Random) -> bytes:
    """`sound` with some of its first `length` bytes changed, cut out or doubled, or cut off somewhere."""
    data = bytearray(sound)
    for _ in range(rng.choice((1, 1, 2, 8))):
        place = rng.randrange(min(length, len(data)))
        match rng.randrange(5):
            case 0:
                data[place] ^= 1 << rng.randrange(8)
            case 1:
                data[place] = rng.choice(b'0123456789-"[]{},:.eE\\\x00\xff')
            case 2:
                del data[place : place + rng.randrange(1, 9)]
            case 3:
                data[place:place] = data[place : place + rng.randrange(1, 9)]
            case 4:
                number = rng.choice((0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1))
                data[place : place + 8] = struct.pack("<Q", number)
        if not data:
            return b""
    return bytes(data[: rng.randrange(len(data))]) if rng.randrange(6) == 0 else bytes(data)


def changed_header(header: Header, data: bytes, rng: random.Random) -> bytes:
    """The file with some values of its header's json replaced by others of any type."""
    soup: list[Any] = [None, True, -1, 0, 1, 2**70, 1.5, "", "F32", "x", [], [0], [-1, 2], [1] * 40, {}, {"a": 1}]
    header = json.loads(json.dumps(header))
    for _ in range(rng.choice((1, 1, 3))):
        name = rng.choice(list(header))
        entry = header[name]
        match rng.randrange(5):
            case 0:
                header[name] = rng.choice(soup)
            case 1:
                header[rng.choice(("", "a", "__metadata__", name + ".comfy_quant", "scaled_fp8"))] = entry
            case 2:
                del header[name]
                if not header:
                    break
            case _ if isinstance(entry, dict) and entry:
                key = rng.choice(list(entry))
                value = entry[key]
                if isinstance(value, list) and value and rng.randrange(2):
                    value[rng.randrange(len(value))] = rng.choice(soup)
                else:
                    entry[key] = rng.choice(soup)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data
