"""The wrapper around ComfyUI's evaluation of conditions: positive, negative and others meet at the ranks.

ComfyUI batches conditions of equal length itself and runs the others one after the other; here each condition is
evaluated by ComfyUI's own code in turn, and all their rows run as one operation. Knows no rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from comfy.patcher_extension import WrappersMP

from .rendezvous import Dispatch, run_together

WRAPPER_KEY = "parallel_diffusion"
_STATEFUL = (WrappersMP.APPLY_MODEL, WrappersMP.DIFFUSION_MODEL)


def make_wrapper(dispatch: Dispatch) -> Callable[..., list[torch.Tensor]]:
    """A CALC_COND_BATCH wrapper that sends what its conditions need through `dispatch`."""

    def evaluate(
        executor: Any, model: Any, conds: list[Any], x_in: torch.Tensor, timestep: torch.Tensor, model_options: Any
    ) -> list[torch.Tensor]:
        present = [index for index, cond in enumerate(conds) if cond is not None]
        if len(present) < 2 or _has_other_wrappers(model_options):
            return executor(model, conds, x_in, timestep, model_options)

        def alone(index: int) -> torch.Tensor:
            only = [cond if position == index else None for position, cond in enumerate(conds)]
            return executor(model, only, x_in, timestep, model_options)[index]

        outputs = run_together([lambda index=index: alone(index) for index in present], dispatch)
        by_index = dict(zip(present, outputs, strict=True))
        return [by_index.get(index, torch.zeros_like(x_in)) for index in range(len(conds))]

    return evaluate


def _has_other_wrappers(model_options: Any) -> bool:
    """Whether something else is wrapped around the model itself.

    Such code (EasyCache) may carry state from one condition to the next, so it sees them as ComfyUI presents them: one
    after the other.
    """
    wrappers = model_options.get("transformer_options", {}).get("wrappers", {})
    return any(found for kind in _STATEFUL for found in wrappers.get(kind, {}).values())
