"""The living groups of ranks: found, started, retired and ended here.

Owns the run folder, the launcher and the supervisor, which exist as long as there are groups. Knows neither models nor
requests.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ..arena import ArenaWriter, create_memory
from ..errors import RankError, UserError
from ..host import require_linux
from ..launch.interpreter import check_rank_python, rank_python
from ..launch.local import GroupSpec, LocalLauncher, RankSpec
from ..launch.run_folder import RunFolder
from ..plan import DeviceInfo
from ..protocol import Ping
from .devices import tokens_for
from .group import Group, GroupKey
from .ledger import Ledger
from .supervisor import Supervisor

logger = logging.getLogger("parallel_diffusion")

Poll = Callable[[], bool]

_IDLE_SECONDS = 0.05  # longer than what happens here between two steps
_BUSY_SECONDS = 0.5  # longer than it takes to end ranks of which one has died
_PING_DEADLINE = 10.0


class Groups:
    """See the module. `lock` guards which groups there are; a group's own lock guards what is asked of it."""

    def __init__(
        self,
        package: Path,
        environ: Mapping[str, str],
        list_devices: Callable[[], Sequence[DeviceInfo]],
        ledger: Ledger,
        on_wake: Callable[[], None],
    ) -> None:
        """`on_wake` runs on the supervisor's thread, about once a second and after `wake`."""
        self.lock = threading.RLock()
        self.num_starts = 0
        """How many groups were started so far."""
        self._package = package
        self._environ = environ
        self._list_devices = list_devices
        self._ledger = ledger
        self._on_wake = on_wake
        self._groups: dict[GroupKey, Group] = {}
        self._launcher: LocalLauncher | None = None
        self._folder: RunFolder | None = None
        self._supervisor: Supervisor | None = None
        self._ending = False

    def find(self, key: GroupKey) -> Group | None:
        """The living group for `key`, if there is one."""
        group = self._groups.get(key)
        return group if group is not None and group.alive and not group.ended_ranks() else None

    def living(self) -> list[Group]:
        """All of them."""
        with self.lock:
            return [group for key in self._groups if (group := self.find(key)) is not None]

    def get(self, key: GroupKey, deadline: float, poll: Poll | None = None) -> Group:
        """The living group for `key`; starts it within `deadline` seconds when there is none."""
        with self.lock:
            group = self.find(key)
            if group is not None and self._answers(group):
                return group
            if key in self._groups:
                self._forget(self._groups[key])
            self._retire_idle_neighbours(key)
            return self._start(key, deadline, poll)

    def _answers(self, group: Group) -> bool:
        """Asks ranks that have been idle whether they still live: one that is just dying is in the process table yet.

        It costs a tenth of a millisecond, and a prompt must not fail for what happened before it.
        """
        if time.monotonic() - group.last_use < _IDLE_SECONDS or not group.lock.acquire(timeout=_BUSY_SECONDS):
            return True  # at work a moment ago, or now
        try:
            group.request(Ping(), deadline=_PING_DEADLINE)
        except RankError as error:
            logger.warning("idle ranks do not answer any more; new ones are started. %s", error)
            return False
        finally:
            group.lock.release()
        return True

    def wake(self) -> None:
        """Makes `on_wake` run soon. Never blocks."""
        supervisor = self._supervisor
        if supervisor is not None:
            supervisor.wake()

    def _start(self, key: GroupKey, deadline: float, poll: Poll | None) -> Group:
        require_linux()
        if self._ending:
            raise RuntimeError("The program is ending; no ranks are started any more.")
        gpus = self._list_devices()
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
            self._supervisor = Supervisor(self._on_rank_exit, self._on_wake)
            atexit.register(self._at_exit)
        self.num_starts += 1
        inbox = create_memory("parallel-diffusion-in")
        spec = GroupSpec(
            kind=key.kind,
            generation=self.num_starts,
            ranks=_rank_specs(key, gpus),
            folder=self._folder.path / f"group_{self.num_starts}",
            python=python,
            source=self._package / "parallel_core",
        )
        try:
            links = self._launcher.start(spec, inbox)
        except BaseException:
            os.close(inbox)
            raise
        group = Group(key, self.num_starts, links, ArenaWriter(inbox))
        try:
            group.wait_ready(deadline, poll)
            self._supervisor.watch(group)
        except BaseException:
            group.kill()
            raise
        self._groups[key] = group
        logger.info("started %d rank(s) on %s", len(links), ", ".join(key.devices))
        return group

    def _retire_idle_neighbours(self, key: GroupKey) -> None:
        """Ends groups of the same kind that share a device with `key` and hold nothing: they only take memory.

        A placement group stays beside a mesh: a workflow that encodes and samples uses both in every prompt.
        """
        for other in list(self._groups.values()):
            shares = other.key.kind == key.kind and set(other.key.devices) & set(key.devices)
            if other.key != key and shares and not self._ledger.of_group(other.key):
                other.shutdown()
                self._forget(other)

    def _forget(self, group: Group) -> None:
        group.kill()
        self._ledger.drop_group(group.key)
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
                self._ledger.drop_group(group.key)
        finally:
            group.lock.release()

    def shutdown(self) -> None:
        """Ends all ranks and removes the run folder. Groups can be started again."""
        with self.lock:
            atexit.unregister(self._at_exit)
            supervisor, self._supervisor = self._supervisor, None
            if supervisor is not None:
                supervisor.close()
            for group in list(self._groups.values()):
                group.shutdown()
                self._forget(group)
            if self._folder is not None:
                self._folder.close()
                self._folder = None

    def _at_exit(self) -> None:
        self._ending = True
        self.shutdown()


def _rank_specs(key: GroupKey, gpus: Sequence[DeviceInfo]) -> tuple[RankSpec, ...]:
    if key.kind == "placement":
        return (RankSpec(rank=0, devices=key.devices, visible_devices=tokens_for(key.devices, gpus)),)
    return tuple(
        RankSpec(rank=rank, devices=(device,), visible_devices=tokens_for((device,), gpus))
        for rank, device in enumerate(key.devices)
    )
