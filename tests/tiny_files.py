"""Writes single files out of tiny transformers, in every layout and quantisation that users have, for tests.

Owns: what such files look like (names, scales, markers, blocks). What is in a fused tensor follows from the family's
declaration; that it is right is shown by ComfyUI's own models, which read the same files.
Does not know: ComfyUI, ranks, plans.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from parallel_core.families.base import Family
from parallel_core.families.layout import reverse
from tests.tiny_weights import write_zeros

PREFIX = "model.diffusion_model."

Weights = dict[str, Tensor]


def original_weights(folder: Path, family: Family) -> Weights:
    """The weights of a transformer folder in the original layout."""
    stored = load_file(folder / "diffusion_pytorch_model.safetensors")
    config = family.full_config(json.loads((folder / "config.json").read_text()))
    places = family.files.weights({name: tuple(tensor.shape) for name, tensor in stored.items()}, config)
    found: Weights = {}
    for name, parts in reverse(places).items():
        rows = sum(stored[part].shape[0] for part, _ in parts)
        whole = stored[parts[0][0]].new_empty(rows, *stored[parts[0][0]].shape[1:])
        for part, place in parts:
            start = 0
            for first, last in place.rows or ((0, rows),):
                whole[first:last] = stored[part][start : start + last - first]
                start += last - first
        found[name] = whole
    return found


def write_hollow(file: Path, folder: Path, family: Family) -> Path:
    """A file in the original layout, of the config in `folder`, whose weights are zero and take no space."""
    config = family.full_config(json.loads((folder / "config.json").read_text()))
    shapes = family.expected_shapes(config)
    originals = reverse(family.files.weights(shapes, config))
    return write_zeros(
        file,
        {
            name: (sum(shapes[part][0] for part, _ in parts), *shapes[parts[0][0]][1:])
            for name, parts in originals.items()
        },
    )


def is_matrix(name: str, tensor: Tensor) -> bool:
    """What converters quantise: the linear layers of the blocks, of text encoders too."""
    inside = any(part in name for part in ("blocks.", ".block.", "layers."))
    return tensor.ndim == 2 and name.endswith(".weight") and inside and "relative_attention_bias" not in name


def plain_fp8(weights: Weights, dtype: torch.dtype = torch.float8_e4m3fn) -> Weights:
    """Everything cast, biases and norms too, as ComfyUI saves a model in fp8."""
    return {name: tensor.to(dtype) for name, tensor in weights.items()}


def _scaled(tensor: Tensor) -> tuple[Tensor, Tensor]:
    scale = tensor.abs().max().float() / torch.finfo(torch.float8_e4m3fn).max
    return (tensor.float() / scale).to(torch.float8_e4m3fn), scale


def old_scaled_fp8(weights: Weights) -> Weights:
    """`scale_weight` beside each matrix and a `scaled_fp8` marker."""
    found: Weights = {"scaled_fp8": torch.zeros(2, dtype=torch.float8_e4m3fn)}
    for name, tensor in weights.items():
        found[name] = tensor
        if is_matrix(name, tensor):
            layer = name.removesuffix(".weight")
            found[name], found[f"{layer}.scale_weight"] = _scaled(tensor)
            found[f"{layer}.scale_input"] = torch.ones(1)
    return found


def new_scaled_fp8(weights: Weights) -> Weights:
    """`weight_scale` and a `comfy_quant` entry beside each matrix."""
    found: Weights = {}
    for name, tensor in weights.items():
        found[name] = tensor
        if is_matrix(name, tensor):
            layer = name.removesuffix(".weight")
            found[name], found[f"{layer}.weight_scale"] = _scaled(tensor)
            entry = json.dumps({"format": "float8_e4m3fn"}).encode()
            found[f"{layer}.comfy_quant"] = torch.tensor(list(entry), dtype=torch.uint8)
    return found


def dequantised(weights: Weights) -> Weights:
    """The float32 weights that a (scaled) fp8 file stands for, by plain arithmetic."""
    found: Weights = {}
    for name, tensor in weights.items():
        layer = name.removesuffix(".weight")
        scale = weights.get(f"{layer}.scale_weight", weights.get(f"{layer}.weight_scale"))
        if name == "scaled_fp8" or name.endswith(("scale_weight", "scale_input", "weight_scale", "comfy_quant")):
            continue
        found[name] = tensor.float() if scale is None or name == layer else tensor.float() * scale.float()
    return found


def unpacked_gguf(file: Path) -> Weights:
    """The float32 weights that a GGUF file stands for, by the gguf package's own arithmetic."""
    import gguf

    found: Weights = {}
    reader = gguf.GGUFReader(str(file))
    for tensor in reader.tensors:
        data = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        field = reader.fields.get(f"comfy.gguf.orig_shape.{tensor.name}")
        shape = field.contents() if field else [int(size) for size in reversed(tensor.shape)]
        found[tensor.name] = data.reshape(shape)
    return found


def _whole_checkpoint(weights: Weights) -> Weights:
    """What ComfyUI saves as a checkpoint: the text encoders and the VAE are in the file too."""
    others = {"vae.decoder.conv_in.weight": torch.ones(4), "text_encoders.clip_l.logit_scale": torch.ones(())}
    return {**{PREFIX + name: tensor for name, tensor in weights.items()}, **others}


FORMATS: dict[str, Callable[[Weights], Weights]] = {
    "original": lambda weights: weights,
    "prefixed": lambda weights: _whole_checkpoint(weights),
    "fp8": plain_fp8,
    "fp8-e5m2": lambda weights: plain_fp8(weights, torch.float8_e5m2),
    "old-scaled": old_scaled_fp8,
    "new-scaled": new_scaled_fp8,
    "metadata-scaled": new_scaled_fp8,
}
"""What a tiny model's weights in the original layout become."""


def write_file(file: Path, folder: Path, family: Family, layout: str) -> Path:
    """Writes `file` from a transformer folder in one of `FORMATS`, or "gguf", or "diffusers"."""
    file.parent.mkdir(parents=True, exist_ok=True)
    metadata: dict[str, str] | None = None
    if layout == "gguf":
        return write_gguf(file, original_weights(folder, family), family.name)
    if layout == "diffusers":
        weights = load_file(folder / "diffusion_pytorch_model.safetensors")
    else:
        weights = FORMATS[layout](original_weights(folder, family))
    if layout == "metadata-scaled":
        weights, metadata = described_in_metadata(weights)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, file, metadata=metadata)
    return file


def described_in_metadata(weights: Weights) -> tuple[Weights, dict[str, str]]:
    """ComfyUI's entries in the file's header in place of tensors."""
    layers = {name.removesuffix(".comfy_quant") for name in weights if name.endswith(".comfy_quant")}
    entries = {"format_version": "1.0", "layers": {layer: {"format": "float8_e4m3fn"} for layer in sorted(layers)}}
    kept = {name: tensor for name, tensor in weights.items() if not name.endswith(".comfy_quant")}
    return kept, {"_quantization_metadata": json.dumps(entries)}


def write_gguf(file: Path, weights: Mapping[str, Tensor], architecture: str, kind: str = "Q8_0") -> Path:
    """A GGUF file as the usual converters write it: blocks for matrices, float32 for the rest, 5-D shapes noted."""
    import gguf

    writer = gguf.GGUFWriter(str(file), architecture)
    quant_type = gguf.GGMLQuantizationType[kind]
    numbers, _ = gguf.GGML_QUANT_SIZES[quant_type]
    for name, tensor in weights.items():
        data = tensor.float().numpy()
        if data.ndim > 4:
            writer.add_array(f"comfy.gguf.orig_shape.{name}", [int(size) for size in data.shape])
            data = data.reshape(*data.shape[:3], -1)
        if is_matrix(name, tensor) and tensor.shape[1] % numbers == 0:
            packed = gguf.quants.quantize(data, quant_type)
            writer.add_tensor(name, packed, raw_dtype=quant_type)
        else:
            writer.add_tensor(name, np.ascontiguousarray(data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
