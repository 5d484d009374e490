"""Loads text encoders and tokenizers on a rank: placed over all devices that it sees, or in slices over a mesh group.

Owns the way from a `TextSource` and a placement to loaded modules. Knows nothing of one family: what the encoders are
is declared in `families`. Does not know ComfyUI or requests.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..errors import UserError
from ..placement import Component, PlacementPlan, plan_placement
from ..text_source import EncoderSource, TextSource, TokenizerSource
from ..text_spec import TextFamily, TextPart
from .budgets import apply_limits, free_budgets
from .placed import accelerate_device
from .store import give_memory_back
from .stored import StoredWeight, open_file
from .text_tensor import fill, slice_model

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
    """Encoders and tokenizers, loaded, by the names of the parts. `describe` says where they lie, for a person."""

    family: TextFamily
    encoders: dict[str, Any]
    tokenizers: dict[str, Any]
    plan: PlacementPlan | None = None
    """Where they were placed; None for slices."""
    offload: Path | None = None
    seconds: float = field(default=0.0)

    def close(self) -> None:
        """Gives the weights back: host, devices and files."""
        self.encoders.clear()
        self.tokenizers.clear()
        if self.offload is not None:
            shutil.rmtree(self.offload, ignore_errors=True)
        give_memory_back()


@dataclass(frozen=True, kw_only=True)
class _Part:
    """What is known of one encoder before its weights are read."""

    declared: TextPart
    source: EncoderSource
    config: Any
    empty: nn.Module
    dtypes: Mapping[str, torch.dtype]
    """By parameter name."""


def load_text_encoders(
    source: TextSource,
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
    tokenizers = _load_tokenizers(source)
    parts = [_look_at(source, part, torch.device("meta")) for part in source.family.parts]
    components = [
        Component(name=part.declared.encoder, module=part.empty, no_split=no_split_classes(part.empty))
        for part in parts
    ]
    free = free_budgets(devices, limits)
    plan = plan_placement(components, apply_limits(free, limits), placement, free=free)
    loaded = TextEncoders(family=source.family, plan=plan, encoders={}, tokenizers=tokenizers, offload=offload)
    transformers.utils.logging.disable_progress_bar()  # a rank's output is a log file
    try:
        for part in parts:
            name = part.declared.encoder
            device_map = {
                module: accelerate_device(device, devices) for module, device in plan.device_map(name).items()
            }
            loaded.encoders[name] = _load_placed(part, device_map, offload / name)
    except BaseException:
        loaded.close()
        raise
    loaded.seconds = time.monotonic() - started
    return loaded


def load_text_slices(source: TextSource, mesh: DeviceMesh, device: torch.device) -> TextEncoders:
    """This rank's slices of the encoders, on `device`; `mesh` (1-D) has all ranks that share them.

    The peak is the slices and one tensor. Parts that are too small to be divided are whole on every rank.
    """
    started = time.monotonic()
    divided = source.divided_parts(mesh.size())
    loaded = TextEncoders(family=source.family, encoders={}, tokenizers=_load_tokenizers(source))
    for declared in source.family.parts:
        part = _look_at(source, declared, None)
        if declared in divided:
            slice_model(part.empty, declared.tp_plan, mesh)
        fill(part.empty, part.source.checkpoint, part.dtypes, device)
        loaded.encoders[declared.encoder] = part.empty.eval().requires_grad_(False)
    loaded.seconds = time.monotonic() - started
    return loaded


def _load_tokenizers(source: TextSource) -> dict[str, Any]:
    return {
        part.tokenizer: _load_tokenizer(source.encoders[part.encoder].tokenizer, source.name)
        for part in source.family.parts
    }


def _load_tokenizer(source: TokenizerSource, model: str) -> Any:
    folder = _unpacked_sentencepiece(source) if source.tensor else source.path
    try:
        return getattr(transformers, source.name).from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, ImportError) as error:
        where = f"{model}/{source.path.name}" if not source.tensor else f"{source.path.name}: {source.tensor}"
        raise UserError(f"{where} cannot be read as a {source.name}: {error}") from error
    finally:
        if source.tensor:
            shutil.rmtree(folder, ignore_errors=True)


def _unpacked_sentencepiece(source: TokenizerSource) -> Path:
    """A folder with the file's SentencePiece model under the name that transformers looks for."""
    folder = Path(tempfile.mkdtemp(prefix="tokenizer-", dir=Path.cwd()))  # the ranks of a group share their folder
    with safe_open(source.path, framework="pt") as file:
        (folder / "spiece.model").write_bytes(file.get_tensor(source.tensor).numpy().tobytes())
    return folder


def _look_at(source: TextSource, part: TextPart, device: torch.device | None) -> _Part:
    """The encoder without weights, and a check that the file's weights are those it needs.

    `device`: where buffers that the constructor computes are; None for where they are made.
    """
    encoder = source.encoders[part.encoder]
    cls, config_class = getattr(transformers, encoder.class_name), getattr(transformers, encoder.config_class)
    config = config_class.config_class.from_dict(dict(encoder.checkpoint.config))
    config = getattr(config, part.config_key) if part.config_key else config
    dtype: torch.dtype = getattr(torch, encoder.dtype)
    with init_empty_weights(include_buffers=False) if device is None else device:
        empty: nn.Module = cls(config)
    dtypes = _dtypes(empty, dtype)
    if device is not None:
        for name, parameter in [*empty.named_parameters(), *empty.named_buffers()]:
            parameter.data = parameter.data.to(dtypes.get(name, parameter.dtype))
    _check_weights(encoder, empty)
    return _Part(declared=part, source=encoder, config=config, empty=empty, dtypes=dtypes)


def _dtypes(empty: nn.Module, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """What each parameter is held in."""
    kept = modules_kept_in_float32(empty, dtype)
    return {
        name: torch.float32 if name.split(".")[-2:-1] and name.split(".")[-2] in kept else dtype
        for name, _ in empty.named_parameters(remove_duplicate=False)
    }


def _check_weights(encoder: EncoderSource, empty: nn.Module) -> None:
    """Names and shapes: what the file lacks would be filled with random numbers, what it has more would be lost."""
    have = encoder.checkpoint.tensors
    names: dict[int, list[str]] = {}  # tied weights are one tensor under several names; a file may hold any of them
    shapes: dict[int, tuple[int, ...]] = {}
    parameters = dict(empty.named_parameters(remove_duplicate=False))
    tied: dict[str, str] = getattr(empty, "all_tied_weights_keys", {})
    for name, parameter in parameters.items():
        one = parameters[tied.get(name, name)]
        names.setdefault(id(one), []).append(name)
        shapes[id(one)] = tuple(parameter.shape)
    problems = []
    for identity, aliases in names.items():
        found = next((have[name] for name in aliases if name in have), None)
        if found is None:
            problems.append(f"{aliases[0]} is missing")
        elif found.shape != shapes[identity]:
            problems.append(f"{aliases[0]} has shape {list(found.shape)}, expected {list(shapes[identity])}")
    ignored = getattr(empty, "_keys_to_ignore_on_load_unexpected", None) or ()
    buffers = {name for name, _ in empty.named_buffers()}
    for name in have:
        if name not in parameters and name not in buffers and not any(re.search(glob, name) for glob in ignored):
            problems.append(f"{name} is not part of a {encoder.class_name}")
    if problems:
        more = f" (and {len(problems) - 4} more)" if len(problems) > 4 else ""
        what = "what they look like" if encoder.is_file else "its config.json"
        raise UserError(
            f"The weights in {encoder.checkpoint.folder.name!r} do not fit {what}: {'; '.join(problems[:4])}{more}."
        )


def _load_placed(part: _Part, device_map: Mapping[str, str | int], offload: Path) -> Any:
    """Through transformers, which puts each module where `device_map` says and brings in what lies elsewhere."""
    checkpoint = part.source.checkpoint
    with ExitStack() as stack:
        if part.source.is_file:
            origin: tuple[str | None, dict[str, Any]] = (None, {"state_dict": _lazy_weights(part, stack)})
        else:
            mapping = {f"^{re.escape(old)}": new for old, new in part.declared.renames}
            origin = (str(checkpoint.folder), {"key_mapping": mapping or None, "local_files_only": True})
        encoder, report = type(part.empty).from_pretrained(  # type: ignore[attr-defined]
            origin[0],
            config=part.config,
            dtype=getattr(torch, part.source.dtype),
            device_map=dict(device_map),
            offload_folder=str(offload),
            use_safetensors=True,
            output_loading_info=True,
            **origin[1],
        )
    missing = [*report["missing_keys"], *report["mismatched_keys"]]
    if missing:
        raise UserError(f"{checkpoint.folder.name!r} lacks weights: {', '.join(map(str, missing[:4]))}.")
    return encoder.eval().requires_grad_(False)


def _lazy_weights(part: _Part, stack: ExitStack) -> dict[str, StoredWeight]:
    """By name, in the form in which transformers takes those of a safetensors file: read when it is their turn.

    The files are open until `stack` ends.
    """
    checkpoint = part.source.checkpoint
    files = {path: open_file(path, stack) for path in checkpoint.files}
    return {name: StoredWeight(files[info.file], info) for name, info in checkpoint.tensors.items()}
