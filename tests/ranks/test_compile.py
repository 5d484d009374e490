"""Compiled blocks of every family under every axis give the numbers of one rank that is not compiled."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.gloo import run_on_ranks
from tests.ranks.matrix import MODELS

CASES = [
    ("flux", {"tensor": 2}),
    ("qwen", {"ulysses": 2}),
    ("qwen", {"ring": 2}),
    ("wan", {"ulysses": 2}),
    ("wan", {"tensor": 2}),
]


@pytest.mark.full
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler on CPU ranks")
@pytest.mark.parametrize(("model", "mode"), CASES, ids=lambda part: part if isinstance(part, str) else "-".join(part))
def test_compiled_blocks(tmp_path: Path, model: str, mode: dict[str, Any]) -> None:
    folder, inputs = str(tmp_path / "model"), list(MODELS[model].inputs.values())[:2]
    run_on_ranks(1, "transformer_ranks:write_models", name=model, models={folder: {}})
    settings = {"name": model, "folder": folder, "mode": {**mode, "compile": "default"}, "dtype": "float32"}
    ranks = run_on_ranks(math.prod(mode.values()), "transformer_ranks:compare", timeout=280, cases=inputs, **settings)
    for results in ranks:
        assert max(error for error, _, _ in results) <= 1e-6
