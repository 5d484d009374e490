"""How a family's weights are named and arranged where they do not come from a diffusers folder.

Owns `Original`, which says where a diffusers weight lies in the layout of ComfyUI's own model (that of single files and
of LoRA keys), and what a family declares about single files. Knows no family, no file and no tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Shape = tuple[int, ...]
Config = Mapping[str, Any]
Rows = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Original:
    """Some rows (dim 0) of a tensor of the original layout, which together are one diffusers weight.

    A fused projection holds several weights one below the other; the two halves of Flux's last modulation have changed
    places. `rows`: (first, one past the last), in the diffusers weight's order; None for all of them.
    """

    name: str
    rows: Rows | None = None


class Shapes:
    """Shapes by diffusers names, of a file whose names may be the original ones."""

    def __init__(self, stored: Mapping[str, Shape], rename: Callable[[str], str]) -> None:
        self._stored = stored
        self._rename = rename

    def __getitem__(self, name: str) -> Shape:
        """`MissingWeightError` where the file has no such tensor."""
        found = self.get(name)
        if found is None:
            raise MissingWeightError(self._rename(name))
        return found

    def get(self, name: str) -> Shape | None:
        """None where the file has no such tensor."""
        return self._stored.get(self._rename(name))

    def __contains__(self, name: str) -> bool:
        return self._rename(name) in self._stored

    def count(self, pattern: str) -> int:
        """How many tensors there are for `pattern` with {} = 0, 1, 2 ...; `MissingWeightError` for a gap."""
        number = 0
        while pattern.format(number) in self:
            number += 1
        if any(pattern.format(later) in self for later in range(number + 1, number + _LONGEST_GAP)):
            raise MissingWeightError(self._rename(pattern.format(number)))
        return number


_LONGEST_GAP = 100
"""Blocks that are looked for behind the first that is missing."""


class MissingWeightError(KeyError):
    """A tensor that every file of the family has is not there. `args[0]` is its name in the file."""


@dataclass(frozen=True, kw_only=True)
class FileLayout:
    """What a family declares about its single files.

    `rename(diffusers name)` is the tensor's name in the original layout; `rows(diffusers name, length, config)` the
    rows of it that the weight of that length (dim 0) has, where that is not all of them. `marks`: diffusers names of
    tensors that together tell the family, in both layouts. `variant(shapes)` names the preset that holds what shapes
    do not show; `structure(shapes, preset)` are the config fields that they do show.
    """

    rename: Callable[[str], str]
    marks: tuple[str, ...]
    variant: Callable[[Shapes], str]
    presets: Mapping[str, Config]
    structure: Callable[[Shapes, Config], dict[str, Any]]
    rows: Callable[[str, int, Config], Rows | None] = lambda name, length, config: None
    canonical: Callable[[str], str] = lambda name: name
    """Another spelling of an original name -> the one that `rename` gives."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Tensors (globs, original names) of models that look like this family and are another: glob -> what it is."""
    flags: Mapping[str, Config] = field(default_factory=dict)
    """Tensors that are no weights, and the config fields that their presence says."""

    def weights(self, shapes: Mapping[str, Shape], config: Config) -> dict[str, Original]:
        """Where each weight of the diffusers model lies in the original layout; `shapes` are the diffusers model's."""
        return {
            name: Original(self.rename(name), self.rows(name, shape[0], config) if shape else None)
            for name, shape in shapes.items()
        }


def renamed(name: str, parts: Mapping[str, str]) -> str:
    """`name` with the longest of `parts` that it starts with, at a dot, replaced."""
    for start in sorted(parts, key=len, reverse=True):
        if name == start or name.startswith(f"{start}."):
            return parts[start] + name[len(start) :]
    return name


def reverse(weights: Mapping[str, Original]) -> dict[str, list[tuple[str, Original]]]:
    """Which diffusers weights an original tensor becomes: original name -> [(diffusers name, its rows)]."""
    found: dict[str, list[tuple[str, Original]]] = {}
    for name, original in weights.items():
        found.setdefault(original.name, []).append((name, original))
    return found
