"""The README's tables of what is supported, made from the matrix that the tests run and the table of the nodes.

`python -m tests.support_table` prints it; `tests/unit/test_support_table.py` holds the README to it.
"""

from __future__ import annotations

import re
import sys

from parallel_core.storage import SUPPORT
from tests.ranks.matrix import MODELS, MODES, Model, num_processes, refusal
from tests.tiny_models import family_of

FAMILIES = {"flux": "FLUX.1", "qwen-image": "Qwen-Image", "wan": "Wan"}
BEGIN, END = "<!-- support table: make it with python -m tests.support_table -->", "<!-- end of support table -->"


def _models_of(family: str) -> list[Model]:
    return [model for model in MODELS.values() if family_of(model.name).name == family]


def _kinds() -> dict[str, list[str]]:
    """Modes that differ in their degrees only, by what they have in common."""
    kinds: dict[str, list[str]] = {}
    for mode in MODES:
        kinds.setdefault(re.sub(r" \d+", "", mode), []).append(mode)
    return kinds


def _ranks(modes: list[str]) -> str:
    """How many ranks were tried."""
    return ", ".join(str(num_processes(mode)) for mode in modes)


def _cell(family: str, modes: list[str]) -> str:
    """What the tests show for a family: in every cell that is not refused, N ranks gave what one rank gives."""
    refused = [bool(refusal(model, mode)) for model in _models_of(family) for mode in modes]
    if all(refused):
        return "refused"
    return "yes, where it divides" if any(refused) else "yes"


def table() -> str:
    """Markdown, one row per kind of mode."""
    lines = [f"| mode | ranks tried | {' | '.join(FAMILIES.values())} |", "| --- | --- |" + " --- |" * len(FAMILIES)]
    for kind, modes in _kinds().items():
        cells = " | ".join(_cell(family, modes) for family in FAMILIES)
        lines.append(f"| {kind} | {_ranks(modes)} | {cells} |")
    lines.append("")
    for family, title in FAMILIES.items():
        names = dict.fromkeys(name for model in _models_of(family) for name in model.inputs)
        lines.append(f"- {title}, inputs tried in every mode: {'; '.join(names)}.")
    return "\n".join(lines)


def storage_table() -> str:
    """Markdown: what is held x what is asked of it, as the nodes refuse by it."""
    modes = list(next(iter(SUPPORT.values())))
    lines = [f"| weights held as | {' | '.join(modes)} |", "| --- |" + " --- |" * len(modes)]
    lines += [f"| {held} | {' | '.join(row[mode] for mode in modes)} |" for held, row in SUPPORT.items()]
    return "\n".join(lines)


def section() -> str:
    """The tables between the lines that mark them in the README."""
    return f"{BEGIN}\n\n{table()}\n\n{storage_table()}\n\n{END}"


if __name__ == "__main__":
    sys.stdout.write(section() + "\n")
