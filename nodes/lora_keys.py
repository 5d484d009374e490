"""Which keys of a LoRA file match nothing in the model: ComfyUI logs them one by one and drops them.

Owns collecting those lines and what a file that does not fit looks like. Knows no family's weights.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from fnmatch import fnmatchcase

_LINE = "lora key not loaded: "
_MOST_KEYS = 100_000

_FILES = (
    ("a LoRA for a text encoder", ("lora_te*", "text_encoder*", "*text_model.encoder*")),
    ("a LoRA for Stable Diffusion 1.5 or SDXL", ("*down_blocks*", "*up_blocks*", "*input_blocks*", "*mid_block*")),
    ("a LoRA for Stable Diffusion 3", ("*joint_blocks*", "*joint_transformer_blocks*")),
    ("a LoRA for FLUX.1", ("*double_blocks*", "*single_blocks*", "*single_transformer_blocks*")),
    ("a LoRA for Wan", ("*blocks*self_attn*", "*blocks*cross_attn*")),
    ("a LoRA for Qwen-Image", ("*transformer_blocks*img_mod*", "*transformer_blocks*add_q_proj*")),
    ("a LoRA for a diffusers transformer of another family", ("*transformer_blocks*",)),
)
"""(what it is, globs of its keys), the surest first."""


class MissingKeys(logging.Filter):
    """Collects the keys that ComfyUI says it does not load, between `start` and `take` on one thread."""

    def __init__(self) -> None:
        super().__init__()
        self._thread: int | None = None
        self._keys: list[str] = []

    def start(self) -> None:
        """A file's keys are about to be matched on this thread."""
        self._thread, self._keys = threading.get_ident(), []
        logging.getLogger().addFilter(self)  # once, however often: logging keeps a list without repeats

    def filter(self, record: logging.LogRecord) -> bool:
        """Looks only: every record passes."""
        if threading.get_ident() == self._thread and len(self._keys) < _MOST_KEYS:
            message = record.getMessage()
            if message.startswith(_LINE):
                self._keys.append(message.removeprefix(_LINE))
        return True

    def take(self) -> list[str]:
        """The keys since `start`; stops collecting."""
        logging.getLogger().removeFilter(self)
        keys, self._keys, self._thread = self._keys, [], None
        return keys


def looks_like(keys: Sequence[str]) -> str:
    """What a file with these keys is made for, or nothing where that is not known: " It looks like ..."."""
    for kind, globs in _FILES:
        if any(fnmatchcase(key, glob) for glob in globs for key in keys):
            return f" It looks like {kind}."
    return ""


def describe_missing(keys: Sequence[str], num_matched: int) -> str:
    """For the node and the log: how many keys of a file were left out, and examples."""
    examples = ", ".join(keys[:3]) + (", ..." if len(keys) > 3 else "")
    noun = "key matches" if len(keys) == 1 else "keys match"
    return f"{len(keys)} {noun} nothing in the model and have no effect ({examples}); {num_matched} weights are changed"
