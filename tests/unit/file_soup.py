"""The header of a sound safetensors file, and what damages its values. Does not know: how the product reads them."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

Header = dict[str, Any]


def read_parts(file: Path) -> tuple[Header, bytes]:
    """The header and the data of a sound safetensors file."""
    data = file.read_bytes()
    end = 8 + int(struct.unpack("<Q", data[:8])[0])
    return json.loads(data[8:end]), data[end:]


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
