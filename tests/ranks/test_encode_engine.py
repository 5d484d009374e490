"""Encoding through the engine: one process over all devices, what it keeps and what it gives back."""

from __future__ import annotations

import os
import signal
import sys
import time
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxPipeline

from parallel_core.engine import Engine
from parallel_core.engine.group import GroupKey
from parallel_core.engine.text import TextModel, encode
from parallel_core.errors import Cancelled, RankUserError, UserError
from parallel_core.families.text_registry import TEXT_FAMILIES
from parallel_core.text_source import read_text_source
from tests.tiny_text import build_t5, write_text, write_wan_text

REPOSITORY = Path(__file__).resolve().parents[2]
RANKS = ("cpu:0", "cpu:1")
PROMPTS = ("seven dogs", "")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("models") / "tiny-flux")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    made = Engine(REPOSITORY, environ={**os.environ, "PARALLEL_DIFFUSION_PYTHON": sys.executable})
    yield made
    made.shutdown()


def model_of(folder: Path, placement: str = "balanced", **limits: int) -> TextModel:
    return TextModel(
        devices=RANKS,
        source=read_text_source(folder, TEXT_FAMILIES),
        placement=placement,
        limits=tuple((name.replace("_", ":"), size) for name, size in limits.items()),
        capacities=(8 * 1000**3,) * len(RANKS),
    )


def run(engine: Engine, model: TextModel, **options: Any) -> Any:
    return encode(engine, model, PROMPTS, **{"max_sequence_length": 64, "keep_loaded": False, **options})


def stored(engine: Engine, model: TextModel) -> dict[str, Any]:
    """The rank's own account, after the releases that are due."""
    engine.group(model.group)
    (group,) = engine.status()
    (rank,) = group["ranks"]  # type: ignore[misc, attr-defined]
    return dict(rank)


def test_both_prompts_come_back_with_diffusers_values(engine: Engine, folder: Path) -> None:
    encoded = run(engine, model_of(folder))
    pipe = FluxPipeline.from_pretrained(folder, transformer=None, vae=None, scheduler=None)
    for prompt, outputs in zip(PROMPTS, encoded.prompts, strict=True):
        with torch.no_grad():
            tokens, pooled, _ = pipe.encode_prompt(prompt, max_sequence_length=64)
        assert torch.equal(outputs["cross_attn"], tokens)
        assert torch.equal(outputs["pooled_output"], pooled)
    assert "text_encoder_2: block" in encoded.placement and "cpu:1" in encoded.placement


def test_encoders_are_given_back_unless_kept(engine: Engine, folder: Path) -> None:
    model = model_of(folder)
    run(engine, model)
    assert stored(engine, model)["models"] == {}

    first = run(engine, model, keep_loaded=True)
    assert list(stored(engine, model)["models"]) == [model.key]
    loads = stored(engine, model)["num_loads"]
    second = run(engine, model, keep_loaded=True)
    assert stored(engine, model)["num_loads"] == loads
    assert first.load_seconds > 0 and second.load_seconds == 0
    assert torch.equal(first.prompts[0]["cross_attn"], second.prompts[0]["cross_attn"])

    run(engine, model)  # not kept any more
    assert stored(engine, model)["models"] == {}


def test_other_settings_replace_what_was_kept(engine: Engine, folder: Path) -> None:
    before, after = model_of(folder), model_of(folder, "single")
    run(engine, before, keep_loaded=True)
    run(engine, after, keep_loaded=True)
    assert list(stored(engine, after)["models"]) == [after.key]


def test_kept_encoders_that_had_to_make_room_are_loaded_again(engine: Engine, folder: Path) -> None:
    model = model_of(folder)
    expected = run(engine, model, keep_loaded=True)
    engine.park(model)
    assert stored(engine, model)["models"] == {}
    again = run(engine, model)
    assert again.load_seconds > 0
    assert torch.equal(again.prompts[0]["cross_attn"], expected.prompts[0]["cross_attn"])


def test_one_process_serves_all_of_this(engine: Engine) -> None:
    assert engine.num_starts == 1


def test_what_does_not_fit_is_refused_before_it_is_loaded(engine: Engine, folder: Path) -> None:
    model = model_of(folder, "single", cpu_0=50_000, cpu_1=60_000)
    loads = stored(engine, model)["num_loads"]
    with pytest.raises(RankUserError, match="text_encoder and text_encoder_2 do not fit: they need"):
        run(engine, model)
    assert stored(engine, model)["num_loads"] == loads
    assert engine.num_starts == 1  # the process is as good as before


def test_a_length_out_of_range_starts_nothing(folder: Path) -> None:
    engine = Engine(REPOSITORY, environ=os.environ)
    with pytest.raises(UserError, match="max_sequence_length is 600"):
        run(engine, model_of(folder), max_sequence_length=600)
    assert engine.num_starts == 0


def test_the_ranks_memory_comes_back(engine: Engine, tmp_path: Path) -> None:
    """200 MB of T5; bfloat16 weights in float32 would be copies, these are mapped: both kinds of memory are counted."""
    folder = write_text(tmp_path / "large")
    build_t5(d_model=512, d_ff=2048, d_kv=64, num_heads=8, num_layers=12).save_pretrained(folder / "text_encoder_2")
    model = model_of(folder)
    run(engine, model)  # what libraries keep after their first use is not the encoders' memory
    before = resident_bytes(engine, model)
    run(engine, model, keep_loaded=True)
    assert resident_bytes(engine, model) - before > 190 * 1000**2
    run(engine, model)
    assert abs(resident_bytes(engine, model) - before) < 5 * 1000**2


def resident_bytes(engine: Engine, model: TextModel) -> int:
    """Of the rank, anonymous and mapped from files."""
    group = engine.group(model.group)
    status = Path(f"/proc/{group.links[0].process.pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile"))


# ----- room on the devices -----

GB = 1000**3


def shares(placement: str, capacities: tuple[int, ...], **limits: int) -> list[float]:
    """Gigabytes of weights asked for on each GPU for 9.8 GB of encoders."""
    model = TextModel(
        devices=tuple(f"cuda:{index}" for index in range(len(capacities))),
        source=_Source(total_bytes=int(9.8 * GB)),  # type: ignore[arg-type]
        placement=placement,
        limits=tuple((name.replace("_", ":"), size) for name, size in limits.items()),
        capacities=tuple(size * GB for size in capacities),
    )
    wanted = model.estimated_bytes()
    return [round(wanted.get(device, 0) / GB, 1) for device in model.devices]


class _Source:
    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes


def test_room_is_asked_for_where_the_placement_puts_weights() -> None:
    assert shares("balanced", (24, 24)) == [4.9, 4.9]
    assert shares("balanced", (24, 24, 1)) == [4.4, 4.4, 1.0]
    assert shares("balanced", (24, 24), cuda_0=2 * GB) == [2.0, 7.8]
    assert shares("sequential", (24, 24)) == [9.8, 0.0]
    assert shares("sequential", (8, 24)) == [8.0, 1.8]
    assert shares("auto", (8, 24)) == [0.0, 9.8]
    assert shares("single", (8, 24), cuda_1=4 * GB) == [8.0, 0.0]


# ----- slices, on a mesh group -----


@pytest.fixture
def sliced(engine: Engine, tmp_path: Path) -> TextModel:
    return model_of(write_wan_text(tmp_path / "tiny-wan"), "tensor")


def ranks_of(engine: Engine, model: TextModel) -> list[dict[str, Any]]:
    """Each rank's own account, after the releases that are due."""
    engine.group(model.group)
    (group,) = (found for found in engine.status() if found["kind"] == "mesh")
    return list(group["ranks"])


def test_slices_come_from_one_rank_per_device(engine: Engine, sliced: TextModel) -> None:
    encoded = run(engine, sliced)
    whole = run(engine, model_of(Path(sliced.source.place.folder)))
    for ours, expected in zip(encoded.prompts, whole.prompts, strict=True):
        torch.testing.assert_close(ours["cross_attn"], expected["cross_attn"], rtol=0, atol=1e-5)
    assert encoded.placement.startswith("text_encoder in slices over 2 ranks; ")
    assert [rank["models"] for rank in ranks_of(engine, sliced)] == [{}, {}]


def test_kept_slices_are_parked_and_come_back_without_being_read(engine: Engine, sliced: TextModel) -> None:
    expected = run(engine, sliced, keep_loaded=True)
    before = ranks_of(engine, sliced)
    held = [rank["models"][sliced.key]["device_bytes"] for rank in before]
    assert held[0] == held[1] and sum(held) < 1.2 * sliced.source.total_bytes
    engine.park(sliced)
    for rank in ranks_of(engine, sliced):
        assert rank["models"][sliced.key] == {"device_bytes": 0, "host_bytes": held[0]}
    again = run(engine, sliced)
    assert [rank["num_loads"] for rank in ranks_of(engine, sliced)] == [rank["num_loads"] for rank in before]
    assert torch.equal(again.prompts[0]["cross_attn"], expected.prompts[0]["cross_attn"])
    assert [rank["models"] for rank in ranks_of(engine, sliced)] == [{}, {}]


def test_another_placement_of_the_same_devices_takes_the_place(engine: Engine, sliced: TextModel) -> None:
    whole = model_of(Path(sliced.source.place.folder))
    run(engine, whole, keep_loaded=True)
    run(engine, sliced, keep_loaded=True)
    assert stored_models(engine) == {sliced.key}
    run(engine, whole, keep_loaded=True)
    assert stored_models(engine) == {whole.key}
    run(engine, whole)


def stored_models(engine: Engine) -> set[str]:
    for kind in ("mesh", "placement"):
        engine.group(GroupKey(devices=RANKS, kind=kind))  # carries out the releases that are due
    return {key for group in engine.status() for rank in group["ranks"] for key in rank["models"]}


def test_cancel_before_encoding(engine: Engine, sliced: TextModel) -> None:
    with pytest.raises(Cancelled, match="Cancelled after loading text encoders of tiny-wan"):
        run(engine, sliced, poll=lambda: True)
    assert [rank["models"] for rank in ranks_of(engine, sliced)] == [{}, {}]
    assert run(engine, sliced).prompts[0]["cross_attn"].shape == (1, 64, 32)


def test_a_rank_that_died_is_replaced(engine: Engine, sliced: TextModel) -> None:
    expected = run(engine, sliced, keep_loaded=True)
    starts = engine.num_starts
    group = engine.group(sliced.group)
    os.kill(group.links[1].process.pid, signal.SIGKILL)
    limit = time.monotonic() + 10
    while not group.ended_ranks() and time.monotonic() < limit:
        time.sleep(0.01)
    again = run(engine, sliced)
    assert engine.num_starts == starts + 1
    assert torch.equal(again.prompts[0]["cross_attn"], expected.prompts[0]["cross_attn"])


def test_slices_that_do_not_come_out_even_start_nothing(tmp_path: Path) -> None:
    engine = Engine(REPOSITORY, environ=os.environ)
    source = read_text_source(write_wan_text(tmp_path / "wan"), TEXT_FAMILIES)
    devices = ("cpu:0", "cpu:1", "cpu:2")
    model = TextModel(devices=devices, source=source, placement="tensor", limits=(), capacities=(GB,) * 3)
    with pytest.raises(UserError, match="over 3 ranks does not fit UMT5"):
        run(engine, model)
    with pytest.raises(UserError, match="max_memory has no meaning with placement 'tensor'"):
        run(engine, replace(model, devices=RANKS, limits=(("cpu:0", 1000),)))
    assert engine.num_starts == 0


def test_room_for_slices() -> None:
    encoder = types.SimpleNamespace(num_bytes=8 * GB)
    source = types.SimpleNamespace(
        encoders={"big": encoder, "small": types.SimpleNamespace(num_bytes=GB)},
        divided_parts=lambda ranks: (types.SimpleNamespace(encoder="big"),),
    )
    devices = ("cuda:0", "cuda:1")
    model = TextModel(devices=devices, source=source, placement="tensor", limits=(), capacities=(24 * GB,) * 2)  # type: ignore[arg-type]
    assert model.estimated_bytes() == {"cuda:0": 5 * GB, "cuda:1": 5 * GB}
