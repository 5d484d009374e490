"""What the benchmarks share: ComfyUI's code in this process, the package in it, and models of a given size.

Run them with the interpreter of the rank environment, which has ComfyUI's packages and diffusers:
`.rank_env/bin/python -m benchmarks.overhead`. ComfyUI's tree is .dev/comfyui, or what COMFYUI_TREE names.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "parallel_diffusion_package"

# 12 blocks of width 768: a step of one 512 x 512 picture is compute-bound and takes over a second on one thread.
COMPUTE_BOUND = {
    "num_layers": 2,
    "num_single_layers": 4,
    "attention_head_dim": 64,
    "num_attention_heads": 12,
    "joint_attention_dim": 256,
    "pooled_projection_dim": 64,
    "guidance_embeds": True,
    "axes_dims_rope": [16, 24, 24],
}


def one_thread() -> None:
    """One thread here and in every rank, so that ratios say something about ranks and nothing about thread pools."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)


def load_package(module: str) -> ModuleType:
    """A module of the package, imported under a name of its own as ComfyUI does it."""
    if PACKAGE not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            PACKAGE, ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
        )
        assert spec is not None and spec.loader is not None
        package = importlib.util.module_from_spec(spec)
        sys.modules[PACKAGE] = package
        spec.loader.exec_module(package)
    return importlib.import_module(f"{PACKAGE}.{module}")


def load_comfyui(models: Path) -> None:
    """Puts ComfyUI's code on the path, for the CPU, with `models` as its models/diffusers folder."""
    tree = Path(os.environ.get("COMFYUI_TREE", ROOT / ".dev" / "comfyui"))
    os.environ["PARALLEL_DIFFUSION_PYTHON"] = sys.executable
    sys.path.insert(0, str(tree))
    sys.argv = [sys.argv[0], "--cpu"]
    import comfy.options

    comfy.options.enable_args_parsing()
    import folder_paths
    import utils.install_util  # noqa: F401  # before ComfyUI's nodes.py puts comfy/, which has a utils.py, in front

    folder_paths.add_model_folder_path("diffusers", str(models), is_default=True)


@contextmanager
def bench(name: str, dtype: Any = None, **config: Any) -> Iterator[Path]:
    """One thread, ComfyUI's code, and a Flux called `name` in a models folder that goes away at the end."""
    one_thread()
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder)
        write_flux(models / name, dtype, **config)
        load_comfyui(models)
        try:
            yield models
        finally:
            load_package("nodes.runtime").engine().shutdown()


def write_flux(folder: Path, dtype: Any = None, **config: Any) -> Path:
    """A Flux transformer folder with random weights; `config` as diffusers names it."""
    import torch
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    model = FluxTransformer2DModel(**config).to(dtype or torch.float32)
    model.save_pretrained(folder / "transformer")
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline"}))
    return folder


def conditioning(tokens: int, width: int, pooled: int) -> list[Any]:
    """A random CONDITIONING of one prompt."""
    import torch

    generator = torch.Generator().manual_seed(tokens)
    text = torch.randn(1, tokens, width, generator=generator)
    return [[text, {"pooled_output": torch.randn(1, pooled, generator=generator), "guidance": 3.5}]]


def median(values: Sequence[float]) -> float:
    """The middle one."""
    return sorted(values)[len(values) // 2]


def say(text: str) -> None:
    """A line of the report."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
