"""Models in pieces: every cut of every family finds its tensors on the right devices, and guests leave again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from parallel_core import upstream
from parallel_core.errors import UserError
from parallel_core.max_memory import DISK, HOST
from parallel_core.placement import Component, plan_placement
from parallel_core.worker.budgets import free_budgets
from parallel_core.worker.placed import Places, attach, bytes_by_device, whole_classes
from tests.pretend_devices import LAYOUTS, empty_model, parts_of
from tests.tiny_models import TINY_MODELS

TWO = ("cuda:5", "cuda:3")  # the controller's names: this process sees them as 0 and 1
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", TINY_MODELS)
def test_every_cut_runs(name: str) -> None:
    """No part meets a tensor on another device, whatever lies where."""
    command = [sys.executable, "-m", "tests.pretend_devices", name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == dict.fromkeys(LAYOUTS, "ok")


class Part(nn.Module):
    """Something with a weight and without arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self) -> None: ...


class TwoParts(nn.Module):
    """Calls both."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Part(), Part()

    def forward(self) -> None:
        self.first()
        self.second()


def test_a_parts_gpu_becomes_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels outside torch run on it."""
    current: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: current.append(str(device)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    model = TwoParts()
    attach(model, Places(homes={"first": TWO[1], "second": TWO[0]}, devices=TWO, guests=TWO[0]), {})
    model()
    assert current == ["cuda:1", "cuda:0", "0"]


@pytest.mark.parametrize("name", TINY_MODELS)
def test_blocks_and_what_stands_beside_them_stay_whole(name: str) -> None:
    """Every part is a module that is called as a whole, or a tensor of the model itself."""
    model = empty_model(name)
    modules = dict(model.named_modules())
    blocks = upstream.blocks_kept_whole(model)
    for part in parts_of(model):
        parents = [modules[part.rsplit(".", n + 1)[0]] for n in range(part.count("."))]
        assert not any(type(parent).__name__ in blocks for parent in parents)
        assert all(isinstance(parent, nn.ModuleList) for parent in parents), part


def test_flux_is_placed_in_these_parts() -> None:
    assert parts_of(empty_model("flux")) == [
        "pos_embed",
        "time_text_embed",
        "context_embedder",
        "x_embedder",
        "transformer_blocks.0",
        "transformer_blocks.1",
        "single_transformer_blocks.0",
        "single_transformer_blocks.1",
        "norm_out",
        "proj_out",
    ]


def test_a_class_that_declares_no_blocks_is_refused() -> None:
    with pytest.raises(UserError, match="Linear does not declare which of its modules must stay on one device"):
        upstream.blocks_kept_whole(nn.Linear(1, 1))


class Half(nn.Module):
    """Two layers of which the second fails when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def placed_half(second: str) -> tuple[Half, Places]:
    model = Half()
    weights = {f"second.{name}": tensor.data.clone() for name, tensor in model.second.named_parameters()}
    model.second.to("meta")
    places = Places(
        homes={"scale": "cpu:0", "first": "cpu:1", "second": second}, devices=("cpu:0", "cpu:1"), guests="cpu:1"
    )
    attach(model, places, weights)
    return model, places


@pytest.mark.parametrize("home", [HOST, DISK])
def test_a_guest_leaves_even_when_its_layer_fails(home: str) -> None:
    model, _ = placed_half(home)
    model(torch.zeros(1, 4))
    assert all(parameter.is_meta for parameter in model.second.parameters())
    model.second.forward = lambda x: 1 / 0
    with pytest.raises(ZeroDivisionError):
        model(torch.zeros(1, 4))
    assert all(parameter.is_meta for parameter in model.second.parameters())


def test_bytes_are_counted_where_they_lie() -> None:
    model, places = placed_half(HOST)
    assert bytes_by_device(model, places) == {"cpu:0": 3 * 4, "cpu:1": (16 + 4) * 4}


def test_guests_compute_where_their_neighbours_do() -> None:
    model = empty_model("flux")
    whole = whole_classes(model, upstream.blocks_kept_whole(model))
    component = Component(name="model", module=model, no_split=whole)
    budgets = {TWO[0]: 1_200_000, TWO[1]: 700_000, HOST: 1 << 30}
    plan = plan_placement([component], budgets, "balanced")
    places = Places.of(plan, TWO, budgets)
    assert set(places.homes.values()) == {*TWO, HOST}
    assert places.computes_on("proj_out.weight") == TWO[1] and places.home("proj_out.weight") == HOST
    budgets = {TWO[0]: 0, TWO[1]: 10_000, HOST: 1 << 30}
    plan = plan_placement([component], budgets, "balanced")
    assert Places.of(plan, TWO, budgets).computes_on("proj_out.weight") == TWO[1], "none lies on a device"


def test_without_a_limit_a_quarter_of_a_gpu_is_left_for_the_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    gigabyte = 1000**3
    memory = {0: (23 * gigabyte, 24 * gigabyte), 1: (9 * gigabyte, 24 * gigabyte)}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: memory[index])
    free = free_budgets(TWO, {}, 0.75)
    assert (free[TWO[0]], free[TWO[1]]) == (18 * gigabyte, 9 * gigabyte - 512 * 1024**2)
    assert free_budgets(TWO, {TWO[0]: 22 * gigabyte}, 0.75)[TWO[0]] == 23 * gigabyte - 512 * 1024**2
