"""What the ranks cannot honour is refused by name before anything is loaded; nothing is dropped in silence.

Knows ComfyUI's ModelPatcher and conditioning; what a family understands is the family's declaration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..parallel_core.errors import UserError
from ..parallel_core.families.base import GENERIC_CONDITIONING, GENERIC_OPTIONS, Config, Family, refuse_unknown
from .prompt_rows import prompt_counts, refuse_batch

_STOCK = "Remove that node, or use ComfyUI's own Load Diffusion Model for this workflow."


def refuse_sampling(
    family: Family,
    config: Config,
    patcher: Any,
    noise_shape: Sequence[int],
    conds: Mapping[str, Any],
    options: Mapping[str, Any],
) -> None:
    """`UserError` for the first thing about this sampling run that would make the picture wrong."""
    _refuse_latent(noise_shape, patcher.model.latent_format, family.name)
    _refuse_model_changes(patcher)
    refuse_block_code(options.get("transformer_options", {}), family.name)
    entries = [cond for found in conds.values() for cond in found or ()]
    for cond in entries:
        _refuse_conditioning(cond, family, config)
    _refuse_prompts(prompt_counts(entries), noise_shape[0], options.get("context_handler"))


def _refuse_latent(shape: Sequence[int], latent_format: Any, family: str) -> None:
    channels, is_video = latent_format.latent_channels, latent_format.latent_dimensions == 3
    if len(shape) != 4 + is_video or shape[1] != channels:
        frames = "frames, " if is_video else ""
        raise UserError(
            f"The latent has shape {list(shape)}; a {family} model expects [batch, {channels}, {frames}height, width]. "
            "It was made by another model family's VAE or empty-latent node."
        )


def _refuse_prompts(counts: Sequence[int], num_images: int, windows: Any) -> None:
    for count in counts:
        refuse_batch(count, num_images)
        if count > 1 and getattr(windows, "dim", None) == 0:
            raise UserError(
                "Context windows over dimension 0 take the images of the batch for frames of one video, and do not say "
                "which prompt is whose. Set the node's dim to the dimension of the frames (2), or remove "
                "One Prompt per Image."
            )


def _refuse_model_changes(patcher: Any) -> None:
    patcher.weight_patches()  # refuses what the ranks cannot do
    if patcher.hook_patches or patcher.forced_hooks:
        raise UserError(f"Weight hooks are applied to the model; they do not reach the ranks. {_STOCK}")
    if patcher.injections:
        raise UserError(f"Code is injected into the model ({', '.join(patcher.injections)}). {_STOCK}")
    inside = [name for name in patcher.object_patches if name.startswith("diffusion_model")]
    inside += [name for name in patcher.object_patches if name == "manual_cast_dtype"]
    inside += list(patcher.weight_wrapper_patches)
    if inside:
        raise UserError(
            f"A node replaces parts of the model or its dtype ({', '.join(map(str, inside[:3]))}). The loader's "
            f"weight_dtype sets what the ranks compute in. {_STOCK}"
        )


def refuse_block_code(options: Mapping[str, Any], family: str) -> None:
    """`UserError` for transformer_options that the ranks do not know or that hold code for the model's blocks.

    Checked before a run and again at every call: skip-layer guidance adds its patches in the middle of a step.
    """
    refuse_unknown("model option", options, GENERIC_OPTIONS, family)
    for kind in ("patches", "patches_replace"):
        names = [f"{kind}: {name}{_places(entry)}" for name, entry in (options.get(kind) or {}).items() if entry]
        if names:
            raise UserError(
                f"A node puts its own code into the model's blocks ({'; '.join(names)}). Blocks run on the ranks, "
                f"where that code is not. {_STOCK}"
            )
    compiled = options.get("wrappers", {}).get("apply_model", {}).get("torch.compile")
    if compiled:
        raise UserError(f"TorchCompileModel compiles the model in ComfyUI's process, where no weight is. {_STOCK}")


def _places(entry: Any) -> str:
    return " " + ", ".join(map(str, list(entry)[:3])) if isinstance(entry, Mapping) else ""


def _refuse_conditioning(cond: Mapping[str, Any], family: Family, config: Config) -> None:
    if cond.get("control") is not None:
        raise UserError(
            f"The conditioning has a ControlNet ({type(cond['control']).__name__}), which works inside the model's "
            f"blocks and does not reach the ranks. {_STOCK}"
        )
    if cond.get("hooks") is not None:
        raise UserError(f"The conditioning has hooks (changed weights for a part of the run). {_STOCK}")
    refuse_unknown("conditioning entry", cond, GENERIC_CONDITIONING | family.comfy.conditioning, family.name)
    family.comfy.check_conditioning(cond, config)
