"""What a rank does before anything heavy: tie its life to the controller's, and say hello.

Standard library only. A rank ends when its controller does, in three ways that cover for one another: the kernel's
parent-death signal, a thread that sees the socket close (it cannot run while C code holds the GIL), and a faulthandler
timer per request (which can).
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import select
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

from ..protocol import encode_frame

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class RankConfig:
    """What the launcher tells a rank on its command line."""

    protocol: int
    kind: str
    generation: int
    rank: int
    world_size: int
    devices: tuple[str, ...]
    parent: int
    socket: int
    inbox: int
    outbox: int

    @staticmethod
    def from_json(data: dict[str, Any]) -> RankConfig:
        """From the launcher's json."""
        return RankConfig(**{**data, "devices": tuple(data["devices"])})


def tie_to_parent(config: RankConfig) -> None:
    """Makes this process end when the controller does."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != config.parent:  # it ended before the line above took effect
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the controller's business
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def watch_socket(sock: socket.socket) -> None:
    """Starts the thread that ends this process when the controller's end of the socket closes."""

    def wait() -> None:
        poller = select.poll()
        poller.register(sock.fileno(), select.POLLHUP)  # POLLIN would wake for every request
        poller.poll()
        os._exit(1)

    threading.Thread(target=wait, name="controller-watch", daemon=True).start()


def say_hello(sock: socket.socket, config: RankConfig) -> None:
    """The first frame, sent before torch is imported: the process lives and speaks our protocol."""
    sock.sendall(encode_frame({"event": "hello", "rank": config.rank, "pid": os.getpid(), "protocol": config.protocol}))


class HangTimer:
    """Ends this process, stacks first, should a request outlast the controller's deadline and nobody act.

    Setting the timer starts a thread (0.05 ms), so a burst of short requests sets it once and it is only taken down
    when the rank has been idle for a while.
    """

    REST = 5.0
    """Seconds of idleness after which `rest` is due; the timer is never older than that when a request starts."""

    def __init__(self) -> None:
        self._set_at = 0.0
        self._limit = 0.0

    def start(self, deadline: float) -> None:
        """A request with this deadline (in seconds) begins."""
        now, limit = time.monotonic(), deadline * 1.5 + 30.0
        if now > self._set_at + self.REST or limit > self._limit:
            faulthandler.dump_traceback_later(limit, exit=True, file=sys.stderr)
            self._set_at, self._limit = now, limit

    def rest(self) -> None:
        """No request is running and none has come for a while."""
        faulthandler.cancel_dump_traceback_later()
        self._set_at = self._limit = 0.0
