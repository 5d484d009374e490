"""Writes tiny LoRA files in every format that ComfyUI reads, for the tiny models of the families.

Owns: what such files look like (names, factors). Does not know: ComfyUI, ranks, what a patch does.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

Tensors = dict[str, Tensor]

RANK = 4

MATRICES: dict[str, dict[str, tuple[int, int]]] = {
    "flux": {
        "double_blocks.0.img_attn.qkv": (192, 64),
        "double_blocks.1.img_mlp.0": (256, 64),
        "double_blocks.1.txt_mlp.2": (64, 256),
        "double_blocks.0.txt_mod.lin": (384, 64),
        "single_blocks.0.linear1": (448, 64),
        "single_blocks.1.linear2": (64, 320),
        "final_layer.adaLN_modulation.1": (128, 64),
    },
    "qwen": {
        "transformer_blocks.0.attn.to_q": (64, 64),
        "transformer_blocks.1.attn.add_v_proj": (64, 64),
        "transformer_blocks.1.attn.to_out.0": (64, 64),
        "transformer_blocks.0.img_mlp.net.0.proj": (256, 64),
        "transformer_blocks.2.txt_mlp.net.2": (64, 256),
        "transformer_blocks.2.img_mod.1": (384, 64),
    },
    "wan": {
        "blocks.0.self_attn.q": (64, 64),
        "blocks.0.cross_attn.v": (64, 64),
        "blocks.1.self_attn.o": (64, 64),
        "blocks.1.ffn.0": (160, 64),
        "blocks.1.ffn.2": (64, 160),
    },
}
"""Linear layers of the tiny models in the original layout: name -> (rows, columns)."""

NORMS = {
    "flux": "double_blocks.0.img_attn.norm.query_norm.scale",
    "qwen": "transformer_blocks.0.attn.norm_q",
    "wan": "blocks.0.self_attn.norm_q",
}
"""A norm of each, and its channels."""
CHANNELS = {"flux": 16, "qwen": 16, "wan": 64}

DIFFUSERS_FLUX: dict[str, tuple[int, int]] = {
    "transformer_blocks.0.attn.to_q": (64, 64),
    "transformer_blocks.0.attn.to_k": (64, 64),
    "transformer_blocks.1.attn.add_v_proj": (64, 64),
    "transformer_blocks.1.ff.net.2": (64, 256),
    "single_transformer_blocks.0.attn.to_v": (64, 64),
    "single_transformer_blocks.0.proj_mlp": (256, 64),
    "single_transformer_blocks.1.proj_out": (64, 320),
    "norm_out.linear": (128, 64),
}
"""Flux's, by diffusers' names: parts of fused tensors, and halves that have changed places."""


class _Noise:
    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, scale: float = 0.3) -> Tensor:
        return scale * torch.randn(*shape, generator=self._generator)


def kohya(family: str, noise: _Noise) -> Tensors:
    found: Tensors = {}
    for name, (rows, columns) in MATRICES[family].items():
        layer = f"lora_unet_{name.replace('.', '_')}"
        found[f"{layer}.lora_up.weight"] = noise(rows, RANK)
        found[f"{layer}.lora_down.weight"] = noise(RANK, columns)
        found[f"{layer}.alpha"] = torch.tensor(2.0)
    return found


def peft(family: str, noise: _Noise) -> Tensors:
    matrices = DIFFUSERS_FLUX if family == "flux" else MATRICES[family]
    prefix = "diffusion_model" if family == "wan" else "transformer"
    found: Tensors = {}
    for name, (rows, columns) in matrices.items():
        found[f"{prefix}.{name}.lora_A.weight"] = noise(RANK, columns).to(torch.bfloat16)
        found[f"{prefix}.{name}.lora_B.weight"] = noise(rows, RANK).to(torch.bfloat16)
    return found


def dora(family: str, noise: _Noise) -> Tensors:
    """With scales of the rows for every other layer, of the columns for the rest."""
    found: Tensors = {}
    for index, (name, (rows, columns)) in enumerate(MATRICES[family].items()):
        layer = f"diffusion_model.{name}"
        found[f"{layer}.lora_up.weight"] = noise(rows, RANK)
        found[f"{layer}.lora_down.weight"] = noise(RANK, columns)
        found[f"{layer}.alpha"] = torch.tensor(3.0)
        shape = (rows, 1) if index % 2 else (1, columns)
        found[f"{layer}.dora_scale"] = 1 + noise(*shape).abs()
    return found


def loha(family: str, noise: _Noise) -> Tensors:
    found: Tensors = {}
    for name, (rows, columns) in MATRICES[family].items():
        layer = f"lora_unet_{name.replace('.', '_')}"
        for half in ("w1", "w2"):
            found[f"{layer}.hada_{half}_a"] = noise(rows, RANK)
            found[f"{layer}.hada_{half}_b"] = noise(RANK, columns)
        found[f"{layer}.alpha"] = torch.tensor(2.0)
    return found


def lokr(family: str, noise: _Noise) -> Tensors:
    """One factor whole, the other a product or whole too."""
    found: Tensors = {}
    for index, (name, (rows, columns)) in enumerate(MATRICES[family].items()):
        layer = f"diffusion_model.{name}"
        found[f"{layer}.lokr_w1"] = noise(8, 4)
        if index % 2:
            found[f"{layer}.lokr_w2"] = noise(rows // 8, columns // 4)
        else:
            found[f"{layer}.lokr_w2_a"] = noise(rows // 8, RANK)
            found[f"{layer}.lokr_w2_b"] = noise(RANK, columns // 4)
            found[f"{layer}.alpha"] = torch.tensor(2.0)
    return found


def differences(family: str, noise: _Noise) -> Tensors:
    """As in distilled models' files: LoRA factors, and differences of biases and norms."""
    found: Tensors = {}
    for name, (rows, columns) in MATRICES[family].items():
        layer = f"diffusion_model.{name}"
        found[f"{layer}.lora_down.weight"] = noise(RANK, columns)
        found[f"{layer}.lora_up.weight"] = noise(rows, RANK)
        found[f"{layer}.diff_b"] = noise(rows)
    first, (rows, columns) = next(iter(MATRICES[family].items()))
    for part in ("lora_down.weight", "lora_up.weight"):
        del found[f"diffusion_model.{first}.{part}"]
    found[f"diffusion_model.{first}.diff"] = noise(rows, columns, scale=0.1)
    norm = f"diffusion_model.{NORMS[family]}"
    found[f"{norm}.diff"] = noise(CHANNELS[family])
    return found


FORMATS: dict[str, Callable[[str, _Noise], Tensors]] = {
    make.__name__: make for make in (kohya, peft, dora, loha, lokr, differences)
}


def lora_name(format_name: str, family: str) -> str:
    return f"{family}-{format_name}.safetensors"


def write_all(folder: Path) -> None:
    """One file for every format and family."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, family in enumerate(MATRICES):
        for index, (name, make) in enumerate(FORMATS.items()):
            tensors = make(family, _Noise(100 * seed + index))
            save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / lora_name(name, family))
