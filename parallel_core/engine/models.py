"""Specs: what a node output holds instead of a live model.

A spec is plain data from which the engine can find or build the model again after a crash, an unload or a restart.
Knows neither how ranks load nor what a model computes.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import Protocol

from ..protocol import LoadTransformer, Request
from ..storage import PLAIN
from .group import GroupKey


class ModelSpec(Protocol):
    """What the engine needs of a spec."""

    @property
    def group(self) -> GroupKey:
        """The group that holds the model."""

    @property
    def key(self) -> str:
        """The model's name in the ranks' stores: equal specs have equal keys."""

    @property
    def weights(self) -> str:
        """Equal for specs with the same weights, however they are divided over the ranks."""

    @property
    def label(self) -> str:
        """For messages: "flux transformer of flux-dev"."""

    def load_request(self) -> Request:
        """The request that makes the ranks load it."""

    def estimated_bytes(self) -> dict[str, int]:
        """Bytes the weights will take on each device."""


def spec_key(kind: str, **parts: object) -> str:
    """A short stable key from what identifies a model."""
    text = repr(sorted(parts.items()))
    return f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


@dataclass(frozen=True, kw_only=True)
class TransformerSpec:
    """A transformer: files, dtype, devices, and how the weights are divided.

    Context axes, replicas and the attention backend are not part of it: they change on the loaded weights.
    """

    devices: tuple[str, ...]
    folder: str
    fingerprint: str
    family: str
    name: str
    dtype: str
    num_bytes: int
    """Bytes of all weights as they are held."""
    tensor: int
    shards: int = 1
    """Ranks that share the weights out among them, on top of `tensor`."""
    storage: str = PLAIN
    """How weights are held; with `dtype` the fields of `storage.Storage`."""
    held: str = ""
    """What that is, for people."""
    config_from: str = ""
    """The diffusers folder whose config a single file is read with."""
    offload: bool = False
    """Shared weights lie in the ranks' host memory."""

    @property
    def group(self) -> GroupKey:
        """One rank per device."""
        return GroupKey(devices=self.devices)

    @property
    def key(self) -> str:
        """Equal for equal specs."""
        return spec_key("transformer", **asdict(self))

    @property
    def weights(self) -> str:
        """Which weights, in which dtype. Packed ones are not divided anew."""
        if self.storage != PLAIN:
            return self.key
        return spec_key(
            "weights",
            folder=self.folder,
            fingerprint=self.fingerprint,
            dtype=self.dtype,
            config_from=self.config_from,
        )

    @property
    def label(self) -> str:
        """For messages."""
        return f"{self.family} transformer {self.name}"

    def load_request(self) -> Request:
        """See `protocol.LoadTransformer`."""
        return LoadTransformer(
            key=self.key,
            folder=self.folder,
            family=self.family,
            dtype=self.dtype,
            tensor=self.tensor,
            shards=self.shards,
            offload=self.offload,
            storage=self.storage,
            config_from=self.config_from,
        )

    def estimated_bytes(self) -> dict[str, int]:
        """An equal part on every device, with what tensor parallelism keeps whole counted as a tenth."""
        sliced = self.num_bytes if self.tensor == 1 else int(self.num_bytes * (1 / self.tensor + 0.1))
        return dict.fromkeys(self.devices, 0 if self.offload else sliced // self.shards)
