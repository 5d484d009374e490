"""The engine with real ranks on gloo: parity of every plan, memory verbs, errors, death, deadlines, ends."""

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
from parallel_core.engine.models import TransformerSpec
from parallel_core.engine.transformer import RemoteTransformer
from parallel_core.errors import Cancelled, RankError, RankUserError
from parallel_core.families.base import SeamCall
from parallel_core.families.flux import FAMILY
from parallel_core.plan import ParallelPlan
from parallel_core.protocol import Ping, Request, Status
from tests.ranks.engines import make_engine
from tests.tiny_flux import TINY, build_transformer, write_transformer

TWO = ("cpu:0", "cpu:1")
FOUR = ("cpu:0", "cpu:1", "cpu:2", "cpu:3")
CONFIG = FAMILY.full_config(TINY)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_transformer(tmp_path_factory.mktemp("models") / "tiny")


def remote(engine: Engine, folder: Path, plan: ParallelPlan, **changed: object) -> RemoteTransformer:
    parts = dict(fingerprint="1", family="flux", name="tiny", dtype="float32", num_bytes=2_000_000, tensor=plan.tensor)
    spec = TransformerSpec(devices=plan.devices, folder=str(folder), **{**parts, **changed})
    return RemoteTransformer(engine=engine, spec=spec, plan=plan, family=FAMILY, config=CONFIG)


def call(rows: int, text: int, image: tuple[int, int] = (5, 3), seed: int = 0) -> SeamCall:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    height, width = image
    ids = torch.cartesian_prod(torch.zeros(1), torch.arange(float(height)), torch.arange(float(width)))
    return SeamCall(
        rows={
            "img": random(rows, height * width, 64),
            "txt": random(rows, text, 32),
            "y": random(rows, 16),
            "timesteps": torch.full((rows,), 0.7),
            "guidance": torch.full((rows,), 3.5),
        },
        shared={"img_ids": ids, "txt_ids": torch.zeros(text, 3)},
    )


def expected(calls: list[SeamCall]) -> list[torch.Tensor]:
    """What diffusers computes in this process, one row after the other."""
    model = build_transformer()
    assert FAMILY.on_loaded is not None
    FAMILY.on_loaded(model)
    with torch.no_grad():
        return [
            torch.cat(
                [
                    FAMILY.finish(model(**FAMILY.prepare({k: v[r : r + 1] for k, v in c.rows.items()}, c.shared)))
                    for r in range(c.num_rows)
                ]
            )
            for c in calls
        ]


def assert_close(outputs: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for output, want in zip(outputs, wanted, strict=True):
        assert (output - want).abs().max() <= 2e-6 * want.abs().max()


# ----- every plan gives the numbers of one process -----

PLANS = [
    ParallelPlan(devices=("cpu:0",)),
    ParallelPlan(devices=TWO, ulysses=2),
    ParallelPlan(devices=TWO, replicas=2),
    ParallelPlan(devices=TWO, tensor=2),
    ParallelPlan(devices=TWO, strategy="auto"),
    *(
        pytest.param(ParallelPlan(devices=FOUR, **degrees), marks=pytest.mark.slow)
        for degrees in (
            {"replicas": 2, "ulysses": 2},
            {"ulysses": 2, "tensor": 2},
            {"replicas": 2, "tensor": 2},
            {"ulysses": 4},
        )
    ),
]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.strategy + "-".join(map(str, plan.shape)))
def test_ragged_calls_on_every_plan(engine: Engine, folder: Path, plan: ParallelPlan) -> None:
    calls = [call(1, text=7), call(2, text=3, seed=1), call(1, text=7, seed=2)]
    outputs = remote(engine, folder, plan).evaluate(calls, label="forward")
    assert_close(outputs, expected(calls))


def test_changing_context_axes_loads_nothing(engine: Engine, folder: Path) -> None:
    calls = [call(2, text=4)]
    first = remote(engine, folder, ParallelPlan(devices=TWO, ulysses=2))
    first.evaluate(calls, label="forward")
    loads = number_of_loads(engine, first)
    starts = engine.num_starts
    again = [
        remote(engine, folder, plan).evaluate(calls, label="forward")[0]
        for plan in (ParallelPlan(devices=TWO, replicas=2), ParallelPlan(devices=TWO, ulysses=2))
    ]
    assert_close(again, expected(calls) * 2)
    assert (number_of_loads(engine, first), engine.num_starts) == (loads, starts)


def test_auto_shares_rows_out_and_a_single_rows_tokens(engine: Engine, folder: Path) -> None:
    model = remote(engine, folder, ParallelPlan(devices=TWO, strategy="auto"))
    chosen = []
    for calls in ([call(1, text=3)], [call(1, text=3), call(1, text=5)]):
        assert_close(model.evaluate(calls, label="forward"), expected(calls))
        assert model.statistics.choice is not None
        chosen.append(model.statistics.choice.plan.shape)
    assert chosen == [(1, 2, 1), (2, 1, 1)]


@pytest.mark.slow
def test_a_batch_larger_than_memory_runs_in_waves(folder: Path) -> None:
    calls = [call(5, text=4)]
    weights = 2_000_000
    per_row = FAMILY.activation_bytes(CONFIG, calls[0], 4)
    engine = make_engine(host=lambda: (0, weights + 3 * per_row))
    try:
        model = remote(engine, folder, ParallelPlan(devices=("cpu:0",)))
        assert_close(model.evaluate(calls, label="forward"), expected(calls))
        assert model.statistics.num_batches == 3, "two rows at a time fit into 80 % of three rows' memory"
    finally:
        engine.shutdown()


# ----- memory -----


def number_of_loads(engine: Engine, model: RemoteTransformer) -> list[int]:
    group = engine.group(model.spec.group)
    return [int(reply.data["num_loads"]) for reply in engine.request_group(group, Status())]


def ledger(engine: Engine, model: RemoteTransformer) -> list[dict[str, dict[str, int]]]:
    group = engine.group(model.spec.group)
    return [reply.data["models"] for reply in engine.request_group(group, Status())]


def test_parked_weights_leave_the_device_and_come_back_without_the_file(engine: Engine, tmp_path: Path) -> None:
    folder = write_transformer(tmp_path / "moving")
    model = remote(engine, folder, ParallelPlan(devices=TWO, replicas=2))
    calls = [call(2, text=4)]
    model.evaluate(calls, label="forward")
    engine.park(model.spec)
    for rank in ledger(engine, model):
        assert rank[model.spec.key]["device_bytes"] == 0
        assert rank[model.spec.key]["host_bytes"] > 1_000_000
    holding = engine.ledger.get(model.spec.group, model.spec.key)
    assert holding is not None and not holding.resident
    folder.rename(tmp_path / "gone")
    assert_close(model.evaluate(calls, label="forward"), expected(calls))


@pytest.mark.slow
def test_the_last_reference_gives_everything_back(folder: Path) -> None:
    """Not while a prompt runs: its next node may well make the same model again."""
    busy = [True]
    engine = make_engine(host_is_busy=lambda: busy[0])
    try:
        model = remote(engine, folder, ParallelPlan(devices=TWO, replicas=2))
        engine.retain(model.spec)
        engine.retain(model.spec)
        model.evaluate([call(2, text=4)], label="forward")
        engine.drop_reference(model.spec.group, model.spec.key)
        busy[0] = False
        assert holds(engine, model), "one reference is left"
        busy[0] = True
        engine.drop_reference(model.spec.group, model.spec.key)
        assert holds(engine, model), "a prompt is running"
        busy[0] = False
        assert not holds(engine, model)
        assert engine.ledger.get(model.spec.group, model.spec.key) is None
    finally:
        engine.shutdown()


@pytest.mark.slow
def test_a_load_sends_away_what_nothing_stands_for(folder: Path, tmp_path: Path) -> None:
    engine = make_engine(host_is_busy=lambda: True)
    try:
        old = remote(engine, folder, ParallelPlan(devices=TWO, replicas=2))
        engine.retain(old.spec)
        old.ensure_loaded()
        engine.drop_reference(old.spec.group, old.spec.key)
        new = remote(engine, write_transformer(tmp_path / "new"), ParallelPlan(devices=TWO, replicas=2))
        new.ensure_loaded()
        assert holds(engine, new) and not holds(engine, old)
    finally:
        engine.shutdown()


def holds(engine: Engine, model: RemoteTransformer) -> bool:
    """Whether every rank has the model; releases that are due are carried out first."""
    engine.group(model.spec.group)
    return all(model.spec.key in rank for rank in ledger(engine, model))


def test_tensor_ranks_hold_about_half(engine: Engine, folder: Path) -> None:
    whole = sum(parameter.nbytes for parameter in build_transformer().parameters())
    model = remote(engine, folder, ParallelPlan(devices=TWO, tensor=2))
    model.ensure_loaded()
    for rank in ledger(engine, model):
        assert rank[model.spec.key]["device_bytes"] <= 0.6 * whole  # 0.55 at real sizes, where small weights count less


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
def test_a_rank_killed_while_idle_is_replaced_by_the_next_request(engine: Engine, folder: Path) -> None:
    model = remote(engine, folder, ParallelPlan(devices=TWO, ulysses=2))
    calls = [call(1, text=4)]
    model.evaluate(calls, label="forward")
    group = engine.group(model.spec.group)
    group.last_use -= 60  # as if it had been a minute
    os.kill(group.links[1].process.pid, signal.SIGKILL)
    assert_close(model.evaluate(calls, label="forward"), expected(calls))


@pytest.mark.slow
def test_ranks_that_hang_while_idle_are_replaced_too(engine: Engine, folder: Path) -> None:
    model = remote(engine, folder, ParallelPlan(devices=TWO, ulysses=2))
    calls = [call(1, text=4)]
    model.evaluate(calls, label="forward")
    group = engine.group(model.spec.group)
    group.last_use -= 60
    os.kill(group.links[1].process.pid, signal.SIGSTOP)
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


def test_a_model_with_guidance_can_run_without_it(engine: Engine, folder: Path) -> None:
    """What FluxDisableGuidance asks for; diffusers alone has no way to say it."""
    with_guidance = call(1, text=4)
    without = SeamCall(
        rows={name: tensor for name, tensor in with_guidance.rows.items() if name != "guidance"},
        shared=with_guidance.shared,
    )
    model = remote(engine, folder, ParallelPlan(devices=TWO, ulysses=2))
    outputs = model.evaluate([without], label="forward")
    assert_close(outputs, expected([without]))
    assert (outputs[0] - expected([with_guidance])[0]).abs().max() > 1e-3


def test_cancel_drains_the_ranks_and_keeps_them(engine: Engine, folder: Path) -> None:
    model = remote(engine, folder, ParallelPlan(devices=TWO, ulysses=2))
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
