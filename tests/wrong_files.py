"""Model files as they are not meant to be: foreign, broken, half there, and sound ones to break.

Owns how such files are written: headers as given, whatever they say, over a body of zeros that takes no space on the
disk. Does not know: how the product reads them, diffusers, ComfyUI.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from parallel_core.families.registry import family_named

WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "I32": 4, "I8": 1, "U8": 1}

Tensors = dict[str, tuple[str, tuple[int, ...]]]
"""name -> (safetensors dtype, shape)"""

CONFIGS: dict[str, dict[str, Any]] = {
    "flux": {"num_attention_heads": 2, "num_layers": 3, "num_single_layers": 2, "joint_attention_dim": 32,
             "pooled_projection_dim": 16, "guidance_embeds": True},
    "qwen-image": {"num_attention_heads": 2, "num_layers": 3, "joint_attention_dim": 32},
    "wan": {"num_attention_heads": 2, "num_layers": 3, "text_dim": 32, "ffn_dim": 96, "cross_attn_norm": True},
}  # fmt: skip
"""Few layers with heads of the real size, which the presets expect."""

QUANT = json.dumps({"format": "float8_e4m3fn"}).encode()


def config_of(family: str) -> dict[str, Any]:
    """All fields, as diffusers would save them."""
    found = family_named(family)
    return {**found.full_config(CONFIGS[family]), "_class_name": found.class_name}


def diffusers_tensors(family: str, dtype: str = "BF16") -> Tensors:
    """The transformer of `CONFIGS` by diffusers' names."""
    found = family_named(family)
    return {name: (dtype, shape) for name, shape in found.expected_shapes(config_of(family)).items()}


def original_tensors(family: str, dtype: str = "BF16", prefix: str = "") -> Tensors:
    """The same in the original layout."""
    found, config = family_named(family), config_of(family)
    shapes = found.expected_shapes(config)
    rows: dict[str, int] = {}
    names: dict[str, tuple[int, ...]] = {}
    for name, place in found.files.weights(shapes, config).items():
        rows[place.name] = rows.get(place.name, 0) + (shapes[name][0] if shapes[name] else 0)
        names[place.name] = shapes[name]
    return {prefix + name: (dtype, (rows[name], *shape[1:])) for name, shape in names.items()}


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """What converters quantise."""
    return len(shape) == 2 and "blocks." in name and name.endswith(".weight")


def scaled(tensors: Tensors, *, new: bool, prefix: str = "") -> Tensors:
    """Scaled fp8 of the older layout, or of ComfyUI's newer one."""
    found: Tensors = {} if new else {f"{prefix}scaled_fp8": ("F8_E4M3", (2,))}
    for name, (dtype, shape) in tensors.items():
        if not is_matrix(name, shape):
            found[name] = (dtype, shape)
            continue
        layer = name.removesuffix(".weight")
        found[name] = ("F8_E4M3", shape)
        found[f"{layer}.weight_scale" if new else f"{layer}.scale_weight"] = ("F32", ())
        if new:
            found[f"{layer}.comfy_quant"] = ("U8", (len(QUANT),))
    return found


def header_of(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, Any]:
    """A sound safetensors header."""
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + prod(shape) * WIDTHS[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    return header


def write(file: Path, tensors: Tensors, *, metadata: Any = None, contents: Mapping[str, bytes] | None = None) -> Path:
    """A sound safetensors file of zeros; `contents` are the bytes of some tensors, comfy_quant entries by default."""
    header = header_of(tensors)
    found = {name: QUANT for name in tensors if name.endswith(".comfy_quant")} | dict(contents or {})
    size = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    start = write_header(file, {**({"__metadata__": metadata} if metadata is not None else {}), **header}, size)
    with file.open("r+b") as stream:
        for name, data in found.items():
            stream.seek(start + header[name]["data_offsets"][0])
            stream.write(data)
    return file


def write_header(file: Path, header: Any, size: int) -> int:
    """A file with that header (bytes, or what becomes json) before `size` zeros; returns where these begin."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        stream.truncate(8 + len(text) + size)
    return 8 + len(text)


# ----- GGUF -----

GGUF_TYPES = {"F32": (0, 1, 4), "F16": (1, 1, 2), "Q8_0": (8, 32, 34), "Q4_K": (12, 256, 144), "IQ2_XXS": (16, 256, 66)}
"""Type number, numbers in a block, bytes of a block."""

STRING, ARRAY, UINT32 = 8, 9, 4


def text(value: str) -> bytes:
    """A GGUF string."""
    return struct.pack("<Q", len(value.encode())) + value.encode()


def gguf_tensor(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    """A GGUF tensor entry; dimensions stand in it innermost first."""
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
    return text(name) + dims + struct.pack("<IQ", kind, offset)


def gguf_head(num_tensors: int, num_entries: int, *, version: int = 3, magic: bytes = b"GGUF") -> bytes:
    """What a GGUF file begins with."""
    return magic + struct.pack("<IQQ", version, num_tensors, num_entries)


def gguf_entry(key: str, kind: int, value: bytes) -> bytes:
    """One entry of the metadata; `value` as it is stored."""
    return text(key) + struct.pack("<I", kind) + value


def write_gguf(
    file: Path, tensors: Tensors, *, kind: str = "Q8_0", architecture: str = "flux", entries: tuple[bytes, ...] = ()
) -> Path:
    """A sound GGUF file of zeros: matrices of the blocks packed as `kind` where they fit, the rest float32."""
    all_entries = (gguf_entry("general.architecture", STRING, text(architecture)), *entries)
    body, offset = b"", 0
    for name, (_, shape) in tensors.items():
        number, block, size = GGUF_TYPES[kind if is_matrix(name, shape) else "F32"]
        if shape and shape[-1] % block:
            number, block, size = GGUF_TYPES["F32"]
        stored = shape
        if len(shape) > 4:
            sizes = struct.pack(f"<IQ{len(shape)}I", UINT32, len(shape), *shape)
            all_entries += (gguf_entry(f"comfy.gguf.orig_shape.{name}", ARRAY, sizes),)
            stored = (*shape[:3], prod(shape[3:]))
        body += gguf_tensor(name, stored, number, offset)
        offset += -(-prod(shape) // block * size // 32) * 32
    data = gguf_head(len(tensors), len(all_entries)) + b"".join(all_entries) + body
    start = -(-len(data) // 32) * 32
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as stream:
        stream.write(data)
        stream.truncate(start + offset)
    return file
