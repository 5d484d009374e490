"""Which family a checkpoint belongs to. A new family is one line here."""

from __future__ import annotations

from ..checkpoint import Checkpoint
from ..errors import UserError
from . import flux, qwen, wan
from .base import Family

FAMILIES: tuple[Family, ...] = (flux.FAMILY, qwen.FAMILY, wan.FAMILY)


def family_named(name: str) -> Family:
    """The family of that name; it always exists, since names come from `find_family`."""
    return next(family for family in FAMILIES if family.name == name)


def find_family(checkpoint: Checkpoint) -> Family:
    """The family whose diffusers class the checkpoint's config names."""
    for family in FAMILIES:
        if family.class_name == checkpoint.class_name:
            return family
    known = ", ".join(f"{family.name} ({family.class_name})" for family in FAMILIES)
    raise UserError(
        f"{checkpoint.folder.name!r} holds a {checkpoint.class_name}, which is not supported. Supported: {known}."
    )
