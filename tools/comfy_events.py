"""A ComfyUI server's websocket, read in a thread: messages become Events on a queue. Knows nothing of prompts."""

from __future__ import annotations

import asyncio
import json
import queue
import struct
import threading
from dataclasses import dataclass
from typing import Any

import aiohttp

from .comfy_server import ServerDied

_PREVIEW, _TEXT, _PREVIEW_WITH_METADATA = 1, 3, 4  # ComfyUI's protocol.BinaryEventTypes
_CLOSE_S = 10.0


@dataclass(frozen=True)
class Event:
    """One websocket message.

    kind: ComfyUI's message type ("executing", "progress", "executed", "execution_error", ...), or "progress_text"
    (data: node, text) or "preview" (data: image = the encoded bytes; node where the server says it).
    """

    kind: str
    data: dict[str, Any]


class EventReader(threading.Thread):
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
        self.join(_CLOSE_S)


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
