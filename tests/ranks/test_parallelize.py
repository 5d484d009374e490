"""Plans come and go on the same weights without a trace, and what cannot be right is refused."""

from __future__ import annotations

import pytest

from tests.ranks.gloo import run_on_ranks

CONTEXT = [
    {"ulysses": 4},
    {"ring": 2, "ulysses": 2},
    {"replicas": 2, "ulysses": 2},
    {"ring": 4},
    {"replicas": 4, "attention_backend": "_native_math"},
    {"ulysses": 4, "ring_fp32": False},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("models") / "flux")
    run_on_ranks(1, "transformer_ranks:write_models", name="flux", models={path: {}})
    return path


def test_context_modes_come_and_go_on_the_same_weights(folder: str) -> None:
    for result in run_on_ranks(4, "transformer_ranks:switch", name="flux", folder=folder, tensor=1, modes=CONTEXT):
        assert max(result["errors"]) <= 1e-6
        assert result["left"] == []
        assert not result["patched"]
        assert result["alone"], "the bare model must give its old bits again"
        assert result["slowest"] <= 0.2


def test_slices_are_joined_again_over_another_mesh(folder: str) -> None:
    modes = [{"ulysses": 2, "tensor": 2}, {"replicas": 2, "tensor": 2}, {"ring": 2, "tensor": 2}]
    for result in run_on_ranks(4, "transformer_ranks:switch", name="flux", folder=folder, tensor=2, modes=modes):
        assert max(result["errors"]) <= 1e-6
        assert result["left"] == []


def test_what_cannot_be_right_is_refused(folder: str) -> None:
    texts = run_on_ranks(2, "transformer_ranks:refusals", folder=folder)[0]
    assert "expected 1 rows and all 32 keys" in texts["mask"]
    assert "img_ids has shape (1, 16, 3), expected 2 dimensions" in texts["ids with a batch"]
    assert "set up by object" in texts["a configuration of diffusers"]
    assert "'transformer_blocks.0.attn'" in texts["a foreign processor"]
    assert texts["left"] == ""
