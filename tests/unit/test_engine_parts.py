"""The engine's plain parts: the ledger, the dealing of rows, device tokens, a rank's environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallel_core.engine import Engine
from parallel_core.engine.devices import tokens_for, visible_tokens
from parallel_core.engine.engine import WORKSPACE_BYTES
from parallel_core.engine.group import GroupKey, RankReply
from parallel_core.engine.ledger import Ledger
from parallel_core.engine.models import TransformerSpec
from parallel_core.engine.transformer import share_rows
from parallel_core.errors import RankError, RankFailure
from parallel_core.launch.environment import rank_environment, threads_per_rank
from parallel_core.plan import DeviceInfo
from parallel_core.protocol import Request, Status

GROUP = GroupKey(devices=("cuda:0", "cuda:1"))
ONE = GroupKey(devices=("cuda:1",))

# ----- ledger -----


def test_the_least_recently_used_model_yields_first() -> None:
    ledger = Ledger()
    ledger.record(GROUP, "old", "the old one", {"cuda:0": 10, "cuda:1": 10})
    ledger.record(GROUP, "new", "the new one", {"cuda:0": 10, "cuda:1": 10})
    assert [h.key for h in ledger.to_yield({"cuda:0": 8}, {"cuda:0": 5}, keep=())] == ["old"]
    ledger.touch(GROUP, "old")
    assert [h.key for h in ledger.to_yield({"cuda:0": 8}, {"cuda:0": 5}, keep=())] == ["new"]


def test_nobody_yields_when_there_is_room() -> None:
    ledger = Ledger()
    ledger.record(GROUP, "model", "a model", {"cuda:0": 10})
    assert ledger.to_yield({"cuda:0": 5}, {"cuda:0": 5}, keep=()) == []


def test_only_what_helps_yields() -> None:
    ledger = Ledger()
    ledger.record(ONE, "elsewhere", "on the other card", {"cuda:1": 10})
    parked = ledger.record(GROUP, "parked", "parked already", {"cuda:0": 10})
    ledger.park(GROUP, "parked")
    kept = ledger.record(GROUP, "kept", "what is being loaded", {"cuda:0": 10})
    assert ledger.to_yield({"cuda:0": 50}, {"cuda:0": 0}, keep=(kept,)) == []
    assert not parked.resident


def test_a_group_that_ends_takes_its_holdings_along() -> None:
    ledger = Ledger()
    ledger.record(GROUP, "a", "a", {"cuda:0": 1})
    ledger.record(ONE, "b", "b", {"cuda:1": 1})
    ledger.drop_group(GROUP)
    assert [h.key for h in ledger.of_group(ONE)] == ["b"]
    assert ledger.of_group(GROUP) == []


class OneRank:
    """Stands in for a group: a rank that says how much its GPU has free."""

    key = GROUP
    alive = True

    def __init__(self, free: int) -> None:
        self._free = free

    def request(self, request: Request, *args: object, **options: object) -> list[RankReply]:
        assert isinstance(request, Status)
        return [RankReply(rank=0, device="cuda:0", data={"free_bytes": {"cuda:0": self._free}}, tensors={})]


def test_a_load_makes_room_and_says_so() -> None:
    asked: list[tuple[str, int]] = []
    gpu = DeviceInfo(name="cuda:0", uuid="", token="0", total_bytes=20)
    engine = Engine(
        Path(),
        environ={},
        free_host=lambda device, size: asked.append((device, size)),
        list_devices=lambda: (gpu,),
    )
    engine.ledger.record(GROUP, "old", "flux transformer of big", {"cuda:0": 10})
    engine._make_room(OneRank(free=5), {"cuda:0": 8, "cpu:0": 8}, keep=())  # type: ignore[arg-type]
    assert asked == [("cuda:0", 8 + WORKSPACE_BYTES)], "only GPUs: CPU ranks share one memory"
    assert engine.take_notices() == ["flux transformer of big left the devices to make room"]


# ----- rows -----


def test_equal_prompts_run_as_one_batch() -> None:
    assert share_rows([2, 2], ["x", "x"], 1, [99, 99]) == [[[(0, 0, 2), (1, 0, 2)]]]


def test_prompts_of_different_length_run_one_after_the_other() -> None:
    assert share_rows([1, 1], ["short", "long"], 1, [99, 99]) == [[[(0, 0, 1)], [(1, 0, 1)]]]


def test_prompts_of_equal_length_share_a_batch_whatever_stands_between_them() -> None:
    shares = share_rows([1, 1, 1], ["short", "long", "short"], 1, [99] * 3)
    assert shares == [[[(0, 0, 1), (2, 0, 1)], [(1, 0, 1)]]]


def test_the_two_halves_of_cfg_go_to_two_replicas() -> None:
    assert share_rows([1, 1], ["short", "long"], 2, [99, 99]) == [[[(0, 0, 1)]], [[(1, 0, 1)]]]


def test_an_uneven_tail() -> None:
    assert share_rows([3], ["x"], 2, [99]) == [[[(0, 0, 2)]], [[(0, 2, 3)]]]


def test_more_replicas_than_rows_leave_some_idle() -> None:
    assert share_rows([1], ["x"], 3, [99]) == [[[(0, 0, 1)]], [], []]


def test_a_batch_larger_than_memory_runs_in_even_waves() -> None:
    (share,) = share_rows([9], ["x"], 1, [4])
    assert share == [[(0, 0, 3)], [(0, 3, 6)], [(0, 6, 9)]]


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_every_row_runs_exactly_once(replicas: int) -> None:
    shares = share_rows([3, 1, 4], ["a", "b", "a"], replicas, [2, 2, 3])
    rows = [
        (call, row)
        for batches in shares
        for batch in batches
        for call, first, last in batch
        for row in range(first, last)
    ]
    assert sorted(rows) == [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1), (2, 2), (2, 3)]


# ----- devices -----


def test_tokens_go_through_the_parents_own_mask() -> None:
    assert visible_tokens(2, {}) == ("0", "1")
    assert visible_tokens(2, {"CUDA_VISIBLE_DEVICES": "3, GPU-abc"}) == ("3", "GPU-abc")


def test_a_rank_sees_its_own_device_only() -> None:
    gpus = [DeviceInfo(name=f"cuda:{i}", uuid="", token=str(5 + i), total_bytes=1) for i in range(3)]
    assert tokens_for(("cuda:2",), gpus) == ("7",)
    assert tokens_for(("cpu:0",), gpus) == ()


def test_a_ranks_environment_is_its_own() -> None:
    parent = {
        "PATH": "/bin",
        "PYTHONPATH": "/comfy",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync",
        "MASTER_PORT": "1",
    }
    env = rank_environment(parent, rank=1, world_size=2, visible_devices=("7",), threads=3)
    assert env["CUDA_VISIBLE_DEVICES"] == "7"
    assert env["GLOO_SOCKET_IFNAME"] == env["NCCL_SOCKET_IFNAME"] == "lo"
    assert env["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert (env["RANK"], env["WORLD_SIZE"], env["OMP_NUM_THREADS"], env["PATH"]) == ("1", "2", "3", "/bin")
    assert not {"PYTHONPATH", "MASTER_PORT"} & set(env)


def test_threads_are_what_the_user_set() -> None:
    assert threads_per_rank({"OMP_NUM_THREADS": "3"}, 2) == 3
    assert threads_per_rank({}, 10_000) == 1


# ----- specs and errors -----


def test_equal_specs_have_equal_keys() -> None:
    parts = dict(folder="f", fingerprint="1", family="flux", name="n", dtype="float32", num_bytes=100, tensor=1)
    one = TransformerSpec(devices=("cpu:0",), **parts)
    same = TransformerSpec(devices=("cpu:0",), **parts)
    replaced_file = TransformerSpec(devices=("cpu:0",), **{**parts, "fingerprint": "2"})
    assert one.key == same.key != replaced_file.key


def test_the_earliest_failure_is_the_cause() -> None:
    late = RankFailure(rank=0, device="cpu:0", operation="forward", type="Closed", message="peer closed", when=2.0)
    early = RankFailure(rank=1, device="cpu:1", operation="forward", type="KeyError", message="boom", when=1.0)
    text = str(RankError([late, early]))
    assert text.startswith("rank 1 (cpu:1) in forward: KeyError: boom")
    assert "also: rank 0 (cpu:0) in forward: Closed: peer closed" in text
