"""`max_memory`: what is accepted, and what each error tells the user."""

from __future__ import annotations

import pytest

from parallel_core.errors import UserError
from parallel_core.max_memory import format_bytes, format_entry, parse_max_memory

GPUS = ("cuda:0", "cuda:1")


def test_nothing_written_means_no_cap() -> None:
    assert parse_max_memory("", GPUS) == {}
    assert parse_max_memory("  ", GPUS) == {}


def test_numbers_names_host_and_disk() -> None:
    assert parse_max_memory("0:16GB, cuda:1:7.5GiB ,cpu:64gb,disk:1TB", GPUS) == {
        "cuda:0": 16 * 1000**3,
        "cuda:1": int(7.5 * 1024**3),
        "cpu": 64 * 1000**3,
        "disk": 1000**4,
    }


def test_numbers_are_those_of_the_devices_not_positions() -> None:
    assert parse_max_memory("3:1GB", ("cuda:2", "cuda:3")) == {"cuda:3": 1000**3}


def test_a_cpu_rank_is_not_the_host() -> None:
    ranks = ("cpu:0", "cpu:1")
    assert parse_max_memory("1:300MB,cpu:1GB", ranks) == {"cpu:1": 300 * 1000**2, "cpu": 1000**3}
    assert parse_max_memory("cpu:1:300MB", ranks) == {"cpu:1": 300 * 1000**2}


def test_zero_keeps_a_device_out() -> None:
    assert parse_max_memory("0:0GB", GPUS) == {"cuda:0": 0}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("16GB", ["'16GB'", "not 'device:size'", "0:16GB,1:16GB,cpu:64GB"]),
        ("0:16GB,,1:2GB", ["''", "not 'device:size'"]),
        ("0:16", ["'0:16'", "Did you mean '16GB'?"]),
        ("0:16XB", ["'16XB' is not a size", "GiB"]),
        ("0:-3GB", ["'-3GB' is not a size"]),
        ("0:", ["'' is not a size"]),
        ("2:16GB", ["device '2'", "cuda:0, cuda:1", "0, 1, cpu, disk"]),
        ("gpu:16GB", ["device 'gpu'"]),
        ("0:1GB,cuda:0:2GB", ["cuda:0 twice"]),
        ("0=16GB", ["'0=16GB'", "not 'device:size'"]),
    ],
)
def test_errors_name_the_part_that_is_wrong(text: str, words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        parse_max_memory(text, GPUS)
    for word in words:
        assert word in str(error.value)


def test_bytes_for_a_person() -> None:
    assert format_bytes(9_770_000_000) == "9.8 GB"
    assert format_bytes(246_000_000) == "246 MB"
    assert format_bytes(46_400_000) == "46 MB"
    assert format_bytes(0) == "0 kB"


def test_a_suggested_entry_grants_what_it_says() -> None:
    entry = format_entry("cpu", 1_910_000_001)
    assert entry == "cpu:2GB"
    assert parse_max_memory(entry, GPUS)["cpu"] >= 1_910_000_001
    assert parse_max_memory(format_entry("cuda:1", 12_345_678), GPUS) == {"cuda:1": 13_000_000}
