"""Which families' prompts can be encoded. A new one is one line here."""

from __future__ import annotations

from ..text_spec import TextFamily
from .flux_text import FLUX_TEXT
from .qwen_text import QWEN_TEXT
from .wan_text import WAN_TEXT

TEXT_FAMILIES: tuple[TextFamily, ...] = (FLUX_TEXT, QWEN_TEXT, WAN_TEXT)
