"""Which share of tokens and heads each rank gets in an evaluation: refused, told or taken as it is.

Knows families by their declarations; knows no rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..attention.layout import split_sizes
from ..errors import UserError
from ..families.base import Config, Family, SeamCall
from ..plan import ParallelPlan


def check_shares(plan: ParallelPlan, family: Family, config: Config, calls: Sequence[SeamCall]) -> str:
    """What to tell the user about unequal shares under `plan`; empty when there is nothing to tell.

    `UserError` for unequal shares where the plan's `uneven` is "never".
    """
    ranks = plan.ring * plan.ulysses
    if ranks == 1:
        return ""
    notes = _heads_note(family.num_heads(config) // plan.tensor, plan)
    for call in calls:
        lengths = family.segment_lengths(config, call)
        notes += [note for note in _tokens_notes(lengths, ranks) if note not in notes]
    if notes and plan.uneven == "never":
        raise UserError(
            f"uneven is 'never', but the shares of the ranks would differ: {'; '.join(notes)}. Set uneven to 'auto' "
            "(the result is the same), or choose a size or a degree that divides evenly."
        )
    return "" if plan.uneven == "always" else "; ".join(notes)


def _heads_note(heads: int, plan: ParallelPlan) -> list[str]:
    if heads % plan.ulysses == 0:
        return []
    return [f"{heads} heads over ulysses {plan.ulysses}: {_text(split_sizes(heads, plan.ulysses))}"]


def _tokens_notes(lengths: Mapping[str, int], ranks: int) -> list[str]:
    uneven = {name: length for name, length in lengths.items() if length % ranks}
    return [f"{length} tokens of {name} over {ranks} ranks: {_text(split_sizes(length, ranks))}"
            for name, length in uneven.items()]  # fmt: skip


def _text(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes)) if len(sizes) <= 8 else f"{sizes[0]} to {sizes[-1]}"
