"""Flux on real gloo ranks: N ranks compute what one rank computes, and a plan comes off without a trace."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.ranks.gloo import run_on_ranks

HEADS = (4, 3, 6)
# (batch, text tokens, image height, image width): even, odd, fewer text tokens than ranks, more text than image
CASES = [[1, 16, 4, 4], [1, 77, 5, 5], [2, 1, 9, 7], [3, 17, 5, 5], [1, 511, 9, 7]]
EVERY_CASE = [
    [batch, text, *size] for batch, text, size in itertools.product((1, 2, 3), (1, 17, 77, 511), ((5, 5), (9, 7)))
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """A model folder per number of attention heads."""
    root = tmp_path_factory.mktemp("models")
    folders = {heads: str(root / f"heads{heads}") for heads in HEADS}
    models = {path: {"num_attention_heads": heads} for heads, path in folders.items()}
    run_on_ranks(1, "flux_ranks:write_models", models=models)
    return folders


def check(folder: str, shape: tuple[int, int, int], cases: list[list[int]], dtype: str, guidance: bool = True) -> None:
    replicas, ulysses, tensor = shape
    ranks = run_on_ranks(
        replicas * ulysses * tensor,
        "flux_ranks:compare",
        folder=folder,
        shape=shape,
        cases=cases,
        dtype=dtype,
        guidance=guidance,
        timeout=280,
    )
    for rank, results in enumerate(ranks):
        for case, (error, is_equal, rounding) in zip(cases, results, strict=True):
            where = f"{dtype}, shape {shape}, case {case}, rank {rank}: {error:.1e}"
            if dtype == "float32":
                assert error <= 1e-6, where
            elif tensor == 1:
                assert is_equal, where
            else:
                assert error <= rounding, f"{where}, one rank is {rounding:.1e} from float32"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("ulysses", [2, 3, 4])
@pytest.mark.parametrize("heads", HEADS)
def test_ulysses(folder: dict[int, str], heads: int, ulysses: int, dtype: str) -> None:
    check(folder[heads], (1, ulysses, 1), CASES, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("heads", "tensor"), [(4, 2), (6, 2), (4, 4), (3, 3)])
def test_tensor(folder: dict[int, str], heads: int, tensor: int, dtype: str) -> None:
    check(folder[heads], (1, 1, tensor), CASES, dtype)


@pytest.mark.parametrize("shape", [(1, 2, 2), (2, 2, 1), (2, 1, 2)])
def test_axes_together(folder: dict[int, str], shape: tuple[int, int, int]) -> None:
    check(folder[4], shape, CASES, "float32")


def test_more_ulysses_ranks_than_heads_of_a_tensor_rank(folder: dict[int, str]) -> None:
    check(folder[3], (1, 2, 3), [[2, 1, 5, 5]], "float32")


def test_without_guidance(folder: dict[int, str], tmp_path: Path) -> None:
    run_on_ranks(1, "flux_ranks:write_models", models={str(tmp_path): {"guidance_embeds": False}})
    check(str(tmp_path), (1, 2, 1), CASES[:2], "float32", guidance=False)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(
    "shape",
    [(1, 2, 1), (1, 3, 1), (1, 4, 1), (1, 1, 2), (1, 1, 4), (1, 2, 2), (2, 2, 1), (2, 2, 2), (1, 5, 1), (1, 8, 1)],
)
def test_every_case(folder: dict[int, str], shape: tuple[int, int, int], heads: int, dtype: str) -> None:
    if heads % shape[2]:
        pytest.skip(f"tensor {shape[2]} does not divide {heads} heads: refused, see test_loading")
    check(folder[heads], shape, EVERY_CASE, dtype)


@pytest.mark.parametrize("shape", [(1, 2, 1), (1, 1, 2)])
def test_the_check_notices_a_missing_exchange(folder: dict[int, str], shape: tuple[int, int, int]) -> None:
    errors = run_on_ranks(2, "flux_ranks:without_exchange", folder=folder[4], shape=shape)
    assert min(errors) > 1e-3


def test_context_plans_come_and_go_on_the_same_weights(folder: dict[int, str]) -> None:
    shapes = [(1, 4, 1), (2, 2, 1), (4, 1, 1), (1, 4, 1)]
    for result in run_on_ranks(4, "flux_ranks:switch", folder=folder[4], tensor=1, shapes=shapes):
        assert max(result["errors"]) <= 1e-6
        assert result["left"] == []
        assert not result["patched"]
        assert result["alone"], "the bare model must give its old bits again"
        assert result["slowest"] <= 0.2


def test_slices_are_joined_again_over_another_mesh(folder: dict[int, str]) -> None:
    shapes = [(1, 2, 2), (2, 1, 2), (1, 2, 2)]
    for result in run_on_ranks(4, "flux_ranks:switch", folder=folder[4], tensor=2, shapes=shapes):
        assert max(result["errors"]) <= 1e-6
        assert result["left"] == []


def test_what_cannot_be_right_is_refused(folder: dict[int, str]) -> None:
    texts = run_on_ranks(2, "flux_ranks:refusals", folder=folder[4])[0]
    assert "got a mask of shape" in texts["mask"]
    assert "img_ids has shape (1, 16, 3), expected 2 dimensions" in texts["ids with a batch"]
    assert "set up by object" in texts["a configuration of diffusers"]
    assert "'transformer_blocks.0.attn'" in texts["a foreign processor"]
    assert texts["left"] == ""
