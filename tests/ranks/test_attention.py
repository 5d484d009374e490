"""The attention by itself: every mask, any heads, grouped keys, and how partial results of the ring are added up."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.ranks.gloo import run_on_ranks

MODES = [{"ulysses": 3}, {"ring": 3}, {"ring": 2, "ulysses": 2}, {"ring": 4}]
IDS = [" x ".join(f"{axis} {degree}" for axis, degree in mode.items()) for mode in MODES]


@pytest.mark.parametrize(
    "heads", [(4, 4), (3, 3), (4, 2), (6, 1)], ids=lambda heads: f"{heads[0]} over {heads[1]} heads"
)
@pytest.mark.parametrize("mode", MODES, ids=IDS)
def test_every_mask(mode: dict[str, Any], heads: tuple[int, int]) -> None:
    for result in run_on_ranks(
        math.prod(mode.values()), "attention_ranks:masks", mode=mode, heads=heads[0], kv_heads=heads[1]
    ):
        for name, error in result.items():
            assert error <= 2e-6, name


def test_partial_results_are_added_up_in_float32_or_not() -> None:
    for error in run_on_ranks(4, "attention_ranks:merging"):
        assert error["float32"] <= math.sqrt(2) * error["whole"], "a chunk's rounding and the result's"
        assert error["bfloat16"] > error["float32"], "ring_fp32 off costs accuracy"


def test_masks_that_cannot_be_served_are_refused() -> None:
    for texts in run_on_ranks(2, "attention_ranks:refused"):
        assert "differs from query to query" in texts["per query"]
        assert "expected 2 rows and all 21 keys" in texts["too short"]
