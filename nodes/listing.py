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


def list_transformers() -> list[str]:
    """Names of diffusers folders with a transformer, then of the files in models/diffusion_models, then of those in
    models/checkpoints with "checkpoints/" before them."""
    folders = list_models("transformer")
    files = [name for name in list_files("diffusion_models", _TRANSFORMER_FILES) if name not in folders]
    return [*folders, *files, *(_CHECKPOINTS + name for name in list_files("checkpoints"))]


def find_transformer(name: str) -> Path:
    """The folder or the file of a listed name; anything else is refused."""
    folder = _folders("transformer").get(name)
    if folder is not None:
        return folder
    if name.startswith(_CHECKPOINTS):
        file = find_file("checkpoints", name.removeprefix(_CHECKPOINTS))
    else:
        file = find_file("diffusion_models", name, _TRANSFORMER_FILES)
    if file is None:
        there = ", ".join(map(repr, list_transformers()[:8])) or "none"
        raise UserError(
            f"model_name {name!r} is neither a model folder with a transformer in models/diffusers nor a file in "
            f"models/diffusion_models or models/checkpoints. There: {there}. Reload the page (R) if you have just "
            "added it."
        )
    return file


def list_vaes() -> list[str]:
    """Names of diffusers folders with a VAE, then of the files in models/vae, then of those in models/checkpoints."""
    folders = list_models("vae")
    files = [name for name in list_files("vae") if name not in folders]
    return [*folders, *files, *(_CHECKPOINTS + name for name in list_files("checkpoints"))]


def find_vae(name: str) -> Path:
    """The folder or the file of a listed name; anything else is refused."""
    folder = _folders("vae").get(name)
    if folder is not None:
        return folder
    is_checkpoint = name.startswith(_CHECKPOINTS)
    file = find_file("checkpoints", name.removeprefix(_CHECKPOINTS)) if is_checkpoint else find_file("vae", name)
    if file is None:
        there = ", ".join(map(repr, list_vaes()[:8])) or "none"
        raise UserError(
            f"model_name {name!r} is neither a model folder with a vae in models/diffusers nor a file in models/vae or "
            f"models/checkpoints. There: {there}. Reload the page (R) if you have just added it."
        )
    return file


_CHECKPOINTS = "checkpoints/"
_TRANSFORMER_FILES = (*SAFETENSORS, ".gguf")


def list_models(component: str) -> list[str]:
    """Names, relative to `models/diffusers`, of the pipeline folders with this component and of bare component folders.

    `component`: "transformer", "vae" or "text_encoder". A pipeline with two transformers (Wan 2.2) is there twice: by
    its own name, and with the second one's folder behind it.
    """
    return list(_folders(component))


def find_model(name: str, component: str) -> Path:
    """The folder of a listed name; anything else is refused, so no path outside the model folders can be named."""
    folders = _folders(component)
    if name not in folders:
        there = ", ".join(map(repr, list(folders)[:8])) or "none"
        raise UserError(
            f"model_name {name!r} is not a model folder with a {component} in models/diffusers. There: {there}. "
            "Reload the page (R) if you have just added it."
        )
    return folders[name]


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
