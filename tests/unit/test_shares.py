"""What is said, or refused, about unequal shares of tokens and heads."""

from __future__ import annotations

import pytest
import torch

from parallel_core.engine.shares import check_shares
from parallel_core.errors import UserError
from parallel_core.families.base import SeamCall
from parallel_core.families.flux import FAMILY
from parallel_core.plan import ParallelPlan
from tests.tiny_models import full_config

CONFIG = full_config("flux", {})
FOUR = tuple(f"cpu:{rank}" for rank in range(4))


def call(text: int, image: int) -> SeamCall:
    return SeamCall(rows={"img": torch.empty(1, image, 64), "txt": torch.empty(1, text, 32)}, shared={})


def note(calls: list[SeamCall], *, devices: int = 2, **settings: object) -> str:
    return check_shares(ParallelPlan(devices=FOUR[:devices], **settings), FAMILY, CONFIG, calls)


def test_equal_shares_are_not_worth_a_word() -> None:
    assert note([call(16, 64), call(2, 64)], ulysses=2, uneven="never") == ""


def test_unequal_shares_are_told_once() -> None:
    text = note([call(1, 7), call(1, 7)], ulysses=2)
    assert text == "1 tokens of text over 2 ranks: 1, 0; 7 tokens of the picture over 2 ranks: 4, 3"


def test_what_costs_nothing_is_not_told() -> None:
    assert note([call(77, 4095)], ulysses=2) == ""


def test_heads_count_for_ulysses_only() -> None:
    assert "4 heads over 3 ranks: 2, 1, 1" in note([call(9, 9)], devices=3, ulysses=3)
    assert note([call(9, 9)], devices=3, ring=3) == ""


def test_always_says_nothing() -> None:
    assert note([call(7, 63)], ulysses=2, uneven="always") == ""


def test_never_refuses_and_names_the_shares() -> None:
    with pytest.raises(UserError, match="63 tokens of the picture over 4 ranks: 16, 16, 16, 15"):
        note([call(8, 63)], devices=4, ring=2, ulysses=2, uneven="never")


def test_without_a_shared_sequence_nothing_is_shared_out() -> None:
    assert note([call(7, 63)], replicas=2, uneven="never") == ""
