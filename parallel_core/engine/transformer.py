"""A transformer that runs on ranks: rows are shared out over replicas, results put together again.

Owns which row runs where. Knows families by their declarations; knows neither ComfyUI nor how a rank computes.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ..attention_backends import check_masks, describe_attention
from ..errors import UserError
from ..families.base import Family, SeamCall
from ..plan import ParallelPlan, PlanChoice, resolve
from ..protocol import CheckMode, Forward
from ..weight_patches import NO_PATCHES, PatchSet
from .engine import Engine
from .groups import Poll
from .models import TransformerSpec
from .shares import check_shares
from .weight_patches import apply_patches

logger = logging.getLogger("parallel_diffusion")

Segment = tuple[int, int, int]
"""(call, first row, one past the last row)."""
Batch = list[Segment]

_ACTIVATION_SHARE = 0.8
"""The part of a device's memory, less the weights, that activations may take: the rest is the allocator's waste and
what other programs use."""


@dataclass
class RunStatistics:
    """What a run did so far, for the text on a node."""

    choice: PlanChoice | None = None
    note: str = ""
    """What is unequal about the ranks' shares."""
    compiled: str = ""
    """What the last evaluation has compiled."""
    num_steps: int = 0
    num_batches: int = 0
    """The most batches that one rank ran one after the other in an evaluation."""
    seconds: float = 0.0
    peak_bytes: dict[str, int] = field(default_factory=dict)
    placement: str = ""
    """With strategy "device_map": which layer lies where."""

    def describe_choice(self) -> str:
        """For a node, once something ran: what was chosen and why, or which layers were placed where."""
        assert self.choice is not None
        chosen = self.choice.plan.describe()
        return f"{chosen}: {self.placement}" if self.placement else f"{chosen} ({self.choice.reason})"


@dataclass
class RemoteTransformer:
    """The controller's handle: a spec and a plan, never a live process."""

    engine: Engine
    spec: TransformerSpec
    plan: ParallelPlan
    family: Family
    config: dict[str, Any]
    found: str = ""
    """What a single file was recognised as, for people."""
    statistics: RunStatistics = field(default_factory=RunStatistics)
    patches: PatchSet = NO_PATCHES
    """What is changed about the weights from the next evaluation on."""

    def ensure_loaded(self, poll: Poll | None = None) -> None:
        """Loads the weights now rather than at the first evaluation, once the ranks have what the plan needs."""
        mode = self.plan.mode
        if mode.attention_backend != "auto" or mode.compile != "off":
            self.engine.request(self.spec.group, CheckMode(mode=asdict(mode)), poll=poll)
        self.engine.ensure_loaded(self.spec, poll)

    def choose(self, num_rows: int) -> PlanChoice:
        """The degrees for an evaluation of `num_rows` rows."""
        return resolve(
            self.plan, rows=num_rows, heads=self.family.tensor_units(self.config), fits_one_device=self.spec.tensor == 1
        )

    def evaluate(self, calls: Sequence[SeamCall], *, label: str, poll: Poll | None = None) -> list[torch.Tensor]:
        """One output per call, rows first, on the CPU. All calls run in one operation.

        Rows are dealt to the replicas in order; rows that agree in every shape and in what they share run as one batch,
        as large as the device's memory allows, whatever calls they come from.
        """
        _check_row_counts(calls)
        choice = self.choose(sum(call.num_rows for call in calls))
        if any(row in call.rows for call in calls for row in self.family.mask_rows):
            check_masks(choice.plan.attention_backend)
        if self.statistics.num_steps == 0:
            self._log_attention(choice.plan)
        self.statistics.note = check_shares(choice.plan, self.family, self.config, calls)
        slots, tensors = _slots(calls)
        assignments = share_rows(
            [call.num_rows for call in calls],
            [_signature(call, slots[index]["shared"]) for index, call in enumerate(calls)],
            choice.plan.replicas,
            [self._rows_at_once(call, choice.plan) for call in calls],
        )
        request = Forward(
            key=self.spec.key,
            mode=asdict(choice.plan.mode),
            first=self.statistics.num_steps == 0,
            calls=slots,
            assignments=[[[list(segment) for segment in batch] for batch in batches] for batches in assignments],
        )
        deadlines = self.engine.deadlines
        compiles = self.statistics.num_steps == 0 or choice.plan.compile != "off"
        deadline = deadlines.first if compiles else deadlines.step
        with self.engine.using(self.spec, poll) as group:
            apply_patches(self.engine, group, self.spec, self.patches)
            started = time.monotonic()
            replies = self.engine.request_group(group, request, tensors, deadline=deadline, label=label, poll=poll)
            seconds = time.monotonic() - started
        self._note(choice, assignments, replies, seconds)
        return _assemble(calls, [reply.tensors for reply in replies])

    def _log_attention(self, plan: ParallelPlan) -> None:
        text = describe_attention(plan.attention_backend, device=plan.devices[0], ring=plan.ring)
        logger.info("%s: %s", self.spec.label, text)

    def _rows_at_once(self, call: SeamCall, plan: ParallelPlan) -> int:
        """Rows of `call` that fit one batch, from the device's total memory: the same on every run on this machine."""
        world = plan.world_size
        weights = self.spec.estimated_bytes()
        room = min(self.engine.total_memory(name, world) - weights[name] for name in plan.devices)
        element = torch.empty((), dtype=call.rows[next(iter(call.rows))].dtype).element_size()
        per_row = self.family.activation_bytes(self.config, call, element) // plan.mode.context
        return max(1, int(room * _ACTIVATION_SHARE) // max(1, per_row))

    def _note(
        self, choice: PlanChoice, assignments: Sequence[Sequence[Batch]], replies: Sequence[Any], seconds: float
    ) -> None:
        self.statistics.choice = choice
        self.statistics.num_steps += 1
        self.statistics.seconds += seconds
        graphs = max(int(reply.data["graphs"]) for reply in replies)
        noun = "graph" if graphs == 1 else "graphs"
        self.statistics.compiled = f"{graphs} {noun} compiled in this step of {seconds:.0f} s" if graphs else ""
        batches = max(len(batches) for batches in assignments)
        self.statistics.num_batches = max(self.statistics.num_batches, batches)
        for reply in replies:
            self.statistics.placement = str(reply.data.get("placement", ""))
            for device, peak in reply.data["peak_bytes"].items():
                self.statistics.peak_bytes[device] = max(int(peak), self.statistics.peak_bytes.get(device, 0))


def _check_row_counts(calls: Sequence[SeamCall]) -> None:
    for call in calls:
        wrong = {name: tensor.shape[0] for name, tensor in call.rows.items() if tensor.shape[0] != call.num_rows}
        if wrong:
            raise UserError(f"A batch of {call.num_rows} rows came with {wrong}; expected as many rows in each tensor.")


def _slots(calls: Sequence[SeamCall]) -> tuple[list[dict[str, dict[str, str]]], dict[str, torch.Tensor]]:
    """Names for all tensors of `calls`; shared tensors that are equal between calls get one name."""
    tensors: dict[str, torch.Tensor] = {}
    result: list[dict[str, dict[str, str]]] = []
    for index, call in enumerate(calls):
        rows = {name: f"{index}.{name}" for name in call.rows}
        shared = {name: _shared_slot(name, tensor, index, result, tensors) for name, tensor in call.shared.items()}
        tensors.update({rows[name]: tensor for name, tensor in call.rows.items()})
        tensors.update({shared[name]: tensor for name, tensor in call.shared.items() if shared[name] not in tensors})
        result.append({"rows": rows, "shared": shared})
    return result, tensors


def _shared_slot(
    name: str,
    tensor: torch.Tensor,
    index: int,
    earlier: Sequence[dict[str, dict[str, str]]],
    tensors: dict[str, torch.Tensor],
) -> str:
    for slots in earlier:
        slot = slots["shared"].get(name)
        if slot is not None and tensors[slot].dtype == tensor.dtype and torch.equal(tensors[slot], tensor):
            return slot
    return f"{index}.{name}"


def _signature(call: SeamCall, shared: dict[str, str]) -> tuple[object, ...]:
    """Calls with equal signatures may share a batch."""
    shapes = tuple((name, tuple(tensor.shape[1:]), tensor.dtype) for name, tensor in sorted(call.rows.items()))
    return (shapes, tuple(sorted(shared.items())))


def share_rows(
    row_counts: Sequence[int], signatures: Sequence[object], replicas: int, rows_at_once: Sequence[int]
) -> list[list[Batch]]:
    """Deals all rows to `replicas`, and cuts each share into batches.

    Rows whose calls have equal signatures come together first, so that they can share batches whatever stands between
    them. `rows_at_once[call]` bounds a batch that holds rows of that call. Returns per replica its batches, possibly
    none.
    """
    first_of = {signature: number for number, signature in reversed(list(enumerate(signatures)))}
    order = sorted(range(len(row_counts)), key=lambda call: first_of[signatures[call]])
    rows = [(call, row) for call in order for row in range(row_counts[call])]
    base, extra = divmod(len(rows), replicas)
    shares: list[list[Batch]] = []
    start = 0
    for replica in range(replicas):
        size = base + (replica < extra)
        shares.append(_batches(rows[start : start + size], signatures, rows_at_once))
        start += size
    return shares


def _batches(rows: Sequence[tuple[int, int]], signatures: Sequence[object], rows_at_once: Sequence[int]) -> list[Batch]:
    batches: list[Batch] = []
    for _, same in itertools.groupby(rows, key=lambda item: signatures[item[0]]):
        alike = list(same)
        limit = min(rows_at_once[call] for call, _ in alike)
        # An uneven last batch would be the slow one: 9 rows in batches of at most 8 are 5 + 4.
        num_batches = -(-len(alike) // limit)
        base, extra = divmod(len(alike), num_batches)
        start = 0
        for index in range(num_batches):
            size = base + (index < extra)
            batches.append(_segments(alike[start : start + size]))
            start += size
    return batches


def _segments(rows: Sequence[tuple[int, int]]) -> Batch:
    segments: Batch = []
    for call, row in rows:
        if segments and segments[-1][0] == call and segments[-1][2] == row:
            segments[-1] = (call, segments[-1][1], row + 1)
        else:
            segments.append((call, row, row + 1))
    return segments


def _assemble(calls: Sequence[SeamCall], results: Sequence[Any]) -> list[torch.Tensor]:
    """The calls' outputs from the pieces of all replicas; every row comes from exactly one piece."""
    pieces: list[dict[int, torch.Tensor]] = [{} for _ in calls]
    for tensors in results:
        for name, tensor in tensors.items():
            call, first, _ = map(int, name.split(":"))
            pieces[call][first] = tensor
    outputs = [torch.cat([parts[first] for first in sorted(parts)]) for parts in pieces]
    for expected, output in zip(calls, outputs, strict=True):
        assert output.shape[0] == expected.num_rows, "every row comes back exactly once"
    return outputs
