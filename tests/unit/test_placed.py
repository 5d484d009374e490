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
from parallel_core.placement import plan_placement
from parallel_core.worker.budgets import free_budgets
from parallel_core.worker.placed import Places, attach, bytes_by_device
from parallel_core.worker.placed_transformer import transformer_component
from tests.pretend_devices import CASES, LAYOUTS, empty_model, units_of
from tests.tiny_models import TINY_MODELS

TWO = ("cuda:5", "cuda:3")  # the controller's names: this process sees them as 0 and 1
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY_MODELS)
def test_every_cut_runs(name: str) -> None:
    """No part meets a tensor on another device, whatever lies where."""
    command = [sys.executable, "-m", "tests.pretend_devices", name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    assert len(results) == len(LAYOUTS) * len(CASES)
    assert results == dict.fromkeys(results, "ok")


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
    attach(model, Places(homes={"first": TWO[1], "second": TWO[0]}, devices=TWO, root=TWO[0], guests=TWO[0]), {})
    model()
    assert current == ["cuda:0", "cuda:1", "cuda:0", "0"]


def test_flux_is_placed_in_these_units() -> None:
    """All that stands beside the blocks is one of them; the blocks are one each."""
    beside = ("pos_embed", "time_text_embed", "context_embedder", "x_embedder", "norm_out", "proj_out")
    blocks = [(f"{kind}_blocks.{index}",) for kind in ("transformer", "single_transformer") for index in range(2)]
    assert units_of(empty_model("flux")) == [beside, *blocks]


@pytest.mark.parametrize("name", TINY_MODELS)
def test_every_weight_belongs_to_a_block_or_lies_beside_them(name: str) -> None:
    model = empty_model(name)
    beside, *blocks = units_of(model)
    assert all(len(unit) == 1 for unit in blocks) and len(blocks) >= 2
    assert not any(part.startswith(f"{block}.") for (block,) in blocks for part in beside)


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
    homes = {"scale": "cpu:0", "first": "cpu:1", "second": second}
    places = Places(homes=homes, devices=("cpu:0", "cpu:1"), root="cpu:0", guests="cpu:1")
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
    component = transformer_component(empty_model("flux"))
    last = "single_transformer_blocks.1.proj_mlp.weight"
    for sizes, home, root in (
        ((1_200_000, 700_000), HOST, TWO[0]),
        ((0, 4_000_000), TWO[1], TWO[1]),
        ((0, 10_000), HOST, TWO[1]),
    ):
        budgets = {**dict(zip(TWO, sizes, strict=True)), HOST: 1 << 30}
        places = Places.of(plan_placement([component], budgets, "balanced"), TWO, budgets, "x_embedder")
        assert (places.home(last), places.computes_on(last), places.root) == (home, TWO[1], root)


def test_without_a_limit_a_quarter_of_a_gpu_is_left_for_the_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    gigabyte = 1000**3
    memory = {0: (23 * gigabyte, 24 * gigabyte), 1: (9 * gigabyte, 24 * gigabyte)}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: memory[index])
    free = free_budgets(TWO, {}, 0.75)
    assert (free[TWO[0]], free[TWO[1]]) == (18 * gigabyte, 9 * gigabyte - 512 * 1024**2)
    assert free_budgets(TWO, {TWO[0]: 22 * gigabyte}, 0.75)[TWO[0]] == 23 * gigabyte - 512 * 1024**2
