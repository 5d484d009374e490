"""How weights are held while a model runs, and what works with what.

Owns the choices of weight_dtype, what each becomes for a given checkpoint, and the table of what is supported, by which
the nodes refuse and from which the README's table is made. Knows neither ranks nor tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from .checkpoint import LOADABLE_DTYPES, Checkpoint, TensorInfo
from .errors import UserError
from .gguf_header import GGUF_BLOCKS
from .plan import ParallelPlan
from .quantised import FP8_DTYPES

PLAIN_CHOICES = ("default", "bfloat16", "float16", "float32")
FP8_CHOICES = {"fp8_e4m3fn": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
TORCHAO_CHOICES = ("torchao_int8", "torchao_fp8")
WEIGHT_DTYPES = (*PLAIN_CHOICES, *FP8_CHOICES, *TORCHAO_CHOICES)
"""Choices of the loader's weight_dtype."""

PLAIN = "plain"
"""Every weight in the compute dtype."""
AS_STORED = "as_stored"
"""The blocks' linear layers stay as the file has them (fp8, GGUF) and are unpacked whenever they compute."""


@dataclass(frozen=True)
class Storage:
    """`dtype`: what is computed in, and held where weights are plain. `kind`: PLAIN, AS_STORED, an fp8 dtype to which
    the blocks' linear layers are cast, or a choice of torchao."""

    dtype: str
    kind: str = PLAIN

    def describe(self, checkpoint: Checkpoint) -> str:
        """For the node: "bfloat16", "float8_e4m3fn, computed in bfloat16"."""
        if self.kind == PLAIN:
            packed = packed_types(checkpoint)
            return f"{self.dtype}, unpacked from {', '.join(packed)}" if packed else self.dtype
        held = ", ".join(packed_types(checkpoint)) if self.kind == AS_STORED else self.kind
        return f"{held}, computed in {self.dtype}"


SUPPORT: dict[str, dict[str, str]] = {
    "16 or 32 bits": {"ulysses, ring": "yes", "tensor": "yes", "shard_weights": "yes", "device_map": "yes"},
    "fp8": {"ulysses, ring": "yes", "tensor": "yes", "shard_weights": "yes", "device_map": "yes"},
    "GGUF": {"ulysses, ring": "yes", "tensor": "whole blocks", "shard_weights": "yes", "device_map": "yes"},
    "torchao": {"ulysses, ring": "yes", "tensor": "no", "shard_weights": "no", "device_map": "no"},
}
"""What is held -> what is asked of it -> whether that works. Replicas work with everything."""

_UNPACKED = "weight_dtype bfloat16 (unpacks the weights when they are loaded)"
_INSTEAD = {"torchao": "weight_dtype fp8_e4m3fn"}
"""What does as well, for what the table has a "no" for."""


def packed_types(checkpoint: Checkpoint) -> list[str]:
    """The quantised types of the checkpoint's tensors, most bytes first."""
    totals: dict[str, int] = {}
    for info in checkpoint.tensors.values():
        if info.is_quantised:
            totals[info.dtype] = totals.get(info.dtype, 0) + info.num_bytes
    return sorted(totals, key=lambda name: -totals[name])


def choose_storage(checkpoint: Checkpoint, weight_dtype: str) -> Storage:
    """What `weight_dtype` means for this checkpoint; `UserError` for a choice that it does not leave."""
    if weight_dtype not in WEIGHT_DTYPES:
        raise UserError(f"weight_dtype is {weight_dtype!r}; expected one of {', '.join(WEIGHT_DTYPES)}.")
    packed = packed_types(checkpoint)
    if weight_dtype in LOADABLE_DTYPES:
        return Storage(weight_dtype)
    if weight_dtype == "default":
        return Storage(_compute_dtype(checkpoint), AS_STORED) if packed else Storage(checkpoint.dtype)
    kind = FP8_CHOICES.get(weight_dtype, weight_dtype)
    if packed:
        raise UserError(
            f"weight_dtype is {weight_dtype!r}, but {checkpoint.folder.name!r} is quantised already "
            f"({', '.join(packed)}), and to quantise it again would lose more. Choose 'default' to keep it as it is, "
            "or bfloat16 to unpack it."
        )
    return Storage(_compute_dtype(checkpoint), kind)


def _compute_dtype(checkpoint: Checkpoint) -> str:
    """Quantised weights are computed in 16 bits: what the file has besides them, else bfloat16."""
    others = {info.dtype for info in checkpoint.tensors.values()}
    return "float16" if "float16" in others and "bfloat16" not in others and not _is_gguf(others) else "bfloat16"


def _is_gguf(dtypes: set[str]) -> bool:
    return bool(dtypes & GGUF_BLOCKS.keys())  # converters write float16 there whatever the model was


def held_kind(checkpoint: Checkpoint, storage: Storage) -> str:
    """The row of `SUPPORT` that holds."""
    if storage.kind in TORCHAO_CHOICES:
        return "torchao"
    if storage.kind in FP8_DTYPES:
        return "fp8"
    if storage.kind == AS_STORED:
        return "GGUF" if _is_gguf(set(packed_types(checkpoint))) else "fp8"
    return "16 or 32 bits"


def is_block_matrix(info: TensorInfo) -> bool:
    """Whether a weight is one of the blocks' linear layers, which alone stay quantised."""
    return len(info.shape) == 2 and "blocks." in info.name and info.name.endswith(".weight")


def check_storage(checkpoint: Checkpoint, storage: Storage, plan: ParallelPlan) -> None:
    """`UserError` where the table says that what is held does not go with the plan."""
    held = held_kind(checkpoint, storage)
    asked = {
        "ulysses, ring": plan.ulysses * plan.ring > 1,
        "tensor": plan.tensor > 1,
        "shard_weights": plan.shard_weights,
        "device_map": plan.strategy == "device_map",
    }
    for mode, is_asked in asked.items():
        if is_asked and SUPPORT[held][mode] == "no":
            works = ", ".join(name for name, answer in SUPPORT[held].items() if answer != "no")
            raise UserError(
                f"Weights held as {storage.kind if held == 'torchao' else held} do not work with {mode}. They work "
                f"with replicas, {works}. Choose another mode, or {_INSTEAD[held]}."
            )
    check_blocks(checkpoint, storage, plan.tensor)


def check_blocks(checkpoint: Checkpoint, storage: Storage, tensor: int) -> None:
    """`UserError` unless a tensor rank's slice of every weight that stays packed is whole blocks."""
    if storage.kind != AS_STORED:
        return
    for info in checkpoint.tensors.values():
        numbers, _ = GGUF_BLOCKS.get(info.dtype, (1, 1))
        if is_block_matrix(info) and info.shape[1] % (numbers * tensor):
            raise UserError(
                f"tensor is {tensor}, but the rows of {info.name!r} are {info.shape[1] // numbers} blocks of {numbers} "
                f"numbers ({info.dtype}), which cannot be dealt to {tensor} ranks evenly. Use ulysses, another tensor "
                f"degree, or {_UNPACKED}."
            )
