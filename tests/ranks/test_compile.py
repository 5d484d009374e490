"""Compiled blocks of every family under every axis give the numbers of one rank that is not compiled."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.ranks.gloo import run_on_ranks
from tests.ranks.matrix import CAN_COMPILE, MODELS, NO_COMPILER

CASES = [
    ("flux", "default", {"tensor": 2}),
    ("flux", "max-autotune-no-cudagraphs", {"ulysses": 2}),
    ("qwen", "default", {"ulysses": 2}),
    ("qwen", "default", {"ring": 2}),
    ("wan", "default", {"ulysses": 2}),
    ("wan", "default", {"tensor": 2}),
]


@pytest.mark.full
@pytest.mark.skipif(not CAN_COMPILE, reason=NO_COMPILER)
@pytest.mark.parametrize(
    ("model", "how", "degrees"), CASES, ids=lambda part: part if isinstance(part, str) else "-".join(part)
)
def test_compiled_blocks(tmp_path: Path, model: str, how: str, degrees: dict[str, int]) -> None:
    folder, inputs = str(tmp_path / "model"), list(MODELS[model].inputs.values())[-3:-1]  # Qwen-Image: with masks
    run_on_ranks(1, "transformer_ranks:write_models", name=model, models={folder: {}})
    settings = {"name": model, "folder": folder, "mode": {**degrees, "compile": how}, "dtype": "float32"}
    ranks = run_on_ranks(
        math.prod(degrees.values()), "transformer_ranks:compare", timeout=280, cases=inputs, **settings
    )
    for results in ranks:
        assert max(error for error, _, _ in results) <= 1e-6
