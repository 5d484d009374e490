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
