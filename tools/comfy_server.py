"""A ComfyUI server as a child process: start it, wait until it answers, notice its death, stop it.

Does not know: prompts, Parallel Diffusion's nodes, where the developer environment lies.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .comfy_client import ComfyClient

_STOP_S = 10.0
# A user's http_proxy must not catch requests to this machine.
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ComfyError(RuntimeError):
    """The server could not do what was asked; the text says what it answered."""


class ServerDied(ComfyError):
    """The server process ended, or does not answer any more."""


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that nobody listens on at this moment."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _bindable(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an ended server may linger
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _heed_sigint() -> None:
    """In the new process: a shell that runs us in the background has SIGINT ignored, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class ComfyServer:
    """A ComfyUI process of our own.

    tree: folder with main.py; base: its --base-directory (models, custom_nodes, input, output, temp, user);
    python: ComfyUI's interpreter; port: a free one when None; cpu: start with --cpu; extra_args and env are added
    last; log_path: where stdout and stderr go (default: base/comfyui-<port>.log).
    """

    def __init__(
        self,
        tree: Path | str,
        base: Path | str,
        *,
        python: Path | str = sys.executable,
        port: int | None = None,
        cpu: bool = True,
        extra_args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        log_path: Path | str | None = None,
    ) -> None:
        self.tree = Path(tree).resolve()
        self.base = Path(base).resolve()
        self.python = Path(python).absolute()  # not resolved: a venv's python is a link out of the venv
        self.port = port if port is not None else free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_path = Path(log_path).resolve() if log_path else self.base / f"comfyui-{self.port}.log"
        self.process: subprocess.Popen[bytes] | None = None
        self._cpu = cpu
        self._extra_args = tuple(extra_args)
        self._env = dict(env or {})

    def command(self) -> list[str]:
        """The launch line."""
        line = [str(self.python), str(self.tree / "main.py"), "--port", str(self.port), "--disable-auto-launch"]
        line += ["--disable-api-nodes", "--base-directory", str(self.base), "--database-url", "sqlite:///:memory:"]
        return line + (["--cpu"] if self._cpu else []) + list(self._extra_args)

    def start(self, timeout: float = 180.0) -> ComfyServer:
        """Start and wait until the server answers; ServerDied with the end of the log when it ends before."""
        if self.alive():
            raise ComfyError(f"the server on port {self.port} has been started already (pid {self.pid})")
        if not (self.tree / "main.py").is_file():
            raise ComfyError(f"no ComfyUI in {self.tree}: main.py is missing")
        if not _bindable(self.port):
            raise ComfyError(f"port {self.port} is in use: stop what listens there, or choose another port")
        for name in ("custom_nodes", "user", "input", "output"):
            (self.base / name).mkdir(parents=True, exist_ok=True)
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                self.command(),
                cwd=self.tree,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # One OpenMP thread: with several on a busy machine a toy sampling takes seconds instead of 0.15 s.
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **self._env},
                start_new_session=True,  # Ctrl-C in our terminal is ours to handle
                preexec_fn=_heed_sigint,
            )
        atexit.register(self.stop)
        try:
            self._wait_ready(time.monotonic() + timeout)
        except BaseException:
            self.stop()
            raise
        return self

    def _wait_ready(self, deadline: float) -> None:
        command = self.command()
        while time.monotonic() < deadline:
            self.check_alive()
            try:
                with OPENER.open(f"{self.url}/system_stats", timeout=5) as reply:
                    argv = json.load(reply)["system"]["argv"]
            except (OSError, ValueError, KeyError):
                time.sleep(0.1)
                continue
            if argv == command[1:]:
                return
            raise ComfyError(f"another ComfyUI answers on port {self.port}: {' '.join(map(str, argv))}")
        raise ComfyError(
            f"ComfyUI did not answer on {self.url} in time; the end of {self.log_path}:\n{self.log_tail()}"
        )

    @property
    def pid(self) -> int | None:
        """The process id, None before start and after stop."""
        return self.process.pid if self.process else None

    def alive(self) -> bool:
        """Whether the process runs."""
        return self.process is not None and self.process.poll() is None

    def check_alive(self, grace: float = 0.0) -> None:
        """Raise ServerDied, with how it ended and the end of its log, unless the process runs.

        grace: seconds in which it may still end, for a caller whose connection just broke.
        """
        if self.process is None:
            raise ServerDied(f"the server on port {self.port} is not running (not started, or stopped)")
        deadline = time.monotonic() + grace
        while (code := self.process.poll()) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        if code is not None:
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            raise ServerDied(f"ComfyUI ended ({how}); the end of {self.log_path}:\n{self.log_tail()}")

    def log_tail(self, lines: int = 40) -> str:
        """The last lines of the log."""
        if not self.log_path.exists():
            return "(no log)"
        text = self.log_path.read_text(encoding="utf-8", errors="replace")
        return "\n".join([line.rstrip() for line in text.splitlines() if line.strip()][-lines:])

    def stop(self) -> None:
        """SIGTERM, wait, SIGKILL last. Does nothing when the server does not run."""
        atexit.unregister(self.stop)
        process, self.process = self.process, None
        if process is None or process.poll() is not None:
            return
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def client(self) -> ComfyClient:
        """A new client of this server, which notices the death of the process."""
        from .comfy_client import ComfyClient  # here, since that module offers this one's names too

        return ComfyClient(self.url, server=self)

    def __enter__(self) -> ComfyServer:
        return self if self.alive() else self.start()

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()


def _terminate(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)


def exit_on_sigterm() -> None:
    """Turn SIGTERM into SystemExit, so that servers started by this process are stopped on the way out."""
    signal.signal(signal.SIGTERM, _terminate)
