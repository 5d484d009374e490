"""The single files of ComfyUI's model folders that a user may choose from, and the way from a name to its path.

Knows ComfyUI's folders and file suffixes; opens no file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import folder_paths

SAFETENSORS = (".safetensors", ".sft")


def list_files(category: str, suffixes: Sequence[str] = SAFETENSORS) -> list[str]:
    """Names of the files in a category ("diffusion_models", "vae"), relative to its folders, as ComfyUI spells them."""
    return sorted(_files(category, suffixes), key=str.casefold)


def find_file(category: str, name: str, suffixes: Sequence[str] = SAFETENSORS) -> Path | None:
    """The file of a listed name; None for any other, so no path outside the model folders can be named."""
    return _files(category, suffixes).get(name)


def _files(category: str, suffixes: Sequence[str]) -> dict[str, Path]:
    """Where two folders have the same name the first one wins, as in ComfyUI."""
    found: dict[str, Path] = {}
    for root in folder_paths.get_folder_paths(category):
        for path, _, files in os.walk(root, followlinks=True):
            for file in files:
                if file.endswith(tuple(suffixes)):
                    full = Path(path) / file
                    found.setdefault(full.relative_to(root).as_posix(), full)
    return found
