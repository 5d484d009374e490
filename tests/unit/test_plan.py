"""Plans: which degrees are accepted, what the errors say, what "auto" chooses."""

from __future__ import annotations

import pytest

from parallel_core.errors import UserError
from parallel_core.plan import DeviceInfo, ParallelPlan, parse_devices, resolve

GPUS = tuple(
    DeviceInfo(name=f"cuda:{index}", uuid=f"GPU-{index}aaa", token=str(index), total_bytes=24_000_000_000)
    for index in range(4)
)
FOUR = ("cuda:0", "cuda:1", "cuda:2", "cuda:3")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("all", FOUR),
        ("0,1", ("cuda:0", "cuda:1")),
        (" 2 , 0 ", ("cuda:2", "cuda:0")),
        ("cuda:3", ("cuda:3",)),
        ("GPU-1aaa", ("cuda:1",)),
        ("cpu:2", ("cpu:0", "cpu:1")),
        ("CPU", ("cpu:0",)),
    ],
)
def test_devices_that_exist(text: str, expected: tuple[str, ...]) -> None:
    assert parse_devices(text, GPUS) == expected


def test_all_without_a_gpu_is_one_cpu_rank() -> None:
    assert parse_devices("all", ()) == ("cpu:0",)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("4", "GPUs here: 0, 1, 2, 3"),
        ("0,0", "names a device twice"),
        ("cpu:0", "N from 1 to 64"),
        ("cpu:65", "N from 1 to 64"),
        ("cpu:two", "'cpu:2'"),
        ("", "which does not exist"),
        ("GPU-9", "which does not exist"),
    ],
)
def test_devices_that_do_not_exist(text: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        parse_devices(text, GPUS)


def test_without_gpus_the_error_offers_cpu_ranks() -> None:
    with pytest.raises(UserError, match="No GPU is visible to ComfyUI here; use 'cpu:2'"):
        parse_devices("0,1", ())


def test_the_product_must_be_the_number_of_devices() -> None:
    with pytest.raises(UserError) as error:
        ParallelPlan(devices=FOUR, replicas=2, ulysses=3)
    assert "replicas 2 x ring 1 x ulysses 3 x tensor 1 = 6, but there are 4 devices" in str(error.value)
    assert "replicas 2, ring 1, ulysses 2, tensor 1" in str(error.value), "the nearest degrees that work"


@pytest.mark.parametrize("degree", [0, -1])
def test_degrees_are_at_least_one(degree: int) -> None:
    with pytest.raises(UserError, match="ulysses is"):
        ParallelPlan(devices=FOUR, ulysses=degree)


def test_auto_refuses_degrees_rather_than_ignoring_them() -> None:
    with pytest.raises(UserError, match="'auto' chooses the degrees itself"):
        ParallelPlan(devices=FOUR, strategy="auto", ulysses=4)


def test_an_unknown_strategy_names_the_known_ones() -> None:
    with pytest.raises(UserError, match="auto, mesh"):
        ParallelPlan(devices=FOUR, strategy="ring")


@pytest.mark.parametrize(
    ("devices", "rows", "heads", "fits", "expected"),
    [
        (1, 4, 24, True, (1, 1, 1, 1)),
        (4, 1, 24, True, (1, 1, 4, 1)),
        (4, 2, 24, True, (2, 1, 2, 1)),
        (4, 4, 24, True, (4, 1, 1, 1)),
        (4, 3, 24, True, (1, 1, 4, 1)),  # three rows do not divide over two or four replicas
        (3, 3, 24, True, (3, 1, 1, 1)),
        (4, 1, 24, False, (1, 1, 1, 4)),
        (4, 1, 6, False, (1, 1, 2, 2)),  # six heads cannot be dealt to four
        (1, 1, 24, False, (1, 1, 1, 1)),
    ],
)
def test_what_auto_chooses(
    devices: int, rows: int, heads: int, fits: bool, expected: tuple[int, int, int, int]
) -> None:
    plan = ParallelPlan(devices=FOUR[:devices], strategy="auto")
    choice = resolve(plan, rows=rows, heads=heads, fits_one_device=fits)
    assert choice.plan.mode.shape == expected
    assert choice.plan.strategy == "mesh"


def test_a_mesh_is_taken_as_it_is() -> None:
    plan = ParallelPlan(devices=FOUR, replicas=4)
    assert resolve(plan, rows=1, heads=24, fits_one_device=False).plan is plan


def test_a_plan_reads_well() -> None:
    assert ParallelPlan(devices=FOUR[:2], ulysses=2).describe() == "2 ranks (cuda:0, cuda:1): ulysses 2"
    assert ParallelPlan(devices=("cpu:0",)).describe() == "1 rank (cpu:0)"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"strategy": "device_map", "ulysses": 2}, "'device_map' places layers over the devices and has no degrees"),
        ({"strategy": "device_map", "shard_weights": True}, "use one of them"),
        ({"strategy": "device_map", "compile": "default"}, "cannot be compiled"),
        ({"replicas": 4, "shard_weights": True}, "ring and ulysses, but replicas 4 x ring 1 x ulysses 1"),
        ({"tensor": 4, "max_memory": "0:1GB"}, "gives every device the same"),
        ({"strategy": "device_map", "max_memory": "7:1GB"}, "names device '7'"),
        ({"ulysses": 4, "shard_weights": True, "max_memory": "disk:9GB"}, "never in files"),
        ({"ulysses": 4, "uneven": "sometimes"}, "uneven is 'sometimes'; expected one of auto, never, always"),
        ({"ulysses": 4, "compile": "fast"}, "compile is 'fast'"),
        ({"ulysses": 4, "attention_backend": "xformers"}, "cannot share one row's tokens out"),
        ({"strategy": "auto", "attention_backend": "xformers"}, "cannot share one row's tokens out"),
        ({"ring": 1.0, "ulysses": 4}, "ring is 1.0; expected a whole number"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, object], says: str) -> None:
    with pytest.raises(UserError, match=says):
        ParallelPlan(devices=FOUR, **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"ring": 2, "ulysses": 2, "shard_weights": True, "max_memory": "0:1GB,cpu:9GB"},
        {"strategy": "device_map", "max_memory": "0:1GB,disk:9GB"},
        {"strategy": "auto", "shard_weights": True, "uneven": "never", "compile": "default"},
        {"tensor": 2, "replicas": 2, "attention_backend": "_native_math"},
    ],
)
def test_settings_that_go_together(settings: dict[str, object]) -> None:
    plan = ParallelPlan(devices=FOUR, **settings)
    assert plan.describe()


def test_shared_weights_tie_all_devices_together() -> None:
    plan = ParallelPlan(devices=FOUR, strategy="auto", shard_weights=True)
    choice = resolve(plan, rows=4, heads=24, fits_one_device=True)
    assert choice.plan.mode.shape == (1, 1, 4, 1)
    assert choice.plan.describe().endswith("ulysses 4, weights shared out")


def test_the_mode_has_every_setting_of_an_evaluation() -> None:
    plan = ParallelPlan(devices=FOUR, ring=2, ulysses=2, ring_fp32=False, compile="default", attention_backend="flash")
    mode = plan.mode
    assert (mode.shape, mode.ring_fp32, mode.compile, mode.attention_backend) == (
        (1, 2, 2, 1),
        False,
        "default",
        "flash",
    )
    assert (mode.context, mode.ranks_per_replica) == (4, 4)
