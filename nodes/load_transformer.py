"""The Load Parallel Transformer node: a drop-in for Load Diffusion Model."""

from __future__ import annotations

import math
from typing import Any

from comfy_api.latest import io

from ..parallel_core.attention_backends import check_dtype
from ..parallel_core.checkpoint import Checkpoint, component_folder
from ..parallel_core.engine.models import TransformerSpec
from ..parallel_core.engine.placed import placed
from ..parallel_core.engine.shares import check_heads
from ..parallel_core.engine.transformer import RemoteTransformer
from ..parallel_core.errors import UserError
from ..parallel_core.families.base import Family
from ..parallel_core.host import host_memory
from ..parallel_core.max_memory import HOST, WEIGHTS_SHARE, format_bytes, parse_max_memory
from ..parallel_core.model_file import ModelSource, check_model, read_transformer
from ..parallel_core.plan import ParallelPlan, resolve
from ..parallel_core.storage import (
    PLAIN,
    WEIGHT_DTYPES,
    Storage,
    check_storage,
    choose_storage,
    is_block_matrix,
)
from .listing import find_folder, find_model, list_folders, list_models
from .parallel_config import ParallelConfigType, default_plan
from .remote_model import build_model
from .runtime import engine, say

_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}

PRESET = "preset"
"""config_from's choice that names no folder."""


def inspect_model(model_name: str, config_from: str = PRESET) -> tuple[Checkpoint, Family]:
    """What the chosen folder or file holds, fully checked from its headers."""
    folder = None
    if config_from != PRESET:
        folder = component_folder(find_folder(config_from, "transformer", "config_from"), "transformer")
    return read_transformer(ModelSource(find_model(model_name, "transformer"), folder))


def make_remote(model_name: str, weight_dtype: str, plan: ParallelPlan, config_from: str = PRESET) -> RemoteTransformer:
    """Checks plan x model x devices and returns the handle; reads no weight and starts nothing."""
    checkpoint, family = inspect_model(model_name, config_from)
    config = family.full_config(checkpoint.config)
    storage = choose_storage(checkpoint, weight_dtype)
    num_bytes = _weight_bytes(checkpoint, family, storage)
    room = int(WEIGHTS_SHARE * min(engine().total_memory(device, plan.world_size) for device in plan.devices))
    fits = num_bytes <= room
    chosen = resolve(plan, rows=1, heads=family.tensor_units(config), fits_one_device=fits).plan
    family.check_plan(config, chosen)
    check_storage(checkpoint, storage, chosen)
    check_dtype(plan.attention_backend, storage.dtype)
    check_heads(chosen, family.num_heads(config))
    shards = chosen.ring * chosen.ulysses if plan.shard_weights else 1
    part = num_bytes // (chosen.tensor * shards)
    offload = plan.shard_weights and part > _limit(plan, room)
    if offload:
        _check_host(num_bytes, chosen)
    elif plan.strategy == "auto" and part > room:
        _refuse_too_large(num_bytes, chosen.tensor, room, family.tensor_units(config))
    spec = TransformerSpec(
        devices=plan.devices,
        folder=str(checkpoint.folder),
        fingerprint=checkpoint.fingerprint,
        family=family.name,
        name=model_name,
        dtype=storage.dtype,
        storage=storage.kind,
        held=storage.describe(checkpoint),
        config_from=str(checkpoint.config_file.parent) if checkpoint.config_file else "",
        num_bytes=num_bytes,
        tensor=chosen.tensor,
        shards=shards,
        offload=offload,
    )
    if plan.strategy == "device_map":
        spec = placed(spec, plan, [engine().total_memory(device, plan.world_size) for device in plan.devices])
    found = f"{checkpoint.variant}: " if checkpoint.variant else ""
    return RemoteTransformer(engine=engine(), spec=spec, plan=plan, family=family, config=config, found=found)


def _weight_bytes(checkpoint: Checkpoint, family: Family, storage: Storage) -> int:
    """Bytes of the loaded weights."""
    width = _BYTES[storage.dtype]
    total = 0
    for tensor in checkpoint.tensors.values():
        if storage.kind != PLAIN and is_block_matrix(tensor):
            total += tensor.num_bytes if tensor.is_quantised else math.prod(tensor.shape)
        else:
            total += math.prod(tensor.shape) * (max(width, 4) if family.is_fp32(tensor.name) else width)
    return total


def _limit(plan: ParallelPlan, room: int) -> int:
    """Bytes of weights that each device may hold: what there is room for, or less where the user says so."""
    limits = parse_max_memory(plan.max_memory, plan.devices)
    return min([room, *(limits[device] for device in plan.devices if device in limits)])


def _check_host(num_bytes: int, plan: ParallelPlan) -> None:
    """All parts of shared weights that no device has room for must fit the host's memory together."""
    limits = parse_max_memory(plan.max_memory, plan.devices)
    available = min(limits.get(HOST, host_memory()[1]), host_memory()[1])  # in all: the parts may lie there already
    needed = num_bytes * plan.replicas
    if needed > available:
        raise UserError(
            f"The weights shared out over {plan.ring * plan.ulysses} ranks take more than a device may hold, and "
            f"{format_bytes(needed)} do not fit the host's memory either ({format_bytes(available)}). Use more devices "
            "for ulysses or ring, a 16-bit weight_dtype, or larger limits in max_memory."
        )


def _refuse_too_large(num_bytes: int, tensor: int, room: int, units: int) -> None:
    """Before minutes of loading end in an out-of-memory error."""
    enough = [degree for degree in range(tensor + 1, units + 1) if units % degree == 0 and num_bytes / degree <= room]
    advice = f"{enough[0]} such devices would do" if enough else "no number of such devices would do"
    raise UserError(
        f"The weights take {format_bytes(num_bytes)}; sliced over {tensor} of these devices each would hold "
        f"{format_bytes(num_bytes // tensor)}, and there is room for {format_bytes(room)} (three quarters of the "
        f"smallest). {advice} (their number must divide {units}); a 16-bit weight_dtype "
        "halves float32 weights."
    )


def describe(remote: RemoteTransformer) -> str:
    """For the node: what will run where, and why."""
    plan = remote.plan
    size = f"{remote.found}{format_bytes(remote.spec.num_bytes)} in {remote.spec.held}"
    if plan.strategy == "device_map":
        return f"{plan.describe()}\n{size}: the first step shows which layer lies where"
    if plan.shard_weights:
        where = "in the host's memory" if remote.spec.offload else "on the devices"
        return f"{remote.choose(1).plan.describe()}\n{size}; every rank's part lies {where}"
    if plan.strategy == "mesh" or plan.world_size == 1:
        return f"{plan.describe()}\n{size}"
    if remote.spec.tensor > 1:
        return f"{remote.choose(1).plan.describe()}\n{size}: too large for one device, so its layers are sliced"
    return f"{plan.describe()}, degrees chosen per run\n{size}: rows go to replicas, a single row's tokens to ulysses"


class LoadParallelTransformer(io.ComfyNode):
    """PD_LoadParallelTransformer."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="PD_LoadParallelTransformer",
            display_name="Load Parallel Transformer",
            category="parallel",
            description="Use it in place of Load Diffusion Model: the transformer then runs on several devices.",
            inputs=[
                io.Combo.Input(
                    "model_name",
                    options=list_models("transformer"),
                    tooltip="FLUX.1, Qwen-Image (also Edit) or Wan: a diffusers folder in models/diffusers, a file in "
                    "models/diffusion_models (safetensors or GGUF), or a whole checkpoint in models/checkpoints.",
                ),
                io.Combo.Input(
                    "weight_dtype",
                    options=list(WEIGHT_DTYPES),
                    default="default",
                    tooltip="What the weights are held and computed in. default: as they are in the file; quantised "
                    "ones stay quantised. bfloat16, float16, float32: unpacks quantised files. fp8_*, torchao_*: "
                    "half the memory of 16 bits, computed in 16 bits, with the loss that 8 bits bring.",
                ),
                ParallelConfigType.Input(
                    "parallel_config",
                    optional=True,
                    tooltip="From Parallel Config. Without it: all GPUs, strategy auto.",
                ),
                io.Combo.Input(
                    "config_from",
                    options=[PRESET, *list_folders("transformer")],
                    default=PRESET,
                    optional=True,
                    tooltip="For single files: what their headers do not show comes from a preset for the kind of "
                    "model that they show. A fine-tune with other settings: the diffusers folder that has them.",
                ),
            ],
            outputs=[io.Model.Output(display_name="model")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(cls, model_name: Any = None) -> bool | str:
        """Checks the folder or file, json and headers before the prompt runs; None comes over a link.

        ComfyUI repeats the message for every input that is named here; what the others change is checked when the node
        runs, which is before anything is read or started.
        """
        try:
            if model_name is not None:
                check_model(find_model(model_name, "transformer"))
        except UserError as error:
            return str(error)
        return True

    @classmethod
    def fingerprint_inputs(cls, model_name: str, config_from: str = PRESET, **others: Any) -> str:
        """Makes ComfyUI run the node again when the model's files were replaced."""
        return inspect_model(model_name, config_from)[0].fingerprint

    @classmethod
    def execute(
        cls,
        model_name: str,
        weight_dtype: str,
        parallel_config: ParallelPlan | None = None,
        config_from: str = PRESET,
    ) -> io.NodeOutput:
        """A MODEL; the ranks start and load when it is first used."""
        remote = make_remote(model_name, weight_dtype, parallel_config or default_plan(), config_from)
        say(describe(remote), cls.hidden.unique_id)
        return io.NodeOutput(build_model(remote))
