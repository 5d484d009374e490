"""Sets of weight patches on the ranks, from the controller's side: sent when another set is wanted than they have.

Only tensors that the ranks do not hold cross, in pieces, so that the arena stays small. Knows neither ComfyUI nor how
weights are changed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from ..errors import RankError, RankUserError
from ..protocol import HoldTensors, PatchWeights
from ..weight_patches import PatchSet
from .engine import Engine
from .group import Group
from .models import ModelSpec

logger = logging.getLogger("parallel_diffusion")

PIECE_BYTES = 128 << 20


def apply_patches(engine: Engine, group: Group, spec: ModelSpec, patches: PatchSet) -> int:
    """Makes `patches` those on the model of `spec`, which `group` holds and is locked for. Returns the bytes sent."""
    if group.patched.get(spec.key) == patches.id:
        return 0
    num_bytes = 0
    try:
        missing = _request(engine, group, spec, patches)
        for piece in _pieces(missing, patches.tensors):
            num_bytes += sum(tensor.nbytes for tensor in piece.values())
            label = f"sending changes of weights to {spec.label}"
            engine.request_group(group, HoldTensors(key=spec.key), piece, deadline=engine.deadlines.load, label=label)
        if missing:
            missing = _request(engine, group, spec, patches)
            assert not missing, "the ranks keep what they are sent"
    except RankUserError:  # refused before anything was changed
        raise
    except RankError:
        engine.discard(group, spec)
        group.patched.pop(spec.key, None)
        raise
    group.patched[spec.key] = patches.id
    text = "%s: %d changes of weights are on it; %.1f MB sent"
    logger.info(text, spec.label, len(patches.patches), num_bytes / 1e6)
    return num_bytes


def _request(engine: Engine, group: Group, spec: ModelSpec, patches: PatchSet) -> Sequence[str]:
    request = PatchWeights(key=spec.key, patches=[patch.to_json() for patch in patches.patches])
    label = f"changing the weights of {spec.label}"
    replies = engine.request_group(group, request, deadline=engine.deadlines.load, label=label)
    return sorted({name for reply in replies for name in reply.data["missing"]})


def _pieces(names: Sequence[str], tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """The tensors of these names, a few at a time."""
    piece: dict[str, Tensor] = {}
    for name in names:
        if piece and sum(tensor.nbytes for tensor in piece.values()) + tensors[name].nbytes > PIECE_BYTES:
            yield piece
            piece = {}
        piece[name] = tensors[name]
    if piece:
        yield piece
