"""One group of living ranks: start, one request at a time, failure, end.

Owns the rule that every rank answers every request and what happens when one does not: the group survives an error only
if all ranks have answered it; anything else ends all of them. Knows not what the operations compute.
"""

from __future__ import annotations

import logging
import select
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..arena import ArenaWriter
from ..errors import Cancelled, RankError, RankFailure, RankOutOfMemory, RankUserError
from ..launch.local import RankLink
from ..protocol import PROTOCOL_VERSION, Request, Shutdown, TensorRef, encode_frame

logger = logging.getLogger("parallel_diffusion")

FAILURE_GRACE = 2.0
"""Seconds the other ranks get to answer once one has failed: enough to report an error of their own, short enough that
ranks stuck in a collective do not make anyone wait."""
_POLL_INTERVAL = 0.05
_EXIT_GRACE = 5.0
_BUSY_PATIENCE = 1.0


@dataclass(frozen=True, kw_only=True)
class GroupKey:
    """Which group: `kind` "mesh" (one process per device) or "placement" (one process that sees all devices)."""

    devices: tuple[str, ...]
    kind: str = "mesh"


@dataclass(frozen=True, kw_only=True)
class RankReply:
    """One rank's answer. Tensors are copies that belong to the receiver."""

    rank: int
    device: str
    data: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]


@dataclass
class _Pending:
    """A request in flight: the frames that have come, and what went wrong so far."""

    operation: str
    frames: dict[int, dict[str, Any]] = field(default_factory=dict)
    failures: list[RankFailure] = field(default_factory=list)
    closed: set[int] = field(default_factory=set)

    def waiting(self, links: Sequence[RankLink]) -> list[RankLink]:
        return [link for link in links if link.rank not in self.frames and link.rank not in self.closed]


class Group:
    """Living ranks. Use it under `lock`; `alive` is False for ever once it has ended."""

    def __init__(self, key: GroupKey, generation: int, links: Sequence[RankLink], inbox: ArenaWriter) -> None:
        self.key = key
        self.generation = generation
        self.links = tuple(links)
        self.inbox = inbox
        self.lock = threading.RLock()
        self.alive = True
        self.loaded: set[str] = set()
        """Keys of what the ranks' stores hold."""
        self.patched: dict[str, str] = {}
        """Which set of weight patches is on a model, by its key, where that is known: `weight_patches.PatchSet.id`."""
        self.last_use = time.monotonic()
        """When the last request ended."""
        self._next_id = 0
        self._poller = select.poll()
        self._by_descriptor = {link.sock.fileno(): link for link in links}
        for descriptor in self._by_descriptor:
            self._poller.register(descriptor, select.POLLIN)

    # -- start -----------------------------------------------------------------------------------------------------

    def wait_ready(self, deadline: float, poll: Callable[[], bool] | None = None) -> None:
        """Waits until every rank has said READY; any rank's end fails the start at once."""
        pending = _Pending(operation="start")
        hello: set[int] = set()
        until = time.monotonic() + deadline
        while pending.waiting(self.links):
            for link in self._receive(pending, until):
                while (frame := link.frames.take()) is not None:
                    self._on_start_frame(link, frame, hello, pending)
            if pending.failures or pending.closed:
                self._fail(pending, until)
            if time.monotonic() > until:
                self._expire(pending, deadline)
            if poll is not None and poll():
                self.kill()
                raise Cancelled("Cancelled while the ranks were starting.")

    def _on_start_frame(self, link: RankLink, frame: dict[str, Any], hello: set[int], pending: _Pending) -> None:
        if frame.get("event") == "hello":
            hello.add(link.rank)
            if frame.get("protocol") != PROTOCOL_VERSION:
                pending.failures.append(
                    self._failure(link, "start", "ProtocolError", f"speaks protocol {frame.get('protocol')}")
                )
        elif frame.get("event") == "ready" and link.rank in hello:
            pending.frames[link.rank] = frame
        else:
            pending.failures.append(_failure_from(frame.get("error") or {}, link, "start"))

    # -- requests --------------------------------------------------------------------------------------------------

    def request(
        self,
        request: Request,
        tensors: Mapping[str, torch.Tensor] | None = None,
        *,
        deadline: float,
        label: str = "",
        poll: Callable[[], bool] | None = None,
    ) -> list[RankReply]:
        """Sends `request` to every rank and returns all their answers, in rank order.

        `poll` is asked every 50 ms; once it says True the ranks finish this request and `Cancelled` is raised. `label`
        names the operation in errors ("forward, step 3 of 20").
        """
        with self.lock:
            pending = _Pending(operation=label or request.operation)
            if not self.alive:
                gone = self._failure(self.links[0], pending.operation, "RankDied", "the ranks have just been ended")
                raise RankError([gone], "The next prompt starts new ones.")
            self._next_id += 1
            refs = self.inbox.write(tensors or {})
            frame = {
                "id": self._next_id,
                "operation": request.operation,
                "arguments": request.to_json(),
                "tensors": {name: ref.to_json() for name, ref in refs.items()},
                "arena": self.inbox.size,
                "deadline": deadline,
            }
            self._send(encode_frame(frame), pending)
            cancelled = self._collect(pending, deadline, poll)
            replies = [self._reply(link, pending.frames[link.rank]) for link in self.links]
            self.last_use = time.monotonic()
            if cancelled:
                raise Cancelled(f"Cancelled during {pending.operation}.")
            return replies

    def _send(self, data: bytes, pending: _Pending) -> None:
        for link in self.links:
            try:
                link.sock.sendall(data)
            except OSError:  # the rank has closed its end
                pending.closed.add(link.rank)

    def _collect(self, pending: _Pending, deadline: float, poll: Callable[[], bool] | None) -> bool:
        """Fills `pending.frames`; raises for failures. True when `poll` asked to stop meanwhile."""
        until = time.monotonic() + deadline
        cancelled = False
        while pending.waiting(self.links) and not (pending.failures or pending.closed):
            for link in self._receive(pending, until):
                while (frame := link.frames.take()) is not None:
                    self._on_reply_frame(link, frame, pending)
            cancelled = cancelled or (poll is not None and poll())
            if time.monotonic() > until:
                self._expire(pending, deadline)
        if pending.failures or pending.closed:
            self._fail(pending, until)
        return cancelled

    def _receive(self, pending: _Pending, until: float) -> list[RankLink]:
        """Reads what has come from any rank; returns those ranks. Ranks that closed go to `pending.closed`."""
        timeout = min(_POLL_INTERVAL, max(0.0, until - time.monotonic()))
        ready = []
        for descriptor, _ in self._poller.poll(timeout * 1000):
            link = self._by_descriptor[descriptor]
            if link.rank in pending.closed:
                time.sleep(0.001)  # its end stays readable; do not spin on it
                continue
            if not link.frames.feed():
                pending.closed.add(link.rank)
            ready.append(link)
        return ready

    def _on_reply_frame(self, link: RankLink, frame: dict[str, Any], pending: _Pending) -> None:
        for record in frame.get("logs", ()):
            logger.log(int(record["level"]), "rank %d: %s", link.rank, record["message"])
        if frame.get("id") != self._next_id:
            return  # the late answer to a request that was given up
        pending.frames[link.rank] = frame
        if not frame.get("ok"):
            pending.failures.append(_failure_from(frame.get("error") or {}, link, pending.operation))

    def _reply(self, link: RankLink, frame: dict[str, Any]) -> RankReply:
        size = int(frame.get("arena", 0))
        tensors = {
            name: link.outbox.look(TensorRef.from_json(ref), size).clone()
            for name, ref in frame.get("tensors", {}).items()
        }
        return RankReply(rank=link.rank, device=link.device, data=frame.get("data", {}), tensors=tensors)

    # -- failure ---------------------------------------------------------------------------------------------------

    def _fail(self, pending: _Pending, until: float) -> None:
        """Hears the other ranks out for a moment, ends the group unless all have answered, raises."""
        grace = min(until, time.monotonic() + FAILURE_GRACE)
        while pending.waiting(self.links) and not pending.closed and time.monotonic() < grace:
            for link in self._receive(pending, grace):
                while (frame := link.frames.take()) is not None:
                    self._on_reply_frame(link, frame, pending)
        starting = pending.operation == "start"
        silent = pending.waiting(self.links)
        if pending.closed or silent or starting:
            self._end_after_failure(pending)
        if not pending.failures:
            pending.failures.append(self._failure(self.links[0], pending.operation, "Error", "no rank gave a reason"))
        raise _as_error(pending.failures, survived=self.alive)

    def _end_after_failure(self, pending: _Pending) -> None:
        ended = [link for link in self.links if link.rank in pending.closed]
        for link in ended:
            try:
                link.process.wait(timeout=1.0)
            except Exception as error:  # it closed its socket and hangs: the kill below ends it
                logger.warning("rank %d closed its socket but has not ended: %s", link.rank, error)
            tail = link.log_tail()
            message = f"the rank's process ended ({link.ending()})" + (f"; its last lines:\n{tail}" if tail else "")
            # When it died is not known, but that the others lost their peer is the consequence.
            pending.failures.append(self._failure(link, pending.operation, "RankDied", message, when=0.0))
        self.kill()

    def _expire(self, pending: _Pending, deadline: float) -> None:
        """The deadline has passed: every rank dumps its stacks into its log, then all are ended."""
        silent = pending.waiting(self.links)
        for link in self.links:
            if link.process.poll() is None:
                link.process.send_signal(signal.SIGUSR1)
        time.sleep(0.5)  # the dump is written by a signal handler in C; nothing tells us when it is done
        for link in silent:
            message = f"no answer after {deadline:.0f} s; where it was:\n{link.log_tail()}"
            pending.failures.append(self._failure(link, pending.operation, "Timeout", message))
        self.kill()
        raise RankError(pending.failures, "All ranks of the group were ended; the next prompt starts new ones.")

    def _failure(
        self, link: RankLink, operation: str, kind: str, message: str, when: float | None = None
    ) -> RankFailure:
        return RankFailure(
            rank=link.rank,
            device=link.device,
            operation=operation,
            type=kind,
            message=message,
            when=time.monotonic() if when is None else when,
        )

    # -- end -------------------------------------------------------------------------------------------------------

    def ended_ranks(self) -> list[RankLink]:
        """Ranks whose process is gone."""
        return [link for link in self.links if link.process.poll() is not None]

    def kill(self) -> None:
        """Ends all ranks at once."""
        with self.lock:
            if self.alive:
                self.alive = False
                self.loaded.clear()
                for link in self.links:
                    link.kill()
                    link.close()
                self.inbox.close()

    def shutdown(self) -> None:
        """Asks the ranks to end, and sees to it that they do. Ranks in the middle of a request are not asked."""
        if not self.lock.acquire(timeout=_BUSY_PATIENCE):
            for link in self.links:
                link.kill()  # whoever is waiting for them hears of it and does the rest
            return
        try:
            if not self.alive:
                return
            pending = _Pending(operation="shutdown")
            self._next_id += 1
            self._send(encode_frame({"id": self._next_id, "operation": Shutdown.operation, "arguments": {}}), pending)
            until = time.monotonic() + _EXIT_GRACE
            for link in self.links:
                while link.process.poll() is None and time.monotonic() < until:
                    time.sleep(0.01)
            self.kill()
        finally:
            self.lock.release()


def _failure_from(error: Mapping[str, Any], link: RankLink, operation: str) -> RankFailure:
    return RankFailure(
        rank=link.rank,
        device=str(error.get("device") or link.device),
        operation=operation,
        type=str(error.get("type", "Error")),
        message=str(error.get("message", "")),
        traceback=str(error.get("traceback", "")),
        memory=str(error.get("memory", "")),
        when=float(error.get("when", time.monotonic())),
    )


def _as_error(failures: Sequence[RankFailure], *, survived: bool) -> RankError:
    advice = "" if survived else "All ranks of the group were ended; the next prompt starts new ones."
    if any(failure.type == "OutOfMemoryError" for failure in failures):
        return RankOutOfMemory(
            failures,
            "The device has too little memory for this. Use a smaller picture or batch, a 16-bit weight_dtype, or "
            "slice the weights (tensor). " + advice,
        )
    if survived and all(failure.type == "UserError" for failure in failures):
        return RankUserError(failures)
    return RankError(failures, advice)
