"""Real gloo ranks for tests: `run_on_ranks(2, "test_gloo:summed", start=1)` -> [result of rank 0, of rank 1].

Owns the processes: a fork server per test session imports torch and diffusers once, every run forks its ranks from it
(a run then costs tens of milliseconds, not seconds). Does not know what the ranks compute.

The target is "module:function", a module of this folder. It is called as `function(rank, world_size, **kwargs)` with
a gloo process group over loopback already up and one thread per rank; what it returns must be JSON. The first rank
that fails is the cause: its traceback is raised here as `RankFailed`. Whatever happens, no process and no file of a
run outlives it.
"""

from __future__ import annotations

import atexit
import ctypes
import datetime
import faulthandler
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
LOG_TAIL = 4000  # characters of a rank's own output that an error shows
PR_SET_PDEATHSIG = 1


class RankFailed(AssertionError):
    """A rank raised, died or did not finish in time."""


def run_on_ranks(world_size: int, target: str, *, timeout: float = 60.0, **kwargs: Any) -> list[Any]:
    """Runs `target` ("module:function") on `world_size` fresh ranks and returns their results in rank order.

    Raises `RankFailed` with the first failing rank's traceback, or with the stacks of those that still run after
    `timeout` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        request = {"world_size": world_size, "target": target, "timeout": timeout, "kwargs": kwargs, "folder": folder}
        outcome = _server().request(request)
        if outcome["failed"]:
            raise RankFailed(_describe(outcome, Path(folder), target, world_size, timeout))
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(world_size)]


def _describe(outcome: dict[str, Any], folder: Path, target: str, world_size: int, timeout: float) -> str:
    lines = [f"{target} on {world_size} ranks:"]
    if outcome["timed_out"]:
        lines.append(f"not finished after {timeout:g} s; still running: ranks {outcome['failed']}, their stacks follow")
    for rank in outcome["failed"]:
        error, log = folder / f"{rank}.error", folder / f"{rank}.log"
        text = error.read_text() if error.exists() else f"ended with {outcome['status'][str(rank)]}\n"
        lines.append(f"--- rank {rank} ---\n{text}{log.read_text()[-LOG_TAIL:] if log.exists() else ''}")
    return "\n".join(lines)


class _Server:
    """The parent's handle on the fork server: one JSON line each way per run."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, str(Path(__file__).resolve()), str(theirs.fileno())]
        with theirs:
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, cwd=ROOT)
        self._file = ours.makefile("rw")
        ours.close()

    def request(self, request: dict[str, Any]) -> dict[str, Any]:
        self._file.write(json.dumps(request) + "\n")
        self._file.flush()
        line = self._file.readline()
        if not line:
            raise RankFailed(f"the fork server ended with status {self.process.wait()}")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def close(self) -> None:
        self._file.close()  # end of file: the server ends by itself
        self.process.wait(timeout=10)


_running: list[_Server] = []


def _server() -> _Server:
    if not _running or _running[0].process.poll() is not None:
        _running[:] = [_Server()]
        atexit.register(_running[0].close)
    return _running[0]


# ----- in the fork server -----


def _serve(fd: int) -> None:
    import diffusers
    import torch

    _ = diffusers.FluxTransformer2DModel  # diffusers imports lazily: this is what the forks are to share
    torch.set_num_threads(1)
    sys.path[:0] = [str(FOLDER), str(ROOT)]
    with socket.socket(fileno=fd) as connection, connection.makefile("rw") as file:
        for line in file:
            file.write(json.dumps(_run(json.loads(line))) + "\n")
            file.flush()


def _run(request: dict[str, Any]) -> dict[str, Any]:
    alive = {_fork_rank(rank, request): rank for rank in range(request["world_size"])}
    deadline = time.monotonic() + request["timeout"]
    failed: list[int] = []
    status: dict[int, str] = {}
    timed_out = False
    try:
        while alive and not failed and not timed_out:
            timed_out = time.monotonic() > deadline
            _reap(alive, failed, status)
        if timed_out:
            failed = sorted(alive.values())
            for pid in alive:
                os.kill(pid, signal.SIGUSR1)  # faulthandler writes its stack
            _reap(alive, [], status, seconds=0.5)
    finally:
        for pid in list(alive):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    for rank in alive.values():
        status.setdefault(rank, "SIGKILL by the harness")
    return {"failed": failed, "status": status, "timed_out": timed_out}


def _reap(alive: dict[int, int], failed: list[int], status: dict[int, str], seconds: float = 0.005) -> None:
    """Takes the children that ended within `seconds` out of `alive`; those that ended badly go into `failed`."""
    end = time.monotonic() + seconds
    while alive and time.monotonic() < end:
        pid, code = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            time.sleep(0.002)
            continue
        rank = alive.pop(pid)
        code = os.waitstatus_to_exitcode(code)
        status[rank] = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        if code != 0:
            failed.append(rank)


def _fork_rank(rank: int, request: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        code = _rank_main(rank, request, Path(request["folder"]))
    finally:
        os._exit(code)  # never back into the server's loop


def _rank_main(rank: int, request: dict[str, Any], folder: Path) -> int:
    import torch.distributed as dist

    with (folder / f"{rank}.log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        faulthandler.enable(log)
        faulthandler.register(signal.SIGUSR1, log, all_threads=True)
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{folder / 'store'}",
                rank=rank,
                world_size=request["world_size"],
                timeout=datetime.timedelta(seconds=request["timeout"]),
            )
            module, _, function = request["target"].partition(":")
            result = getattr(importlib.import_module(module), function)(
                rank, request["world_size"], **request["kwargs"]
            )
            (folder / f"{rank}.json").write_text(json.dumps(result))
            dist.destroy_process_group()
        except BaseException:  # the parent raises it again
            (folder / f"{rank}.error").write_text(traceback.format_exc())
            return 1
        return 0


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
