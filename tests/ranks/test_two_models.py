"""Two models on the same ranks: both resident where there is room, else the one that is not in use is parked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from parallel_core.engine import Engine
from parallel_core.engine.transformer import RemoteTransformer
from parallel_core.plan import DeviceInfo, ParallelPlan
from tests.ranks.engines import make_engine
from tests.ranks.remote_flux import TWO, call, ledger, number_of_loads, remote
from tests.tiny_flux import write_transformer

CALLS = [call(2, text=4)]
FULL = tuple(DeviceInfo(name=device, uuid="", token="", total_bytes=1 << 34) for device in TWO)
"""The ranks' memory as if it were apart from the host's. They say that nothing of it is free."""

Folders = tuple[Path, Path]


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    return write_transformer(tmp_path / "one"), write_transformer(tmp_path / "two", seed=1)


def both(engine: Engine, folders: Folders) -> tuple[RemoteTransformer, RemoteTransformer]:
    """Two models under different plans."""
    ulysses = ParallelPlan(devices=TWO, ulysses=2)
    tensor = ParallelPlan(devices=TWO, tensor=2)
    return remote(engine, folders[0], ulysses, name="one"), remote(engine, folders[1], tensor, name="two")


@contextmanager
def crowded(host: Callable[[], tuple[int, int]] = lambda: (1 << 34, 1 << 34)) -> Iterator[Engine]:
    """An engine whose devices have no room for two models. `host`: available and total bytes."""
    engine = make_engine(list_devices=lambda: FULL, host=host)
    try:
        yield engine
    finally:
        engine.shutdown()


def evaluate(model: RemoteTransformer) -> torch.Tensor:
    return model.evaluate(CALLS, label="forward")[0]


def where(engine: Engine, model: RemoteTransformer) -> set[str]:
    """Where the ranks themselves say that a model lies."""
    held = [rank[model.spec.key] for rank in ledger(engine, model) if model.spec.key in rank]
    return {kind for entry in held for kind, size in entry.items() if size}


def test_the_model_that_is_not_in_use_is_parked_and_comes_back_with_the_same_bits(folders: Folders) -> None:
    with crowded() as engine:
        models = both(engine, folders)
        made = [evaluate(model) for model in models]
        assert engine.take_notices() == ["flux transformer one left the devices to make room"]
        for folder in folders:
            folder.rename(folder.with_suffix(".gone"))
        for index in (0, 1, 0, 1):
            used, other = models[index], models[1 - index]
            assert torch.equal(evaluate(used), made[index])
            assert where(engine, used) == {"device_bytes"} and where(engine, other) == {"host_bytes"}
            assert (engine.is_resident(used.spec), engine.is_resident(other.spec)) == (True, False)
        assert number_of_loads(engine, models[0]) == [2, 2]


def test_both_stay_where_there_is_room(engine: Engine, folders: Folders) -> None:
    models = both(engine, folders)
    for model in models:
        evaluate(model)
    assert all(engine.is_resident(model.spec) and where(engine, model) == {"device_bytes"} for model in models)
    for model in models:
        engine.release_later(model.spec.group, model.spec.key)


def test_what_does_not_fit_the_host_either_is_read_again(folders: Folders) -> None:
    with crowded(host=lambda: (1000, 1 << 34)) as engine:
        models = both(engine, folders)
        made = [evaluate(model) for model in models]
        assert where(engine, models[0]) == set()
        assert torch.equal(evaluate(models[0]), made[0])
        assert number_of_loads(engine, models[0]) == [3, 3]
