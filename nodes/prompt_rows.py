"""One prompt per image: which entries of a conditioning hold for which rows of the batch.

An entry of prompt i of n carries PROMPT_ROW: (i, n) and holds for the rows i, i + n, i + 2n, ...; an entry without it
holds for every row. Any MODEL learns this from the entry's strength, which ComfyUI multiplies into the entry's weights:
see `RowStrength`. Knows neither ComfyUI's nodes nor ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..parallel_core.errors import UserError
from ..parallel_core.families.base import PROMPT_ROW

Entry = Mapping[str, Any]
"""One entry of a condition, as ComfyUI's samplers hold it."""

_WORKS_ON_EVERY_IMAGE = {
    "default": "ComfyUI applies a default prompt (Cond Set Default Combine) to every image, wherever no other is",
    "control_apply_to_uncond": "Apply ControlNet (Old) changes every image's negative prompt; use Apply ControlNet",
    "gligen": "GLIGEN changes every image's negative prompt",
}
"""What ComfyUI does across the entries of a condition, and would do to other images than the prompt's own."""


class PromptRow(NamedTuple):
    """Prompt `index` of `count`; what an entry holds under PROMPT_ROW."""

    index: int
    count: int

    def holds_for(self, row: int) -> bool:
        """Whether this is the prompt of the batch's row."""
        return row % self.count == self.index


@dataclass(frozen=True)
class RowStrength:
    """A strength that is zero for the rows of other prompts.

    ComfyUI's result for a condition is sum(output x weight) / sum(weight) over its entries, with weight = mask x
    strength. A row mask would do the same, but ComfyUI tells a batch of masks from a video mask by counting dimensions,
    and softens the edge of an area only where there is no mask; a strength works for every kind of latent.
    """

    row: PromptRow
    strength: float = 1.0

    def __rmul__(self, weights: torch.Tensor) -> torch.Tensor:
        """`weights` [B, ...] times the strength in this prompt's rows, zero elsewhere; `UserError` for a wrong B."""
        refuse_batch(self.row.count, weights.shape[0])
        per_row = weights.new_zeros(weights.shape[0])
        per_row[self.row.index :: self.row.count] = self.strength
        return weights * per_row.view(-1, *[1] * (weights.ndim - 1))


def refuse_batch(num_prompts: int, num_images: int) -> None:
    """`UserError` unless the prompts go into the batch without a rest."""
    if num_images % num_prompts:
        nearest = max(1, round(num_images / num_prompts)) * num_prompts
        raise UserError(
            f"{num_prompts} prompts for a batch of {num_images} images: One Prompt per Image needs a batch of "
            f"{num_prompts} or a multiple of it, over which the prompts repeat in order. Set the latent's batch_size "
            f"to {nearest}, or connect {num_images} prompts."
        )


def one_prompt_per_row(prompts: Mapping[str, Sequence[Sequence[Any]]]) -> list[list[Any]]:
    """All entries of `prompts` (CONDITIONING by input name, in order) as one CONDITIONING: prompt i for image i."""
    if not prompts:
        raise UserError("No prompt is connected. Connect one CONDITIONING per image, to conditioning_1 and so on.")
    batch = []
    for index, (name, conditioning) in enumerate(prompts.items()):
        for text, options in conditioning:
            _refuse_entry(name, options)
            batch.append([text, assigned(options, PromptRow(index, len(prompts)))])
    return batch


def _refuse_entry(name: str, options: Entry) -> None:
    if PROMPT_ROW in options:
        raise UserError(
            f"{name} already holds one prompt per image. Connect the prompts themselves to a single node; it takes "
            "up to 16. To add a prompt to every image, use Conditioning (Combine) behind this node."
        )
    for key, what_happens in _WORKS_ON_EVERY_IMAGE.items():
        if options.get(key):
            raise UserError(f"{name} cannot be the prompt of one image only: {what_happens}.")


def assigned(entry: Entry, row: PromptRow) -> dict[str, Any]:
    """The entry as one that holds for the rows of `row`."""
    return {**entry, PROMPT_ROW: row, "strength": RowStrength(row, _plain_strength(entry))}


def freed(entry: Entry) -> Entry:
    """The entry as it was before it was assigned to rows."""
    if PROMPT_ROW not in entry:
        return entry
    return {name: value for name, value in entry.items() if name != PROMPT_ROW} | {"strength": _plain_strength(entry)}


def _plain_strength(entry: Entry) -> float:
    strength = entry.get("strength", 1.0)
    return strength.strength if isinstance(strength, RowStrength) else strength


def entries_for(entries: Sequence[Entry], row: int) -> list[Entry]:
    """The entries that hold for the batch's row."""
    return [entry for entry in entries if PROMPT_ROW not in entry or entry[PROMPT_ROW].holds_for(row)]


def prompt_counts(entries: Iterable[Entry]) -> list[int]:
    """Of how many prompts the entries are: a number per node that dealt, none for ordinary entries."""
    return sorted({entry[PROMPT_ROW].count for entry in entries if PROMPT_ROW in entry})


def reassign(entries: Iterable[dict[str, Any]]) -> None:
    """Puts each entry back to its rows in place, if a node has set a strength of its own since (an area node does)."""
    for entry in entries:
        if PROMPT_ROW in entry:
            entry.update(assigned(entry, entry[PROMPT_ROW]))


@dataclass(frozen=True)
class Share:
    """Rows of a condition for which the same entries hold. `condition` is its place in ComfyUI's list of conditions."""

    condition: int
    rows: tuple[int, ...]
    entries: list[Entry]


def share_rows(condition: int, entries: Sequence[Entry], num_rows: int) -> list[Share]:
    """All rows, grouped by which of `entries` hold for them; a single share if no entry is for certain rows."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for row in range(num_rows):
        groups.setdefault(tuple(map(id, entries_for(entries, row))), []).append(row)
    return [Share(condition, tuple(rows), entries_for(entries, rows[0])) for rows in groups.values()]
