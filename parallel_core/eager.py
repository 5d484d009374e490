"""Marks what torch.compile must leave as it is: collectives, whose sizes and groups it would freeze into a graph, and
the hooks that note what a forward's sizes and masks are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import torch

_P = ParamSpec("_P")
_T = TypeVar("_T")


def eager(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """`function`, always run by Python: a compiled block is cut in two around it."""
    return cast(Callable[_P, _T], torch.compiler.disable(function))
