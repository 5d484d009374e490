"""Strategy device_map through the engine: layers of one transformer over two "devices", host memory and files."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel_core.engine import Engine
from parallel_core.engine.models import TransformerSpec
from parallel_core.engine.placed import PlacedTransformerSpec, placed
from parallel_core.engine.text import TextModel, encode
from parallel_core.engine.transformer import RemoteTransformer
from parallel_core.errors import RankUserError, UserError
from parallel_core.families.base import SeamCall
from parallel_core.families.flux import FAMILY
from parallel_core.families.text_registry import TEXT_FAMILIES
from parallel_core.model_file import ModelSource
from parallel_core.plan import ParallelPlan
from parallel_core.storage import Storage
from parallel_core.text_source import read_text_source
from parallel_core.worker.loading import load_transformer
from parallel_core.worker.placed import bytes_by_device
from parallel_core.worker.placed_transformer import place_transformer
from tests.ranks.engines import make_engine
from tests.ranks.gloo import run_on_ranks
from tests.ranks.remote_flux import CONFIG, TWO, call, holds, ledger, number_of_loads, remote
from tests.tiny_flux import build_transformer, write_transformer
from tests.tiny_models import TINY_MODELS
from tests.tiny_text import write_text

CALLS = [call(1, text=7), call(2, text=3, seed=1)]
GB = 1000**3
WEIGHTS = sum(parameter.nbytes for parameter in build_transformer().parameters())


def placed_remote(engine: Engine, folder: Path, max_memory: str = "", **changed: object) -> RemoteTransformer:
    plan = ParallelPlan(devices=TWO, strategy="device_map", max_memory=max_memory)
    model = remote(engine, folder, plan, num_bytes=WEIGHTS, **changed)
    return replace(model, spec=placed(model.spec, plan, [8 * GB] * 2))


def one_rank(engine: Engine, folder: Path, **changed: object) -> RemoteTransformer:
    return remote(engine, folder, ParallelPlan(devices=("cpu:0",)), **changed)


def run(model: RemoteTransformer, calls: list[SeamCall] = CALLS) -> list[torch.Tensor]:
    return model.evaluate(calls, label="forward")


@pytest.fixture(scope="module")
def wanted(engine: Engine, tiny_flux: Path) -> list[torch.Tensor]:
    return run(one_rank(engine, tiny_flux))


def assert_equal(outputs: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for output, want in zip(outputs, wanted, strict=True):
        assert torch.equal(output, want)


def device_bytes(engine: Engine, model: RemoteTransformer) -> dict[str, int]:
    holding = engine.ledger.get(model.spec.group, model.spec.key)
    assert holding is not None and holding.resident
    return holding.device_bytes


def rank_bytes(engine: Engine, model: RemoteTransformer) -> tuple[int, int]:
    """(on the devices, in host memory) as the rank itself counts."""
    (models,) = ledger(engine, model)
    return models[model.spec.key]["device_bytes"], models[model.spec.key]["host_bytes"]


# ----- placing -----


def test_layers_are_balanced_over_the_devices_and_equal_one_rank(
    engine: Engine, tiny_flux: Path, wanted: list[torch.Tensor]
) -> None:
    model = placed_remote(engine, tiny_flux)
    assert_equal(run(model), wanted)
    shares = device_bytes(engine, model)
    assert list(shares) == list(TWO) and sum(shares.values()) == WEIGHTS
    assert max(shares.values()) < 0.7 * WEIGHTS, "a double block is a quarter of this model"
    assert rank_bytes(engine, model) == (WEIGHTS, 0)
    text = model.statistics.placement
    assert "transformer_block" in text and "on cpu:0" in text and "on cpu:1" in text
    (group,) = [group for group in engine.status() if group["kind"] == "placement"]
    assert len(group["ranks"]) == 1, "one process sees both devices"
    assert list(model.statistics.peak_bytes) == ["cpu:0+cpu:1"]


@pytest.mark.parametrize(
    ("max_memory", "outside"),
    [
        ("0:1500KB,1:100KB,cpu:2MB", {"cpu"}),
        ("0:1500KB,1:100KB,cpu:0MB,disk:2MB", {"disk"}),
        ("0:900KB,1:200KB,cpu:600KB,disk:2MB", {"cpu", "disk"}),
        ("0:0B,1:0B,cpu:0B,disk:3MB", {"disk"}),
        ("0:0B,1:0B,cpu:3MB", {"cpu"}),
    ],
)
def test_what_has_no_room_lies_in_host_memory_or_in_the_files(
    engine: Engine, tiny_flux: Path, wanted: list[torch.Tensor], max_memory: str, outside: set[str]
) -> None:
    model = placed_remote(engine, tiny_flux, max_memory)
    for _ in range(2):  # again: nothing of the first evaluation stays behind
        assert_equal(run(model), wanted)
    text = model.statistics.placement
    assert {name for name in ("cpu", "disk") if f" on {name}," in text or text.endswith(f" on {name}")} >= outside
    on_devices, on_host = rank_bytes(engine, model)
    limits = dict(model.spec.limits) if isinstance(model.spec, PlacedTransformerSpec) else {}
    assert all(size <= limits[device] for device, size in device_bytes(engine, model).items())
    assert on_devices == sum(device_bytes(engine, model).values()) < WEIGHTS
    assert (on_host > 0) == ("cpu" in outside) and on_host <= limits["cpu"]
    assert (on_devices + on_host < WEIGHTS) == ("disk" in outside)


def test_bfloat16_and_several_files(engine: Engine, tmp_path: Path) -> None:
    """The file's dtype differs from the one that is asked for, on the devices, in host memory and on disk."""
    folder = write_transformer(tmp_path / "sharded", max_shard_size="400KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    half = {"dtype": "bfloat16"}
    calls = [
        SeamCall(
            rows={k: v.bfloat16() if k != "timesteps" else v for k, v in CALLS[0].rows.items()}, shared=CALLS[0].shared
        )
    ]
    model = placed_remote(engine, folder, "0:500KB,1:100KB,cpu:300KB,disk:2MB", **half)
    assert_equal(run(model, calls), run(one_rank(engine, folder, **half), calls))
    assert sum(device_bytes(engine, model).values()) <= 600_000


def test_an_attention_backend_is_applied(engine: Engine, tiny_flux: Path) -> None:
    model = placed_remote(engine, tiny_flux)
    model.plan = replace(model.plan, attention_backend="_native_math")
    rank = one_rank(engine, tiny_flux)
    rank.plan = replace(rank.plan, attention_backend="_native_math")
    outputs = run(model)
    assert_equal(outputs, run(rank))
    model.plan = replace(model.plan, attention_backend="auto")
    assert number_of_loads(engine, model) == number_of_loads(engine, placed_remote(engine, tiny_flux))
    assert any(not torch.equal(math, native) for math, native in zip(outputs, run(model), strict=True))


@pytest.mark.parametrize("name", TINY_MODELS)
def test_every_family_equals_one_rank(name: str, tmp_path: Path) -> None:
    """In 16 bits, with the weights that a family keeps in float32, on two devices, on the host and in the files."""
    run_on_ranks(1, "transformer_ranks:write_models", name=name, models={str(tmp_path): {}})
    for shares in (
        {"cpu:0": 2.0, "cpu:1": 2.0},
        {"cpu:0": 0.95, "cpu:1": 0.0, "cpu": 0.0, "disk": 2.0},
        {"cpu:0": 0.0, "cpu:1": 0.0, "cpu": 0.95, "disk": 2.0},
    ):
        settings = {"case": {"batch": 2, "frames": 2, "ragged": True}, "dtype": "bfloat16", "shares": shares}
        (placed,) = run_on_ranks(1, "transformer_ranks:compare_placed", name=name, folder=str(tmp_path), **settings)
        assert placed["equal"]
        assert len(placed["homes"]) == 2 and ("disk" in placed["homes"]) == ("disk" in shares)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("limits", [{}, {"cuda:0": 900_000, "cuda:1": 0, "cpu": 600_000, "disk": 3_000_000}], ids=str)
def test_on_gpus_with_host_and_files_behind_them(tiny_flux: Path, limits: dict[str, int]) -> None:
    devices = tuple(f"cuda:{index}" for index in range(min(2, torch.cuda.device_count())))
    before = torch.cuda.memory_allocated(0)
    placed_model = place_transformer(ModelSource(tiny_flux), FAMILY, Storage("float32"), devices, limits)
    lies_there = bytes_by_device(placed_model.model, placed_model.places)
    assert torch.cuda.memory_allocated(0) - before >= lies_there["cuda:0"] > 0
    whole = load_transformer(ModelSource(tiny_flux), FAMILY, Storage("float32"), torch.device("cuda:0")).model
    tensors = [{name: tensor.cuda(0) for name, tensor in part.items()} for part in (CALLS[0].rows, CALLS[0].shared)]
    with torch.inference_mode():
        ours, theirs = (FAMILY.finish(model(**FAMILY.prepare(*tensors))).cpu() for model in (placed_model.model, whole))
    assert torch.equal(ours, theirs)


# ----- refused -----


def test_what_does_not_fit_is_refused_before_it_is_read(engine: Engine, tiny_flux: Path) -> None:
    model = placed_remote(engine, tiny_flux, "0:800KB,1:800KB,cpu:450KB")  # enough, but for the guests' own room
    before = number_of_loads(engine, model)
    with pytest.raises(RankUserError, match=r"transformer does not fit: it needs 2 MB and .* without the limits"):
        model.ensure_loaded()
    assert number_of_loads(engine, model) == before
    assert not holds(engine, model)


def test_a_wrong_plan_starts_nothing(engine: Engine, tiny_flux: Path) -> None:
    with pytest.raises(UserError, match=r"take 2 MB, and max_memory .* allows 600 kB in all.* 'disk:2MB'"):
        placed_remote(engine, tiny_flux, "0:100KB,1:200KB,cpu:300KB")
    with pytest.raises(UserError, match=r"compile is 'default'.*'device_map'"):
        ParallelPlan(devices=TWO, strategy="device_map", compile="default")
    with pytest.raises(UserError, match=r"max_memory names device '2'"):
        ParallelPlan(devices=TWO, strategy="device_map", max_memory="2:1GB")
    with pytest.raises(UserError, match=r"has no degrees, but .*ulysses 2"):
        ParallelPlan(devices=TWO, strategy="device_map", ulysses=2)


# ----- memory -----


@pytest.mark.parametrize("max_memory", ["", "0:900KB,1:200KB,cpu:600KB,disk:2MB"])
def test_parked_layers_leave_the_devices_and_come_back(
    engine: Engine, tiny_flux: Path, wanted: list[torch.Tensor], max_memory: str
) -> None:
    model = placed_remote(engine, tiny_flux, max_memory)
    run(model)
    on_devices, on_host = rank_bytes(engine, model)
    loads = number_of_loads(engine, model)
    engine.park(model.spec)
    assert rank_bytes(engine, model) == (0, on_devices + on_host)
    assert_equal(run(model), wanted)
    assert rank_bytes(engine, model) == (on_devices, on_host)
    assert number_of_loads(engine, model) == loads, "nothing was read again"


def test_a_placed_model_never_takes_more_than_its_place(tmp_path: Path) -> None:
    """76 MB in float32 that become 38 in bfloat16, of which some or all stay in the files: they come in by layers."""
    config = {"attention_head_dim": 64, "num_attention_heads": 8, "axes_dims_rope": [16, 24, 24], "num_layers": 1}
    run_on_ranks(1, "transformer_ranks:write_models", name="flux", models={str(tmp_path): config})
    (file,) = tmp_path.glob("*.safetensors")
    whole, mega = file.stat().st_size // 2, 10**6
    assert whole > 35 * mega
    layer = 6 * 512 * 512 * (2 + 4)  # the largest, and the same in the file's dtype
    evaluating = []
    for on_devices, on_host in ((40 * mega, 0), (26 * mega, 9 * mega), (0, 0)):
        limits = {"cpu:0": on_devices, "cpu:1": on_devices // 4, "cpu": on_host, "disk": 50 * mega}
        (placed,) = run_on_ranks(1, "transformer_ranks:place", folder=str(tmp_path), dtype="bfloat16", limits=limits)
        resident = sum(size for home, size in placed["planned"].items() if home != "disk")
        assert min(whole, on_devices) // 2 <= resident <= on_devices * 5 // 4 + on_host
        assert placed["host"] == placed["planned"].get("cpu", 0)
        assert placed["loading"] <= resident + layer
        assert placed["mapped"] == []
        evaluating.append(placed["evaluating"])
    assert max(evaluating) <= evaluating[0] + layer, "beside what a first evaluation takes with all weights there"


def test_two_models_one_after_the_other(engine: Engine, tmp_path: Path, wanted: list[torch.Tensor]) -> None:
    folders = [write_transformer(tmp_path / name, seed=seed) for name, seed in (("first", 0), ("second", 1))]
    first, second = [placed_remote(engine, folder) for folder in folders]
    other = run(second)
    assert not torch.equal(other[0], wanted[0])
    assert_equal(run(first), wanted)
    assert_equal(run(second), other)
    engine.release_later(first.spec.group, first.spec.key)
    assert not holds(engine, first) and holds(engine, second)


def test_a_mesh_yields_to_a_device_map_on_the_same_devices(tiny_flux: Path) -> None:
    """And back: they are two groups, and nobody stands for the first model any more."""
    engine = make_engine(host_is_busy=lambda: True)
    try:
        mesh = remote(engine, tiny_flux, ParallelPlan(devices=TWO, replicas=2))
        over = placed_remote(engine, tiny_flux)
        for old, new in ((mesh, over), (over, mesh)):
            engine.retain(old.spec)
            old.ensure_loaded()
            engine.drop_reference(old.spec.group, old.spec.key)
            assert holds(engine, old), "a prompt is running"
            new.ensure_loaded()
            assert holds(engine, new) and not holds(engine, old)
    finally:
        engine.shutdown()


def test_encoding_in_the_same_process_leaves_the_transformer(
    engine: Engine, tiny_flux: Path, tmp_path: Path, wanted: list[torch.Tensor]
) -> None:
    source = read_text_source(write_text(tmp_path / "text"), TEXT_FAMILIES)
    text = TextModel(devices=TWO, source=source, placement="balanced", limits=(), capacities=(8 * GB,) * 2)
    model = placed_remote(engine, tiny_flux)
    run(model)
    loads = number_of_loads(engine, model)
    options: dict[str, Any] = {"max_sequence_length": 64}
    for keep_loaded in (True, False):
        encode(engine, text, ["seven dogs"], keep_loaded=keep_loaded, **options)
        assert_equal(run(model), wanted)
    assert number_of_loads(engine, model) == [loads[0] + 1], "the encoders"
    engine.park(model.spec)
    encode(engine, text, ["seven dogs"], keep_loaded=False, **options)
    assert_equal(run(model), wanted)
    assert number_of_loads(engine, model) == [loads[0] + 2], "the encoders again, the transformer came from the park"


def test_a_process_that_died_is_replaced_by_the_next_request(
    engine: Engine, tiny_flux: Path, wanted: list[torch.Tensor]
) -> None:
    model = placed_remote(engine, tiny_flux)
    run(model)
    group = engine.group(model.spec.group)
    os.kill(group.links[0].process.pid, signal.SIGKILL)
    group.links[0].process.wait()
    assert_equal(run(model), wanted)
    assert not group.alive


# ----- what the controller expects -----


def test_rows_at_once_follow_the_fullest_device(tiny_flux: Path) -> None:
    """Limits put two thirds of the weights on the first device: what is left there bounds a batch."""
    calls = [call(5, text=4)]
    per_row = FAMILY.activation_bytes(CONFIG, calls[0], 4)
    first = 2 * WEIGHTS // 3
    total = first + 4 * per_row
    engine = make_engine(host=lambda: (0, 2 * total))
    plan = ParallelPlan(devices=TWO, strategy="device_map", max_memory=f"0:{first}B,1:{WEIGHTS - first}B")
    model = remote(engine, tiny_flux, plan)
    spec = replace(model.spec, num_bytes=WEIGHTS)
    model = replace(model, spec=placed(spec, plan, [total] * 2))
    assert model.spec.estimated_bytes() == {"cpu:0": first, "cpu:1": WEIGHTS - first}
    assert model._rows_at_once(calls[0], plan) == 3, "80 % of four rows' memory"


def test_a_device_that_is_left_out_is_not_asked_for_room() -> None:
    spec = TransformerSpec(
        devices=("cuda:0", "cuda:1"),
        folder="/models/flux",
        fingerprint="1",
        family="flux",
        name="flux",
        dtype="bfloat16",
        num_bytes=24 * GB,
        tensor=1,
    )
    plan = ParallelPlan(devices=spec.devices, strategy="device_map", max_memory="0:0GB")
    assert placed(spec, plan, [24 * GB, 80 * GB]).estimated_bytes() == {"cuda:0": 0, "cuda:1": 24 * GB}
    plan = replace(plan, max_memory="")
    assert placed(spec, plan, [12 * GB, 80 * GB]).estimated_bytes() == {"cuda:0": 9 * GB, "cuda:1": 15 * GB}
    assert placed(spec, plan, [12 * GB, 80 * GB]).key != replace(spec).key
