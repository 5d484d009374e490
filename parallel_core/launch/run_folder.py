"""The folder that a process's groups keep their stores and logs in, and the promise that it goes away.

A janitor, a shell that does nothing but wait for its standard input to end, removes the folder whatever way this
process ends: also on SIGTERM and SIGKILL, when no code of ours runs any more.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

# Ranks need a moment to see that their controller is gone; they hold their log files open until then.
_JANITOR = 'cat >/dev/null; for i in 1 2 3; do rm -rf -- "$1" && break; sleep 1; done'


class RunFolder:
    """A fresh 0700 folder in the system's temporary folder, removed by `close` or by the janitor."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="parallel-diffusion-"))
        self._janitor = subprocess.Popen(
            ["/bin/sh", "-c", _JANITOR, "parallel-diffusion-janitor", str(self.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
            env={"PATH": os.environ.get("PATH", os.defpath)},
        )

    def close(self) -> None:
        """Removes the folder and ends the janitor."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._janitor.stdin is not None:
            self._janitor.stdin.close()
        self._janitor.wait()
