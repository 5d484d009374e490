"""The cache of device meshes: every axis works, their number is bounded, nothing leaks."""

from __future__ import annotations

from tests.ranks.gloo import run_on_ranks

SHAPES = [(4, 1, 1, 1), (2, 1, 2, 1), (1, 1, 4, 1), (1, 2, 2, 1), (1, 1, 1, 4)]


def test_evicted_meshes_leave_nothing_behind() -> None:
    for result in run_on_ranks(4, "transformer_ranks:cycle_meshes", shapes=SHAPES, rounds=6, most=2):
        assert result["right"] and result["same"]
        assert result["world"] == 4
        (threads, files), *_, (last_threads, last_files) = result["sizes"][1:]
        assert last_threads <= threads and last_files <= files


def test_meshes_are_built_once() -> None:
    result = run_on_ranks(4, "transformer_ranks:cycle_meshes", shapes=SHAPES, rounds=3, most=8)[0]
    assert result["right"] and result["same"]
    assert result["sizes"][0] == result["sizes"][-1]
