"""Which share of tokens and heads each rank gets in an evaluation: refused, told or taken as it is.

Knows families by their declarations; knows no rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..attention.layout import split_sizes
from ..errors import UserError
from ..families.base import Config, Family, SeamCall
from ..plan import ParallelPlan

_WORTH_TELLING = 1.05
"""How much more than an equal share the largest one is before it slows a step down by more than anyone would notice."""

_NAMES = {"encoder_hidden_states": "text", "hidden_states": "the picture"}


def check_shares(plan: ParallelPlan, family: Family, config: Config, calls: Sequence[SeamCall]) -> str:
    """What to tell the user about unequal shares under `plan`; empty when there is nothing to tell.

    `UserError` for unequal shares where the plan's `uneven` is "never".
    """
    ranks = plan.ring * plan.ulysses
    if ranks == 1:
        return ""
    notes = check_heads(plan, family.num_heads(config))
    for call in calls:
        lengths = family.segment_lengths(config, call)
        tokens = {f"tokens of {_NAMES.get(name, name)}": length for name, length in lengths.items()}
        notes += [note for note in _notes(tokens, ranks, plan.uneven) if note not in notes]
    _refuse_if_never(plan, notes)
    return "; ".join(notes)


def check_heads(plan: ParallelPlan, num_heads: int) -> list[str]:
    """The part of `check_shares` that is known before anything runs."""
    notes = _notes({"heads": num_heads // plan.tensor}, plan.ulysses, plan.uneven)
    _refuse_if_never(plan, notes)
    return notes


def _refuse_if_never(plan: ParallelPlan, notes: Sequence[str]) -> None:
    if notes and plan.uneven == "never":
        raise UserError(
            f"uneven is 'never', but the shares of the ranks would differ: {'; '.join(notes)}. Set uneven to 'auto' "
            "(the result is the same), or choose a size or a degree that divides evenly."
        )


def _notes(parts: Mapping[str, int], ranks: int, uneven: str) -> list[str]:
    """One note for each of `parts` that is shared out unequally; none where that is not worth telling."""
    total, largest = sum(parts.values()), sum(-(-count // ranks) for count in parts.values())
    if uneven == "always" or (uneven == "auto" and largest * ranks <= _WORTH_TELLING * total):
        return []
    return [
        f"{count} {name} over {ranks} ranks: {_text(split_sizes(count, ranks))}"
        for name, count in parts.items()
        if count % ranks
    ]


def _text(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes)) if len(sizes) <= 8 else f"{sizes[0]} to {sizes[-1]}"
