"""Text encoders on a rank that sees all devices: placing, loading, encoding, giving back.

Owns the way from a folder and a placement to encoded prompts, and the operations of a placement group. Knows nothing
of one family: what the encoders are and what their outputs are called is declared in `families`. Does not know ComfyUI.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from ..checkpoint import Checkpoint, read_checkpoint, read_json
from ..errors import UserError
from ..families.text_registry import TEXT_FAMILIES
from ..placement import Component, PlacementPlan, plan_placement
from ..protocol import Request
from ..text_spec import EncodeText, LoadText, TextFamily, TextPart, check_class, read_text_source
from .budgets import apply_limits, free_budgets
from .placed import accelerate_device
from .store import StoredModel, give_memory_back
from .worker import Handler, Inputs, Result, Worker

# ----- what this file uses of transformers that is not promised to stay -----


def no_split_classes(module: nn.Module) -> tuple[str, ...]:
    """Names of the module classes that must stay on one device (they have residual connections inside)."""
    return tuple(getattr(module, "_no_split_modules", None) or ())


def modules_kept_in_float32(module: nn.Module, dtype: torch.dtype) -> tuple[str, ...]:
    """Last parts of the names of modules that transformers loads in float32 although `dtype` is asked for."""
    names = list(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:  # T5's wo overflows there
        names += list(getattr(module, "_keep_in_fp32_modules", None) or ())
    return tuple(names) if dtype in (torch.float16, torch.bfloat16) else ()


# ----- loading -----


@dataclass
class TextEncoders:
    """The encoders and tokenizers of one folder, loaded, by the names of their folders."""

    family: TextFamily
    plan: PlacementPlan
    encoders: dict[str, Any]
    tokenizers: dict[str, Any]
    offload: Path
    seconds: float = field(default=0.0)

    def close(self) -> None:
        """Gives the weights back: host, devices and files."""
        self.encoders.clear()
        self.tokenizers.clear()
        shutil.rmtree(self.offload, ignore_errors=True)
        give_memory_back()


@dataclass(frozen=True, kw_only=True)
class _Part:
    """What is known of one encoder before its weights are read."""

    declared: TextPart
    checkpoint: Checkpoint
    empty: nn.Module
    dtype: torch.dtype


def load_text_encoders(
    folder: Path,
    family: TextFamily,
    *,
    devices: Sequence[str],
    placement: str,
    limits: Mapping[str, int],
    offload: Path,
) -> TextEncoders:
    """Tokenizers, then the plan, then the weights; everything a user can have wrong is refused before the last step.

    `devices` are the group's names; this process sees them in the same order. `offload`: a folder for weights that
    have to be written anew to be read from disk.
    """
    started = time.monotonic()
    index = read_json(folder / "model_index.json")
    tokenizers = {part.tokenizer: _load_tokenizer(folder, index, part) for part in family.parts}
    parts = [_look_at(folder, index, part) for part in family.parts]
    components = [
        Component(name=part.declared.encoder, module=part.empty, no_split=no_split_classes(part.empty))
        for part in parts
    ]
    free = free_budgets(devices, limits)
    plan = plan_placement(components, apply_limits(free, limits), placement, free=free)
    loaded = TextEncoders(family=family, plan=plan, encoders={}, tokenizers=tokenizers, offload=offload)
    transformers.utils.logging.disable_progress_bar()  # a rank's output is a log file
    try:
        for part in parts:
            name = part.declared.encoder
            device_map = {
                module: accelerate_device(device, devices) for module, device in plan.device_map(name).items()
            }
            loaded.encoders[name] = _load_encoder(part, device_map, offload / name)
    except BaseException:
        loaded.close()
        raise
    loaded.seconds = time.monotonic() - started
    return loaded


def _load_tokenizer(folder: Path, index: Mapping[str, Any], part: TextPart) -> Any:
    name = check_class(folder, index, part.tokenizer, part.tokenizer_classes)
    try:
        return getattr(transformers, name).from_pretrained(str(folder / part.tokenizer), local_files_only=True)
    except (OSError, ValueError, ImportError) as error:
        raise UserError(f"{folder.name}/{part.tokenizer} cannot be read as a {name}: {error}") from error


def _look_at(folder: Path, index: Mapping[str, Any], part: TextPart) -> _Part:
    """The encoder without weights, and a check that the file's weights are those it needs."""
    name = check_class(folder, index, part.encoder, part.encoder_classes)
    checkpoint = read_checkpoint(folder, part.encoder)
    cls = getattr(transformers, name)
    dtype: torch.dtype = getattr(torch, checkpoint.dtype)
    with torch.device("meta"):
        empty: nn.Module = cls(cls.config_class.from_dict(dict(checkpoint.config))).to(dtype)
    kept = modules_kept_in_float32(empty, dtype)
    for module_name, module in empty.named_modules():
        if module_name.rpartition(".")[2] in kept:
            module.to(torch.float32)
    _check_weights(checkpoint, part, empty)
    return _Part(declared=part, checkpoint=checkpoint, empty=empty, dtype=dtype)


def _check_weights(checkpoint: Checkpoint, part: TextPart, empty: nn.Module) -> None:
    """Names and shapes: what the file lacks would be filled with random numbers."""
    have = dict(checkpoint.tensors)
    for prefix in part.prefixes:
        have |= {name.removeprefix(prefix): info for name, info in have.items()}
    names: dict[int, list[str]] = {}  # tied weights are one tensor under several names; a file may hold any of them
    shapes: dict[int, tuple[int, ...]] = {}
    for name, parameter in empty.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        shapes[id(parameter)] = tuple(parameter.shape)
    problems = []
    for identity, aliases in names.items():
        found = next((have[name] for name in aliases if name in have), None)
        if found is None:
            problems.append(f"{aliases[0]} is missing")
        elif found.shape != shapes[identity]:
            problems.append(f"{aliases[0]} has shape {list(found.shape)}, expected {list(shapes[identity])}")
    if problems:
        more = f" (and {len(problems) - 4} more)" if len(problems) > 4 else ""
        raise UserError(
            f"The weights in {checkpoint.folder.name!r} do not fit its config.json: {'; '.join(problems[:4])}{more}."
        )


def _load_encoder(part: _Part, device_map: Mapping[str, str | int], offload: Path) -> Any:
    encoder, report = type(part.empty).from_pretrained(  # type: ignore[attr-defined]
        str(part.checkpoint.folder),
        dtype=part.dtype,
        device_map=dict(device_map),
        offload_folder=str(offload),
        local_files_only=True,
        use_safetensors=True,
        output_loading_info=True,
    )
    missing = [*report["missing_keys"], *report["mismatched_keys"]]
    if missing:
        raise UserError(f"{part.checkpoint.folder.name!r} lacks weights: {', '.join(map(str, missing[:4]))}.")
    return encoder.eval().requires_grad_(False)


# ----- encoding -----


@dataclass(frozen=True, kw_only=True)
class EncodedPrompt:
    """One prompt's outputs by conditioning key (batch of one, the encoder's dtype, CPU), and the encoders that did
    not read all of it: (label, tokens of the prompt, tokens read)."""

    outputs: Mapping[str, Tensor]
    cut: Sequence[tuple[str, int, int]]


def encode_prompt(loaded: TextEncoders, prompt: str, max_sequence_length: int) -> EncodedPrompt:
    """What diffusers' own pipeline makes of the prompt: padded, cut to length, one forward per encoder."""
    outputs: dict[str, Tensor] = {}
    cut: list[tuple[str, int, int]] = []
    with torch.inference_mode():
        for part in loaded.family.parts:
            tokenizer, encoder = loaded.tokenizers[part.tokenizer], loaded.encoders[part.encoder]
            length = max_sequence_length if part.length == "request" else _own_length(tokenizer, encoder)
            ids = _token_ids(tokenizer, encoder, prompt, length, part)
            tokens = len(tokenizer(prompt, verbose=False)["input_ids"])
            if tokens > length:
                cut.append((part.label, tokens, length))
            output = encoder(ids.to(_input_device(encoder)), output_hidden_states=False)[part.output]
            output = output.to(device="cpu", dtype=encoder.dtype)
            if not torch.isfinite(output).all():
                raise UserError(
                    f"{part.encoder} gave values that are not finite in {encoder.dtype}. "
                    "Use a folder in bfloat16 or float32."
                )
            outputs[part.key] = output
    return EncodedPrompt(outputs=outputs, cut=cut)


def _own_length(tokenizer: Any, encoder: Any) -> int:
    """The tokenizer's length, but no more than the encoder has positions for."""
    return min(int(tokenizer.model_max_length), int(encoder.config.max_position_embeddings))


def _token_ids(tokenizer: Any, encoder: Any, prompt: str, length: int, part: TextPart) -> Tensor:
    batch = tokenizer(prompt, padding="max_length", max_length=length, truncation=True, return_tensors="pt")
    ids: Tensor = batch["input_ids"]
    known = encoder.config.vocab_size
    if int(ids.max()) >= known:
        raise UserError(
            f"{part.tokenizer} gives token {int(ids.max())}, but {part.encoder} knows {known}. "
            "They are not of one model."
        )
    return ids


def _input_device(encoder: Any) -> torch.device:
    """Where token ids are read; an encoder whose embeddings lie elsewhere than they compute moves its inputs itself."""
    device: torch.device = encoder.get_input_embeddings().weight.device
    return torch.device("cpu") if device.type == "meta" else device


# ----- operations -----


def load(worker: Worker, request: LoadText, tensors: Inputs) -> Result:
    """Places and loads the encoders of a folder."""
    if request.key not in worker.store:
        folder = Path(request.folder)
        loaded = load_text_encoders(
            folder,
            read_text_source(folder, TEXT_FAMILIES).family,
            devices=worker.devices,
            placement=request.placement,
            limits=request.max_memory,
            offload=Path.cwd() / f"offload-{request.key}",
        )
        module = nn.ModuleDict(loaded.encoders)
        worker.store.add(
            request.key,
            StoredModel(
                module=module, device=worker.device, close=loaded.close, extra={"loaded": loaded}, movable=False
            ),
        )
    loaded = worker.store.use(request.key).extra["loaded"]
    bytes_per_device = loaded.plan.bytes_per_device
    return Result(data={"device_bytes": {device: bytes_per_device.get(device, 0) for device in worker.devices}})


def encode(worker: Worker, request: EncodeText, tensors: Inputs) -> Result:
    """Encodes every prompt by itself, so that its bits do not depend on the others."""
    loaded: TextEncoders = worker.store.use(request.key).extra["loaded"]
    started = time.monotonic()
    encoded = [encode_prompt(loaded, prompt, request.max_sequence_length) for prompt in request.prompts]
    return Result(
        data={
            "cut": [[index, *cut] for index, prompt in enumerate(encoded) for cut in prompt.cut],
            "placement": loaded.plan.describe(),
            "load_seconds": loaded.seconds,
            "seconds": time.monotonic() - started,
        },
        tensors={
            f"{index}.{key}": output for index, prompt in enumerate(encoded) for key, output in prompt.outputs.items()
        },
    )


OPERATIONS: dict[str, tuple[type[Request], Handler]] = {
    LoadText.operation: (LoadText, load),
    EncodeText.operation: (EncodeText, encode),
}
