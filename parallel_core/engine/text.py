"""Encoding prompts from the controller's side: which requests one call becomes, and what it holds when it is done.

Owns `TextModel`, the spec of encoders on a placement group or, in slices, on a mesh group, and how much room they ask
for. Knows neither ComfyUI nor how encoders compute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..errors import UserError
from ..protocol import Request
from ..text_source import TextSource
from ..text_spec import TENSOR, EncodeText, LoadText
from .engine import Engine
from .group import GroupKey
from .groups import Poll
from .models import spec_key
from .placed import expected_shares

_KIND = "text"
"""Where the keys of encoders start."""


@dataclass(frozen=True, kw_only=True)
class TextModel:
    """The encoders of `source` over `devices`: all seen by one process, or with placement "tensor" one rank each. See
    `models.ModelSpec`.

    `limits`: the user's max_memory in bytes per device, "cpu" and "disk". `capacities`: memory of each device in bytes.
    """

    devices: tuple[str, ...]
    source: TextSource
    placement: str
    limits: tuple[tuple[str, int], ...]
    capacities: tuple[int, ...]

    @property
    def group(self) -> GroupKey:
        """One process that sees all devices; for slices one rank per device."""
        return GroupKey(devices=self.devices, kind="mesh" if self.placement == TENSOR else "placement")

    @property
    def key(self) -> str:
        """Equal for equal files, placement, limits and devices."""
        return spec_key(
            _KIND,
            devices=self.devices,
            place=self.source.place,
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
        return f"text encoders of {self.source.name}"

    def load_request(self) -> Request:
        """See `LoadText`."""
        place = self.source.place
        return LoadText(
            key=self.key,
            placement=self.placement,
            folder=place.folder,
            files=list(place.files),
            family=place.family,
            tokenizers=place.tokenizers,
            max_memory=dict(self.limits),
        )

    def estimated_bytes(self) -> dict[str, int]:
        """What to make free on each device so that the placement comes out as it would on empty devices."""
        if self.placement == TENSOR:
            return dict.fromkeys(self.devices, self._bytes_per_rank())
        limits = dict(self.limits)
        room = {
            device: min(capacity, limits.get(device, capacity))
            for device, capacity in zip(self.devices, self.capacities, strict=True)
        }
        shares = expected_shares(self.placement, room, self.source.total_bytes)
        return {device: share for device, share in shares.items() if share}

    def _bytes_per_rank(self) -> int:
        """Slices, and what is whole on every rank."""
        divided = {part.encoder for part in self.source.divided_parts(len(self.devices))}
        return sum(
            encoder.num_bytes // (len(self.devices) if name in divided else 1)
            for name, encoder in self.source.encoders.items()
        )

    def check_placement(self) -> None:
        """Refuses slices that do not come out equal, and limits that nothing would keep to."""
        if self.placement != TENSOR:
            return
        self.source.divided_parts(len(self.devices))
        if self.limits:
            raise UserError(
                "max_memory has no meaning with placement 'tensor': each device takes an equal slice of every weight. "
                "Leave it empty, or choose placement 'balanced'."
            )


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
    model.check_placement()
    _forget_others(engine, model)
    holding = engine.ledger.get(model.group, model.key)
    kept = holding is not None and holding.resident
    try:
        with engine.using(model, poll) as group:
            replies = engine.request_group(
                group,
                EncodeText(key=model.key, prompts=list(prompts), max_sequence_length=max_sequence_length),
                deadline=engine.deadlines.first,
                label=f"encoding with the {model.label}",
                poll=poll,
            )
    finally:
        if not keep_loaded:
            engine.release_later(model.group, model.key)
    reply = replies[0]
    return Encoded(
        prompts=[
            {part.key: reply.tensors[f"{index}.{part.key}"] for part in model.source.family.parts}
            for index in range(len(prompts))
        ],
        cut=[(int(prompt), str(label), int(tokens), int(read)) for prompt, label, tokens, read in reply.data["cut"]],
        placement=_describe(model, [str(reply.data["placement"]) for reply in replies]),
        load_seconds=0.0 if kept else max(float(reply.data["load_seconds"]) for reply in replies),
        encode_seconds=max(float(reply.data["seconds"]) for reply in replies),
        notices=engine.take_notices(),
    )


def _describe(model: TextModel, told: Sequence[str]) -> str:
    """What one process tells of its devices; or each rank of its slices."""
    if model.placement != TENSOR:
        return told[0]
    divided = model.source.divided_parts(len(model.devices))
    whole = [part.encoder for part in model.source.family.parts if part not in divided]
    parts = ", ".join(part.encoder for part in divided)
    kept = f" ({', '.join(whole)} whole on each: its heads cannot be dealt out)" if whole else ""
    return f"{parts} in slices over {len(model.devices)} ranks{kept}; {' + '.join(told)}"


def _forget_others(engine: Engine, model: TextModel) -> None:
    """Gives other encoders of the devices back; also these ones once they were parked where that took them off."""
    for kind in ("placement", "mesh"):
        for holding in engine.ledger.of_group(GroupKey(devices=model.devices, kind=kind)):
            is_text = holding.key.startswith(_KIND)  # a transformer may be on the same ranks
            is_lost = not holding.resident and kind == "placement"
            if is_text and (holding.key != model.key or is_lost):
                engine.release_later(holding.group, holding.key)  # carried out before the group's next load
