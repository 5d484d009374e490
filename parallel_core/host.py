"""The machine itself: whether ranks can run on it, and its memory.

Knows no device, no rank and no model.
"""

from __future__ import annotations

import platform
from pathlib import Path

from .errors import UserError


def require_linux() -> None:
    """`UserError` where ranks cannot run: they need memfd, pidfd and the parent-death signal of Linux."""
    if platform.system() != "Linux":
        raise UserError(
            f"Parallel ranks run on Linux and in WSL2; this is {platform.system()}. The nodes load here, but nothing "
            "can run in parallel: use ComfyUI's own loaders, or start ComfyUI in WSL2."
        )


def host_memory() -> tuple[int, int]:
    """(available without swapping, total) bytes of the machine's memory, from proc(5)."""
    require_linux()
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024, int(fields["MemTotal"].split()[0]) * 1024
