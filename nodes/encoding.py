"""What the two encode nodes share: their common inputs, and the way from encoders and prompts to CONDITIONING.

Knows ComfyUI and the engine; not where encoders come from.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import comfy.model_management
import torch
from comfy_api.latest import io

from ..parallel_core.engine.text import Encoded, RemoteText, TextModel, encode
from ..parallel_core.errors import UserError
from ..parallel_core.max_memory import parse_max_memory
from ..parallel_core.plan import ParallelPlan
from ..parallel_core.text_source import TextSource
from ..parallel_core.text_spec import CHOICES
from .parallel_config import ParallelConfigType, default_plan
from .remote_patcher import RemotePatcher, WeightlessModel
from .runtime import as_comfy_interrupt, cancel_requested, engine, say

_PROMPTS = ("positive", "negative")
_WEIGHT = re.compile(r"(?<!\\)\([^()]*:\s*[-+]?\d*\.?\d+\s*\)")
_EMBEDDING = re.compile(r"\bembedding:\S+")


def check_placement(placement: str) -> None:
    """ComfyUI leaves the check of a choice to a node that has a check of its own."""
    if placement not in CHOICES:
        raise UserError(f"placement is {placement!r}; expected one of {', '.join(CHOICES)}.")


def make_model(source: TextSource, plan: ParallelPlan, placement: str, max_memory: str) -> TextModel:
    """What the ranks are asked to load; `UserError` for a max_memory that does not fit the plan's devices."""
    check_placement(placement)
    model = TextModel(
        devices=plan.devices,
        source=source,
        placement=placement,
        limits=tuple(sorted(parse_max_memory(max_memory, plan.devices).items())),
        capacities=tuple(engine().total_memory(device, plan.world_size) for device in plan.devices),
    )
    model.check_placement()
    return model


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


def prompt_inputs() -> list[io.Input]:
    """positive and negative."""
    return [
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
    ]


def placement_input() -> io.Input:
    """Where the encoders lie."""
    return io.Combo.Input(
        "placement",
        options=list(CHOICES),
        default="balanced",
        tooltip="balanced: spread evenly over all devices. auto: as few devices as hold everything. "
        "sequential: fill the first, then the next. single: one device only. "
        "What no device has room for goes to the host's memory, except with single. "
        "tensor: every device takes an equal slice of every weight and all compute at once.",
    )


def setting_inputs() -> list[io.Input]:
    """The optional ones: max_memory, keep_loaded, max_sequence_length, parallel_config."""
    return [
        io.String.Input(
            "max_memory",
            default="",
            optional=True,
            tooltip="The most that weights may take per device, such as '0:16GB,1:16GB,cpu:64GB'. "
            "Empty: what is free. 'disk:20GB' allows weights to be read from the model's files each time. "
            "Not with placement tensor.",
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
            max=1024,
            optional=True,
            tooltip="Tokens per prompt: for T5 and UMT5 shorter ones are padded, longer ones cut; Qwen2.5-VL only "
            "cuts. FLUX.1 and Wan take up to 512 (FLUX.1 schnell: 256), Qwen-Image up to 1024.",
        ),
        ParallelConfigType.Input(
            "parallel_config",
            optional=True,
            tooltip="From Parallel Config; only its devices count here. Without it: all GPUs.",
        ),
    ]


def prompt_outputs() -> list[io.Output]:
    """positive and negative."""
    return [
        io.Conditioning.Output(display_name="positive"),
        io.Conditioning.Output(display_name="negative"),
    ]


def encode_prompts(
    source: TextSource,
    prompts: tuple[str, str],
    node_id: str | None,
    *,
    placement: str,
    max_memory: str,
    keep_loaded: bool,
    max_sequence_length: int,
    parallel_config: ParallelPlan | None,
) -> io.NodeOutput:
    """Both prompts as CONDITIONING; everything a user can have wrong is refused before a rank starts."""
    source.check_length(max_sequence_length)
    model = make_model(source, parallel_config or default_plan(), placement, max_memory)
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
    say(account(encoded, prompts, keep_loaded=keep_loaded), node_id)
    return io.NodeOutput(*(conditioning(outputs) for outputs in encoded.prompts))
