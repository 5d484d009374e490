"""The models that a user may choose from, and the way from a chosen name to its path.

Knows ComfyUI's model folders and the diffusers layout; reads no weight.
"""

from __future__ import annotations

import os
from pathlib import Path

import folder_paths

from ..parallel_core.errors import UserError
from .files import SAFETENSORS, find_file, list_files

_EXAMPLES = Path(__file__).resolve().parent.parent / "example_models"
"""The package's own demo model, so that the example workflow runs at once."""

_SECOND = "transformer_2"
"""diffusers' folder for the transformer of the last, low-noise steps."""


def _roots() -> list[Path]:
    return [*map(Path, folder_paths.get_folder_paths("diffusers")), _EXAMPLES]


_CHECKPOINTS = "checkpoints/"
_FILES = {"transformer": ("diffusion_models", (*SAFETENSORS, ".gguf")), "vae": ("vae", SAFETENSORS)}
"""Where the single files of a component lie, and their suffixes."""


def list_models(component: str) -> list[str]:
    """Names of the diffusers folders with a "transformer" or a "vae", then of the component's single files, then of the
    files in models/checkpoints with "checkpoints/" before them."""
    folders = list_folders(component)
    files = [name for name in list_files(*_FILES[component]) if name not in folders]
    return [*folders, *files, *(_CHECKPOINTS + name for name in list_files("checkpoints"))]


def find_model(name: str, component: str) -> Path:
    """The folder or the file of a listed name; anything else is refused, so no path outside the model folders can be
    named."""
    category, suffixes = _FILES[component]
    found = _folders(component).get(name)
    if found is None and name.startswith(_CHECKPOINTS):
        found = find_file("checkpoints", name.removeprefix(_CHECKPOINTS))
    elif found is None:
        found = find_file(category, name, suffixes)
    if found is None:
        raise UserError(
            f"model_name {name!r} is neither a model folder with a {component} in models/diffusers nor a file in "
            f"models/{category} or models/checkpoints. {_there(list_models(component))}"
        )
    return found


def list_folders(component: str) -> list[str]:
    """Names, relative to `models/diffusers`, of the pipeline folders with this component and of bare component folders.

    `component`: "transformer", "vae" or "text_encoder". A pipeline with two transformers (Wan 2.2) is there twice: by
    its own name, and with the second one's folder behind it.
    """
    return list(_folders(component))


def find_folder(name: str, component: str, widget: str = "model_name") -> Path:
    """The folder of a listed name; anything else is refused. `widget`: where the name was chosen."""
    folders = _folders(component)
    if name not in folders:
        raise UserError(
            f"{widget} {name!r} is not a model folder with a {component} in models/diffusers. {_there(list(folders))}"
        )
    return folders[name]


def _there(names: list[str]) -> str:
    return f"There: {', '.join(map(repr, names[:8])) or 'none'}. Reload the page (R) if you have just added it."


def _folders(component: str) -> dict[str, Path]:
    """Listed names and where they are; where two model roots have the same name the first one wins, as in ComfyUI."""
    found: dict[str, Path] = {}
    for root in _roots():
        seen: set[str] = set()
        for path, subfolders, files in os.walk(root, followlinks=True):
            folder = Path(path)
            subfolders.sort()
            if os.path.realpath(path) in seen:  # a link that leads back
                subfolders.clear()
                continue
            seen.add(os.path.realpath(path))
            pipeline, bare = "model_index.json" in files, "config.json" in files and folder != root
            if (pipeline and component in subfolders) or (bare and not pipeline and component != "text_encoder"):
                found.setdefault(folder.relative_to(root).as_posix(), folder)
            if pipeline and component == "transformer" and _SECOND in subfolders:
                found.setdefault((folder.relative_to(root) / _SECOND).as_posix(), folder / _SECOND)
            if pipeline or bare:
                subfolders.clear()
    return found
