"""The Encode on device_map node: a folder's own text encoders, placed or sliced over devices, as CONDITIONING."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..parallel_core.errors import UserError
from ..parallel_core.families.text_registry import TEXT_FAMILIES
from ..parallel_core.plan import ParallelPlan
from ..parallel_core.text_source import TextSource, read_text_source
from .encoding import encode_prompts, placement_input, prompt_inputs, prompt_outputs, setting_inputs
from .listing import find_folder, list_folders


def inspect_source(model_name: str) -> TextSource:
    """The chosen folder's encoders, checked from json files and headers."""
    return read_text_source(find_folder(model_name, "text_encoder"), TEXT_FAMILIES)


class EncodeOnDeviceMap(io.ComfyNode):
    """PD_EncodeOnDeviceMap."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="PD_EncodeOnDeviceMap",
            display_name="Encode on device_map",
            category="parallel",
            description="Encodes both prompts with a diffusers folder's own text encoders, over several devices.",
            inputs=[
                io.Combo.Input(
                    "model_name",
                    options=list_folders("text_encoder"),
                    tooltip="A diffusers folder in models/diffusers with its text encoder(s) and tokenizer(s): FLUX.1, "
                    "Qwen-Image, Wan.",
                ),
                *prompt_inputs(),
                placement_input(),
                *setting_inputs(),
            ],
            outputs=prompt_outputs(),
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(cls, model_name: Any = None) -> bool | str:
        """Checks the folder, its json and headers before the prompt runs; None comes over a link.

        The other inputs are checked when the node runs, which is before anything is read or started.
        """
        try:
            if model_name is not None:
                inspect_source(model_name)
        except UserError as error:
            return str(error)
        return True

    @classmethod
    def fingerprint_inputs(cls, model_name: str, **others: Any) -> str:
        """Makes ComfyUI run the node again when the encoders' files were replaced."""
        return inspect_source(model_name).fingerprint

    @classmethod
    def execute(
        cls,
        model_name: str,
        positive: str,
        negative: str,
        placement: str,
        max_memory: str = "",
        keep_loaded: bool = False,
        max_sequence_length: int = 512,
        parallel_config: ParallelPlan | None = None,
    ) -> io.NodeOutput:
        """Both prompts as CONDITIONING."""
        return encode_prompts(
            inspect_source(model_name),
            (positive, negative),
            cls.hidden.unique_id,
            placement=placement,
            max_memory=max_memory,
            keep_loaded=keep_loaded,
            max_sequence_length=max_sequence_length,
            parallel_config=parallel_config,
        )
