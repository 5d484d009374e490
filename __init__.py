"""ComfyUI's door to Parallel Diffusion: the extension entry point and the folder of page files.

Nothing is imported here before ComfyUI asks, so that tools and pytest can import this folder without ComfyUI.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from comfy_api.latest import ComfyExtension

WEB_DIRECTORY = "./web"

__all__ = ["WEB_DIRECTORY", "comfy_entrypoint"]


async def comfy_entrypoint() -> ComfyExtension:
    """Called once by ComfyUI when it loads custom nodes."""
    from .nodes.extension import ParallelDiffusionExtension

    return ParallelDiffusionExtension()
