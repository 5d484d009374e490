"""torch.compile for a model's repeated blocks, put on after the plan and taken off again.

Only the blocks: they are alike, so that one graph serves all of them. Collectives stay outside the graphs (`eager`).
Does not know plans or families.
"""

from __future__ import annotations

import importlib.util
import shutil
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from .. import upstream
from ..errors import UserError
from .applied import Applied

_RECOMPILES = 64
"""Sizes and plans that one block may be compiled for; beyond torch's own 8 it would silently run uncompiled."""


def apply_compile(model: nn.Module, mode: str) -> Applied:
    """Compiles the repeated blocks in `mode` ("off", or one of torch.compile's), at their next call."""
    if mode == "off":
        return Applied(ExitStack())
    dynamo: Any = torch._dynamo.config
    dynamo.recompile_limit = _RECOMPILES
    with ExitStack() as undo:
        for block in upstream.repeated_blocks(model):
            block.compile(mode=None if mode == "default" else mode)
            undo.callback(setattr, block, "_compiled_call_impl", None)
        return Applied(undo.pop_all())


def check_compiler(device: torch.device) -> None:
    """`UserError` where torch.compile has no compiler to work with."""
    if device.type == "cpu" and not any(map(shutil.which, ("g++", "clang++"))):
        raise UserError(
            "compile needs a C++ compiler on CPU ranks, and neither g++ nor clang++ was found. Set compile to 'off', "
            "or install one."
        )
    if device.type == "cpu" and " " in torch.__file__:
        raise UserError(
            "compile does not work on CPU ranks here: PyTorch's compiler does not find its own libraries in a folder "
            f"with a space in its path ({torch.__file__}). Set compile to 'off'."
        )
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        raise UserError(
            "compile needs triton on GPUs, which is not in the ranks' environment. Set compile to 'off', or install it."
        )


def num_graphs() -> int:
    """Graphs that this process has compiled so far."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
