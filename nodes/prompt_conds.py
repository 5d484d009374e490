"""Prepares the conditions of a run prompt by prompt where ComfyUI would mix them.

ComfyUI gives every area of one condition an entry of the same area in the others, and takes what stands in it from the
first entry that it finds. Where images have prompts of their own, that may be another image's. Knows ComfyUI's
samplers; knows no rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import comfy.samplers

from .prompt_rows import Entry, PromptRow, assigned, entries_for, freed, prompt_counts

Conditions = Mapping[str, Sequence[Entry]]


def prepare_apart(
    executor: Any,
    guider: Any,
    sigmas: Any,
    extra_args: dict[str, Any],
    callback: Any,
    noise: Any,
    latent_image: Any = None,
    denoise_mask: Any = None,
    *rest: Any,
) -> Any:
    """SAMPLER_SAMPLE wrapper: it comes after ComfyUI's preparation, whose result it replaces where it is mixed."""
    entries = [entry for found in guider.conds.values() for entry in found]
    if prompt_counts(entries) and any("area" in entry for entry in entries):

        def prepare(conditions: Conditions) -> Conditions:
            prepared: Conditions = comfy.samplers.process_conds(
                guider.inner_model,
                noise,
                dict(conditions),
                guider.model_patcher.load_device,
                latent_image,
                denoise_mask,
                extra_args.get("seed"),
                latent_shapes=[noise.shape],
            )
            return prepared

        guider.conds = prompt_by_prompt(guider.original_conds, prepare)
    return executor(guider, sigmas, extra_args, callback, noise, latent_image, denoise_mask, *rest)


def prompt_by_prompt(conditions: Conditions, prepare: Callable[[Conditions], Conditions]) -> dict[str, list[Entry]]:
    """What `prepare` makes of each prompt's own entries, with the rows that they hold for."""
    count = math.lcm(*prompt_counts(entry for entries in conditions.values() for entry in entries))
    prepared: dict[str, list[Entry]] = {name: [] for name in conditions}
    for index in range(count):
        own = {name: [freed(entry) for entry in entries_for(found, index)] for name, found in conditions.items()}
        for name, entries in prepare(own).items():
            prepared[name] += [assigned(entry, PromptRow(index, count)) for entry in entries]
    return prepared
