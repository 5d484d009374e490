"""The Encode from Files node: ComfyUI's own text encoder files, placed or sliced over devices, as CONDITIONING."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import comfy
from comfy_api.latest import io

from ..parallel_core.errors import UserError
from ..parallel_core.families.text_registry import TEXT_FAMILIES
from ..parallel_core.plan import ParallelPlan
from ..parallel_core.text_files import open_place
from ..parallel_core.text_source import TextSource
from ..parallel_core.text_spec import TextPlace
from .encoding import encode_prompts, placement_input, prompt_inputs, prompt_outputs, setting_inputs
from .files import find_file, list_files

_CATEGORY = "text_encoders"
_NONE = "none"


def inspect_files(text_encoder_1: str, text_encoder_2: str, kind: str) -> TextSource:
    """The chosen files' encoders, checked from their headers. `UserError` for what is not listed or does not fit."""
    chosen = {"text_encoder_1": text_encoder_1, "text_encoder_2": text_encoder_2}
    files = tuple(str(_find(name, widget)) for widget, name in chosen.items() if name != _NONE)
    # what ComfyUI's own encoders cut text with; the files hold no tokenizer but UMT5's
    tokenizers = str(Path(comfy.__path__[0]))
    return open_place(TextPlace(files=files, family=kind, tokenizers=tokenizers), TEXT_FAMILIES)


def _find(name: str, widget: str) -> Path:
    file = find_file(_CATEGORY, name)
    if file is None:
        there = ", ".join(map(repr, list_files(_CATEGORY)[:8])) or "none"
        raise UserError(
            f"{widget} {name!r} is not a file in models/text_encoders. There: {there}. "
            "Reload the page (R) if you have just added it."
        )
    return file


class EncodeFromFiles(io.ComfyNode):
    """PD_EncodeFromFiles."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="PD_EncodeFromFiles",
            display_name="Encode from Files",
            category="parallel",
            description="Encodes both prompts with the text encoder files of ComfyUI's own loaders, over several "
            "devices.",
            inputs=[
                io.Combo.Input(
                    "text_encoder_1",
                    options=list_files(_CATEGORY),
                    tooltip="A file in models/text_encoders. What it is, is read from the file itself.",
                ),
                io.Combo.Input(
                    "text_encoder_2",
                    options=[_NONE, *list_files(_CATEGORY)],
                    default=_NONE,
                    tooltip="The second file for flux, which needs CLIP and T5, in any order. none for the others.",
                ),
                io.Combo.Input(
                    "type",
                    options=[family.name for family in TEXT_FAMILIES],
                    default="flux",
                    tooltip="Which transformer the prompts are for. flux: clip_l and t5xxl. qwen-image: "
                    "qwen_2.5_vl_7b. wan: umt5_xxl.",
                ),
                *prompt_inputs(),
                placement_input(),
                *setting_inputs(),
            ],
            outputs=prompt_outputs(),
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def fingerprint_inputs(cls, text_encoder_1: str, text_encoder_2: str, type: str, **others: Any) -> str:
        """Makes ComfyUI run the node again when a file was replaced."""
        return inspect_files(text_encoder_1, text_encoder_2, type).fingerprint

    @classmethod
    def execute(
        cls,
        text_encoder_1: str,
        text_encoder_2: str,
        type: str,
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
            inspect_files(text_encoder_1, text_encoder_2, type),
            (positive, negative),
            cls.hidden.unique_id,
            placement=placement,
            max_memory=max_memory,
            keep_loaded=keep_loaded,
            max_sequence_length=max_sequence_length,
            parallel_config=parallel_config,
        )
