"""The Parallel Config node: devices and degrees, as a plan."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..parallel_core.attention_backends import BACKEND_NAMES
from ..parallel_core.errors import UserError
from ..parallel_core.plan import COMPILE_MODES, STRATEGIES, UNEVEN, ParallelPlan, parse_devices
from .runtime import engine

ParallelConfigType = io.Custom("PARALLEL_CONFIG")
_MAX_DEGREE = 64


def make_plan(devices: str, **settings: Any) -> ParallelPlan:
    """The plan for the node's inputs; `UserError` for anything that cannot work."""
    return ParallelPlan(devices=parse_devices(devices, engine().list_devices()), **settings)


def default_plan() -> ParallelPlan:
    """What a loader uses without a Parallel Config: every GPU, degrees chosen by the rule of "auto"."""
    return make_plan("all", strategy="auto")


class ParallelConfig(io.ComfyNode):
    """PD_ParallelConfig."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="PD_ParallelConfig",
            display_name="Parallel Config",
            category="parallel",
            description="Which devices work together on a model, and how. Connect it to the parallel loaders.",
            inputs=[
                io.String.Input(
                    "devices",
                    default="all",
                    tooltip="'all' GPUs, some of them ('0,1' or UUIDs), or 'cpu:2' for two CPU ranks.",
                ),
                io.Combo.Input(
                    "strategy",
                    options=list(STRATEGIES),
                    default="auto",
                    tooltip="auto: degrees chosen from the model's size and the batch; the node shows the choice. "
                    "mesh: the degrees below; their product must be the number of devices. "
                    "device_map: whole layers placed over the devices, one picture at a time.",
                ),
                io.Int.Input(
                    "replicas",
                    default=1,
                    min=1,
                    max=_MAX_DEGREE,
                    tooltip="Copies of the model that share out the batch: images, and the two halves of cfg > 1.",
                ),
                io.Int.Input(
                    "ulysses",
                    default=1,
                    min=1,
                    max=_MAX_DEGREE,
                    tooltip="Devices that share one picture's tokens: one picture sooner. Each holds all weights.",
                ),
                io.Int.Input(
                    "tensor",
                    default=1,
                    min=1,
                    max=_MAX_DEGREE,
                    tooltip="Devices that share the weights: for a model that does not fit one device.",
                ),
                io.Int.Input(
                    "ring",
                    default=1,
                    min=1,
                    max=_MAX_DEGREE,
                    optional=True,
                    tooltip="As ulysses, but keys and values go round. Works with it: ring between machines or slots, "
                    "ulysses between fast neighbours.",
                ),
                io.Combo.Input(
                    "uneven",
                    options=list(UNEVEN),
                    default="auto",
                    optional=True,
                    tooltip="Shares of tokens or heads of unequal size. auto: taken, and shown where it costs time; "
                    "always: taken; never: refused. The picture is the same.",
                ),
                io.Boolean.Input(
                    "shard_weights",
                    default=False,
                    optional=True,
                    tooltip="The ranks of ring and ulysses hold a part of the weights each and collect every layer "
                    "when it is needed: less memory than ulysses alone, slower than tensor.",
                ),
                io.Combo.Input(
                    "attention_backend",
                    options=list(BACKEND_NAMES),
                    default="auto",
                    optional=True,
                    tooltip="diffusers' attention backends by their names; auto is torch's own attention. What does "
                    "not work on these devices or with these degrees is refused.",
                ),
                io.Boolean.Input(
                    "ring_fp32",
                    default=True,
                    optional=True,
                    tooltip="Ring adds partial results up in float32 even where the model computes in 16 bits.",
                ),
                io.Combo.Input(
                    "compile",
                    options=list(COMPILE_MODES),
                    default="off",
                    optional=True,
                    tooltip="torch.compile for the model's repeated blocks. The first steps at a new size take longer; "
                    "the node shows it.",
                ),
                io.String.Input(
                    "max_memory",
                    default="",
                    optional=True,
                    tooltip="Limits for device_map and shard_weights: '0:16GB,1:16GB,cpu:64GB'. Empty: what is free.",
                ),
            ],
            outputs=[ParallelConfigType.Output(display_name="parallel_config")],
        )

    @classmethod
    def validate_inputs(cls, devices: Any = None) -> bool | str:
        """Refuses devices that do not exist before the prompt runs; None comes over a link and is checked later.

        Only one input is named, because ComfyUI shows a message once for each that is. The degrees' equation is checked
        when the node runs, which is before anything is read or started.
        """
        try:
            if devices is not None:
                parse_devices(devices, engine().list_devices())
        except UserError as error:
            return str(error)
        return True

    @classmethod
    def execute(
        cls,
        devices: str,
        strategy: str,
        replicas: int,
        ulysses: int,
        tensor: int,
        ring: int = 1,
        uneven: str = "auto",
        shard_weights: bool = False,
        attention_backend: str = "auto",
        ring_fp32: bool = True,
        compile: str = "off",
        max_memory: str = "",
    ) -> io.NodeOutput:
        """The plan."""
        return io.NodeOutput(
            make_plan(
                devices,
                strategy=strategy,
                replicas=replicas,
                ring=ring,
                ulysses=ulysses,
                tensor=tensor,
                uneven=uneven,
                shard_weights=shard_weights,
                attention_backend=attention_backend,
                ring_fp32=ring_fp32,
                compile=compile,
                max_memory=max_memory,
            )
        )
