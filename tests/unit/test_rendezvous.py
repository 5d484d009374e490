"""Evaluations that meet at the ranks: one operation, a fixed order, and no thread left after a failure."""

from __future__ import annotations

import contextvars
import threading

import pytest
import torch

from tests.unit.package import load

rendezvous = load("nodes.rendezvous")
SeamCall = load("parallel_core.families.base").SeamCall


def call(value: float) -> object:
    return SeamCall(rows={"x": torch.tensor([value])}, shared={})


class Ranks:
    """Doubles what it gets and remembers what came together."""

    def __init__(self) -> None:
        self.operations: list[list[float]] = []

    def __call__(self, calls: list[object]) -> list[torch.Tensor]:
        self.operations.append([float(c.rows["x"]) for c in calls])
        return [c.rows["x"] * 2 for c in calls]


def test_calls_that_meet_are_one_operation() -> None:
    ranks = Ranks()
    work = [lambda v=v: float(rendezvous.submit(call(v), ranks)) + 1 for v in (1.0, 2.0, 3.0)]
    assert rendezvous.run_together(work, ranks) == [3.0, 5.0, 7.0]
    assert ranks.operations == [[1.0, 2.0, 3.0]]


def test_evaluations_may_call_again_or_not_at_all() -> None:
    ranks = Ranks()

    def twice() -> float:
        return float(rendezvous.submit(rendezvous_result(), ranks))

    def rendezvous_result() -> object:
        return call(float(rendezvous.submit(call(1.0), ranks)))

    assert rendezvous.run_together([twice, lambda: "nothing"], ranks) == [4.0, "nothing"]
    assert ranks.operations == [[1.0], [2.0]]


def test_alone_a_call_goes_straight_to_the_ranks() -> None:
    ranks = Ranks()
    assert float(rendezvous.submit(call(4.0), ranks)) == 8.0
    assert ranks.operations == [[4.0]]


def test_evaluations_run_in_turn_so_that_order_never_depends_on_timing() -> None:
    ranks = Ranks()
    order: list[str] = []

    def work(name: str) -> None:
        order.append(f"{name} before")
        rendezvous.submit(call(0.0), ranks)
        order.append(f"{name} after")

    rendezvous.run_together([lambda: work("a"), lambda: work("b")], ranks)
    assert order == ["a before", "b before", "a after", "b after"]


def test_a_failure_is_raised_and_leaves_no_thread() -> None:
    ranks = Ranks()

    def fails() -> None:
        raise KeyError("boom")

    before = threading.active_count()
    with pytest.raises(KeyError, match="boom"):
        rendezvous.run_together([lambda: rendezvous.submit(call(1.0), ranks), fails], ranks)
    for thread in threading.enumerate():
        if thread.name.startswith("Thread-"):
            thread.join(timeout=5)
    assert threading.active_count() == before
    assert ranks.operations == [], "nothing was sent for a run that had failed already"


def test_a_failure_of_the_ranks_reaches_the_caller() -> None:
    def broken(calls: list[object]) -> list[torch.Tensor]:
        raise RuntimeError("rank 1 died")

    with pytest.raises(RuntimeError, match="rank 1 died"):
        rendezvous.run_together([lambda: rendezvous.submit(call(1.0), broken)] * 2, broken)


def test_the_callers_context_and_inference_mode_hold_in_the_threads() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")
    variable.set("set")
    with torch.inference_mode():
        seen = rendezvous.run_together(
            [lambda: (variable.get(), torch.is_inference_mode_enabled(), torch.is_grad_enabled())] * 2, Ranks()
        )
    assert seen == [("set", True, False)] * 2
