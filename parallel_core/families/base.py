"""What a family declares, and the calls that cross from ComfyUI to the ranks.

A family is one module with one `Family`: declarations and pure functions over tensors, importable on both sides.
Classes are named by strings ("diffusers:FluxTransformer2DModel") and resolved where they are needed. Knows no process,
no node.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any

import torch

from ..errors import UserError
from .layout import FileLayout

if TYPE_CHECKING:
    from ..plan import ParallelPlan

Config = Mapping[str, Any]

GENERIC_OPTIONS = frozenset(
    {
        "wrappers", "callbacks", "sample_sigmas", "cond_or_uncond", "uuids", "sigmas", "rope_options", "easycache",
        "context_window", "total_blocks", "block_type", "block_index", "img_slice", "reference_image_num_tokens",
        "multigpu_thread_device", "prefetch_dynamic_vbars", "patches", "patches_replace",
    }
)  # fmt: skip
"""transformer_options that ComfyUI's samplers and weight-free code set and read. `patches` and `patches_replace` are
here because ComfyUI leaves them empty; what they hold is checked apart, since it would run inside the blocks."""

PROMPT_ROW = "parallel_diffusion_row"
"""The key of a conditioning entry that is the prompt of certain images only (One Prompt per Image)."""

GENERIC_CONDITIONING = frozenset(
    {
        "cross_attn", "model_conds", "uuid", "hooks", "default", "area", "mask", "mask_strength",
        "set_area_to_bounds", "strength", "start_percent", "end_percent", "timestep_start", "timestep_end",
        "clip_start_percent", "clip_end_percent", "control", "control_apply_to_uncond", "prompt_type", PROMPT_ROW,
    }
)  # fmt: skip
"""Conditioning keys that ComfyUI's samplers handle for every model; `control` and `hooks` are checked apart."""


@dataclass(frozen=True)
class SeamCall:
    """What one call of ComfyUI's model needs computed on the ranks.

    `rows`: tensors whose first dimension is the batch row. `shared`: tensors that hold for every row.
    """

    rows: Mapping[str, torch.Tensor]
    shared: Mapping[str, torch.Tensor]

    @property
    def num_rows(self) -> int:
        """Batch rows of this call."""
        return next(iter(self.rows.values())).shape[0]


@dataclass(frozen=True, kw_only=True)
class ComfySide:
    """How ComfyUI's own class for the family is built and where its weights would be used.

    `config_class(config)` names the class in comfy.supported_models, `unet_config(config)` its arguments. `seam` is the
    method of the diffusion model that is replaced: the innermost one that needs weights. `call(model, arguments,
    config)` turns its bound arguments into a `SeamCall`; `model` is ComfyUI's weightless diffusion model, for those of
    its methods that need no weight. Argument names that are not in `arguments` are refused unless None.
    """

    config_class: Callable[[Config], str]
    unet_config: Callable[[Config], dict[str, Any]]
    params_class: str
    """What takes the unet_config in ComfyUI (the diffusion model, or a dataclass of its arguments): arguments that it
    lacks in a version are left out."""
    seam: str
    arguments: frozenset[str]
    call: Callable[[Any, Mapping[str, Any], Config], SeamCall]
    conditioning: frozenset[str]
    """Conditioning keys of this family besides `GENERIC_CONDITIONING`."""
    check_conditioning: Callable[[Mapping[str, Any], Config], None]
    """`UserError` for a conditioning whose tensors do not fit (another family's text encoder, say)."""
    restore: Callable[[Any, Mapping[str, Any], torch.Tensor], torch.Tensor] | None = None
    """(model, arguments, what `finish` gave) -> what the seam returns, where the two differ: the weight-free end of the
    function that the seam stands for (tokens back to a latent, say)."""
    needs: Mapping[str, str] = field(default_factory=dict)
    """Arguments of `params_class` that must not be left out where `unet_config` has them, since the model would not be
    the same without: argument -> what in the model's config asks for it, for the message."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model family."""

    name: str
    transformer: str
    """The diffusers class, "module:name"."""
    defaults: Config
    """The diffusers class's own defaults: a config.json may leave fields out (FLUX.1-dev's does)."""
    expected_shapes: Callable[[Config], dict[str, tuple[int, ...]]]
    """Every weight's name and shape, from the config alone."""
    num_heads: Callable[[Config], int]
    check_config: Callable[[Config], None] | None = None
    """`UserError` for a variant of the diffusers class that this family does not run."""
    check_plan: Callable[[Config, ParallelPlan], None]
    """`UserError` for degrees that this model cannot serve."""
    activation_bytes: Callable[[Config, SeamCall, int], int]
    """Peak activation bytes of one row, for an element size in bytes. An estimate from above."""
    comfy: ComfySide
    files: FileLayout
    """How its weights lie in single files, which is how ComfyUI's own model names them too."""
    prepare: Callable[[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]], dict[str, Any]]
    """(rows, shared) on the rank's device -> the arguments of the transformer's `forward`."""
    finish: Callable[[Any], torch.Tensor]
    """The transformer's output -> the tensor that the seam returns, rows first."""
    on_loaded: Callable[[torch.nn.Module], None] | None = None
    """Called once on each loaded model."""
    cp_segments: tuple[str, ...]
    """Arguments of the split modules' `forward` whose tokens (dim 1) make up the attention's sequence, in its order."""
    segment_lengths: Callable[[Config, SeamCall], dict[str, int]]
    """Tokens of each of `cp_segments` in a call."""
    cp_masks: Mapping[str, str] = field(default_factory=dict)
    """Arguments of the split modules that mask a segment's keys: argument -> segment. They stay whole on every rank."""
    mask_rows: tuple[str, ...] = ()
    """Rows of a call that are attention masks: not every attention backend takes them."""
    cp_sometimes: tuple[str, ...] = ()
    """Arguments that run along the sequence for some inputs only, told apart by their number of dimensions."""
    cp_plan: Mapping[str, Any] | None = None
    """Where diffusers has no context-parallel plan or has it wrong."""
    tp_plan: Mapping[str, Any] | None = None
    """Where diffusers has no tensor-parallel plan or has it wrong."""
    tp_units: Callable[[Config], int] | None = None
    """What a tensor degree must divide, where that is not the number of heads alone."""
    tp_norms: tuple[str, ...] = ()
    """RMS norms (globs) over the channels of all heads: a rank norms its own by the sum of squares over all ranks."""
    tp_heads: tuple[str, ...] = ()
    """Attention modules (globs) whose `heads` must be the number of local heads."""
    tp_replicated_output: tuple[str, ...] = ()
    """Linear layers (globs) that are sliced over the ranks too, but whose whole output every rank needs."""
    fp32_weights: tuple[str, ...] = ()
    """Weights (globs) that are held in float32 when the model runs in 16 bits; the layers' own code computes with
    them in float32."""
    unused_weights: tuple[str, ...] = ()
    """Weights (globs) that some files hold and neither diffusers nor ComfyUI reads."""

    @property
    def class_name(self) -> str:
        """The diffusers class's own name, as config.json gives it."""
        return self.transformer.split(":")[1]

    def tensor_units(self, config: Config) -> int:
        """A tensor degree works when it divides this number."""
        return (self.tp_units or self.num_heads)(config)

    def is_fp32(self, name: str) -> bool:
        """Whether the weight of that name keeps float32."""
        return any(fnmatch(name, pattern) for pattern in self.fp32_weights)

    def full_config(self, config: Config) -> dict[str, Any]:
        """The config with the defaults filled in. A null that is written there stays, as in diffusers."""
        return {**self.defaults, **config}


def resolve_class(path: str) -> Any:
    """The object that "module:name" names."""
    module, name = path.split(":")
    return getattr(importlib.import_module(module), name)


def refuse_unknown(what: str, given: Mapping[str, Any], understood: frozenset[str], family: str) -> None:
    """`UserError` that names whatever is not None in `given` and not in `understood`."""
    unknown = sorted(name for name, value in given.items() if value is not None and name not in understood)
    if unknown:
        raise UserError(
            f"The {family} family does not know the {what} {', '.join(map(repr, unknown))}, and leaving it out would "
            "change the picture. Remove the node that sets it, or use ComfyUI's own Load Diffusion Model."
        )
