"""The harness itself: results come back in rank order, failures and hangs are told apart, nothing is left behind."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks.gloo import RankFailed, run_on_ranks


def summed(rank: int, world_size: int, start: int) -> list[int]:
    value = torch.tensor([start + rank])
    dist.all_reduce(value)
    return [rank, int(value), os.getpid()]


def fails_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("only rank 1")
    dist.barrier()


def waits_for_ever(rank: int, world_size: int) -> None:
    while True:
        time.sleep(0.01)


def dies(rank: int, world_size: int) -> None:
    if rank == 0:
        os.kill(os.getpid(), 9)
    dist.barrier()


def test_every_rank_answers() -> None:
    results = run_on_ranks(3, "test_gloo:summed", start=10)
    assert [result[:2] for result in results] == [[0, 33], [1, 33], [2, 33]]
    assert not any(os.path.exists(f"/proc/{pid}") for _, _, pid in results)


def test_the_first_failure_is_the_cause() -> None:
    with pytest.raises(RankFailed, match="rank 1(.|\n)*ValueError: only rank 1"):
        run_on_ranks(2, "test_gloo:fails_on_one")


def test_a_killed_rank_is_named() -> None:
    with pytest.raises(RankFailed, match="rank 0(.|\n)*SIGKILL"):
        run_on_ranks(2, "test_gloo:dies")


def test_a_hang_ends_with_the_stacks() -> None:
    with pytest.raises(RankFailed, match="not finished after 1 s(.|\n)*most recent call first"):
        run_on_ranks(2, "test_gloo:waits_for_ever", timeout=1)
