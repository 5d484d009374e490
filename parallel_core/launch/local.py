"""Starts ranks as child processes of this one.

Owns the processes, their sockets, memory files, run folder and log files, and the thread that creates them. Knows
nothing of what ranks compute or when they should end.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import signal
import socket
import subprocess
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from ..arena import ArenaReader, create_memory
from ..protocol import PROTOCOL_VERSION, FrameReader
from .environment import rank_environment, threads_per_rank

logger = logging.getLogger("parallel_diffusion")

_STDERR_LINES = 50
_KILL_PATIENCE = 10.0


@dataclass(frozen=True, kw_only=True)
class RankSpec:
    """What one rank is: its number, the devices it stands for and the CUDA tokens it may see."""

    rank: int
    devices: tuple[str, ...]
    visible_devices: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class GroupSpec:
    """A group to start. `kind` is "mesh" (one device per rank) or "placement" (one rank that sees all)."""

    kind: str
    generation: int
    ranks: tuple[RankSpec, ...]
    folder: Path
    python: Path
    source: Path
    """The `parallel_core` folder that ranks import."""


class RankLink:
    """The controller's end of one rank: its process, socket and reply arena."""

    def __init__(self, spec: RankSpec, process: subprocess.Popen[bytes], sock: socket.socket, outbox: int) -> None:
        self.rank = spec.rank
        self.device = "+".join(spec.devices)
        self.process = process
        self.sock = sock
        self.frames = FrameReader(sock)
        self.outbox = ArenaReader(outbox)
        self._outbox_descriptor = outbox
        self.log_path: Path = Path()

    def close(self) -> None:
        """Closes the socket (the rank sees it and ends) and the reply memory."""
        self.sock.close()
        os.close(self._outbox_descriptor)

    def kill(self) -> None:
        """SIGKILL to the rank's own session, which holds nothing but the rank and its children."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended by itself just now
                os.killpg(self.process.pid, signal.SIGKILL)
            try:
                self.process.wait(timeout=_KILL_PATIENCE)
            except subprocess.TimeoutExpired:
                logger.warning("rank %d does not end; it is stuck in the kernel (a driver, a network disk)", self.rank)

    def ending(self) -> str:
        """How the process ended, for a person: "killed by SIGKILL", "exit code 1", "still running"."""
        code = self.process.poll()
        if code is None:
            return "still running"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def log_tail(self) -> str:
        """The last lines the rank wrote, or "" when it wrote nothing."""
        try:
            text = self.log_path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return ""
        return "\n".join(text.splitlines()[-_STDERR_LINES:])


class LocalLauncher:
    """Starts groups of ranks on this machine.

    All processes are created by one thread that lives as long as this process does: the parent-death signal that a
    rank asks for follows the thread that created it.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[GroupSpec, int, Future[list[RankLink]]]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="parallel-diffusion-launcher", daemon=True)
        self._thread.start()

    def start(self, spec: GroupSpec, inbox: int) -> list[RankLink]:
        """Creates all processes of `spec` and returns at once; `inbox` is the memory file that all ranks read."""
        future: Future[list[RankLink]] = Future()
        self._jobs.put((spec, inbox, future))
        return future.result()

    def _run(self) -> None:
        while True:
            spec, inbox, future = self._jobs.get()
            try:
                future.set_result(_start_group(spec, inbox))
            except BaseException as error:
                future.set_exception(error)


def _start_group(spec: GroupSpec, inbox: int) -> list[RankLink]:
    spec.folder.mkdir(mode=0o700)
    # `python -m` puts the current folder first; in the run folder it finds our code and nothing else.
    (spec.folder / "parallel_core").symlink_to(spec.source, target_is_directory=True)
    links: list[RankLink] = []
    try:
        for rank in spec.ranks:
            links.append(_start_rank(spec, rank, inbox))
    except BaseException:
        for link in links:
            link.kill()
            link.close()
        raise
    return links


def _start_rank(spec: GroupSpec, rank: RankSpec, inbox: int) -> RankLink:
    ours, theirs = socket.socketpair()
    outbox = create_memory(f"parallel-diffusion-out-{rank.rank}")
    config = {
        "protocol": PROTOCOL_VERSION,
        "kind": spec.kind,
        "generation": spec.generation,
        "rank": rank.rank,
        "world_size": len(spec.ranks),
        "devices": list(rank.devices),
        "parent": os.getpid(),
        "socket": theirs.fileno(),
        "inbox": inbox,
        "outbox": outbox,
    }
    environment = rank_environment(
        os.environ,
        rank=rank.rank,
        world_size=len(spec.ranks),
        visible_devices=rank.visible_devices,
        threads=threads_per_rank(os.environ, len(spec.ranks)),
    )
    log_path = spec.folder / f"rank_{rank.rank}.log"
    try:
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [str(spec.python), "-m", "parallel_core.worker", json.dumps(config)],
                cwd=spec.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(theirs.fileno(), inbox, outbox),
                start_new_session=True,
            )
    except OSError:
        os.close(outbox)
        ours.close()
        raise
    finally:
        theirs.close()
    link = RankLink(rank, process, ours, outbox)
    link.log_path = log_path
    return link
