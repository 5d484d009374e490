"""How weights are held: what weight_dtype means for a file, and the table by which modes are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from parallel_core.checkpoint import Checkpoint, TensorInfo
from parallel_core.errors import UserError
from parallel_core.plan import ParallelPlan
from parallel_core.storage import AS_STORED, SUPPORT, Storage, check_storage, choose_storage, held_kind

TWO = ("cpu:0", "cpu:1")
ASKED: dict[str, dict[str, Any]] = {
    "ulysses, ring": {"ulysses": 2},
    "tensor": {"tensor": 2},
    "shard_weights": {"ulysses": 2, "shard_weights": True},
    "device_map": {"strategy": "device_map"},
}
HELD = {
    "16 or 32 bits": ("bfloat16", "default"),
    "fp8": ("float8_e4m3fn", "default"),
    "GGUF": ("Q4_K", "default"),
    "torchao": ("bfloat16", "torchao_int8"),
}


def checkpoint(matrix: str, other: str = "bfloat16", width: int = 1024) -> Checkpoint:
    """One matrix of a block and one bias, in these dtypes."""
    file = Path("model.safetensors")
    tensors = {
        "blocks.0.ffn.weight": TensorInfo(
            name="blocks.0.ffn.weight", dtype=matrix, shape=(8, width), num_bytes=8 * width, file=file
        ),
        "norm.bias": TensorInfo(name="norm.bias", dtype=other, shape=(8,), num_bytes=16, file=file),
    }
    return Checkpoint(folder=file, class_name="WanTransformer3DModel", config={}, tensors=tensors)


@pytest.mark.parametrize("mode", ASKED)
@pytest.mark.parametrize("held", SUPPORT)
def test_what_the_table_has_no_for_is_refused_and_nothing_else(held: str, mode: str) -> None:
    dtype, weight_dtype = HELD[held]
    model = checkpoint(dtype)
    storage = choose_storage(model, weight_dtype)
    assert held_kind(model, storage) == held
    plan = ParallelPlan(devices=TWO, **ASKED[mode])
    if SUPPORT[held][mode] == "no":
        with pytest.raises(UserError, match=f"Weights held as {weight_dtype} do not work with {mode}. .* weight_dtype"):
            check_storage(model, storage, plan)
    else:
        check_storage(model, storage, plan)


def test_the_tables_hold_the_same_modes() -> None:
    assert all(row.keys() == ASKED.keys() for row in SUPPORT.values()) and SUPPORT.keys() == HELD.keys()


@pytest.mark.parametrize(("width", "fits"), [(512, True), (768, False)])
def test_a_slice_of_packed_blocks_must_be_whole_blocks(width: int, fits: bool) -> None:
    model = checkpoint("Q4_K", width=width)
    plan = ParallelPlan(devices=TWO, tensor=2)
    if fits:
        check_storage(model, choose_storage(model, "default"), plan)
        return
    with pytest.raises(UserError, match="3 blocks of 256 numbers .* cannot be dealt to 2 ranks .* bfloat16"):
        check_storage(model, choose_storage(model, "default"), plan)
    check_storage(model, choose_storage(model, "bfloat16"), plan)  # unpacked, any slice will do


@pytest.mark.parametrize(
    ("matrix", "other", "weight_dtype", "expected"),
    [
        ("float32", "float32", "default", Storage("float32")),
        ("bfloat16", "float32", "default", Storage("bfloat16")),
        ("float32", "float32", "fp8_e4m3fn", Storage("bfloat16", "float8_e4m3fn")),
        ("float16", "float16", "fp8_e5m2", Storage("float16", "float8_e5m2")),
        ("bfloat16", "bfloat16", "torchao_fp8", Storage("bfloat16", "torchao_fp8")),
        ("float8_e4m3fn", "float8_e4m3fn", "default", Storage("bfloat16", AS_STORED)),
        ("float8_e4m3fn", "float16", "default", Storage("float16", AS_STORED)),
        ("float8_e4m3fn", "float32", "default", Storage("bfloat16", AS_STORED)),
        ("Q8_0", "float16", "default", Storage("bfloat16", AS_STORED)),
        ("Q8_0", "float16", "float16", Storage("float16")),
    ],
)
def test_what_weight_dtype_means(matrix: str, other: str, weight_dtype: str, expected: Storage) -> None:
    assert choose_storage(checkpoint(matrix, other), weight_dtype) == expected


@pytest.mark.parametrize("weight_dtype", ["fp8_e4m3fn", "torchao_int8"])
def test_what_is_quantised_is_not_quantised_again(weight_dtype: str) -> None:
    with pytest.raises(UserError, match=f"{weight_dtype}.*quantised already.*Q8_0.*'default'.*bfloat16"):
        choose_storage(checkpoint("Q8_0"), weight_dtype)


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(UserError, match="weight_dtype is 'int3'; expected one of default, bfloat16"):
        choose_storage(checkpoint("bfloat16"), "int3")
