"""The Load Parallel Transformer node: a drop-in for Load Diffusion Model."""

from __future__ import annotations

import math
from typing import Any

from comfy_api.latest import io

from ..parallel_core.attention_backends import check_dtype
from ..parallel_core.checkpoint import Checkpoint, check_loadable, check_shapes, read_checkpoint
from ..parallel_core.engine.models import TransformerSpec
from ..parallel_core.engine.placed import placed
from ..parallel_core.engine.shares import check_heads
from ..parallel_core.engine.transformer import RemoteTransformer
from ..parallel_core.errors import UserError
from ..parallel_core.families.base import Family
from ..parallel_core.families.registry import find_family
from ..parallel_core.host import host_memory
from ..parallel_core.max_memory import HOST, WEIGHTS_SHARE, format_bytes, parse_max_memory
from ..parallel_core.plan import ParallelPlan, resolve
from .listing import find_model, list_models
from .parallel_config import ParallelConfigType, default_plan
from .remote_model import build_model
from .runtime import engine, say

WEIGHT_DTYPES = ("default", "bfloat16", "float16", "float32")
_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


def inspect_model(model_name: str, weight_dtype: str) -> tuple[Checkpoint, Family]:
    """What the chosen folder holds, fully checked from its headers."""
    if weight_dtype not in WEIGHT_DTYPES:
        raise UserError(f"weight_dtype is {weight_dtype!r}; expected one of {', '.join(WEIGHT_DTYPES)}.")
    checkpoint = read_checkpoint(find_model(model_name, "transformer"), "transformer")
    family = find_family(checkpoint)
    checkpoint = checkpoint.without(family.unused_weights)
    check_loadable(checkpoint)
    config = family.full_config(checkpoint.config)
    if family.check_config is not None:
        family.check_config(config)
    check_shapes(checkpoint, family.expected_shapes(config))
    return checkpoint, family


def make_remote(model_name: str, weight_dtype: str, plan: ParallelPlan) -> RemoteTransformer:
    """Checks plan x model x devices and returns the handle; reads no weight and starts nothing."""
    checkpoint, family = inspect_model(model_name, weight_dtype)
    config = family.full_config(checkpoint.config)
    dtype = checkpoint.dtype if weight_dtype == "default" else weight_dtype
    num_bytes = _weight_bytes(checkpoint, family, dtype)
    room = int(WEIGHTS_SHARE * min(engine().total_memory(device, plan.world_size) for device in plan.devices))
    fits = num_bytes <= room
    chosen = resolve(plan, rows=1, heads=family.tensor_units(config), fits_one_device=fits).plan
    family.check_plan(config, chosen)
    check_dtype(plan.attention_backend, dtype)
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
        dtype=dtype,
        num_bytes=num_bytes,
        tensor=chosen.tensor,
        shards=shards,
        offload=offload,
    )
    if plan.strategy == "device_map":
        spec = placed(spec, plan, [engine().total_memory(device, plan.world_size) for device in plan.devices])
    return RemoteTransformer(engine=engine(), spec=spec, plan=plan, family=family, config=config)


def _weight_bytes(checkpoint: Checkpoint, family: Family, dtype: str) -> int:
    """Bytes of the loaded weights."""
    kept = max(_BYTES[dtype], _BYTES["float32"])
    return sum(
        math.prod(tensor.shape) * (kept if family.is_fp32(tensor.name) else _BYTES[dtype])
        for tensor in checkpoint.tensors.values()
    )


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
    size = f"{format_bytes(remote.spec.num_bytes)} in {remote.spec.dtype}"
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
                    tooltip="A diffusers folder in models/diffusers (FLUX.1, Qwen-Image and their edit models; Wan).",
                ),
                io.Combo.Input(
                    "weight_dtype",
                    options=list(WEIGHT_DTYPES),
                    default="default",
                    tooltip="What the weights are held and computed in. default: as they are in the file.",
                ),
                ParallelConfigType.Input(
                    "parallel_config",
                    optional=True,
                    tooltip="From Parallel Config. Without it: all GPUs, strategy auto.",
                ),
            ],
            outputs=[io.Model.Output(display_name="model")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(cls, model_name: Any = None) -> bool | str:
        """Checks the folder, its json and its headers before the prompt runs; None comes over a link."""
        try:
            if model_name is not None:
                inspect_model(model_name, "default")
        except UserError as error:
            return str(error)
        return True

    @classmethod
    def fingerprint_inputs(cls, model_name: str, weight_dtype: str, parallel_config: ParallelPlan | None = None) -> str:
        """Makes ComfyUI run the node again when the model's files were replaced."""
        return inspect_model(model_name, weight_dtype)[0].fingerprint

    @classmethod
    def execute(cls, model_name: str, weight_dtype: str, parallel_config: ParallelPlan | None = None) -> io.NodeOutput:
        """A MODEL; the ranks start and load when it is first used."""
        remote = make_remote(model_name, weight_dtype, parallel_config or default_plan())
        say(describe(remote), cls.hidden.unique_id)
        return io.NodeOutput(build_model(remote))
