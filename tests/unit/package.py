"""Imports the package as ComfyUI does: by its folder, under a name of its own, so that relative imports work."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
NAME = "package_under_test"


def load(module: str) -> ModuleType:
    """A module of the package, such as "nodes.rendezvous"; it must not need ComfyUI."""
    if NAME not in sys.modules:
        init, folders = ROOT / "__init__.py", [str(ROOT)]
        spec = importlib.util.spec_from_file_location(NAME, init, submodule_search_locations=folders)
        assert spec is not None and spec.loader is not None
        package = importlib.util.module_from_spec(spec)
        sys.modules[NAME] = package
        spec.loader.exec_module(package)
    return importlib.import_module(f"{NAME}.{module}")
