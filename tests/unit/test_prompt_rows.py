"""One prompt per image, the pure part: which entry holds for which row, and the weight that says so to ComfyUI."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.unit.package import load

rows = load("nodes.prompt_rows")
PROMPT_ROW = load("parallel_core.families.base").PROMPT_ROW
UserError = load("parallel_core.errors").UserError


def conditioning(*texts: str, **options: Any) -> list[list[Any]]:
    return [[text, dict(options)] for text in texts]


def batch(*counts: int) -> list[dict[str, Any]]:
    """Entries named "i.k": entry k of prompt i, which has counts[i] of them."""
    prompts = {f"conditioning_{i}": conditioning(*(f"{i}.{k}" for k in range(count))) for i, count in enumerate(counts)}
    return [{**options, "cross_attn": text} for text, options in rows.one_prompt_per_row(prompts)]


def texts(entries: list[dict[str, Any]]) -> list[str]:
    return [entry["cross_attn"] for entry in entries]


def test_every_prompt_keeps_its_entries_and_gets_every_nth_row() -> None:
    entries = batch(2, 1, 1)
    assert texts(rows.entries_for(entries, 0)) == ["0.0", "0.1"]
    assert [texts(rows.entries_for(entries, row)) for row in (1, 2, 4)] == [["1.0"], ["2.0"], ["1.0"]]


def test_an_ordinary_entry_holds_for_every_row() -> None:
    entries = [*batch(1, 1), {"cross_attn": "all"}]
    assert [texts(rows.entries_for(entries, row)) for row in range(2)] == [["0.0", "all"], ["1.0", "all"]]


def test_the_inputs_are_left_as_they_are() -> None:
    given = conditioning("a", strength=0.5)
    rows.one_prompt_per_row({"conditioning_1": given})
    assert given == [["a", {"strength": 0.5}]]


@pytest.mark.parametrize("shape", [(4, 2, 3), (4, 16, 5, 6), (4, 16, 3, 5, 6)], ids=["sound", "image", "video"])
def test_the_weight_of_an_entry_is_its_strength_in_its_own_rows(shape: tuple[int, ...]) -> None:
    weights = torch.rand(shape)
    chosen = weights * rows.RowStrength(rows.PromptRow(1, 2), 0.7)
    assert torch.equal(chosen[1::2], weights[1::2] * 0.7)
    assert not chosen[0::2].any()


@pytest.mark.parametrize(("images", "nearest"), [(1, 3), (2, 3), (4, 3), (5, 6), (10, 9)])
def test_a_batch_into_which_the_prompts_do_not_go_is_refused_with_both_numbers(images: int, nearest: int) -> None:
    weights = torch.ones(images, 1, 1, 1)
    with pytest.raises(UserError, match=f"^3 prompts for a batch of {images} images: .* to {nearest}, or connect"):
        weights * rows.RowStrength(rows.PromptRow(0, 3))


def test_an_entry_can_be_freed_and_assigned_again() -> None:
    entry = rows.assigned({"cross_attn": "a", "strength": 0.5}, rows.PromptRow(0, 2))
    assert rows.freed(entry) == {"cross_attn": "a", "strength": 0.5}
    again = rows.assigned(entry, rows.PromptRow(3, 4))
    assert again["strength"] == rows.RowStrength(rows.PromptRow(3, 4), 0.5)
    assert rows.freed(again) == rows.freed(entry)


def test_a_strength_that_another_node_sets_keeps_the_rows() -> None:
    entries = [rows.assigned({}, rows.PromptRow(1, 2)) | {"strength": 0.3}, {"strength": 0.4}]
    rows.reassign(entries)
    assert entries[0]["strength"] == rows.RowStrength(rows.PromptRow(1, 2), 0.3)
    assert entries[1] == {"strength": 0.4}


def shares(entries: list[dict[str, Any]], num_rows: int) -> list[tuple[tuple[int, ...], list[str]]]:
    return [(share.rows, texts(share.entries)) for share in rows.share_rows(0, entries, num_rows)]


def test_rows_of_one_prompt_are_one_share() -> None:
    assert shares(batch(1, 2), 6) == [((0, 2, 4), ["0.0"]), ((1, 3, 5), ["1.0", "1.1"])]


def test_without_prompts_of_rows_all_rows_are_one_share() -> None:
    assert shares([{"cross_attn": "a"}, {"cross_attn": "b"}], 3) == [((0, 1, 2), ["a", "b"])]
    assert shares(batch(1), 2) == [((0, 1), ["0.0"])]


def test_prompts_dealt_by_two_nodes_meet_in_the_rows_that_both_have() -> None:
    entries = batch(1, 1) + [{**entry, "cross_attn": "of four " + entry["cross_attn"]} for entry in batch(1, 1, 1, 1)]
    assert rows.prompt_counts(entries) == [2, 4]
    assert shares(entries, 4)[2] == ((2,), ["0.0", "of four 2.0"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"default": True}, "conditioning_2 cannot be the prompt of one image only: .* a default prompt"),
        ({"control_apply_to_uncond": True}, r"conditioning_2 .*Apply ControlNet \(Old\)"),
        ({"gligen": ("position", None, [])}, "conditioning_2 .*GLIGEN"),
        (rows.assigned({}, rows.PromptRow(0, 1)), "conditioning_2 already holds one prompt per image"),
    ],
    ids=["default", "old-control-net", "gligen", "nested"],
)
def test_an_entry_that_would_change_other_images_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        rows.one_prompt_per_row({"conditioning_1": conditioning("a"), "conditioning_2": conditioning("b", **options)})


def test_no_prompt_at_all_is_refused() -> None:
    with pytest.raises(UserError, match="conditioning_1"):
        rows.one_prompt_per_row({})
