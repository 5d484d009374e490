"""The engine: finds or starts groups, loads models into them, keeps the ledger, ends everything.

One per process. Safe to call from several threads; each group takes one request at a time. Knows neither diffusers nor
ComfyUI: what ComfyUI must do (free its own models) is a callback.
"""

from __future__ import annotations

import atexit
import collections
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..arena import ArenaWriter, create_memory
from ..errors import RankError, UserError
from ..launch.interpreter import check_rank_python, rank_python
from ..launch.local import GroupSpec, LocalLauncher, RankSpec
from ..launch.run_folder import RunFolder
from ..plan import DeviceInfo
from ..protocol import Park, Release, Request
from .devices import Memory, device_memory, list_gpus, tokens_for
from .group import Group, GroupKey, RankReply
from .ledger import Holding, Ledger
from .models import ModelSpec
from .references import Item, References
from .status import group_status
from .supervisor import Supervisor

logger = logging.getLogger("parallel_diffusion")

Poll = Callable[[], bool]

WORKSPACE_BYTES = 1 << 30
"""Made free on a GPU beside a model's weights, for what evaluating it takes (FLUX.1 at 1024 x 1024: 0.45 GB)."""


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
        memory: Callable[[str, int], Memory] = device_memory,
    ) -> None:
        """`package` is the folder that holds `parallel_core`. Of the host program: `free_host(device, bytes)` asks it
        to make room on a device, `host_is_busy` tells whether it is at work on a prompt. `list_devices` and `memory`
        are what the hardware says.
        """
        self.deadlines = deadlines or Deadlines()
        self.ledger = Ledger()
        self.list_devices = list_devices
        self._package = package
        self._environ = environ
        self._free_host = free_host
        self._host_is_busy = host_is_busy
        self._memory = memory
        self._groups: dict[GroupKey, Group] = {}
        self._generation = 0
        self._lock = threading.RLock()
        self._references = References()
        self._releases: collections.deque[Item] = collections.deque()
        self._launcher: LocalLauncher | None = None
        self._folder: RunFolder | None = None
        self._supervisor: Supervisor | None = None
        self.num_starts = 0
        self._notices: collections.deque[str] = collections.deque(maxlen=20)
        atexit.register(self.shutdown)

    # -- groups ----------------------------------------------------------------------------------------------------

    def group(self, key: GroupKey, poll: Poll | None = None) -> Group:
        """The living group for `key`; starts it when there is none."""
        with self._lock:
            self._drain_releases()
            group = self._groups.get(key)
            if group is not None and group.alive and not group.ended_ranks():
                return group
            if group is not None:
                self._forget(group)
            self._retire_idle_neighbours(key)
            return self._start(key, poll)

    def _start(self, key: GroupKey, poll: Poll | None) -> Group:
        gpus = self.list_devices()
        missing = [name for name in key.devices if name.startswith("cuda:") and name not in {g.name for g in gpus}]
        if missing:
            raise UserError(f"{', '.join(missing)} does not exist any more; GPUs here: {[g.name for g in gpus]}.")
        python = rank_python(self._package, self._environ)
        check_rank_python(python)
        if self._launcher is None:
            self._launcher = LocalLauncher()
        if self._folder is None:
            self._folder = RunFolder()
        if self._supervisor is None:
            self._supervisor = Supervisor(self._on_rank_exit, self._drain_releases)
        self._generation += 1
        inbox = create_memory("parallel-diffusion-in")
        spec = GroupSpec(
            kind=key.kind,
            generation=self._generation,
            ranks=_rank_specs(key, gpus),
            folder=self._folder.path / f"group_{self._generation}",
            python=python,
            source=self._package / "parallel_core",
        )
        links = self._launcher.start(spec, inbox)
        group = Group(key, self._generation, links, ArenaWriter(inbox))
        self.num_starts += 1
        group.wait_ready(self.deadlines.start, poll)
        self._groups[key] = group
        self._supervisor.watch(group)
        logger.info("started %d rank(s) on %s", len(links), ", ".join(key.devices))
        return group

    def _retire_idle_neighbours(self, key: GroupKey) -> None:
        """Ends groups that share a device with `key` and hold nothing: their processes only take memory."""
        for other in list(self._groups.values()):
            if other.key != key and set(other.key.devices) & set(key.devices) and not self.ledger.of_group(other.key):
                other.shutdown()
                self._forget(other)

    def _forget(self, group: Group) -> None:
        group.kill()
        self.ledger.drop_group(group.key)
        if self._groups.get(group.key) is group:
            del self._groups[group.key]

    def _on_rank_exit(self, group: Group, rank: int) -> None:
        """From the supervisor: a rank's process has ended. While a request runs, that request reports it instead."""
        if not group.lock.acquire(blocking=False):
            return
        try:
            if group.alive:
                ended = next(link for link in group.links if link.rank == rank)
                logger.warning(
                    "rank %d (%s) ended while idle (%s); the next prompt starts new ranks. %s",
                    rank, ended.device, ended.ending(), ended.log_tail(),
                )  # fmt: skip
                group.kill()
        finally:
            group.lock.release()

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

    def ensure_loaded(self, spec: ModelSpec, poll: Poll | None = None) -> Group:
        """The group of `spec` with its model resident on the devices: loads or takes it out of the park when needed."""
        group = self.group(spec.group, poll)
        if spec.key not in group.loaded:
            self._release_orphans(spec)
        with group.lock:
            holding = self.ledger.get(spec.group, spec.key)
            if holding is None or spec.key not in group.loaded:
                self._make_room(spec.estimated_bytes(), keep=())
                self._load(group, spec, poll)
            elif not holding.resident:
                self._make_room(holding.device_bytes, keep=(holding,))
                self.ledger.touch(spec.group, spec.key)  # ranks bring parked weights back when they use them
            else:
                self.ledger.touch(spec.group, spec.key)
        return group

    def _load(self, group: Group, spec: ModelSpec, poll: Poll | None) -> None:
        try:
            replies = self.request_group(
                group, spec.load_request(), deadline=self.deadlines.load, label=f"loading {spec.label}", poll=poll
            )
        except RankError:
            if group.alive:  # some ranks may hold it, others not: none shall
                self.request_group(group, Release(key=spec.key))
            raise
        by_device: dict[str, int] = {}
        for reply in replies:
            for device, size in reply.data["device_bytes"].items():
                by_device[device] = by_device.get(device, 0) + int(size)
        group.loaded.add(spec.key)
        self.ledger.record(spec.group, spec.key, spec.label, by_device)
        logger.info("loaded %s: %s", spec.label, ", ".join(f"{d} {s / 1e6:.0f} MB" for d, s in by_device.items()))

    def _make_room(self, needed: Mapping[str, int], keep: Sequence[Holding]) -> None:
        """Asks the host program, then parks our own models, least recently used first."""
        needed = {device: size + WORKSPACE_BYTES for device, size in needed.items() if device.startswith("cuda:")}
        if self._free_host is not None:
            for device, size in needed.items():
                self._free_host(device, size)
        free = {device: self._memory(device, 1).free for device in needed}
        for holding in self.ledger.to_yield(needed, free, keep):
            if self._park(holding):
                self._notices.append(f"{holding.label} left the devices to make room")
                logger.info(self._notices[-1])

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
        group = self._groups.get(holding.group)
        if group is None or not group.alive or group.ended_ranks():
            self.ledger.drop(holding.group, holding.key)
            return True
        if not group.lock.acquire(timeout=1.0):
            return False
        try:
            self.request_group(group, Park(key=holding.key))
            self.ledger.park(holding.group, holding.key)
        finally:
            group.lock.release()
        return True

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
        if self._supervisor is not None:
            self._supervisor.wake()

    def release_later(self, group: GroupKey, key: str) -> None:
        """Gives a model's memory back as soon as its group is free. Never blocks."""
        self._releases.append((group, key))
        if self._supervisor is not None:
            self._supervisor.wake()

    def _release(self, key: GroupKey, model: str) -> None:
        group = self._groups.get(key)
        if group is not None and group.alive and model in group.loaded and not group.ended_ranks():
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
        group = self._groups.get(key)
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

    def _release_orphans(self, spec: ModelSpec) -> None:
        """Before `spec` is loaded, what nothing stands for any more goes from its devices."""
        with self._lock:
            for key, model in self._references.orphans():
                if model != spec.key and set(key.devices) & set(spec.group.devices) and self._try_release(key, model):
                    self._references.forget((key, model))

    # -- looking and ending ----------------------------------------------------------------------------------------

    def memory_of(self, device: str, num_cpu_ranks: int = 1) -> Memory:
        """Memory of a device now."""
        return self._memory(device, num_cpu_ranks)

    def status(self) -> list[dict[str, Any]]:
        """One entry per living group; see `status.group_status`."""
        with self._lock:
            groups = [group for group in self._groups.values() if group.alive and not group.ended_ranks()]
        return [group_status(group, self.ledger, self.deadlines.short) for group in groups]

    def shutdown(self) -> None:
        """Ends all ranks and removes the run folder. The engine starts anew when it is used again."""
        with self._lock:
            if self._supervisor is not None:
                self._supervisor.close()
                self._supervisor = None
            for group in list(self._groups.values()):
                group.shutdown()
                self._forget(group)
            if self._folder is not None:
                self._folder.close()
                self._folder = None


def _rank_specs(key: GroupKey, gpus: Sequence[DeviceInfo]) -> tuple[RankSpec, ...]:
    if key.kind == "placement":
        return (RankSpec(rank=0, devices=key.devices, visible_devices=tokens_for(key.devices, gpus)),)
    return tuple(
        RankSpec(rank=rank, devices=(device,), visible_devices=tokens_for((device,), gpus))
        for rank, device in enumerate(key.devices)
    )
