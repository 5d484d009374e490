"""From the patches on a ModelPatcher (LoRA and its kin) to the plain description that crosses to the ranks.

Whatever does not have an exact counterpart there is refused by name before anything is loaded. Knows ComfyUI's weight
adapters and the names of a family's weights; what a patch does to a weight is `parallel_core.weight_math`'s.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import comfy.utils
import torch
from comfy.weight_adapter import LoHaAdapter, LoKrAdapter, LoRAAdapter
from comfy.weight_adapter.base import WeightAdapterBase
from torch.utils.weak import WeakTensorKeyDictionary

from ..parallel_core.arena import DTYPES
from ..parallel_core.engine.transformer import RemoteTransformer
from ..parallel_core.errors import UserError
from ..parallel_core.families.layout import reverse
from ..parallel_core.storage import TORCHAO_CHOICES
from ..parallel_core.weight_math import check_patch
from ..parallel_core.weight_patches import NO_PATCHES, PatchSet, WeightPatch

_PREFIX = "diffusion_model."
_INSTEAD = "Remove it, or use ComfyUI's own Load Diffusion Model for this workflow."

Found = tuple[str, float | None, dict[str, torch.Tensor]]
"""A patch's kind, its alpha and its tensors by their roles."""


def patch_set(patches: Mapping[str, Sequence[Any]], remote: RemoteTransformer) -> PatchSet:
    """`patcher.patches` of a MODEL that stands for `remote`. `UserError` for what cannot be done exactly."""
    if not patches:
        return NO_PATCHES
    if remote.spec.storage in TORCHAO_CHOICES:
        raise UserError(
            f"A LoRA is applied to a model whose weights are held as {remote.spec.storage}, which cannot be changed. "
            "Choose weight_dtype fp8_e4m3fn or bfloat16 in the loader, or remove the LoRA."
        )
    family, shapes = remote.family, remote.family.expected_shapes(remote.config)
    targets = reverse(family.files.weights(shapes, remote.config))
    tensors: dict[str, torch.Tensor] = {}
    found: list[WeightPatch] = []
    for key, entries in patches.items():
        target = family.files.canonical(key.removeprefix(_PREFIX)) if key.startswith(_PREFIX) else ""
        if target not in targets:
            raise UserError(
                f"A node changes {key!r}, which is no weight of a {family.name} transformer on the ranks. {_INSTEAD}"
            )
        parts = [shapes[name] for name, _ in targets[target]]
        shape = (sum(part[0] for part in parts), *parts[0][1:])
        found += [_translate(key, target, entry, shape, tensors) for entry in entries]
    return PatchSet.of(found, tensors)


def _translate(
    key: str, target: str, entry: Any, shape: tuple[int, ...], tensors: dict[str, torch.Tensor]
) -> WeightPatch:
    """One entry of a patcher's list: (strength, value, strength of the model, offset, function)."""
    strength, value, strength_model, offset, function = entry
    if strength_model != 1.0:
        raise UserError(
            f"A node scales the model's own weight {key!r} by {strength_model} (model merging). Weights on the ranks "
            f"take additions such as LoRAs only. {_INSTEAD}"
        )
    if function is not None and function is not comfy.utils.swap_scale_shift:
        name = getattr(function, "__qualname__", repr(function))
        raise UserError(f"A node changes {key!r} through a function of its own ({name}). {_INSTEAD}")
    if offset is not None and (len(offset) != 3 or offset[0] not in (0, 1)):
        raise UserError(f"A node changes a part of {key!r} at {offset!r}, which is not known. {_INSTEAD}")
    kind, alpha, factors = _read(key, value, shape)
    patch = WeightPatch(
        target=target,
        kind=kind,
        strength=float(strength),
        tensors={role: _name(tensor) for role, tensor in factors.items()},
        alpha=alpha,
        offset=None if offset is None else tuple(map(int, offset)),
        swap=function is not None,
    )
    try:
        check_patch(patch, factors, shape)
    except (ValueError, RuntimeError, IndexError) as error:
        raise UserError(
            f"A {_LABELS[kind]} does not fit {key!r}, which has shape {list(shape)}: {error}. It was made for another "
            "model, or for another variant of this one."
        ) from error
    tensors.update({patch.tensors[role]: _as_sent(tensor) for role, tensor in factors.items()})
    return patch


_LABELS = {"lora": "LoRA", "loha": "LoHa", "lokr": "LoKr", "diff": "difference of weights", "set": "weight"}


def _read(key: str, value: Any, shape: tuple[int, ...]) -> Found:
    for adapter, read in _ADAPTERS.items():
        if isinstance(value, adapter):
            return read(key, value.weights, shape)
    if isinstance(value, WeightAdapterBase):
        raise UserError(
            f"A LoRA of the kind {value.name} is applied ({key!r}); LoRA, DoRA, LoHa, LoKr and plain differences "
            f"work. {_INSTEAD}"
        )
    if isinstance(value, tuple) and value:
        kind, content = ("diff", value) if len(value) == 1 else value[:2]
        padded = len(content) > 1 and content[1].get("pad_weight") and tuple(content[0].shape) != shape
        if kind in ("diff", "set") and isinstance(content[0], torch.Tensor) and not padded:
            return kind, None, {"value": content[0]}
    name = value[0] if isinstance(value, tuple) and isinstance(value[0], str) else type(value).__name__
    raise UserError(f"A node changes {key!r} in a way that is not known ({name}). {_INSTEAD}")


def _lora(key: str, weights: Any, shape: tuple[int, ...]) -> Found:
    up, down, alpha, mid, dora_scale, reshape = weights
    if reshape is not None and tuple(reshape) != shape:
        raise UserError(
            f"The LoRA makes {key!r} larger, from {list(shape)} to {list(reshape)}: it is one of FLUX.1's control "
            f"LoRAs (depth, canny), which need ComfyUI's own loader. {_INSTEAD}"
        )
    _refuse_convolution(key, mid)
    return "lora", alpha, _given(up=up, down=down, dora_scale=dora_scale)


def _loha(key: str, weights: Any, shape: tuple[int, ...]) -> Found:
    w1_a, w1_b, alpha, w2_a, w2_b, t1, t2, dora_scale = weights
    _refuse_convolution(key, t1, t2)
    return "loha", alpha, _given(w1_a=w1_a, w1_b=w1_b, w2_a=w2_a, w2_b=w2_b, dora_scale=dora_scale)


def _lokr(key: str, weights: Any, shape: tuple[int, ...]) -> Found:
    w1, w2, alpha, w1_a, w1_b, w2_a, w2_b, t2, dora_scale = weights
    _refuse_convolution(key, t2, *(tensor for tensor in (w1, w2) if tensor is not None and tensor.dim() != 2))
    first = {"w1": w1} if w1 is not None else {"w1_a": w1_a, "w1_b": w1_b}
    second = {"w2": w2} if w2 is not None else {"w2_a": w2_a, "w2_b": w2_b}
    return "lokr", alpha, _given(**first, **second, dora_scale=dora_scale)


_ADAPTERS: dict[type, Callable[[str, Any, tuple[int, ...]], Found]] = {
    LoRAAdapter: _lora,
    LoHaAdapter: _loha,
    LoKrAdapter: _lokr,
}


def _refuse_convolution(key: str, *factors: torch.Tensor | None) -> None:
    if any(factor is not None for factor in factors):
        raise UserError(f"The LoRA for {key!r} is one for convolutions, which this model does not have. {_INSTEAD}")


def _given(**tensors: torch.Tensor | None) -> dict[str, torch.Tensor]:
    return {role: tensor for role, tensor in tensors.items() if tensor is not None}


def _as_sent(tensor: torch.Tensor) -> torch.Tensor:
    """fp8 does not cross; bfloat16 holds its numbers exactly."""
    return tensor if tensor.dtype in DTYPES.values() else tensor.to(torch.bfloat16)


_names: Any = WeakTensorKeyDictionary()
"""What a tensor's bytes were found to be called: a LoRA of a gigabyte is not hashed again for another strength."""


def _name(tensor: torch.Tensor) -> str:
    """Equal for tensors with equal dtype, shape and bytes."""
    if tensor not in _names:
        data = tensor.detach().to("cpu").contiguous().flatten().view(torch.uint8)
        digest = hashlib.blake2b(f"{tensor.dtype}{tuple(tensor.shape)}".encode(), digest_size=16)
        digest.update(data.numpy())
        _names[tensor] = digest.hexdigest()
    return str(_names[tensor])
