"""The engine with real ranks on gloo: parity of every plan, and the memory verbs."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from parallel_core.engine import Engine
from parallel_core.errors import UserError
from parallel_core.families.base import SeamCall
from parallel_core.families.flux import FAMILY
from parallel_core.plan import ParallelPlan
from tests.ranks.engines import make_engine
from tests.ranks.matrix import CAN_COMPILE, NO_COMPILER
from tests.ranks.remote_flux import (
    CONFIG,
    FOUR,
    TWO,
    assert_close,
    call,
    expected,
    holds,
    ledger,
    number_of_loads,
    remote,
)
from tests.tiny_flux import build_transformer, write_transformer

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


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.describe())
def test_ragged_calls_on_every_plan(engine: Engine, tiny_flux: Path, plan: ParallelPlan) -> None:
    calls = [call(1, text=7), call(2, text=3, seed=1), call(1, text=7, seed=2)]
    outputs = remote(engine, tiny_flux, plan).evaluate(calls, label="forward")
    assert_close(outputs, expected(calls))


def test_changing_context_axes_loads_nothing(engine: Engine, tiny_flux: Path) -> None:
    calls = [call(2, text=4)]
    first = remote(engine, tiny_flux, ParallelPlan(devices=TWO, ulysses=2))
    first.evaluate(calls, label="forward")
    loads = number_of_loads(engine, first)
    starts = engine.num_starts
    again = [
        remote(engine, tiny_flux, plan).evaluate(calls, label="forward")[0]
        for plan in (ParallelPlan(devices=TWO, replicas=2), ParallelPlan(devices=TWO, ulysses=2))
    ]
    assert_close(again, expected(calls) * 2)
    assert (number_of_loads(engine, first), engine.num_starts) == (loads, starts)


def test_auto_shares_rows_out_and_a_single_rows_tokens(engine: Engine, tiny_flux: Path) -> None:
    model = remote(engine, tiny_flux, ParallelPlan(devices=TWO, strategy="auto"))
    chosen = []
    for calls in ([call(1, text=3)], [call(1, text=3), call(1, text=5)]):
        assert_close(model.evaluate(calls, label="forward"), expected(calls))
        assert model.statistics.choice is not None
        chosen.append(model.statistics.choice.plan.mode.shape)
    assert chosen == [(1, 1, 2, 1), (2, 1, 1, 1)]


@pytest.mark.slow
def test_a_batch_larger_than_memory_runs_in_waves(tiny_flux: Path) -> None:
    calls = [call(5, text=4)]
    weights = 2_000_000
    per_row = FAMILY.activation_bytes(CONFIG, calls[0], 4)
    engine = make_engine(host=lambda: (0, weights + 3 * per_row))
    try:
        model = remote(engine, tiny_flux, ParallelPlan(devices=("cpu:0",)))
        assert_close(model.evaluate(calls, label="forward"), expected(calls))
        assert model.statistics.num_batches == 3, "two rows at a time fit into 80 % of three rows' memory"
    finally:
        engine.shutdown()


def test_a_model_with_guidance_can_run_without_it(engine: Engine, tiny_flux: Path) -> None:
    """What FluxDisableGuidance asks for; diffusers alone has no way to say it."""
    with_guidance = call(1, text=4)
    without = SeamCall(
        rows={name: tensor for name, tensor in with_guidance.rows.items() if name != "guidance"},
        shared=with_guidance.shared,
    )
    model = remote(engine, tiny_flux, ParallelPlan(devices=TWO, ulysses=2))
    outputs = model.evaluate([without], label="forward")
    assert_close(outputs, expected([without]))
    assert (outputs[0] - expected([with_guidance])[0]).abs().max() > 1e-3


# ----- memory -----


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
def test_the_last_reference_gives_everything_back(tiny_flux: Path) -> None:
    """Not while a prompt runs: its next node may well make the same model again."""
    busy = [True]
    engine = make_engine(host_is_busy=lambda: busy[0])
    try:
        model = remote(engine, tiny_flux, ParallelPlan(devices=TWO, replicas=2))
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
def test_a_load_sends_away_what_nothing_stands_for(tiny_flux: Path, tmp_path: Path) -> None:
    engine = make_engine(host_is_busy=lambda: True)
    try:
        old = remote(engine, tiny_flux, ParallelPlan(devices=TWO, replicas=2))
        engine.retain(old.spec)
        old.ensure_loaded()
        engine.drop_reference(old.spec.group, old.spec.key)
        new = remote(engine, write_transformer(tmp_path / "new"), ParallelPlan(devices=TWO, replicas=2))
        new.ensure_loaded()
        assert holds(engine, new) and not holds(engine, old)
    finally:
        engine.shutdown()


def test_tensor_ranks_hold_about_half(engine: Engine, tiny_flux: Path) -> None:
    whole = sum(parameter.nbytes for parameter in build_transformer().parameters())
    model = remote(engine, tiny_flux, ParallelPlan(devices=TWO, tensor=2))
    model.ensure_loaded()
    for rank in ledger(engine, model):
        assert rank[model.spec.key]["device_bytes"] <= 0.6 * whole  # 0.55 at real sizes, where small weights count less


def _drop_data(weights: Path) -> None:
    """Zeros for every weight; the header stays."""
    with weights.open("r+b") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        size = weights.stat().st_size
        file.seek(8 + length)
        file.write(bytes(size - 8 - length))


@pytest.mark.parametrize(
    "plans",
    [
        [{"tensor": 2}, {"ulysses": 2}, {"tensor": 2}],
        [{"ulysses": 2}, {"ulysses": 2, "shard_weights": True}, {"ring": 2}],
    ],
    ids=["tensor and back", "shard_weights and back"],
)
def test_weights_are_divided_anew_without_reading_them(
    engine: Engine, tmp_path: Path, plans: list[dict[str, Any]]
) -> None:
    calls = [call(2, text=4)]
    folder = write_transformer(tmp_path / "model")
    previous = None
    for number, degrees in enumerate(plans):
        plan = ParallelPlan(devices=TWO, **degrees)
        shards = 2 if plan.shard_weights else 1
        model = remote(engine, folder, plan, tensor=plan.tensor, shards=shards)
        engine.retain(model.spec)
        assert_close(model.evaluate(calls, label="forward"), expected(calls))
        if number == 0:
            _drop_data(folder / "diffusion_pytorch_model.safetensors")
            loads = number_of_loads(engine, model)
        else:
            engine.drop_reference(previous.spec.group, previous.spec.key)
        previous = model
    assert number_of_loads(engine, previous) == loads
    engine.drop_reference(previous.spec.group, previous.spec.key)


def test_an_orphan_goes_as_soon_as_its_weights_are_divided_anew(engine: Engine, tiny_flux: Path) -> None:
    sliced, whole = (remote(engine, tiny_flux, ParallelPlan(devices=TWO, **d)) for d in ({"tensor": 2}, {"ulysses": 2}))
    engine.retain(sliced.spec)
    sliced.ensure_loaded()
    engine.drop_reference(sliced.spec.group, sliced.spec.key)
    whole.ensure_loaded()
    assert holds(engine, whole)
    assert not holds(engine, sliced)


def test_shared_weights_take_their_part_and_can_be_parked(engine: Engine, tiny_flux: Path) -> None:
    plan = ParallelPlan(devices=TWO, ulysses=2, shard_weights=True)
    model = remote(engine, tiny_flux, plan, shards=2, fingerprint="shared")
    calls = [call(1, text=3)]
    assert_close(model.evaluate(calls, label="forward"), expected(calls))
    total = sum(parameter.nbytes for parameter in build_transformer().parameters())
    for rank in ledger(engine, model):
        assert rank[model.spec.key]["device_bytes"] <= 0.52 * total, "also after a forward"
    engine.park(model.spec)
    assert not engine.is_resident(model.spec)
    assert_close(model.evaluate(calls, label="forward"), expected(calls))


def test_one_ranks_weights_can_lie_in_host_memory(engine: Engine, tiny_flux: Path) -> None:
    plan = ParallelPlan(devices=("cpu:0",), shard_weights=True, max_memory="0:1KB")
    model = remote(engine, tiny_flux, plan, offload=True)
    calls = [call(1, text=3)]
    assert_close(model.evaluate(calls, label="forward"), expected(calls))
    (held,) = (rank[model.spec.key] for rank in ledger(engine, model))
    assert held["device_bytes"] == 0 < held["host_bytes"]


@pytest.mark.slow
@pytest.mark.skipif(not CAN_COMPILE, reason=NO_COMPILER)
def test_compiled_blocks_give_the_same_numbers_and_say_when_they_compile(engine: Engine, tiny_flux: Path) -> None:
    model = remote(engine, tiny_flux, ParallelPlan(devices=TWO, ulysses=2, compile="default"))
    model.ensure_loaded()
    said = []
    for size in ((5, 3), (5, 3), (4, 6)):
        calls = [call(1, text=7, image=size)]
        assert_close(model.evaluate(calls, label="forward"), expected(calls))
        said.append("compiled" in model.statistics.compiled)
    assert said == [True, False, True]


def test_a_backend_whose_package_is_missing_is_refused_before_loading(engine: Engine, tiny_flux: Path) -> None:
    model = remote(engine, tiny_flux, ParallelPlan(devices=TWO, ulysses=2), fingerprint="never loaded")
    model.plan = replace(model.plan)
    object.__setattr__(model.plan, "attention_backend", "flash")  # on CPU ranks the plan itself refuses it
    with pytest.raises(UserError, match="flash-attn"):
        model.ensure_loaded()
    assert not holds(engine, model)
