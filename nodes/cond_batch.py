"""The wrapper around ComfyUI's evaluation of conditions: positive, negative and others meet at the ranks.

ComfyUI batches conditions of equal length itself and runs the others one after the other; here each condition is
evaluated by ComfyUI's own code in turn, and all their rows run as one operation. Knows no rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from comfy.patcher_extension import CallbacksMP, WrappersMP

from .rendezvous import Dispatch, run_together

WRAPPER_KEY = "parallel_diffusion"
_AROUND_THE_MODEL = (WrappersMP.APPLY_MODEL, WrappersMP.DIFFUSION_MODEL)


def make_wrapper(dispatch: Dispatch) -> Callable[..., list[torch.Tensor]]:
    """A CALC_COND_BATCH wrapper that sends what its conditions need through `dispatch`."""

    def evaluate(
        executor: Any, model: Any, conds: list[Any], x_in: torch.Tensor, timestep: torch.Tensor, model_options: Any
    ) -> list[torch.Tensor]:
        present = [index for index, cond in enumerate(conds) if cond is not None]
        if len(present) < 2 or _is_watched(model, model_options):
            return executor(model, conds, x_in, timestep, model_options)

        def alone(index: int) -> torch.Tensor:
            only = [cond if position == index else None for position, cond in enumerate(conds)]
            return executor(model, only, x_in, timestep, model_options)[index]

        outputs = run_together([lambda index=index: alone(index) for index in present], dispatch)
        by_index = dict(zip(present, outputs, strict=True))
        return [by_index.get(index, torch.zeros_like(x_in)) for index in range(len(conds))]

    return evaluate


def _is_watched(model: Any, model_options: Any) -> bool:
    """Whether code of other nodes runs during the evaluation, which must then happen just as ComfyUI does it.

    Such code may carry state from one condition to the next (EasyCache), mix the conditions (a wrapper like this one),
    change the model around a call and put it back (a model function wrapper), or count steps (a prepare-state
    callback). What it gives up is that prompts of unequal length run at the same time.
    """
    if "model_function_wrapper" in model_options:
        return True
    if model.current_patcher.get_all_callbacks(CallbacksMP.ON_PREPARE_STATE):
        return True
    wrappers = model_options.get("transformer_options", {}).get("wrappers", {})
    others = [key for key in wrappers.get(WrappersMP.CALC_COND_BATCH, {}) if key != WRAPPER_KEY]
    return bool(others) or any(found for kind in _AROUND_THE_MODEL for found in wrappers.get(kind, {}).values())
