"""Draws the training pictures: scikit-learn's hand-written digits as crisp coloured ink on light paper.

Owns the palette and the geometry. Does not know prompts or models. Data: scikit-learn's ``load_digits``, the test part
of the UCI ML hand-written digits data set (E. Alpaydin, C. Kaynak; CC BY 4.0), 1797 pictures of 8x8 pixels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import cross_val_predict
from sklearn.svm import SVC
from torch.nn import functional

INKS: dict[str, tuple[float, float, float]] = {
    "red": (0.82, 0.10, 0.14),
    "orange": (0.96, 0.52, 0.05),
    "green": (0.08, 0.55, 0.25),
    "blue": (0.10, 0.30, 0.80),
    "purple": (0.52, 0.18, 0.66),
    "black": (0.10, 0.10, 0.13),
}
PAPER = (0.975, 0.955, 0.905)
DIGIT_SHARE = 0.92  # of the canvas' shorter side is taken by the padded 10x10 cells of a digit
INK_THRESHOLD = 0.40
INK_SHARPNESS = 16.0
LEGIBLE_SHARE = 0.4  # of each digit's pictures is drawn: those that a classifier which never saw them finds clearest


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """Pictures [n, 3, height, width] in -1..1 with what each shows; indices into ten digits and ``INKS``."""

    pixels: torch.Tensor
    digits: torch.Tensor
    inks: torch.Tensor


def legible_digits() -> tuple[np.ndarray, np.ndarray]:
    """The clearest of the data set's digits: images [n, 8, 8] in 0..16 and labels [n]."""
    data = load_digits()
    scores = cross_val_predict(SVC(), data.data, data.target, cv=5, method="decision_function")
    own = scores[np.arange(len(scores)), data.target]
    scores[np.arange(len(scores)), data.target] = -np.inf
    margin = own - scores.max(axis=1)
    keep = np.zeros(len(margin), dtype=bool)
    for digit in range(10):
        members = np.flatnonzero(data.target == digit)
        clearest = members[np.argsort(-margin[members], kind="stable")]
        keep[clearest[: int(len(members) * LEGIBLE_SHARE)]] = True
    return data.images[keep], data.target[keep]


class DigitPainter:
    """Draws random digits of the data set; every draw comes from the generator it was given."""

    def __init__(self, generator: torch.Generator) -> None:
        images, labels = legible_digits()
        self._cells = functional.pad(torch.tensor(images, dtype=torch.float32) / 16.0, (1, 1, 1, 1))[:, None]
        self._labels = torch.tensor(labels)
        self._inks = torch.tensor(list(INKS.values()))
        self._generator = generator

    def draw(self, count: int, height: int = 64, width: int = 64) -> Pictures:
        """``count`` pictures of random digits in random inks, slightly moved, scaled and slanted."""
        index = torch.randint(len(self._labels), (count,), generator=self._generator)
        inks = torch.randint(len(self._inks), (count,), generator=self._generator)
        alpha = self._strokes(self._cells[index], height, width)
        ink = self._inks[inks] + 0.02 * torch.randn(count, 3, generator=self._generator)
        pixels = self._paper(count, height, width) * (1 - alpha) + ink[:, :, None, None] * alpha
        return Pictures(pixels=pixels.clamp(0, 1) * 2 - 1, digits=self._labels[index], inks=inks)

    def _uniform(self, count: int, spread: float) -> torch.Tensor:
        return (torch.rand(count, generator=self._generator) * 2 - 1) * spread

    def _strokes(self, cells: torch.Tensor, height: int, width: int) -> torch.Tensor:
        """Ink coverage [n, 1, height, width]: a smooth enlargement of the cells, cut at a level."""
        count = len(cells)
        shorter = min(height, width)
        scale = 1 / (DIGIT_SHARE * (1 + self._uniform(count, 0.03)))
        rotation = torch.zeros(count, 2, 3)
        rotation[:, 0, 0] = scale * width / shorter
        rotation[:, 1, 1] = scale * height / shorter
        rotation[:, 0, 1] = self._uniform(count, 0.06)
        rotation[:, 0, 2] = self._uniform(count, 0.03)
        rotation[:, 1, 2] = self._uniform(count, 0.03)
        grid = functional.affine_grid(rotation, [count, 1, height, width], align_corners=False)
        smooth = functional.grid_sample(cells, grid, mode="bicubic", padding_mode="zeros", align_corners=False)
        return torch.sigmoid((smooth - INK_THRESHOLD) * INK_SHARPNESS)

    def _paper(self, count: int, height: int, width: int) -> torch.Tensor:
        """Cream paper, a little lighter towards one side."""
        x = torch.linspace(-1, 1, width)[None, None, None, :]
        y = torch.linspace(-1, 1, height)[None, None, :, None]
        slope = self._uniform(2 * count, 0.02).view(2, count, 1, 1, 1)
        return torch.tensor(PAPER)[None, :, None, None] + slope[0] * x + slope[1] * y - 0.01
