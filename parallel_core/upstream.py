"""Every private name of diffusers that the ranks use, in one place.

Owns the imports and the one patch. `tests/unit/test_upstream_contract.py` holds every entry to what is relied on
here, so that a new diffusers version fails there and not in a picture. Rank side only. Does not know what the entries
are for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import torch
from diffusers.hooks.tensor_parallel import resolve_tp_shard_specs
from diffusers.models import attention_dispatch
from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput
from diffusers.models.attention_dispatch import AttentionBackendName
from diffusers.models.attention_dispatch import dispatch_attention_fn as dispatch_attention
from torch import nn

from .attention_backends import backend_named
from .errors import UserError

__all__ = [
    "VAE_BLEND_PREFIX",
    "VAE_TILE_KNOBS",
    "ContextParallelInput",
    "ContextParallelOutput",
    "attention_processors",
    "blocks_kept_whole",
    "check_backend_package",
    "choose_backend",
    "context_parallel_plan",
    "dispatch_attention",
    "release_context_attention",
    "repeated_blocks",
    "replace_context_attention",
    "resolve_tp_shard_specs",
    "route_attention",
    "tensor_parallel_plan",
    "unpack_gguf",
    "unroute_attention",
    "vae_tiles",
]

_stock_context_attention = attention_dispatch._templated_context_parallel_attention
_owners: set[int] = set()  # who needs the replacement; the patch is process-wide, so is this


def replace_context_attention(function: Callable[..., Any], owner: object) -> None:
    """Makes `function` diffusers' context-parallel attention until every owner has released it.

    Where a processor's `_parallel_config` is not None, diffusers' attention backends call it in place of their kernel:
    `function(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, return_lse, *, forward_op,
    backward_op, _parallel_config)`. Tensors are (batch, tokens, heads, head_dim), `forward_op` is the kernel.
    """
    attention_dispatch._templated_context_parallel_attention = function
    _owners.add(id(owner))


def release_context_attention(owner: object) -> None:
    """Takes the owner's claim back; without owners diffusers' own function is in its place again."""
    _owners.discard(id(owner))
    if not _owners:
        attention_dispatch._templated_context_parallel_attention = _stock_context_attention


def attention_processors(model: nn.Module) -> list[Any]:
    """The processors of all attention modules. ValueError for one that would attend to its own tokens in silence."""
    processors = []
    for name, module in model.named_modules():
        processor = getattr(module, "processor", None)
        if processor is None:
            continue
        if not hasattr(processor, "_parallel_config") or not hasattr(processor, "_attention_backend"):
            raise ValueError(
                f"The attention processor {type(processor).__name__} of '{name}' does not go through diffusers' "
                "attention dispatch, so its tokens cannot be shared out; use the model's default processors."
            )
        processors.append(processor)
    return processors


def route_attention(processor: Any, config: object) -> None:
    """Sends the processor's attention through the context-parallel function, with `config` as `_parallel_config`."""
    processor._parallel_config = config


def unroute_attention(processor: Any) -> None:
    """Back to the class's own value (None: plain attention)."""
    del processor._parallel_config


def choose_backend(model: nn.Module, name: str) -> Callable[[], None]:
    """Makes every attention use the backend of that name ("auto": torch's own); returns the way back.

    It is always named, since the process-wide default (DIFFUSERS_ATTN_BACKEND) may be another one.
    """
    processors = attention_processors(model)
    for processor in processors:
        processor._attention_backend = AttentionBackendName(backend_named(name).name)

    def undo() -> None:
        for processor in processors:
            del processor._attention_backend

    return undo


def check_backend_package(name: str) -> None:
    """`UserError` when the package that the backend needs is not there."""
    try:
        attention_dispatch._check_attention_backend_requirements(AttentionBackendName(backend_named(name).name))
    except RuntimeError as error:
        raise UserError(f"attention_backend {name!r} cannot be used by the ranks. {error}") from None


def context_parallel_plan(model: nn.Module) -> dict[str, Any] | None:
    """What the class declares to be split and gathered: module path -> {argument: input rule} or an output rule."""
    plan: dict[str, Any] | None = getattr(model, "_cp_plan", None)
    return plan


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks that make up most of the model: instances of the classes that it names as repeated."""
    names = set(getattr(model, "_repeated_blocks", None) or ())
    return [module for module in model.modules() if names & {base.__name__ for base in type(module).__mro__}]


def tensor_parallel_plan(model: nn.Module) -> dict[str, Any] | None:
    """How the class declares its linears to be sharded: glob -> "colwise" / "rowwise" / a packed variant."""
    plan: dict[str, Any] | None = getattr(model, "_tp_plan", None)
    return plan


def blocks_kept_whole(model: nn.Module) -> tuple[str, ...]:
    """Names of the classes whose modules the class declares to need one device; `UserError` when it declares none."""
    names = tuple(getattr(model, "_no_split_modules", None) or ())
    if not names:
        raise UserError(
            f"{type(model).__name__} does not declare which of its modules must stay on one device, so strategy "
            "'device_map' cannot place it. Set strategy to 'mesh' or 'auto'."
        )
    return names


# ----- GGUF -----


def unpack_gguf(stored: torch.Tensor, kind: str, dtype: torch.dtype) -> torch.Tensor:
    """Numbers [..., n] from the bytes of their blocks [..., bytes of n], by diffusers' code for the packed type."""
    utils: Any = importlib.import_module("diffusers.quantizers.gguf.utils")  # imports gguf, which few models need
    quant_type = utils.gguf.GGMLQuantizationType[kind]
    numbers, size = utils.GGML_QUANT_SIZES[quant_type]
    blocks = stored.view(torch.uint8).reshape(-1, size)
    unpacked: torch.Tensor = utils.dequantize_functions[quant_type](blocks, numbers, size, dtype=torch.float32)
    return unpacked.reshape(*stored.shape[:-1], -1).to(dtype)


# ----- tiled VAEs (AutoencoderKL) -----

VAE_BLEND_PREFIX = "blend_"
"""The methods that blend a tile with the one above or to the left, in place: blend_v, blend_h; blend_t for video."""

VAE_TILE_KNOBS = ("use_slicing", "use_tiling", "tile_sample_min_size", "tile_latent_min_size", "tile_overlap_factor")


@contextmanager
def vae_tiles(vae: Any, *, side: int, overlap: int) -> Iterator[None]:
    """Makes decode and encode work picture by picture in tiles of `side` latent cells with `overlap` of them shared.

    The factor is a Fraction: diffusers takes `int(size * (1 - factor))`, which is one too few for some floats.
    """
    scale = 2 ** (len(vae.config.block_out_channels) - 1)
    before = {name: getattr(vae, name) for name in VAE_TILE_KNOBS}
    values = (True, True, side * scale, side, Fraction(overlap, side))
    try:
        for name, value in zip(VAE_TILE_KNOBS, values, strict=True):
            setattr(vae, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(vae, name, value)
