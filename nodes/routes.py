"""HTTP routes of the package: what the ranks are and hold, as json.

Knows ComfyUI's server and the engine's status; starts nothing.
"""

from __future__ import annotations

import asyncio

from aiohttp import web
from server import PromptServer

from .runtime import engine


def register() -> None:
    """Adds the routes to ComfyUI's server. Called once, when the extension is made."""

    @PromptServer.instance.routes.get("/parallel_diffusion/status")
    async def status(request: web.Request) -> web.Response:
        """The living groups; asking a rank takes a moment, so it happens off the event loop."""
        return web.json_response({"groups": await asyncio.to_thread(engine().status)})
