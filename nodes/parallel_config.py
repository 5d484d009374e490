"""The Parallel Config node: devices and degrees, as a plan."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..parallel_core.errors import UserError
from ..parallel_core.plan import STRATEGIES, ParallelPlan, parse_devices
from .runtime import engine

ParallelConfigType = io.Custom("PARALLEL_CONFIG")
_MAX_DEGREE = 64


def make_plan(devices: str, strategy: str, replicas: int, ulysses: int, tensor: int) -> ParallelPlan:
    """The plan for the node's inputs; `UserError` for anything that cannot work."""
    names = parse_devices(devices, engine().list_devices())
    return ParallelPlan(devices=names, strategy=strategy, replicas=replicas, ulysses=ulysses, tensor=tensor)


def default_plan() -> ParallelPlan:
    """What a loader uses without a Parallel Config: every GPU, degrees chosen by the rule of "auto"."""
    return make_plan("all", "auto", 1, 1, 1)


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
                    "mesh: the degrees below; their product must be the number of devices.",
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
    def execute(cls, devices: str, strategy: str, replicas: int, ulysses: int, tensor: int) -> io.NodeOutput:
        """The plan."""
        return io.NodeOutput(make_plan(devices, strategy, replicas, ulysses, tensor))
