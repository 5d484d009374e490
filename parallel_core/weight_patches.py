"""Changes to a model's weights (LoRA and its kin) as plain data that crosses from ComfyUI to the ranks.

Owns what a patch is and when two sets of patches are the same. Knows neither ComfyUI's objects nor what a patch does
to a weight.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from .protocol import ProtocolError

KINDS = ("lora", "loha", "lokr", "diff", "set")


@dataclass(frozen=True, kw_only=True)
class WeightPatch:
    """One change to one tensor of ComfyUI's model.

    `target`: the tensor's name in the original layout (see `families.layout`). `tensors`: role -> name of a tensor of
    the set. `offset`: (dim, start, length) of the part that is changed; None for all of it. `swap`: the halves of the
    change (dim 0) have changed places.
    """

    target: str
    kind: str
    strength: float
    tensors: Mapping[str, str]
    alpha: float | None = None
    offset: tuple[int, int, int] | None = None
    swap: bool = False

    @property
    def is_decomposed(self) -> bool:
        """Whether the changed weight is scaled by its norm (DoRA, arXiv:2402.09353), for which all of it is needed."""
        return "dora_scale" in self.tensors

    def to_json(self) -> dict[str, Any]:
        """For a frame."""
        return asdict(self)

    @staticmethod
    def from_json(data: Any) -> WeightPatch:
        """The reverse of `to_json`; `ProtocolError` on anything else."""
        try:
            offset = data["offset"]
            patch = WeightPatch(**{**data, "offset": None if offset is None else tuple(offset)})
        except (KeyError, TypeError) as error:
            raise ProtocolError(f"Not a weight patch: {data!r} ({error}).") from None
        if patch.kind not in KINDS:
            raise ProtocolError(f"Unknown kind of weight patch {patch.kind!r}; known: {', '.join(KINDS)}.")
        return patch


@dataclass(frozen=True, kw_only=True)
class PatchSet:
    """All changes to the weights of one MODEL: patches of a tensor apply in order. `tensors` by their names."""

    id: str = ""
    """Equal for equal sets, and empty for the set without patches."""
    patches: Sequence[WeightPatch] = ()
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def of(patches: Sequence[WeightPatch], tensors: Mapping[str, Tensor]) -> PatchSet:
        """The set of `patches`, whose tensors have names that are equal only for equal tensors."""
        if not patches:
            return NO_PATCHES
        text = json.dumps([patch.to_json() for patch in patches])
        return PatchSet(id=hashlib.sha256(text.encode()).hexdigest()[:16], patches=patches, tensors=tensors)


NO_PATCHES = PatchSet()
