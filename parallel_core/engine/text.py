"""Encoding prompts from the controller's side: which requests one call becomes, and what it holds when it is done.

Owns `TextModel`, the spec of a folder's encoders on a placement group, and how much room they ask for. Knows neither
ComfyUI nor how encoders compute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ..protocol import Request
from ..text_spec import EncodeText, LoadText, TextSource
from .engine import Engine
from .group import GroupKey
from .groups import Poll
from .models import spec_key
from .placed import expected_shares

_KIND = "text"
"""Where the keys of encoders start."""


@dataclass(frozen=True, kw_only=True)
class TextModel:
    """The encoders of `source` over `devices`, all seen by one process. See `models.ModelSpec`.

    `limits`: the user's max_memory in bytes per device, "cpu" and "disk". `capacities`: memory of each device in bytes.
    """

    devices: tuple[str, ...]
    source: TextSource
    placement: str
    limits: tuple[tuple[str, int], ...]
    capacities: tuple[int, ...]

    @property
    def group(self) -> GroupKey:
        """One process that sees all devices."""
        return GroupKey(devices=self.devices, kind="placement")

    @property
    def key(self) -> str:
        """Equal for equal folder, placement, limits and devices."""
        return spec_key(
            _KIND,
            devices=self.devices,
            folder=self.source.folder,
            fingerprint=self.source.fingerprint,
            placement=self.placement,
            limits=self.limits,
        )

    @property
    def weights(self) -> str:
        """As the key: they are divided in one way only."""
        return self.key

    @property
    def label(self) -> str:
        """For messages: "text encoders of flux-dev"."""
        return f"text encoders of {Path(self.source.folder).name}"

    def load_request(self) -> Request:
        """See `LoadText`."""
        return LoadText(key=self.key, folder=self.source.folder, placement=self.placement, max_memory=dict(self.limits))

    def estimated_bytes(self) -> dict[str, int]:
        """What to make free on each device so that the placement comes out as it would on empty devices."""
        limits = dict(self.limits)
        room = {
            device: min(capacity, limits.get(device, capacity))
            for device, capacity in zip(self.devices, self.capacities, strict=True)
        }
        shares = expected_shares(self.placement, room, self.source.total_bytes)
        return {device: share for device, share in shares.items() if share}


@dataclass(frozen=True, kw_only=True)
class RemoteText:
    """The controller's handle of encoders that stay loaded: a spec, never a live process."""

    engine: Engine
    spec: TextModel

    def ensure_loaded(self, poll: Poll | None = None) -> None:
        """Makes the weights resident."""
        self.engine.ensure_loaded(self.spec, poll)


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """Encoded prompts: per prompt its outputs by conditioning key, each [1, ...]; and what there is to tell.

    `cut`: (prompt, encoder's label, tokens of the prompt, tokens read). `load_seconds` is 0 when nothing was loaded.
    `notices`: what had to make room.
    """

    prompts: Sequence[Mapping[str, Tensor]]
    cut: Sequence[tuple[int, str, int, int]]
    placement: str
    load_seconds: float
    encode_seconds: float
    notices: Sequence[str]


def encode(
    engine: Engine,
    model: TextModel,
    prompts: Sequence[str],
    *,
    max_sequence_length: int,
    keep_loaded: bool,
    poll: Poll | None = None,
) -> Encoded:
    """Loads the encoders unless they are kept from before, encodes each prompt, gives the encoders back unless
    `keep_loaded`.

    At most one set of encoders is kept per group: another folder, placement or limit gives the former one back.
    """
    model.source.check_length(max_sequence_length)
    _forget_others(engine, model)
    holding = engine.ledger.get(model.group, model.key)
    kept = holding is not None and holding.resident
    try:
        with engine.using(model, poll) as group:
            (reply,) = engine.request_group(
                group,
                EncodeText(key=model.key, prompts=list(prompts), max_sequence_length=max_sequence_length),
                deadline=engine.deadlines.first,
                label=f"encoding with the {model.label}",
                poll=poll,
            )
    finally:
        if not keep_loaded:
            engine.release_later(model.group, model.key)
    return Encoded(
        prompts=[
            {part.key: reply.tensors[f"{index}.{part.key}"] for part in model.source.family.parts}
            for index in range(len(prompts))
        ],
        cut=[(int(prompt), str(label), int(tokens), int(read)) for prompt, label, tokens, read in reply.data["cut"]],
        placement=str(reply.data["placement"]),
        load_seconds=0.0 if kept else float(reply.data["load_seconds"]),
        encode_seconds=float(reply.data["seconds"]),
        notices=engine.take_notices(),
    )


def _forget_others(engine: Engine, model: TextModel) -> None:
    """Gives other encoders of the group back; also these ones once they were parked, which took them off the rank."""
    for holding in engine.ledger.of_group(model.group):
        is_text = holding.key.startswith(_KIND)  # a transformer's layers may lie in the same process
        if is_text and (holding.key != model.key or not holding.resident):
            engine.release_later(holding.group, holding.key)  # carried out before the group's next load
