"""Looks at what the demo model draws: a contact sheet for people, and a classifier's word on obedience.

Knows the pipeline only as something that turns prompts into pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from diffusers import FluxPipeline
from PIL import Image
from sklearn.svm import SVC
from torch.nn import functional

from .pictures import INKS, DigitPainter

Sampler = Callable[[Sequence[str], int], np.ndarray]


def sampler_of(pipeline: FluxPipeline, steps: int, height: int = 64, width: int = 64, text: int = 64) -> Sampler:
    """A function of (prompts, seed) that gives pictures [n, height, width, 3] in 0..1: Euler steps, no guidance."""
    pipeline.set_progress_bar_config(disable=True)

    def sample(prompts: Sequence[str], seed: int) -> np.ndarray:
        result = pipeline(
            prompt=list(prompts),
            height=height,
            width=width,
            num_inference_steps=steps,
            sigmas=np.linspace(1.0, 1 / steps, steps).tolist(),
            generator=torch.Generator().manual_seed(seed),
            max_sequence_length=text,
            output_type="np",
        )
        return np.asarray(result.images)

    return sample


class Judge:
    """Names the digit and the ink of a picture; learned from pictures of the painter."""

    def __init__(self, painter: DigitPainter) -> None:
        pictures = painter.draw(3000)
        self._classifier = SVC(C=10.0)
        self._classifier.fit(_coverage(_as_images(pictures.pixels)), pictures.digits.numpy())

    def digits(self, images: np.ndarray) -> np.ndarray:
        """The digit of each picture [n, 64, 64, 3]."""
        return self._classifier.predict(_coverage(images))

    def inks(self, images: np.ndarray) -> np.ndarray:
        """The index in ``INKS`` that is nearest to the mean colour of each picture's darkest pixels."""
        pixels = images.reshape(len(images), -1, 3)
        darkest = np.argsort(pixels.min(axis=2), axis=1)[:, :100]
        mean = np.take_along_axis(pixels, darkest[:, :, None], axis=1).mean(axis=1)
        return np.linalg.norm(mean[:, None] - np.array(list(INKS.values()))[None], axis=2).argmin(axis=1)


def save_sheet(rows: Sequence[np.ndarray], path: str, zoom: int = 2) -> None:
    """Writes rows of pictures of one size as one PNG."""
    sheet = np.concatenate([np.concatenate(list(row), axis=1) for row in rows], axis=0)
    image = Image.fromarray((sheet.clip(0, 1) * 255).round().astype(np.uint8))
    image.resize((image.width * zoom, image.height * zoom), Image.Resampling.BICUBIC).save(path)


def _as_images(pixels: torch.Tensor) -> np.ndarray:
    return ((pixels + 1) / 2).permute(0, 2, 3, 1).numpy()


def _coverage(images: np.ndarray) -> np.ndarray:
    """Where ink is, as features [n, 256]: every ink is dark in one channel at least, the paper in none."""
    ink = torch.tensor(images, dtype=torch.float32).amin(dim=-1)
    return functional.avg_pool2d(((0.9 - ink) / 0.8).clamp(0, 1)[:, None], 4).flatten(1).numpy()
