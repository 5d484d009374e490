"""What the engine does when ranks refuse, die, hang or are cancelled, and how everything ends."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from parallel_core.engine import Engine, GroupKey
from parallel_core.errors import Cancelled, RankError, RankUserError
from parallel_core.plan import ParallelPlan
from parallel_core.protocol import Ping, Request
from tests.ranks.engines import make_engine
from tests.ranks.remote_flux import TWO, assert_close, call, expected, holds, ledger, remote
from tests.tiny_flux import write_transformer

# ----- errors -----


@dataclass(frozen=True, kw_only=True)
class Nonsense(Request):
    """An operation that no rank knows."""

    operation: ClassVar[str] = "nonsense"


def test_an_error_that_every_rank_reports_leaves_the_group_alive(engine: Engine) -> None:
    key = GroupKey(devices=TWO)
    group = engine.group(key)
    with pytest.raises(RankError, match=r"(?s)Unknown operation 'nonsense'.*also: rank"):
        engine.request_group(group, Nonsense())
    assert len(engine.request_group(group, Ping())) == 2
    assert engine.group(key) is group


def test_a_file_that_broke_since_is_a_users_error_and_nothing_stays_half_loaded(engine: Engine, tmp_path: Path) -> None:
    folder = write_transformer(tmp_path / "cut")
    file = folder / "diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    model = remote(engine, folder, ParallelPlan(devices=TWO, replicas=2))
    with pytest.raises(RankUserError, match="is cut off"):
        model.evaluate([call(2, text=4)], label="forward")
    assert all(model.spec.key not in rank for rank in ledger(engine, model))


@pytest.mark.slow
@pytest.mark.parametrize("what", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung"])
def test_a_rank_lost_while_idle_is_replaced_by_the_next_request(engine: Engine, tiny_flux: Path, what: int) -> None:
    model = remote(engine, tiny_flux, ParallelPlan(devices=TWO, ulysses=2))
    calls = [call(1, text=4)]
    model.evaluate(calls, label="forward")
    group = engine.group(model.spec.group)
    group.last_use -= 60  # as if it had been a minute
    os.kill(group.links[1].process.pid, what)
    assert_close(model.evaluate(calls, label="forward"), expected(calls))
    assert not group.alive


def test_a_rank_killed_during_a_request_is_named_with_its_signal(engine: Engine) -> None:
    key = GroupKey(devices=TWO)
    group = engine.group(key)
    victim = group.links[1].process.pid
    os.kill(victim, signal.SIGSTOP)  # so that it cannot answer before it is killed
    threading.Timer(0.3, os.kill, (victim, signal.SIGKILL)).start()
    started = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 \(cpu:1\) in ping: RankDied: .*killed by SIGKILL"):
        engine.request_group(group, Ping())
    assert time.monotonic() - started < 5
    assert all(link.process.poll() is not None for link in group.links), "the others were ended"
    assert len(engine.request(key, Ping())) == 2


@pytest.mark.slow
def test_a_silent_rank_is_ended_at_the_deadline_with_its_stacks(engine: Engine) -> None:
    key = GroupKey(devices=TWO)
    group = engine.group(key)
    os.kill(group.links[0].process.pid, signal.SIGSTOP)
    with pytest.raises(RankError, match="rank 0 .*Timeout: no answer after 1 s"):
        engine.request_group(group, Ping(), deadline=1.0)
    assert not group.alive
    assert len(engine.request(key, Ping())) == 2


def test_cancel_drains_the_ranks_and_keeps_them(engine: Engine, tiny_flux: Path) -> None:
    model = remote(engine, tiny_flux, ParallelPlan(devices=TWO, ulysses=2))
    calls = [call(1, text=4)]
    model.ensure_loaded()
    group = engine.group(model.spec.group)
    with pytest.raises(Cancelled):
        model.evaluate(calls, label="forward", poll=lambda: True)
    assert engine.group(model.spec.group) is group
    assert_close(model.evaluate(calls, label="forward"), expected(calls))


def test_a_python_that_is_not_there_is_named(tmp_path: Path) -> None:
    engine = make_engine(python=str(tmp_path / "no-python"))
    with pytest.raises(ValueError, match="PARALLEL_DIFFUSION_PYTHON"):
        engine.request(GroupKey(devices=TWO), Ping())
    assert engine.num_starts == 0


def test_ranks_that_die_while_starting_fail_the_start_at_once(tmp_path: Path) -> None:
    """The interpreter passes the check of its packages, but as a rank it ends with a message."""
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\n[ "$2" = parallel_core.worker ] && {{ echo "no room on device" >&2; exit 3; }}\n'
        f'exec "{sys.executable}" "$@"\n'
    )
    python.chmod(0o755)
    engine = make_engine(python=str(python))
    try:
        with pytest.raises(RankError, match="(?s)in start: RankDied: .*exit code 3.*no room on device"):
            engine.request(GroupKey(devices=TWO), Ping())
        assert engine.status() == []
    finally:
        engine.shutdown()


def test_cancel_while_loading_leaves_nothing_unknown_on_the_ranks(engine: Engine, tmp_path: Path) -> None:
    model = remote(engine, write_transformer(tmp_path / "cancelled"), ParallelPlan(devices=TWO, replicas=2))
    with pytest.raises(Cancelled):
        model.ensure_loaded(poll=lambda: True)
    assert engine.is_resident(model.spec), "the load was finished and noted, so the next prompt is warm"
    engine.release_later(model.spec.group, model.spec.key)
    assert not holds(engine, model)


def test_ranks_that_were_just_ended_are_not_asked(engine: Engine) -> None:
    group = engine.group(GroupKey(devices=TWO))
    group.kill()
    with pytest.raises(RankError, match="have just been ended"):
        engine.request_group(group, Ping(), {"large": torch.zeros(1 << 20)})
    assert len(engine.request(GroupKey(devices=TWO), Ping())) == 2


# ----- ends -----


@pytest.fixture
def own_engine() -> Iterator[Engine]:
    engine = make_engine()
    yield engine
    engine.shutdown()


@pytest.mark.slow
def test_the_thread_that_first_asked_may_end(own_engine: Engine) -> None:
    key = GroupKey(devices=("cpu:0",))
    thread = threading.Thread(target=lambda: own_engine.request(key, Ping()))
    thread.start()
    thread.join()
    gc.collect()
    assert len(own_engine.request(key, Ping())) == 1
    assert own_engine.num_starts == 1


@pytest.mark.slow
def test_shutdown_leaves_nothing(own_engine: Engine) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    threads = threading.active_count()
    key = GroupKey(devices=TWO)
    own_engine.request(key, Ping())
    links = own_engine.group(key).links
    folder = links[0].log_path.parent.parent
    assert folder.stat().st_mode & 0o777 == 0o700
    own_engine.shutdown()
    assert all(link.process.poll() is not None for link in links)
    assert not folder.exists()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert threading.active_count() <= threads + 1, "the launcher's thread stays, ranks' lives hang on it"
    assert len(own_engine.request(key, Ping())) == 2, "an engine that was shut down starts anew"


@pytest.mark.slow
def test_shutdown_does_not_wait_for_a_request_in_flight(own_engine: Engine) -> None:
    key = GroupKey(devices=TWO)
    group = own_engine.group(key)
    os.kill(group.links[0].process.pid, signal.SIGSTOP)  # so that the request cannot end
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            own_engine.request_group(group, Ping())
        except RankError as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    while group.lock.acquire(blocking=False):  # until the thread is in its request
        group.lock.release()
    started = time.monotonic()
    own_engine.shutdown()
    thread.join(timeout=10)
    assert time.monotonic() - started < 10
    assert errors and all(link.process.poll() is not None for link in group.links)


@pytest.mark.slow
def test_encoders_and_transformer_keep_their_processes(own_engine: Engine) -> None:
    """A workflow uses both kinds in every prompt: neither may end the other."""
    mesh, placement = GroupKey(devices=TWO), GroupKey(devices=TWO, kind="placement")
    groups = [own_engine.group(key) for key in (placement, mesh, placement, mesh)]
    assert groups[0] is groups[2] and groups[1] is groups[3]


@pytest.mark.slow
def test_an_idle_group_on_the_same_devices_gives_way(own_engine: Engine) -> None:
    own_engine.request(GroupKey(devices=("cpu:0",)), Ping())
    first = own_engine.group(GroupKey(devices=("cpu:0",)))
    own_engine.request(GroupKey(devices=TWO), Ping())
    assert not first.alive
