"""One thread that notices when a rank's process ends, and carries out releases that are due.

Watches process descriptors (pidfd), never the ranks' sockets, so it cannot take a reply from anybody.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
from collections.abc import Callable

from .group import Group

logger = logging.getLogger("parallel_diffusion")


class Supervisor:
    """See the module. `on_exit(group, rank)` and `on_wake()` run on its thread and must not block."""

    def __init__(self, on_exit: Callable[[Group, int], None], on_wake: Callable[[], None]) -> None:
        self._on_exit = on_exit
        self._on_wake = on_wake
        self._watched: dict[int, tuple[Group, int]] = {}
        self._lock = threading.Lock()
        self._closing = False
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="parallel-diffusion-supervisor", daemon=True)
        self._thread.start()

    def watch(self, group: Group) -> None:
        """Starts watching a group's processes."""
        with self._lock:
            for link in group.links:
                self._watched[os.pidfd_open(link.process.pid)] = (group, link.rank)
        self.wake()

    def wake(self) -> None:
        """Makes the thread look again. Safe to call from anywhere, the garbage collector included."""
        if not self._closing:
            with contextlib.suppress(OSError):  # the pipe is full, so it will wake anyway
                os.write(self._wake_write, b"x")

    def close(self) -> None:
        """Ends the thread."""
        self._closing = True
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b"x")
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while not self._closing:
            with self._lock:
                descriptors = list(self._watched)
            poller = select.poll()
            for descriptor in (self._wake_read, *descriptors):
                poller.register(descriptor, select.POLLIN)
            # The timeout is for releases that found their group busy.
            for descriptor, _ in poller.poll(1000):
                if descriptor == self._wake_read:
                    os.read(self._wake_read, 4096)
                else:
                    self._ended(descriptor)
            try:
                self._on_wake()
            except Exception:  # this thread is needed as long as the process lives
                logger.exception("carrying out releases failed")
        with self._lock:
            for descriptor in (self._wake_read, self._wake_write, *self._watched):
                os.close(descriptor)
            self._watched.clear()

    def _ended(self, descriptor: int) -> None:
        with self._lock:
            group, rank = self._watched.pop(descriptor)
            os.close(descriptor)
        try:
            self._on_exit(group, rank)
        except Exception:  # see _run
            logger.exception("handling the end of rank %d failed", rank)
