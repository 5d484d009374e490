"""The MODEL that stands for a transformer on the ranks.

A stock ModelPatcher over ComfyUI's own model class, built on the meta device (right attributes and names, no memory),
in which the innermost function that needs weights is replaced by a remote call. All of ComfyUI's weight-free code and
its wrappers run as ever. Knows families by their declarations and no process.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import comfy.model_management
import torch
from comfy.patcher_extension import WrappersMP

from ..parallel_core.attention_backends import check_masks
from ..parallel_core.engine.transformer import RemoteTransformer, RunStatistics
from ..parallel_core.errors import UserError
from ..parallel_core.families.base import ComfySide, SeamCall, refuse_unknown, resolve_class
from ..parallel_core.weight_patches import PatchSet
from .cond_batch import WRAPPER_KEY, make_wrapper
from .lora_keys import MissingKeys, describe_missing, looks_like
from .prompt_conds import prepare_apart
from .prompt_rows import reassign
from .refusals import refuse_block_code, refuse_sampling
from .remote_patcher import RemotePatcher, bind, remote_of
from .rendezvous import submit
from .runtime import as_comfy_interrupt, cancel_requested, say
from .weight_patches import patch_set


class RemoteModelPatcher(RemotePatcher):
    """The MODEL: besides the weights on the ranks there are the sigmas here, which must be where sampling happens.

    Patches (LoRAs) are this side's: what is on the weights is what the patcher that was loaded last has, as with
    ComfyUI's own models, whose clones share their weights too.
    """

    _translated: tuple[Any, PatchSet] | None = None
    """What `patches` were when they had this uuid."""

    def add_patches(self, patches: Any, strength_patch: float = 1.0, strength_model: float = 1.0) -> list[Any]:
        """As ComfyUI's; says which keys of a LoRA's file match nothing. `UserError` when none does."""
        missing = self.model.missing_keys.take()
        if not patches:
            examples = f" Keys of the file: {', '.join(missing[:3])}." if missing else ""
            raise UserError(
                f"No key of the LoRA matches a weight of this {_remote(self).family.name} model, so it would have no "
                f"effect.{looks_like(missing)}{examples} Choose a LoRA for this model."
            )
        matched = list(super().add_patches(patches, strength_patch, strength_model))
        self.model.missing_keys.take()  # ComfyUI looks at the names here too
        if not matched:  # LoraLoader's other half, the text encoder, has them all
            say("None of the LoRA's keys is for the diffusion model, which stays as it is")
        elif missing:
            say(describe_missing(missing, len(matched)))
        return matched

    def get_key_patches(self, filter_prefix: str | None = None) -> Any:
        """Refused: these are the weights, for nodes that merge them into other models."""
        raise UserError("The model's weights live on the ranks and cannot be merged into another model from here.")

    def weight_patches(self) -> PatchSet:
        """What the patches on this MODEL mean for the ranks. `UserError` for what they cannot do."""
        if self._translated is None or self._translated[0] != self.patches_uuid:
            self._translated = (self.patches_uuid, patch_set(self.patches, _remote(self)))
        return self._translated[1]

    def partially_load(self, device_to: Any, extra_memory: float = 0, force_patch_weights: bool = False) -> Any:
        """As ComfyUI's, but other patches are no reason to unload: the ranks change the weights that they hold."""
        _remote(self).patches = self.weight_patches()
        if self.model.current_weight_patches_uuid is not None:
            self.model.current_weight_patches_uuid = self.patches_uuid
        return super().partially_load(device_to, extra_memory)

    def load(self, device_to: Any = None, *args: Any, **kwargs: Any) -> None:
        """Makes the weights resident on the ranks."""
        super().load(device_to, *args, **kwargs)
        self.model.model_sampling.to(device_to)


def _remote(patcher: RemoteModelPatcher) -> RemoteTransformer:
    handle: RemoteTransformer = remote_of(patcher.model)
    return handle


def build_model(remote: RemoteTransformer) -> RemoteModelPatcher:
    """The MODEL for a transformer that the ranks will hold. Loads nothing and starts nothing."""
    model = _meta_model(remote)
    patcher = RemoteModelPatcher(
        model,
        load_device=comfy.model_management.get_torch_device(),
        offload_device=comfy.model_management.unet_offload_device(),
    )
    dispatch = _Dispatch(remote)
    patcher.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, WRAPPER_KEY, make_wrapper(dispatch))
    patcher.add_wrapper_with_key(WrappersMP.PREPARE_SAMPLING, WRAPPER_KEY, _Guard(remote))
    patcher.add_wrapper_with_key(WrappersMP.SAMPLER_SAMPLE, WRAPPER_KEY, prepare_apart)
    return patcher


def _meta_model(remote: RemoteTransformer) -> Any:
    """ComfyUI's own model for the family, weightless, with the seam replaced."""
    side = remote.family.comfy
    config_class = resolve_class(side.config_class(remote.config))
    dtype = getattr(torch, remote.spec.dtype)
    unet_config = _known_fields(side, remote.config)
    model_config = config_class({**unet_config, "dtype": dtype})
    model_config.set_inference_dtype(dtype, None)
    model = model_config.get_model({}, "", device=torch.device("meta"))
    seam = _Seam(remote, model.diffusion_model, getattr(type(model.diffusion_model), side.seam))
    setattr(model.diffusion_model, side.seam, seam)
    for module in model.diffusion_model.modules():
        if module is not model.diffusion_model and next(module.parameters(recurse=False), None) is not None:
            module.register_forward_pre_hook(_refuse_local)
    # ComfyUI splits batches by the memory it has here, where none is needed: what runs where must not depend on it.
    model.memory_required = _no_memory
    model.state_dict_for_saving = _refuse_saving
    model.missing_keys = MissingKeys()
    model.register_state_dict_pre_hook(_begin_matching)
    bind(model, remote)
    return model


def _known_fields(side: ComfySide, config: Mapping[str, Any]) -> dict[str, Any]:
    """The unet_config without arguments that this version of ComfyUI does not have."""
    wanted = side.unet_config(config)
    known = {*inspect.signature(resolve_class(side.params_class)).parameters, "image_model"}
    for name, cause in side.needs.items():
        if name in wanted and name not in known:
            raise UserError(f"The model has {cause}, which this version of ComfyUI cannot run. Update ComfyUI.")
    return {name: value for name, value in wanted.items() if name in known}


def _refuse_local(module: torch.nn.Module, args: Any) -> None:
    """Nothing with weights is called here, unless a node has put its own code in the place of the seam (TeaCache)."""
    raise UserError(
        "A node runs the model's blocks with its own code in ComfyUI's process, where no weight is. Remove that node, "
        "or use ComfyUI's own Load Diffusion Model for this workflow."
    )


def _refuse_saving(*args: Any, **kwargs: Any) -> None:
    raise UserError("The model's weights live on the ranks and cannot be saved from here; save the original model.")


def _begin_matching(model: Any, *args: Any) -> None:
    """ComfyUI asks for the names of the weights before it looks for them in a LoRA's file."""
    model.missing_keys.start()


def _no_memory(input_shape: Any, cond_shapes: Any = None) -> int:
    return 0


class _Guard:
    """PREPARE_SAMPLING wrapper: refuses before anything is loaded, and starts the run's statistics."""

    def __init__(self, remote: RemoteTransformer) -> None:
        self._remote = remote

    def __call__(
        self,
        executor: Any,
        patcher: Any,
        noise_shape: Any,
        conds: Any,
        *args: Any,
        model_options: Any = None,
        **rest: Any,
    ) -> Any:
        remote = self._remote
        refuse_sampling(remote.family, remote.config, patcher, noise_shape, conds, model_options or {})
        for entries in conds.values():
            reassign(entries or ())
        if remote.family.mask_rows and any(map(_masks_tokens, _entries(conds))):
            check_masks(remote.plan.attention_backend)
        remote.statistics = RunStatistics()
        return executor(patcher, noise_shape, conds, *args, model_options=model_options, **rest)


def _entries(conds: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    return (entry for entries in conds.values() for entry in entries or ())


def _masks_tokens(entry: Mapping[str, Any]) -> bool:
    """Whether a prompt says that some of its tokens are padding (a mask of ones only is the same as none)."""
    mask = entry.get("attention_mask")
    return mask is not None and bool((mask != 1).any())


class _Dispatch:
    """Sends calls to the ranks; says on the executing node what was chosen at a run's first step."""

    def __init__(self, remote: RemoteTransformer) -> None:
        self._remote = remote

    def __call__(self, calls: list[SeamCall]) -> list[torch.Tensor]:
        remote = self._remote
        first = remote.statistics.num_steps == 0
        step = f"step {remote.statistics.num_steps + 1} of {remote.spec.label}"
        with as_comfy_interrupt():
            outputs = remote.evaluate(calls, label=step, poll=cancel_requested)
        statistics = remote.statistics
        if statistics.choice is not None and (first or statistics.compiled):
            say("\n".join(filter(None, [statistics.describe_choice(), statistics.note, statistics.compiled])))
        return outputs


class _Seam:
    """Stands in for the model's function that needs weights: the same arguments, the same result."""

    def __init__(self, remote: RemoteTransformer, model: Any, original: Any) -> None:
        self._remote = remote
        self._model = weakref.ref(model)  # the model holds this object: a cycle would delay the release of the weights
        self._signature = inspect.signature(original)
        self._dispatch = _Dispatch(remote)

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        side = self._remote.family.comfy
        model = self._model()
        arguments = self._bind(args, kwargs)
        refuse_unknown("argument", arguments, side.arguments, self._remote.family.name)
        refuse_block_code(arguments.get("transformer_options") or {}, self._remote.family.name)
        call = side.call(model, arguments, self._remote.config)
        model_input = next(iter(call.rows.values()))
        output = submit(call, self._dispatch).to(device=model_input.device, dtype=model_input.dtype)
        return output if side.restore is None else side.restore(model, arguments, output)

    def _bind(self, args: Any, kwargs: Any) -> dict[str, Any]:
        """Every argument by its name, those that the function takes as ``**kwargs`` among them."""
        arguments = dict(self._signature.bind(None, *args, **kwargs).arguments)
        arguments.pop("self")
        for name, parameter in self._signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                arguments |= arguments.pop(name, {})
        return arguments
