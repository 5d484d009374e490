"""Which families' prompts can be encoded. A new one is one line here."""

from __future__ import annotations

from ..text_spec import TextFamily
from .flux_text import FLUX_TEXT

TEXT_FAMILIES: tuple[TextFamily, ...] = (FLUX_TEXT,)
