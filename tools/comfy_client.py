"""A small synchronous client of ComfyUI's HTTP and websocket interface; with comfy_server, all that a script needs.

Owns: queueing API-format prompts, following them, fetching what they made.
Does not know: Parallel Diffusion's nodes, pytest, where the developer environment lies.

    with ComfyServer(tree, base, python=python) as server, server.client() as client:
        outcome = client.run(prompt)
        png = client.fetch_image(outcome.images()[0])

As a command: ``python -m tools.comfy_client URL prompt.json [-o FOLDER]`` runs one prompt on a server that is up.
"""

from __future__ import annotations

import argparse
import json
import queue
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from .comfy_events import Event, EventReader
from .comfy_server import OPENER, ComfyError, ComfyServer, ServerDied, exit_on_sigterm, free_port

__all__ = [
    "ComfyClient",
    "ComfyError",
    "ComfyServer",
    "Event",
    "Outcome",
    "Prompt",
    "PromptRejected",
    "ServerDied",
    "exit_on_sigterm",
    "free_port",
]

Prompt = Mapping[str, Any]
Status = Literal["success", "error", "interrupted"]

_END_EVENTS = ("execution_success", "execution_error", "execution_interrupted")
_POLL_S = 0.5  # how long the socket may be silent before /history and the process are looked at


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


class ComfyClient:
    """One client id of a server: events of the prompts it queues come to it alone. Use as a context manager."""

    def __init__(self, url: str, *, server: ComfyServer | None = None) -> None:
        self.url = url.rstrip("/")
        self.client_id = uuid.uuid4().hex
        self._server = server
        self._reader: EventReader | None = None

    def queue(self, prompt: Prompt) -> str:
        """Queue an API-format prompt and return its id; PromptRejected when validation refuses any part of it."""
        if self._server is not None:
            self._server.check_alive()
        if self._reader is None or not self._reader.is_alive():
            self._reader = EventReader(self.url, self.client_id)
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
            with OPENER.open(request, timeout=60) as reply:
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
