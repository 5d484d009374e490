"""A ComfyUI server as a child process, and a small synchronous client for its HTTP and websocket interface.

Owns: starting and stopping a server, queueing API-format prompts, following them, fetching what they made.
Does not know: Parallel Diffusion's nodes, pytest, where the developer environment lies.

    with ComfyServer(tree, base, python=python) as server, server.client() as client:
        outcome = client.run(prompt)
        png = client.fetch_image(outcome.images()[0])

As a command: ``python -m tools.comfy_client URL prompt.json [-o FOLDER]`` runs one prompt on a server that is up.
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import json
import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal

import aiohttp

Prompt = Mapping[str, Any]
Status = Literal["success", "error", "interrupted"]

_PREVIEW, _TEXT, _PREVIEW_WITH_METADATA = 1, 3, 4  # ComfyUI's protocol.BinaryEventTypes
_END_EVENTS = ("execution_success", "execution_error", "execution_interrupted")
_POLL_S = 0.5  # how long the socket may be silent before /history and the process are looked at
_STOP_S = 10.0
# A user's http_proxy must not catch requests to this machine.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ComfyError(RuntimeError):
    """The server could not do what was asked; the text says what it answered."""


class ServerDied(ComfyError):
    """The server process ended, or does not answer any more."""


class PromptRejected(ComfyError):
    """ComfyUI's validation refused the prompt, wholly or in part.

    error: the general error ({"type", "message", "details", ...}); node_errors: node id -> {"errors": [...], ...};
    prompt_id: set when ComfyUI runs the valid outputs of the prompt all the same.
    """

    def __init__(self, error: dict[str, Any], node_errors: dict[str, Any], prompt_id: str | None = None) -> None:
        self.error = error
        self.node_errors = node_errors
        self.prompt_id = prompt_id
        lines = [f"{error.get('message', 'prompt rejected')} {error.get('details', '')}".strip()]
        for node_id, entry in node_errors.items():
            for problem in entry.get("errors", []):
                where = f"node {node_id} ({entry.get('class_type')})"
                lines.append(f"{where}: {problem.get('message')}: {problem.get('details')}")
        super().__init__("\n".join(lines))


@dataclass(frozen=True)
class Event:
    """One websocket message.

    kind: ComfyUI's message type ("executing", "progress", "executed", "execution_error", ...), or "progress_text"
    (data: node, text) or "preview" (data: image = the encoded bytes; node where the server says it).
    """

    kind: str
    data: dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """How a prompt ended. `messages` are ComfyUI's (type, data) pairs; `texts` what nodes showed on themselves."""

    prompt_id: str
    status: Status
    outputs: dict[str, dict[str, Any]]
    messages: list[tuple[str, dict[str, Any]]]
    error: dict[str, Any] | None = None
    texts: dict[str, list[str]] = field(default_factory=dict)

    @property
    def error_text(self) -> str:
        """Node, exception type and message of the failure; empty when there is none."""
        if self.error is None:
            return ""
        where = f"node {self.error.get('node_id')} ({self.error.get('node_type')})"
        return f"{where}: {self.error.get('exception_type')}: {str(self.error.get('exception_message')).strip()}"

    def message(self, kind: str) -> dict[str, Any] | None:
        """The data of the first message of that type, for instance message("execution_cached")["nodes"]."""
        return next((data for name, data in self.messages if name == kind), None)

    def images(self) -> list[dict[str, str]]:
        """Every image of every node ({"filename", "subfolder", "type"}), nodes in the server's order."""
        return [image for output in self.outputs.values() for image in output.get("images", [])]


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
                with _OPENER.open(f"{self.url}/system_stats", timeout=5) as reply:
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
        return ComfyClient(self.url, server=self)

    def __enter__(self) -> ComfyServer:
        return self if self.alive() else self.start()

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()


class _EventReader(threading.Thread):
    """Reads one websocket in a thread of its own and puts Events on `events`; ends when the socket does."""

    def __init__(self, url: str, client_id: str) -> None:
        super().__init__(name=f"comfy-events-{client_id[:8]}", daemon=True)
        self.events: queue.Queue[Event] = queue.Queue()
        self._url = f"{url.replace('http', 'ws', 1)}/ws?clientId={client_id}"
        self._connected = threading.Event()
        self._failure: Exception | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None

    def connect(self) -> None:
        """Start; returns when the socket is open, so that no event of a later prompt can be missed."""
        self.start()
        self._connected.wait()
        if self._failure is not None:
            raise ServerDied(f"no websocket at {self._url}: {self._failure}") from self._failure

    def run(self) -> None:
        try:
            asyncio.run(self._read())
        except asyncio.CancelledError:
            pass  # close() was called
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            self._failure = error
        finally:
            self._connected.set()

    async def _read(self) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        async with aiohttp.ClientSession() as session, session.ws_connect(self._url, max_msg_size=0) as stream:
            flags = {"type": "feature_flags", "data": {"supports_preview_metadata": True}}
            await stream.send_json(flags)
            self._connected.set()
            async for message in stream:
                event = _decode(message.type, message.data)
                if event is not None:
                    self.events.put(event)

    def close(self) -> None:
        """Close the socket and wait for the thread."""
        if self._loop is not None and self._task is not None and self.is_alive():
            try:
                self._loop.call_soon_threadsafe(self._task.cancel)
            except RuntimeError:
                pass  # the loop ended between the two lines
        self.join(_STOP_S)


def _decode(form: aiohttp.WSMsgType, content: Any) -> Event | None:
    if form == aiohttp.WSMsgType.TEXT:
        body = json.loads(content)
        return Event(body["type"], body.get("data") or {})
    if form != aiohttp.WSMsgType.BINARY:
        return None
    kind, rest = struct.unpack(">I", content[:4])[0], content[4:]
    if kind == _PREVIEW:
        return Event("preview", {"image": rest[4:]})
    if kind == _TEXT:
        size = struct.unpack(">I", rest[:4])[0]
        return Event("progress_text", {"node": rest[4 : 4 + size].decode(), "text": rest[4 + size :].decode()})
    if kind == _PREVIEW_WITH_METADATA:
        size = struct.unpack(">I", rest[:4])[0]
        metadata = json.loads(rest[4 : 4 + size])
        return Event("preview", {**metadata, "node": metadata.get("node_id"), "image": rest[4 + size :]})
    return None


class ComfyClient:
    """One client id of a server: events of the prompts it queues come to it alone. Use as a context manager."""

    def __init__(self, url: str, *, server: ComfyServer | None = None) -> None:
        self.url = url.rstrip("/")
        self.client_id = uuid.uuid4().hex
        self._server = server
        self._reader: _EventReader | None = None

    def queue(self, prompt: Prompt) -> str:
        """Queue an API-format prompt and return its id; PromptRejected when validation refuses any part of it."""
        if self._server is not None:
            self._server.check_alive()
        if self._reader is None or not self._reader.is_alive():
            self._reader = _EventReader(self.url, self.client_id)
            self._reader.connect()
        body = {"prompt": prompt, "client_id": self.client_id}
        code, raw = self._exchange("POST", "/prompt", body)
        reply = json.loads(raw)
        if code != 200 or reply.get("node_errors"):
            error = reply.get("error") or {"message": "some outputs of the prompt failed validation"}
            error = error if isinstance(error, dict) else {"message": str(error)}
            raise PromptRejected(error, reply.get("node_errors") or {}, reply.get("prompt_id"))
        return str(reply["prompt_id"])

    def wait(
        self, prompt_id: str, *, on_progress: Callable[[Event], None] | None = None, timeout: float = 300.0
    ) -> Outcome:
        """Follow a queued prompt to its end. on_progress is called here, in the caller's thread, with every Event.

        Raises ServerDied when the server ends, TimeoutError (after interrupting the prompt) when it takes longer
        than `timeout` seconds. A failed or interrupted prompt is not an exception: see Outcome.status.
        """
        deadline = time.monotonic() + timeout
        texts: dict[str, list[str]] = {}
        while time.monotonic() < deadline:
            event = self._next_event()
            if event is None:
                finished = self._finished(prompt_id, texts)
                if finished is None:
                    continue
                event = self._next_event()  # finished in the silence: its last events may have come since
                if event is None:
                    return finished
            if event.data.get("prompt_id", prompt_id) != prompt_id:
                continue
            if event.kind == "progress_text":
                texts.setdefault(event.data["node"], []).append(event.data["text"])
            if on_progress is not None:
                on_progress(event)
            if event.kind in _END_EVENTS:
                return self._recorded(prompt_id, texts, deadline)
        self.interrupt(prompt_id)
        raise TimeoutError(f"prompt {prompt_id} did not end within {timeout:g} s")

    def run(
        self, prompt: Prompt, *, on_progress: Callable[[Event], None] | None = None, timeout: float = 300.0
    ) -> Outcome:
        """queue() and wait()."""
        return self.wait(self.queue(prompt), on_progress=on_progress, timeout=timeout)

    def interrupt(self, prompt_id: str | None = None) -> None:
        """Cancel the running prompt (that one only, if given); what waits in the queue stays there."""
        self.post("/interrupt", {"prompt_id": prompt_id} if prompt_id else {})

    def free(self, *, unload_models: bool = True, free_memory: bool = False) -> None:
        """Ask ComfyUI to unload models (and drop its cached outputs); it does so when idle, after this returns."""
        self.post("/free", {"unload_models": unload_models, "free_memory": free_memory})

    def history(self, prompt_id: str) -> dict[str, Any] | None:
        """The server's record of a finished prompt, None while it is waiting or running."""
        record: dict[str, Any] | None = self.get(f"/history/{prompt_id}").get(prompt_id)
        return record

    def fetch_image(self, image: Mapping[str, str]) -> bytes:
        """The file of one entry of Outcome.images()."""
        query = urllib.parse.urlencode({key: image[key] for key in ("filename", "subfolder", "type") if key in image})
        return self._checked("GET", f"/view?{query}")

    def get(self, path: str) -> Any:
        """GET a JSON document, for instance get("/object_info/KSampler")."""
        return json.loads(self._checked("GET", path))

    def post(self, path: str, body: Any) -> Any:
        """POST a JSON body; the reply as JSON, None when it is empty."""
        raw = self._checked("POST", path, body)
        return json.loads(raw) if raw else None

    def close(self) -> None:
        """Close the websocket."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def __enter__(self) -> ComfyClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _next_event(self) -> Event | None:
        if self._reader is None:
            time.sleep(_POLL_S)  # waiting for somebody else's prompt: only /history tells
            return None
        try:
            # A dead reader's last events are still to be read; after them there is nothing to wait for but /history.
            return self._reader.events.get(timeout=_POLL_S)
        except queue.Empty:
            return None

    def _finished(self, prompt_id: str, texts: dict[str, list[str]]) -> Outcome | None:
        if self._server is not None:
            self._server.check_alive()
        record = self.history(prompt_id)
        return None if record is None else _outcome(prompt_id, record, texts)

    def _recorded(self, prompt_id: str, texts: dict[str, list[str]], deadline: float) -> Outcome:
        # The last event is sent before the record is written, a moment later.
        while time.monotonic() < deadline:
            finished = self._finished(prompt_id, texts)
            if finished is not None:
                return finished
            time.sleep(0.01)
        raise TimeoutError(f"prompt {prompt_id} ended, but the server's history does not show it")

    def _checked(self, method: str, path: str, body: Any = None) -> bytes:
        code, raw = self._exchange(method, path, body)
        if code != 200:
            raise ComfyError(f"{method} {path}: HTTP {code}: {raw.decode(errors='replace')[:500]}")
        return raw

    def _exchange(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with _OPENER.open(request, timeout=60) as reply:
                return reply.status, reply.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()
        except OSError as error:
            if self._server is not None:
                self._server.check_alive(grace=1.0)
            raise ServerDied(f"{method} {self.url}{path}: {error}") from error


def _outcome(prompt_id: str, record: dict[str, Any], texts: dict[str, list[str]]) -> Outcome:
    messages = [(kind, data) for kind, data in record["status"]["messages"]]
    by_kind = dict(messages)
    status: Status = "success"
    if "execution_interrupted" in by_kind:
        status = "interrupted"
    elif record["status"]["status_str"] != "success":
        status = "error"
    return Outcome(prompt_id, status, record["outputs"], messages, by_kind.get("execution_error"), texts)


def _terminate(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)


def exit_on_sigterm() -> None:
    """Turn SIGTERM into SystemExit, so that servers started by this process are stopped on the way out."""
    signal.signal(signal.SIGTERM, _terminate)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one API-format prompt on a server that is up; images go to a folder."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("url", help="http://127.0.0.1:8188")
    parser.add_argument("prompt", type=Path, help="API-format workflow (json)")
    parser.add_argument("-o", "--output", type=Path, default=Path("output"), help="folder for the images")
    options = parser.parse_args(argv)
    out = sys.stdout

    def show(event: Event) -> None:
        if event.kind == "progress_text":
            out.write(f"node {event.data['node']}: {event.data['text']}\n")
        elif event.kind == "progress":
            out.write(f"node {event.data.get('node')}: {event.data['value']}/{event.data['max']}\n")

    with ComfyClient(options.url) as client:
        try:
            outcome = client.run(json.loads(options.prompt.read_text(encoding="utf-8")), on_progress=show)
        except ComfyError as error:
            out.write(f"{error}\n")
            return 1
        options.output.mkdir(parents=True, exist_ok=True)
        for image in outcome.images():
            target = options.output / image["filename"]
            target.write_bytes(client.fetch_image(image))
            out.write(f"{target}\n")
    out.write(f"{outcome.status} {outcome.error_text}".rstrip() + "\n")
    return 0 if outcome.status == "success" else 1


if __name__ == "__main__":
    raise SystemExit(main())
