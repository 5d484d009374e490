"""Makes engines for the tests of real ranks."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from parallel_core.engine import Engine

ROOT = Path(__file__).resolve().parents[2]


def make_engine(python: str = sys.executable, **options: object) -> Engine:
    """An engine whose ranks run in the interpreter that runs the tests."""
    environ = {**os.environ, "PARALLEL_DIFFUSION_PYTHON": python}
    return Engine(ROOT, environ=environ, **options)  # type: ignore[arg-type]
