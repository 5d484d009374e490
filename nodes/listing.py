"""The model folders that a user may choose from, and the way from a chosen name to its path.

Knows ComfyUI's model folders and the diffusers layout; reads no weight.
"""

from __future__ import annotations

import os
from pathlib import Path

import folder_paths

from ..parallel_core.errors import UserError

_EXAMPLES = Path(__file__).resolve().parent.parent / "example_models"
"""The package's own demo model, so that the example workflow runs at once."""


def _roots() -> list[Path]:
    return [*map(Path, folder_paths.get_folder_paths("diffusers")), _EXAMPLES]


def list_models(component: str) -> list[str]:
    """Names, relative to `models/diffusers`, of the pipeline folders with this component and of bare component folders.

    `component`: "transformer", "vae" or "text_encoder".
    """
    names: dict[str, None] = {}
    for root in _roots():
        for folder, subfolders, files in os.walk(root, followlinks=True):
            subfolders.sort()
            if "model_index.json" in files:
                if component in subfolders:
                    names[Path(folder).relative_to(root).as_posix()] = None
                subfolders.clear()
            elif "config.json" in files and Path(folder) != root:
                if component != "text_encoder":
                    names[Path(folder).relative_to(root).as_posix()] = None
                subfolders.clear()
    return list(names)


def find_model(name: str, component: str) -> Path:
    """The folder of a listed name; anything else is refused, so no path outside the model folders can be named."""
    listed = list_models(component)
    if name not in listed:
        there = ", ".join(map(repr, listed[:8])) or "none"
        raise UserError(
            f"model_name {name!r} is not a model folder with a {component} in models/diffusers. There: {there}. "
            "Reload the page (R) if you have just added it."
        )
    for root in _roots():
        if (root / name).is_dir():
            return root / name
    raise UserError(f"The model folder {name!r} has just gone away.")
