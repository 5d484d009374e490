"""A rank needs little more memory than the part of a file that it holds, and keeps no map of the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks.gloo import run_on_ranks

FILES = {
    "original.safetensors": "original",
    "old-scaled.safetensors": "old-scaled",
    "new-scaled.safetensors": "new-scaled",
    "model.gguf": "gguf",
}
MOST = 1.3
"""Of what is held then. The largest weight is a twentieth of a rank's part."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("middle")
    run_on_ranks(1, "loading_ranks:write_middle", timeout=300, root=str(root), files=FILES)
    return root


@pytest.mark.parametrize("weight_dtype", ["default", "bfloat16"])
@pytest.mark.parametrize("file", FILES)
def test_a_tensor_rank_needs_little_more_than_it_holds(root: Path, file: str, weight_dtype: str) -> None:
    size = (root / "original.safetensors").stat().st_size
    ranks = run_on_ranks(2, "loading_ranks:load_slices", timeout=300, file=str(root / file), weight_dtype=weight_dtype)
    for rank in ranks:
        packed = weight_dtype == "default" and file != "original.safetensors"
        assert 0.25 * size < rank["held"] < (0.31 if packed else 0.53) * size
        assert rank["peak"] <= MOST * rank["held"]
        assert rank["mapped"] == []


@pytest.mark.parametrize("weight_dtype", ["default", "bfloat16"])
@pytest.mark.parametrize("file", ["new-scaled.safetensors", "model.gguf"])
def test_so_does_a_model_that_lies_in_several_places(root: Path, file: str, weight_dtype: str) -> None:
    limits = {"cpu:0": 60_000_000, "cpu": 40_000_000, "disk": 1 << 40}
    (placed,) = run_on_ranks(
        1, "loading_ranks:place", timeout=300, file=str(root / file), weight_dtype=weight_dtype, limits=limits
    )
    assert {"cpu", "disk"} & {*placed["homes"]}
    assert placed["peak"] <= MOST * placed["held"]
    assert placed["mapped"] == []
