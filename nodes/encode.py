"""The Encode on device_map node: a folder's own text encoders, placed over devices, as CONDITIONING."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import comfy.model_management
import torch
from comfy_api.latest import io

from ..parallel_core.engine.text import Encoded, RemoteText, TextModel, encode
from ..parallel_core.errors import UserError
from ..parallel_core.families.text_registry import TEXT_FAMILIES
from ..parallel_core.max_memory import parse_max_memory
from ..parallel_core.plan import ParallelPlan
from ..parallel_core.text_spec import PLACEMENTS, TextSource, read_text_source
from .listing import find_model, list_models
from .parallel_config import ParallelConfigType, default_plan
from .remote_patcher import RemotePatcher, WeightlessModel
from .runtime import as_comfy_interrupt, cancel_requested, engine, say

_PROMPTS = ("positive", "negative")
_WEIGHT = re.compile(r"(?<!\\)\([^()]*:\s*[-+]?\d*\.?\d+\s*\)")
_EMBEDDING = re.compile(r"\bembedding:\S+")


def inspect_source(model_name: str) -> TextSource:
    """The chosen folder's encoders, checked from json files and headers."""
    return read_text_source(find_model(model_name, "text_encoder"), TEXT_FAMILIES)


def check_placement(placement: str) -> None:
    """ComfyUI leaves the check of a choice to a node that has a check of its own."""
    if placement not in PLACEMENTS:
        raise UserError(f"placement is {placement!r}; expected one of {', '.join(PLACEMENTS)}.")


def make_model(source: TextSource, plan: ParallelPlan, placement: str, max_memory: str) -> TextModel:
    """What the ranks are asked to load; `UserError` for a max_memory that does not fit the plan's devices."""
    check_placement(placement)
    return TextModel(
        devices=plan.devices,
        source=source,
        placement=placement,
        limits=tuple(sorted(parse_max_memory(max_memory, plan.devices).items())),
        capacities=tuple(engine().total_memory(device, plan.world_size) for device in plan.devices),
    )


def conditioning(outputs: Mapping[str, torch.Tensor]) -> list[list[Any]]:
    """ComfyUI's CONDITIONING: `cross_attn` first, all else by its key; float32 as ComfyUI's own encoders give it."""
    tensors = {key: tensor.float() for key, tensor in outputs.items()}
    return [[tensors.pop("cross_attn"), tensors]]


def account(encoded: Encoded, prompts: Sequence[str], *, keep_loaded: bool) -> str:
    """For the node: where the encoders lay, seconds, what was cut or not understood."""
    if encoded.load_seconds:
        time = f"loaded in {encoded.load_seconds:.1f} s, encoded in {encoded.encode_seconds:.1f} s"
    else:
        time = f"were loaded, encoded in {encoded.encode_seconds:.1f} s"
    lines = [encoded.placement, f"{time}; {'kept' if keep_loaded else 'memory given back'}", *encoded.notices]
    for prompt, label, tokens, read in encoded.cut:
        lines.append(f"{_PROMPTS[prompt]}: {label} read {read} of {tokens} tokens, the rest was cut")
    for name, prompt_text in zip(_PROMPTS, prompts, strict=True):
        lines += [f"{name}: {found} is read as plain text" for found in comfy_syntax(prompt_text)]
    return "\n".join(lines)


def comfy_syntax(prompt: str) -> list[str]:
    """What ComfyUI's own encoders would not read as text: weights "(word:1.2)" and "embedding:name"."""
    found = [match.group() for pattern in (_WEIGHT, _EMBEDDING) for match in pattern.finditer(prompt)]
    return [f"ComfyUI's {text!r}" for text in dict.fromkeys(found)]


_kept: dict[tuple[str, ...], RemotePatcher] = {}
"""What keep_loaded holds, by devices: as long as it stands here, ComfyUI can free it like a model of its own."""


def keep(model: TextModel) -> None:
    """Makes encoders that stay loaded known to ComfyUI's memory management."""
    known = _kept.get(model.devices)
    if known is None or known.remote.spec.key != model.key:
        _kept[model.devices] = RemotePatcher(
            WeightlessModel(RemoteText(engine=engine(), spec=model)),
            load_device=comfy.model_management.get_torch_device(),
            offload_device=comfy.model_management.text_encoder_offload_device(),
        )
    comfy.model_management.load_models_gpu([_kept[model.devices]])


class EncodeOnDeviceMap(io.ComfyNode):
    """PD_EncodeOnDeviceMap."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="PD_EncodeOnDeviceMap",
            display_name="Encode on device_map",
            category="parallel",
            description="Encodes both prompts with a diffusers folder's own text encoders, over several devices.",
            inputs=[
                io.Combo.Input(
                    "model_name",
                    options=list_models("text_encoder"),
                    tooltip="A diffusers folder in models/diffusers with its text encoders and tokenizers (FLUX.1).",
                ),
                io.String.Input(
                    "positive",
                    multiline=True,
                    dynamic_prompts=True,
                    tooltip="What the picture shall show. Plain text: weights such as (word:1.2) are not understood.",
                ),
                io.String.Input(
                    "negative",
                    multiline=True,
                    dynamic_prompts=True,
                    tooltip="What it shall not show; used when cfg is above 1.",
                ),
                io.Combo.Input(
                    "placement",
                    options=list(PLACEMENTS),
                    default="balanced",
                    tooltip="balanced: spread evenly over all devices. auto: as few devices as hold everything. "
                    "sequential: fill the first, then the next. single: one device only. "
                    "What no device has room for goes to the host's memory, except with single.",
                ),
                io.String.Input(
                    "max_memory",
                    default="",
                    optional=True,
                    tooltip="The most that weights may take per device, such as '0:16GB,1:16GB,cpu:64GB'. "
                    "Empty: what is free. 'disk:20GB' allows weights to be read from the model's files each time.",
                ),
                io.Boolean.Input(
                    "keep_loaded",
                    default=False,
                    optional=True,
                    tooltip="On: the next prompt loads nothing. Off: the memory is given back at once.",
                ),
                io.Int.Input(
                    "max_sequence_length",
                    default=512,
                    min=1,
                    max=512,
                    optional=True,
                    tooltip="Tokens per prompt for T5: shorter ones are padded, longer ones cut. FLUX.1 schnell: 256.",
                ),
                ParallelConfigType.Input(
                    "parallel_config",
                    optional=True,
                    tooltip="From Parallel Config; only its devices count here. Without it: all GPUs.",
                ),
            ],
            outputs=[
                io.Conditioning.Output(display_name="positive"),
                io.Conditioning.Output(display_name="negative"),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(cls, model_name: Any = None) -> bool | str:
        """Checks the folder, its json and headers before the prompt runs; None comes over a link.

        The other inputs are checked when the node runs, which is before anything is read or started.
        """
        try:
            if model_name is not None:
                inspect_source(model_name)
        except UserError as error:
            return str(error)
        return True

    @classmethod
    def fingerprint_inputs(cls, model_name: str, **others: Any) -> str:
        """Makes ComfyUI run the node again when the encoders' files were replaced."""
        return inspect_source(model_name).fingerprint

    @classmethod
    def execute(
        cls,
        model_name: str,
        positive: str,
        negative: str,
        placement: str,
        max_memory: str = "",
        keep_loaded: bool = False,
        max_sequence_length: int = 512,
        parallel_config: ParallelPlan | None = None,
    ) -> io.NodeOutput:
        """Both prompts as CONDITIONING."""
        source = inspect_source(model_name)
        source.check_length(max_sequence_length)
        model = make_model(source, parallel_config or default_plan(), placement, max_memory)
        prompts = (positive, negative)
        with as_comfy_interrupt():
            encoded = encode(
                engine(),
                model,
                prompts,
                max_sequence_length=max_sequence_length,
                keep_loaded=keep_loaded,
                poll=cancel_requested,
            )
        if keep_loaded:
            keep(model)
        else:
            _kept.pop(model.devices, None)
        say(account(encoded, prompts, keep_loaded=keep_loaded), cls.hidden.unique_id)
        return io.NodeOutput(*(conditioning(outputs) for outputs in encoded.prompts))
