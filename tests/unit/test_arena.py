"""Shared memory: tensors arrive bit for bit, unchanged ones are not sent again, growth never hurts a living view."""

from __future__ import annotations

import os

import pytest
import torch

from parallel_core.arena import ArenaReader, ArenaWriter, create_memory
from parallel_core.protocol import ProtocolError, TensorRef


@pytest.fixture
def arena() -> tuple[ArenaWriter, ArenaReader]:
    descriptor = create_memory("test")
    return ArenaWriter(descriptor), ArenaReader(os.dup(descriptor))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_every_dtype_arrives(arena: tuple[ArenaWriter, ArenaReader], dtype: torch.dtype) -> None:
    writer, reader = arena
    tensor = torch.arange(-6, 6).reshape(3, 4).to(dtype)
    refs = writer.write({"t": tensor, "transposed": tensor.T, "empty": tensor[:0]})
    assert torch.equal(reader.look(refs["t"], writer.size), tensor)
    assert torch.equal(reader.look(refs["transposed"], writer.size), tensor.T)
    assert reader.look(refs["empty"], writer.size).shape == (0, 4)


def test_what_has_not_changed_keeps_its_version(arena: tuple[ArenaWriter, ArenaReader]) -> None:
    writer, _ = arena
    first = writer.write({"same": torch.ones(3), "other": torch.ones(3)})
    second = writer.write({"same": torch.ones(3), "other": torch.zeros(3)})
    assert second["same"] == first["same"]
    assert second["other"].version != first["other"].version


def test_nan_equals_itself_and_minus_zero_is_not_zero(arena: tuple[ArenaWriter, ArenaReader]) -> None:
    writer, _ = arena
    nan = writer.write({"t": torch.tensor([float("nan")])})["t"]
    assert writer.write({"t": torch.tensor([float("nan")])})["t"] == nan
    zero = writer.write({"t": torch.tensor([0.0])})["t"]
    assert writer.write({"t": torch.tensor([-0.0])})["t"] != zero


def test_growth_leaves_old_views_alone(arena: tuple[ArenaWriter, ArenaReader]) -> None:
    writer, reader = arena
    refs = writer.write({"small": torch.arange(10)})
    old = reader.look(refs["small"], writer.size)
    size = writer.size
    refs = writer.write({"large": torch.arange(size)})
    assert writer.size > size
    assert torch.equal(reader.look(refs["large"], writer.size), torch.arange(size))
    assert old.shape == (10,) and int(old.sum()) >= 0, "the old mapping still lives"


def test_a_slot_that_grows_moves(arena: tuple[ArenaWriter, ArenaReader]) -> None:
    writer, reader = arena
    writer.write({"a": torch.zeros(4), "b": torch.ones(4)})
    refs = writer.write({"a": torch.arange(100.0), "b": torch.ones(4)})
    assert torch.equal(reader.look(refs["a"], writer.size), torch.arange(100.0))
    assert torch.equal(reader.look(refs["b"], writer.size), torch.ones(4))


@pytest.mark.parametrize(
    ("ref", "says"),
    [
        (TensorRef(dtype="float32", shape=(10**9,), offset=0, version=1), "outside the arena"),
        (TensorRef(dtype="float32", shape=(1,), offset=-4, version=1), "outside the arena"),
        (TensorRef(dtype="object", shape=(1,), offset=0, version=1), "Unknown dtype"),
        (TensorRef(dtype="float32", shape=(-1,), offset=0, version=1), "negative size"),
    ],
)
def test_a_reference_outside_the_arena_is_refused(
    arena: tuple[ArenaWriter, ArenaReader], ref: TensorRef, says: str
) -> None:
    writer, reader = arena
    writer.write({"t": torch.zeros(4)})
    with pytest.raises(ProtocolError, match=says):
        reader.look(ref, writer.size)


def test_a_size_that_the_file_does_not_have_is_refused(arena: tuple[ArenaWriter, ArenaReader]) -> None:
    writer, reader = arena
    ref = writer.write({"t": torch.zeros(4)})["t"]
    with pytest.raises(ProtocolError, match="is said to have"):
        reader.look(ref, writer.size * 2)


def test_a_dtype_that_may_not_cross_is_refused(arena: tuple[ArenaWriter, ArenaReader]) -> None:
    with pytest.raises(ProtocolError, match="complex64"):
        arena[0].write({"t": torch.zeros(1, dtype=torch.complex64)})
