"""Where the weights are: parked by /free, given back with the last reference, never in ComfyUI's own process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.comfyui.broken_models import WEIGHTS, other_weights
from tests.comfyui.graphs import Graph
from tests.comfyui.harness import Comfy, bytes_read, mapped_files, resident_bytes, wait_until
from tests.comfyui.parity import PLANS, load_parallel
from tests.comfyui.workflows import Case, ksampler
from tests.tiny_files import write_hollow
from tests.tiny_models import family_of

CASE = Case(name="memory", steps=1)
LARGE = "hollow-flux"
SMALL = "tiny-flux"
GC_SECONDS = 30
"""ComfyUI collects garbage every ten seconds."""


def sample(comfy: Comfy, model: str, plan: str = "ulysses 2") -> torch.Tensor:
    graph = Graph()
    return comfy.latents(graph, ksampler(graph, load_parallel(graph, PLANS[plan], model=model), CASE))


@pytest.fixture
def large_bytes(models: Path) -> int:
    """Bytes of the large model's weights."""
    size = (models / "diffusers" / LARGE / "transformer" / WEIGHTS).stat().st_size
    assert size > 400e6
    return size


def holdings(comfy: Comfy) -> list[tuple[int, int]]:
    """What the ranks' own ledgers say, model by model: bytes on the device, bytes in host memory."""
    models = [model for group in comfy.groups() for rank in group["ranks"] for model in rank["models"].values()]
    return [(model["device_bytes"], model["host_bytes"]) for model in models]


@pytest.mark.parametrize("plan", ["ulysses 2", "tensor 2"])
def test_free_parks_the_weights_and_the_next_prompt_needs_no_disk(comfy: Comfy, models: Path, plan: str) -> None:
    before = sample(comfy, "other-flux", plan)
    ranks = comfy.ranks(group_of=2)
    resident = holdings(comfy)
    assert all(device > 0 and host == 0 for device, host in resident)
    parked = [(0, device) for device, _ in resident]
    comfy.free_until(lambda: holdings(comfy) == parked, seconds=20, what="all bytes are in host memory")
    with other_weights(models / "diffusers" / "other-flux" / "transformer" / WEIGHTS):
        assert torch.equal(sample(comfy, "other-flux", plan), before)
    assert comfy.ranks(group_of=2) == ranks


def resident(comfy: Comfy) -> list[int]:
    """Bytes of memory of each rank."""
    return [resident_bytes(rank) for rank in comfy.ranks(group_of=2)]


def test_another_workflow_gives_the_memory_of_the_last_one_back(comfy: Comfy, large_bytes: int) -> None:
    sample(comfy, SMALL)
    ranks, idle = comfy.ranks(group_of=2), resident(comfy)
    sample(comfy, LARGE)
    assert all(now > before + 0.9 * large_bytes for now, before in zip(resident(comfy), idle, strict=True))
    sample(comfy, SMALL)
    wait_until(
        lambda: all(now < before + 0.1 * large_bytes for now, before in zip(resident(comfy), idle, strict=True)),
        seconds=GC_SECONDS,
        what="the ranks gave the weights back",
    )
    assert comfy.ranks(group_of=2) == ranks
    assert len(comfy.state()["patchers"]) == 1


def test_dropping_comfyuis_cache_gives_everything_back(comfy: Comfy, large_bytes: int) -> None:
    sample(comfy, LARGE)
    ranks, loaded = comfy.ranks(group_of=2), resident(comfy)
    comfy.free_until(
        lambda: all(now < before - 0.9 * large_bytes for now, before in zip(resident(comfy), loaded, strict=True)),
        seconds=GC_SECONDS,
        what="the ranks gave the weights back",
        free_memory=True,
    )
    assert comfy.ranks(group_of=2) == ranks, "given back by living ranks"
    assert comfy.state()["patchers"] == []
    assert comfy.state()["models"] == []
    assert holdings(comfy) == []


def test_comfyuis_own_process_holds_no_weights(comfy: Comfy, large_bytes: int) -> None:
    sample(comfy, SMALL)
    before = comfy.state()["memory"]["VmRSS"]
    sample(comfy, LARGE)
    assert comfy.state()["memory"]["VmRSS"] < before + 0.1 * large_bytes


@pytest.fixture
def large_file(models: Path) -> Path:
    """The large model as a single file, fused as ComfyUI has it."""
    file = models / "diffusion_models" / f"{LARGE}.safetensors"
    file.parent.mkdir(exist_ok=True)
    return write_hollow(file, models / "diffusers" / LARGE / "transformer", family_of("flux"))


def test_comfyuis_own_process_reads_headers_only(comfy: Comfy, large_file: Path) -> None:
    pid = comfy.server.pid
    assert pid is not None
    sample(comfy, SMALL, "tensor 2")
    memory, read = comfy.state()["memory"]["VmRSS"], bytes_read(pid)
    graph = Graph()
    model = load_parallel(graph, PLANS["tensor 2"], model=large_file.name, config_from=LARGE)
    comfy.latents(graph, ksampler(graph, model, CASE))
    assert bytes_read(pid) - read < 0.01 * large_file.stat().st_size
    assert comfy.state()["memory"]["VmRSS"] - memory < 0.01 * large_file.stat().st_size, "nor by a memory map"
    assert all(str(large_file) not in mapped_files(process) for process in (pid, *comfy.ranks(group_of=2)))
