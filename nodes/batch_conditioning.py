"""The One Prompt per Image node: several CONDITIONINGs become one, in which image i of the batch has prompt i."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from .prompt_rows import one_prompt_per_row

_INPUTS = (
    "conditioning_1", "conditioning_2", "conditioning_3", "conditioning_4", "conditioning_5", "conditioning_6",
    "conditioning_7", "conditioning_8", "conditioning_9", "conditioning_10", "conditioning_11", "conditioning_12",
    "conditioning_13", "conditioning_14", "conditioning_15", "conditioning_16",
)  # fmt: skip


class BatchConditioning(io.ComfyNode):
    """PD_BatchConditioning."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="PD_BatchConditioning",
            display_name="One Prompt per Image",
            category="parallel",
            description="Image i of a batch gets prompt i, of any length. Works in positive and in negative.",
            inputs=[
                io.Conditioning.Input(
                    name,
                    optional=True,
                    tooltip="The prompt of one image. Inputs that are not connected are left out.",
                )
                for name in _INPUTS
            ],
            outputs=[io.Conditioning.Output(display_name="conditioning")],
        )

    @classmethod
    def execute(cls, **conditionings: Any) -> io.NodeOutput:
        """The prompts in the order of their inputs, which need not be the order in which they come."""
        given = {name: conditionings[name] for name in _INPUTS if conditionings.get(name) is not None}
        return io.NodeOutput(one_prompt_per_row(given))
