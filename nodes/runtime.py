"""What all nodes share: the one engine of this ComfyUI, text on nodes, and Cancel.

Knows ComfyUI and the engine; knows no model.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import comfy.model_management
import torch
from comfy_execution.utils import get_executing_context
from server import PromptServer

from ..parallel_core.engine import Engine
from ..parallel_core.errors import Cancelled

logger = logging.getLogger("parallel_diffusion")

_PACKAGE = Path(__file__).resolve().parent.parent
_lock = threading.Lock()
_engines: list[Engine] = []


def engine() -> Engine:
    """The engine of this process, made at the first call. Nothing starts before a node needs ranks."""
    with _lock:
        if not _engines:
            _engines.append(Engine(_PACKAGE, environ=os.environ, free_host=_free_host, host_is_busy=_prompt_is_running))
        return _engines[0]


def _free_host(device: str, num_bytes: int) -> None:
    """Asks ComfyUI to free its own models on one of the ranks' GPUs.

    The GPU that ComfyUI itself computes on is left out: there it makes room by our models' `model_size`.
    """
    wanted = torch.device(device)
    if wanted != comfy.model_management.get_torch_device():
        comfy.model_management.free_memory(num_bytes, wanted)


def _prompt_is_running() -> bool:
    server = _server()
    return server is not None and server.prompt_queue.get_tasks_remaining() > 0


def _server() -> Any:
    """ComfyUI's server, or None where its code is used without one (in a script)."""
    return getattr(PromptServer, "instance", None)


def say(text: str, node_id: str | None = None) -> None:
    """Shows `text` on a node; on the executing one when none is named."""
    if node_id is None:
        context = get_executing_context()
        node_id = context.node_id if context is not None else None
    server = _server()
    if node_id is not None and server is not None:
        server.send_progress_text(text, node_id)
    logger.info("%s", text.replace("\n", "; "))


def cancel_requested() -> bool:
    """Whether the user pressed Cancel. Only looks: the flag stays for ComfyUI."""
    return bool(comfy.model_management.processing_interrupted())


@contextmanager
def as_comfy_interrupt() -> Iterator[None]:
    """Turns the engine's `Cancelled` into ComfyUI's own exception, which ends the prompt as interrupted."""
    try:
        yield
    except Cancelled:
        comfy.model_management.throw_exception_if_processing_interrupted()
        raise
