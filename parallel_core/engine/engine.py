"""The engine: loads models into groups of ranks, sends requests to them, keeps the ledger.

One per process. Safe to call from several threads; each group takes one request at a time. Knows neither diffusers nor
ComfyUI: what ComfyUI must do (free its own models) is a callback.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..errors import Cancelled, RankError
from ..host import host_memory
from ..plan import DeviceInfo
from ..protocol import LoadTransformer, Park, Release, Request, Status
from .devices import list_gpus
from .group import Group, GroupKey, RankReply
from .groups import Groups, Poll
from .ledger import Holding, Ledger
from .models import ModelSpec
from .references import Item, References
from .status import group_status

logger = logging.getLogger("parallel_diffusion")

WORKSPACE_BYTES = 1 << 30
"""Made free on a GPU beside a model's weights, for what evaluating it takes (FLUX.1 at 1024 x 1024: 0.45 GB)."""


HOST_SHARE = 0.8
"""Of the host's available memory, what parked weights may take; beyond it they are released instead."""


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """Seconds a request may take. The first evaluation is longer: kernels are chosen and compiled then."""

    start: float = 180.0
    load: float = 1800.0
    first: float = 1200.0
    step: float = 600.0
    short: float = 60.0


class Engine:
    """See the module."""

    def __init__(
        self,
        package: Path,
        *,
        environ: Mapping[str, str],
        deadlines: Deadlines | None = None,
        free_host: Callable[[str, int], None] | None = None,
        host_is_busy: Callable[[], bool] = lambda: False,
        list_devices: Callable[[], Sequence[DeviceInfo]] = list_gpus,
        host: Callable[[], tuple[int, int]] = host_memory,
    ) -> None:
        """`package` is the folder that holds `parallel_core`. Of the host program: `free_host(device, bytes)` asks it
        to make room on a device, `host_is_busy` tells whether it is at work on a prompt. `list_devices` and `host`
        (available and total bytes) are what the hardware says.
        """
        self.deadlines = deadlines or Deadlines()
        self.ledger = Ledger()
        self.list_devices = list_devices
        self._free_host = free_host
        self._host_is_busy = host_is_busy
        self._host = host
        self._groups = Groups(package, environ, list_devices, self.ledger, self._drain_releases)
        self._lock = self._groups.lock
        self._references = References()
        self._releases: collections.deque[Item] = collections.deque()
        self._notices: collections.deque[str] = collections.deque(maxlen=20)

    @property
    def num_starts(self) -> int:
        """How many groups were started so far."""
        return self._groups.num_starts

    def group(self, key: GroupKey, poll: Poll | None = None) -> Group:
        """The living group for `key`; starts it when there is none. Releases that are due are carried out first."""
        with self._lock:
            self._drain_releases()
            return self._groups.get(key, self.deadlines.start, poll)

    # -- requests --------------------------------------------------------------------------------------------------

    def request(
        self,
        key: GroupKey,
        request: Request,
        tensors: Mapping[str, torch.Tensor] | None = None,
        *,
        deadline: float | None = None,
        label: str = "",
        poll: Poll | None = None,
    ) -> list[RankReply]:
        """One request to the group of `key` (started when needed); one answer per rank."""
        group = self.group(key, poll)
        return self.request_group(group, request, tensors, deadline=deadline, label=label, poll=poll)

    def request_group(
        self,
        group: Group,
        request: Request,
        tensors: Mapping[str, torch.Tensor] | None = None,
        *,
        deadline: float | None = None,
        label: str = "",
        poll: Poll | None = None,
    ) -> list[RankReply]:
        """One request to a group that is at hand."""
        try:
            return group.request(
                request,
                tensors,
                deadline=self.deadlines.short if deadline is None else deadline,
                label=label,
                poll=poll,
            )
        except RankError:
            if not group.alive:
                self.ledger.drop_group(group.key)
            raise

    def ensure_loaded(self, spec: ModelSpec, poll: Poll | None = None) -> None:
        """Makes the model of `spec` resident on its devices: loads it, or takes it out of the park."""
        with self.using(spec, poll):
            pass

    @contextmanager
    def using(self, spec: ModelSpec, poll: Poll | None = None) -> Iterator[Group]:
        """The group of `spec` with the model resident, and nobody else's until the block ends."""
        group = self.group(spec.group, poll)
        source = ""
        if spec.key not in group.loaded:
            source = self._source(group, spec)
            self._release_orphans(spec, keep=source)
        with group.lock:
            holding = self.ledger.get(spec.group, spec.key)
            if holding is None or spec.key not in group.loaded:
                self._make_room(group, spec.estimated_bytes(), keep=self._holdings(spec.group, source))
                self._load(group, spec, source if source in group.loaded else "")
            elif not holding.resident:
                self._make_room(group, holding.device_bytes, keep=(holding,))
                self._load(group, spec)  # the ranks have it and only bring it back
            else:
                self.ledger.touch(spec.group, spec.key)
            # A load is finished and noted before Cancel counts: what the ranks hold is always known here.
            if poll is not None and poll():
                raise Cancelled(f"Cancelled after loading {spec.label}.")
            yield group

    def is_resident(self, spec: ModelSpec) -> bool:
        """Whether the weights are on the devices now."""
        holding = self.ledger.get(spec.group, spec.key)
        return self._groups.find(spec.group) is not None and holding is not None and holding.resident

    def _source(self, group: Group, spec: ModelSpec) -> str:
        """The key of a resident model whose parts the new one can be made of, if there is room for both; else ""."""
        sibling = self.ledger.sibling(spec.group, spec.key, spec.weights)
        if sibling is None:
            return ""
        needed = spec.estimated_bytes()
        if spec.group.devices[0].startswith("cpu"):
            return sibling.key if sum(needed.values()) < self._host()[0] * HOST_SHARE else ""
        free = self._free(group)
        fits = all(free.get(device, 0) > size + WORKSPACE_BYTES for device, size in needed.items())
        return sibling.key if fits else ""

    def _holdings(self, group: GroupKey, key: str) -> tuple[Holding, ...]:
        holding = self.ledger.get(group, key)
        return () if holding is None else (holding,)

    def _load(self, group: Group, spec: ModelSpec, source: str = "") -> None:
        request = spec.load_request()
        if source and isinstance(request, LoadTransformer):  # nothing else can be divided in two ways
            request = replace(request, source=source)
        try:
            replies = self.request_group(group, request, deadline=self.deadlines.load, label=f"loading {spec.label}")
        except RankError:
            self.discard(group, spec)
            raise
        finally:
            for key in (spec.key, source):  # a model loses its patches when it is read, or another is made of it
                group.patched.pop(key, None)
        by_device: dict[str, int] = {}
        for reply in replies:
            for device, size in reply.data["device_bytes"].items():
                by_device[device] = by_device.get(device, 0) + int(size)
        group.loaded.add(spec.key)
        self.ledger.record(spec.group, spec.key, spec.label, by_device, spec.weights)
        if source:
            self._release_if_orphan(spec.group, source)
        logger.info("loaded %s: %s", spec.label, ", ".join(f"{d} {s / 1e6:.0f} MB" for d, s in by_device.items()))

    def discard(self, group: Group, spec: ModelSpec) -> None:
        """After an error some ranks may hold the model in one state, others in another: none shall."""
        if group.alive:
            self.request_group(group, Release(key=spec.key))
            group.loaded.discard(spec.key)
            self.ledger.drop(spec.group, spec.key)

    def _make_room(self, group: Group, needed: Mapping[str, int], keep: Sequence[Holding]) -> None:
        """Asks the host program, then parks our own models, least recently used first. CPU ranks share one memory."""
        needed = {device: size + WORKSPACE_BYTES for device, size in self._apart_from_host(needed).items()}
        if not needed:
            return
        if self._free_host is not None:
            for device, size in needed.items():
                self._free_host(device, size)
        for holding in self.ledger.to_yield(needed, self._free(group), keep):
            if self._park(holding):
                self._notices.append(f"{holding.label} left the devices to make room")
                logger.info(self._notices[-1])

    def _apart_from_host(self, device_bytes: Mapping[str, int]) -> dict[str, int]:
        """The part that lies on devices with memory of their own."""
        own = {device.name for device in self.list_devices()}
        return {device: size for device, size in device_bytes.items() if device in own}

    def _free(self, group: Group) -> dict[str, int]:
        free: dict[str, int] = {}
        for reply in self.request_group(group, Status()):
            free.update(reply.data["free_bytes"])
        return free

    def take_notices(self) -> list[str]:
        """What was done to other models since the last call, for the text of the node that caused it."""
        return [self._notices.popleft() for _ in range(len(self._notices))]

    # -- memory verbs ----------------------------------------------------------------------------------------------

    def park(self, spec: ModelSpec) -> None:
        """Moves the weights off the devices into the ranks' host memory. Nothing when it is not loaded."""
        holding = self.ledger.get(spec.group, spec.key)
        if holding is not None and holding.resident:
            self._park(holding)

    def _park(self, holding: Holding) -> bool:
        """True when it yields. A group in the middle of a request does not: its model is in use."""
        group = self._groups.find(holding.group)
        if group is None:
            self.ledger.drop(holding.group, holding.key)
            return True
        if not group.lock.acquire(timeout=1.0):
            return False
        try:
            if sum(self._apart_from_host(holding.device_bytes).values()) > self._host()[0] * HOST_SHARE:
                logger.warning("%s does not fit the host's memory; it will be read again", holding.label)
                self._release(holding.group, holding.key)
            else:
                self.request_group(group, Park(key=holding.key))
                self.ledger.park(holding.group, holding.key)
        except RankError as error:  # not for the caller, who may be ComfyUI's own worker between two prompts
            logger.warning("parking %s failed. %s", holding.label, error)
            self._release_unparked(holding)
        finally:
            group.lock.release()
        return True

    def _release_unparked(self, holding: Holding) -> None:
        """After a failed park some ranks may hold the weights on the device and others not: none shall hold them."""
        try:
            self._release(holding.group, holding.key)
        except RankError as error:
            logger.warning("releasing %s failed; its ranks were ended. %s", holding.label, error)
            self.ledger.drop(holding.group, holding.key)

    def retain(self, spec: ModelSpec) -> None:
        """Notes one more object that stands for `spec`; each is followed by one `drop_reference`."""
        with self._lock:
            self._references.retain((spec.group, spec.key))

    def drop_reference(self, group: GroupKey, key: str) -> None:
        """Notes that such an object is gone. Never blocks and takes no lock: the garbage collector calls it.

        When it was the last one the model is released, though not while the host program is at work: a prompt whose
        config has changed drops the old object before it makes the new one, and its weights must not be read again.
        """
        self._references.drop((group, key))
        self._groups.wake()

    def release_later(self, group: GroupKey, key: str) -> None:
        """Gives a model's memory back as soon as its group is free. Never blocks."""
        self._releases.append((group, key))
        self._groups.wake()

    def _release(self, key: GroupKey, model: str) -> None:
        group = self._groups.find(key)
        if group is not None and model in group.loaded:
            self.request_group(group, Release(key=model))
            group.loaded.discard(model)
        self.ledger.drop(key, model)

    def _drain_releases(self) -> None:
        """Carries out the releases that are due; those of a busy group wait for its next call."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            orphans = self._references.orphans()
            if orphans and not self._host_is_busy():
                for item in orphans:
                    if self._try_release(*item):
                        self._references.forget(item)
            for _ in range(len(self._releases)):
                item = self._releases.popleft()
                if not self._try_release(*item):
                    self._releases.append(item)
        finally:
            self._lock.release()

    def _try_release(self, key: GroupKey, model: str) -> bool:
        """False when the group is busy."""
        group = self._groups.find(key)
        if group is None:
            self.ledger.drop(key, model)
            return True
        if not group.lock.acquire(blocking=False):
            return False
        try:
            self._release(key, model)
        except RankError as error:
            logger.warning("releasing %s failed; its ranks were ended. %s", model, error)
        finally:
            group.lock.release()
        return True

    def _release_if_orphan(self, group: GroupKey, key: str) -> None:
        """Soon, when nothing stands for it; without waiting for whoever looks at the references just now."""
        if self._lock.acquire(blocking=False):
            try:
                if (group, key) in self._references.orphans():
                    self.release_later(group, key)
            finally:
                self._lock.release()

    def _release_orphans(self, spec: ModelSpec, keep: str) -> None:
        """Before `spec` is loaded, what nothing stands for any more goes from its devices, but for `keep`."""
        with self._lock:
            for key, model in self._references.orphans():
                if (
                    model not in (spec.key, keep)
                    and set(key.devices) & set(spec.group.devices)
                    and self._try_release(key, model)
                ):
                    self._references.forget((key, model))

    # -- looking and ending ----------------------------------------------------------------------------------------

    def total_memory(self, device: str, num_cpu_ranks: int) -> int:
        """Bytes of a GPU, or a CPU rank's equal share of the machine's memory."""
        for gpu in self.list_devices():
            if gpu.name == device:
                return gpu.total_bytes
        return self._host()[1] // num_cpu_ranks

    def status(self) -> list[dict[str, Any]]:
        """One entry per living group; see `status.group_status`."""
        return [group_status(group, self.ledger, self.deadlines.short) for group in self._groups.living()]

    def shutdown(self) -> None:
        """Ends all ranks and removes the run folder. The engine starts anew when it is used again."""
        self._groups.shutdown()
