"""Loads a transformer as others do, for `benchmarks.load`: each line on standard input is one load, answered by a line.

`python benchmarks/load_elsewhere.py comfyui|diffusers FILE CONFIG`, in the interpreter of the program that is measured.
Does not know: how it is measured.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def comfyui(file: str, config: str) -> Callable[[], Any]:
    """Load Diffusion Model, as ComfyUI's node calls it. It computes in float32 on a CPU unless it is told a dtype."""
    tree = os.environ.get("COMFYUI_TREE", str(Path(__file__).resolve().parent.parent / ".dev" / "comfyui"))
    sys.path.insert(0, tree)
    sys.argv = [sys.argv[0], "--cpu"]
    import comfy.options

    comfy.options.enable_args_parsing()
    import comfy.sd
    import torch

    options = {} if "fp8" in Path(file).name else {"dtype": torch.bfloat16}
    return lambda: comfy.sd.load_diffusion_model(file, model_options=options)


def diffusers(file: str, config: str) -> Callable[[], Any]:
    """`from_single_file` with a local config."""
    import torch
    from diffusers import FluxTransformer2DModel

    return lambda: FluxTransformer2DModel.from_single_file(file, config=config, torch_dtype=torch.bfloat16)


def main() -> None:
    """Answers until standard input ends."""
    load = {"comfyui": comfyui, "diffusers": diffusers}[sys.argv[1]](*sys.argv[2:])
    answers, sys.stdout = sys.stdout, sys.stderr
    answers.write("ready\n")
    answers.flush()
    model = None
    for _ in sys.stdin:
        model = load()
        answers.write("loaded\n")
        answers.flush()
        sys.stdin.readline()
        del model
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        answers.write("gone\n")
        answers.flush()


if __name__ == "__main__":
    main()
