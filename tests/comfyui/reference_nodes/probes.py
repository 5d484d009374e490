"""What a test reads: latents as files, and the state of the server's process over HTTP.

Does not know: whose MODEL it was.
"""

# ruff: noqa: N802 (INPUT_TYPES is ComfyUI's name)

from __future__ import annotations

import ctypes
import gc
import threading
from pathlib import Path
from typing import Any

import comfy.model_base
import comfy.model_patcher
import folder_paths
from aiohttp import web
from safetensors.torch import save_file
from server import PromptServer

COUNTERS: dict[str, list[int]] = {}


class TestSaveLatent:
    """Writes `samples` to output/<name>.safetensors, bit for bit."""

    RETURN_TYPES = ()
    FUNCTION = "save"
    CATEGORY = "test"
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"samples": ("LATENT",), "name": ("STRING", {})}}

    def save(self, samples: dict[str, Any], name: str) -> dict[str, Any]:
        path = Path(folder_paths.get_output_directory()) / f"{name}.safetensors"
        save_file({"samples": samples["samples"].contiguous()}, path)
        return {"ui": {"latent": [{"filename": path.name, "subfolder": "", "type": "output"}]}}


def _resident_bytes() -> dict[str, int]:
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return {name: int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "RssAnon")}


def _living(base: type) -> list[str]:
    """Names of the classes of living instances of `base`, the stock class itself left out."""
    found = [type(thing) for thing in gc.get_objects() if issubclass(type(thing), base)]
    return sorted(f"{cls.__module__}.{cls.__qualname__}" for cls in found if not cls.__module__.startswith("comfy."))


@PromptServer.instance.routes.get("/test/state")
async def state(request: web.Request) -> web.Response:
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # freed memory goes back to the system, so that RSS shows what is held
    return web.json_response(
        {
            "memory": _resident_bytes(),
            "threads": sorted(thread.name for thread in threading.enumerate()),
            "models": _living(comfy.model_base.BaseModel),
            "patchers": _living(comfy.model_patcher.ModelPatcher),
            "counters": COUNTERS,
        }
    )


NODES = {"TestSaveLatent": TestSaveLatent}
