"""The text operations of a rank, on placement and mesh groups alike: load encoders, encode prompts.

Knows nothing of one family and nothing of ComfyUI; how encoders are loaded is in `text_loading`, what becomes of a
prompt in `prompts`.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from torch import nn

from ..families.text_registry import TEXT_FAMILIES
from ..max_memory import format_bytes
from ..placement import PlacementPlan
from ..protocol import Request
from ..text_files import open_place
from ..text_spec import TENSOR, EncodeText, LoadText
from .prompts import encode_prompt
from .store import StoredModel
from .text_loading import TextEncoders, load_text_encoders, load_text_slices
from .worker import Handler, Inputs, Result, Worker


def load(worker: Worker, request: LoadText, tensors: Inputs) -> Result:
    """Loads the encoders of a place, in the way of this kind of group."""
    if request.key not in worker.store:
        source = open_place(request.place, TEXT_FAMILIES)
        if request.placement == TENSOR:
            loaded = load_text_slices(source, worker.meshes.everyone(), worker.device)
        else:
            loaded = load_text_encoders(
                source,
                devices=worker.devices,
                placement=request.placement,
                limits=request.max_memory,
                offload=Path.cwd() / f"offload-{request.key}",
            )
        model = StoredModel(
            module=nn.ModuleDict(loaded.encoders),
            device=worker.device,
            close=loaded.close,
            extra={"loaded": loaded},
            movable=loaded.plan is None,
        )
        worker.store.add(request.key, model)
    return Result(data={"device_bytes": _device_bytes(worker, request.key)})


def _device_bytes(worker: Worker, key: str) -> dict[str, int]:
    stored = worker.store.use(key)
    plan: PlacementPlan | None = stored.extra["loaded"].plan
    if plan is None:
        return {worker.devices[0]: stored.num_bytes}
    return {device: plan.bytes_per_device.get(device, 0) for device in worker.devices}


def encode(worker: Worker, request: EncodeText, tensors: Inputs) -> Result:
    """Encodes every prompt by itself, so that its bits do not depend on the others."""
    stored = worker.store.use(request.key)
    loaded: TextEncoders = stored.extra["loaded"]
    started = time.monotonic()
    encoded = [
        encode_prompt(loaded.family, loaded.tokenizers, loaded.encoders, prompt, request.max_sequence_length)
        for prompt in request.prompts
    ]
    own = f"{format_bytes(stored.num_bytes)} on {worker.devices[0]}"
    data: dict[str, Any] = {
        "placement": own if loaded.plan is None else loaded.plan.describe(),
        "load_seconds": loaded.seconds,
        "seconds": time.monotonic() - started,
    }
    if worker.rank > 0:  # the ranks have the same outputs; the first one's bits win
        return Result(data=data)
    return Result(
        data={**data, "cut": [[index, *cut] for index, prompt in enumerate(encoded) for cut in prompt.cut]},
        tensors={
            f"{index}.{key}": output for index, prompt in enumerate(encoded) for key, output in prompt.outputs.items()
        },
    )


OPERATIONS: dict[str, tuple[type[Request], Handler]] = {
    LoadText.operation: (LoadText, load),
    EncodeText.operation: (EncodeText, encode),
}
"""Of both kinds of groups."""
