"""Seeded random weights for the tiny models of every family.

They are scaled so that every path of a network matters: modulation, gates and norms are far from their initial values,
so that a wrong shard, a swapped scale or a lost bias changes the result by far more than rounding does.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn


def fill(model: nn.Module, seed: int) -> None:
    """Gives every parameter its random values."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1 and name.endswith("weight"):  # norms: around one
                parameter.copy_(1 + 0.3 * noise)
            elif parameter.ndim == 1:
                parameter.copy_(0.2 * noise)
            elif name.endswith(("scale_shift_table", "pos_embed")):
                parameter.copy_(0.5 * noise)
            else:  # unit gain, so that activations keep their size through the blocks
                parameter.copy_(noise / math.sqrt(parameter[0].numel()))


def write_zeros(file: Path, shapes: Mapping[str, Sequence[int]]) -> Path:
    """A safetensors file of float32 zeros, which take no space on the disk: for models of any size."""
    header: dict[str, object] = {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        stream.truncate(stream.tell() + end)
    return file
