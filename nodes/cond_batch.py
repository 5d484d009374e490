"""The wrapper around ComfyUI's evaluation of conditions: positive, negative and others meet at the ranks.

ComfyUI batches conditions of equal length itself and runs the others one after the other, each for every row; here each
condition, and in it each row that has a prompt of its own, is evaluated by ComfyUI's own code in turn, and all their
rows run as one operation. Knows no rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from comfy.conds import CONDConstant
from comfy.patcher_extension import CallbacksMP, WrappersMP

from .prompt_rows import Entry, Share, freed, share_rows
from .rendezvous import Dispatch, run_together

WRAPPER_KEY = "parallel_diffusion"
_AROUND_THE_MODEL = (WrappersMP.APPLY_MODEL, WrappersMP.DIFFUSION_MODEL)


def make_wrapper(dispatch: Dispatch) -> Callable[..., list[torch.Tensor]]:
    """A CALC_COND_BATCH wrapper that sends what its conditions need through `dispatch`."""

    def evaluate(
        executor: Any, model: Any, conds: list[Any], x_in: torch.Tensor, timestep: torch.Tensor, model_options: Any
    ) -> list[torch.Tensor]:
        shares = [
            share
            for condition, entries in enumerate(conds)
            if entries is not None
            for share in share_rows(condition, entries, x_in.shape[0])
        ]
        if len(shares) < 2 or _is_watched(model, model_options):
            return executor(model, conds, x_in, timestep, model_options)

        def alone(share: Share) -> torch.Tensor:
            x, sigma, entries = _cut(share, x_in, timestep)
            only = [entries if position == share.condition else None for position in range(len(conds))]
            return executor(model, only, x, sigma, model_options)[share.condition]

        parts = run_together([lambda share=share: alone(share) for share in shares], dispatch)
        outputs = [torch.zeros_like(x_in) for _ in conds]
        for share, part in zip(shares, parts, strict=True):
            outputs[share.condition][list(share.rows)] = part
        return outputs

    return evaluate


def _cut(
    share: Share, x_in: torch.Tensor, timestep: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, Sequence[Entry]]:
    """The arguments of an evaluation for the share's rows alone. `x_in` [B, ...], `timestep` [B] or [1]."""
    if len(share.rows) == x_in.shape[0]:
        return x_in, timestep, share.entries
    return (
        x_in[list(share.rows)],
        rows_of(timestep, share.rows),
        [_cut_entry(freed(entry), share.rows) for entry in share.entries],
    )


def _cut_entry(entry: Entry, rows: Sequence[int]) -> dict[str, Any]:
    """The entry as if only these rows were in the batch, for which ComfyUI has prepared it as a whole."""
    cut = {**entry, "model_conds": {name: _cut_cond(cond, rows) for name, cond in entry["model_conds"].items()}}
    if "mask" in entry:
        cut["mask"] = rows_of(entry["mask"], rows)
    return cut


def _cut_cond(cond: Any, rows: Sequence[int]) -> Any:
    """One of comfy.conds' wrappers of an argument of the model."""
    if isinstance(cond, CONDConstant):
        return cond
    if isinstance(cond.cond, list):
        return cond._copy_with([rows_of(tensor, rows) for tensor in cond.cond])
    return cond._copy_with(rows_of(cond.cond, rows))


def rows_of(tensor: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """What ComfyUI gives these rows of a batch: it repeats a tensor that has fewer, and cuts one that has more."""
    num_rows = tensor.shape[0]
    return tensor if num_rows == 1 else tensor[[row % num_rows for row in rows]]


def _is_watched(model: Any, model_options: Any) -> bool:
    """Whether code of other nodes runs during the evaluation, which must then happen just as ComfyUI does it.

    Such code may carry state from one condition to the next (EasyCache), mix the conditions (a wrapper like this one),
    change the model around a call and put it back (a model function wrapper), or count steps (a prepare-state
    callback). What it gives up is that prompts of unequal length run at the same time, and that a prompt is evaluated
    for its own rows only.
    """
    if "model_function_wrapper" in model_options:
        return True
    if model.current_patcher.get_all_callbacks(CallbacksMP.ON_PREPARE_STATE):
        return True
    wrappers = model_options.get("transformer_options", {}).get("wrappers", {})
    others = [key for key in wrappers.get(WrappersMP.CALC_COND_BATCH, {}) if key != WRAPPER_KEY]
    return bool(others) or any(found for kind in _AROUND_THE_MODEL for found in wrappers.get(kind, {}).values())
