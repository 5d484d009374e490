"""What patches do to weights: the formulas on numbers that can be checked by hand, and parts against the whole."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from parallel_core.protocol import ProtocolError
from parallel_core.weight_math import WHOLE, Part, Place, apply_patch, check_patch, dora_ratios
from parallel_core.weight_patches import NO_PATCHES, PatchSet, WeightPatch

SHAPE = (12, 8)
FACTORS: dict[str, dict[str, tuple[int, ...]]] = {
    "lora": {"up": (12, 3), "down": (3, 8)},
    "loha": {"w1_a": (12, 3), "w1_b": (3, 8), "w2_a": (12, 2), "w2_b": (2, 8)},
    "lokr": {"w1": (3, 2), "w2_a": (4, 2), "w2_b": (2, 4)},
    "diff": {"value": (12, 8)},
    "set": {"value": (12, 8)},
}


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def patch_of(
    kind: str, shapes: dict[str, tuple[int, ...]], strength: float = 0.5, **rest: object
) -> tuple[WeightPatch, dict[str, Tensor]]:
    factors = {role: noise(index, *shape) for index, (role, shape) in enumerate(shapes.items())}
    patch = WeightPatch(target="w", kind=kind, strength=strength, tensors={role: role for role in shapes}, **rest)  # type: ignore[arg-type]
    return patch, factors


def patched(weight: Tensor, patch: WeightPatch, factors: dict[str, Tensor], part: Part = WHOLE) -> Tensor:
    (ratio,) = dora_ratios(weight.clone(), [patch], [factors])
    place = Place.of(patch, tuple(weight.shape), part)
    return apply_patch(part.of(weight).clone(), patch, factors, place, ratio)


def by_hand(kind: str, factors: dict[str, Tensor]) -> Tensor:
    if kind == "lora":
        return factors["up"] @ factors["down"]
    if kind == "loha":
        return (factors["w1_a"] @ factors["w1_b"]) * (factors["w2_a"] @ factors["w2_b"])
    if kind == "lokr":
        return torch.kron(factors["w1"], factors["w2_a"] @ factors["w2_b"])
    return factors["value"]


@pytest.mark.parametrize(("kind", "rank"), [("lora", 3), ("loha", 3), ("lokr", 2), ("diff", None)])
def test_the_change_times_strength_and_alpha_over_rank(kind: str, rank: int | None) -> None:
    patch, factors = patch_of(kind, FACTORS[kind], alpha=6.0 if rank else None)
    scale = 0.5 * 6.0 / rank if rank else 0.5
    weight = noise(9, *SHAPE)
    torch.testing.assert_close(patched(weight, patch, factors), weight + scale * by_hand(kind, factors))


def test_without_alpha_the_scale_is_the_strength() -> None:
    patch, factors = patch_of("lora", FACTORS["lora"], strength=-2.0)
    weight = noise(9, *SHAPE)
    torch.testing.assert_close(patched(weight, patch, factors), weight - 2 * by_hand("lora", factors))


def test_a_strength_of_zero_changes_no_bit() -> None:
    for kind in ("lora", "loha", "lokr", "diff"):
        patch, factors = patch_of(kind, FACTORS[kind], strength=0.0)
        weight = noise(9, *SHAPE)
        assert torch.equal(patched(weight, patch, factors), weight)


def test_set_replaces_whatever_the_strength() -> None:
    patch, factors = patch_of("set", FACTORS["set"], strength=0.1)
    assert torch.equal(patched(noise(9, *SHAPE), patch, factors), factors["value"])


def test_an_offset_changes_those_rows_or_columns_alone() -> None:
    weight = noise(9, *SHAPE)
    rows, factors = patch_of("diff", {"value": (4, 8)}, offset=(0, 8, 4), strength=1.0)
    expected = weight.clone()
    expected[8:] += factors["value"]
    assert torch.equal(patched(weight, rows, factors), expected)
    columns, factors = patch_of("diff", {"value": (12, 3)}, offset=(1, 2, 3), strength=1.0)
    expected = weight.clone()
    expected[:, 2:5] += factors["value"]
    assert torch.equal(patched(weight, columns, factors), expected)


def test_swap_exchanges_the_halves_of_the_change() -> None:
    patch, factors = patch_of("diff", FACTORS["diff"], strength=1.0, swap=True)
    expected = noise(9, *SHAPE) + torch.cat([factors["value"][6:], factors["value"][:6]])
    assert torch.equal(patched(noise(9, *SHAPE), patch, factors), expected)


@pytest.mark.parametrize("by_rows", [True, False])
@pytest.mark.parametrize("strength", [1.0, 0.5])
def test_dora_gives_rows_or_columns_their_magnitudes(by_rows: bool, strength: float) -> None:
    """By columns of the changed weight; by rows of the one that was there, as ComfyUI does."""
    scale_shape = (12, 1) if by_rows else (1, 8)
    patch, factors = patch_of("lora", {**FACTORS["lora"], "dora_scale": scale_shape}, strength=strength, alpha=3.0)
    weight = noise(9, *SHAPE)
    changed = weight + by_hand("lora", factors)
    norms = weight.norm(dim=1, keepdim=True) if by_rows else changed.norm(dim=0, keepdim=True)
    expected = weight + strength * (changed * factors["dora_scale"] / norms - weight)
    torch.testing.assert_close(patched(weight, patch, factors), expected)


PARTS = {
    "rows": Part(rows=torch.tensor([3, 4, 5, 9])),
    "rows in another order": Part(rows=torch.tensor([6, 7, 8, 9, 10, 11, 0, 1, 2, 3, 4, 5])),
    "columns": Part(columns=torch.tensor([0, 1, 6, 7])),
    "both": Part(rows=torch.tensor([0, 8, 11]), columns=torch.tensor([4, 5])),
    "none": Part(rows=torch.tensor([], dtype=torch.int64)),
}


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("kind", FACTORS)
@pytest.mark.parametrize("rest", [{}, {"swap": True}, {"dora": (12, 1)}, {"dora": (1, 8)}], ids=str)
def test_a_part_is_the_part_of_the_whole(name: str, kind: str, rest: dict[str, object]) -> None:
    shapes = dict(FACTORS[kind])
    if "dora" in rest:
        if kind in ("diff", "set"):
            return
        shapes["dora_scale"] = rest["dora"]  # type: ignore[assignment]
    patch, factors = patch_of(kind, shapes, swap="swap" in rest and kind != "set")
    weight, part = noise(9, *SHAPE), PARTS[name]
    torch.testing.assert_close(patched(weight, patch, factors, part), part.of(patched(weight, patch, factors)))


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("offset", [(0, 4, 6), (1, 2, 5)])
def test_a_part_meets_an_offset_where_it_lies(name: str, offset: tuple[int, int, int]) -> None:
    shape = (6, 8) if offset[0] == 0 else (12, 5)
    patch, factors = patch_of("lora", {"up": (shape[0], 2), "down": (2, shape[1])}, offset=offset)
    weight, part = noise(9, *SHAPE), PARTS[name]
    torch.testing.assert_close(patched(weight, patch, factors, part), part.of(patched(weight, patch, factors)))


def test_weights_of_more_dimensions_are_matrices_of_their_rows() -> None:
    shape = (6, 4, 1, 2, 2)
    patch, factors = patch_of("lora", {"up": (6, 2), "down": (2, math.prod(shape[1:]))}, strength=1.0)
    weight = noise(9, *shape)
    expected = weight + (factors["up"] @ factors["down"]).view(shape)
    torch.testing.assert_close(patched(weight, patch, factors), expected)
    part = Part(rows=torch.tensor([1, 4]))
    torch.testing.assert_close(patched(weight, patch, factors, part), expected[[1, 4]])


@pytest.mark.parametrize(
    ("kind", "shapes", "rest"),
    [
        ("lora", {"up": (11, 3), "down": (3, 8)}, {}),
        ("lora", {"up": (12, 3), "down": (2, 8)}, {}),
        ("lora", {"up": (12, 3), "down": (3, 8), "dora_scale": (5, 1)}, {}),
        ("lora", {"up": (4, 3), "down": (3, 8)}, {"offset": (0, 9, 4)}),
        ("loha", {"w1_a": (12, 3), "w1_b": (3, 8), "w2_a": (12, 2), "w2_b": (2, 7)}, {}),
        ("lokr", {"w1": (3, 2), "w2": (4, 5)}, {}),
        ("diff", {"value": (8, 12)}, {}),
        ("set", {"value": (12, 7)}, {}),
    ],
)
def test_what_does_not_fit_is_found_without_computing(
    kind: str, shapes: dict[str, tuple[int, ...]], rest: dict[str, object]
) -> None:
    patch, factors = patch_of(kind, shapes, **rest)
    with pytest.raises((ValueError, RuntimeError, IndexError)):
        check_patch(patch, factors, SHAPE)


@pytest.mark.parametrize("kind", FACTORS)
def test_what_fits_passes(kind: str) -> None:
    check_patch(*patch_of(kind, FACTORS[kind]), SHAPE)


def test_patches_survive_the_way_and_equal_sets_have_equal_ids() -> None:
    patch, factors = patch_of("lora", FACTORS["lora"], offset=(0, 1, 2), alpha=2.0, swap=True)
    again = WeightPatch.from_json(patch.to_json())
    assert again == patch
    assert PatchSet.of([again], factors).id == PatchSet.of([patch], factors).id != NO_PATCHES.id
    other, _ = patch_of("lora", FACTORS["lora"], strength=0.51)
    assert PatchSet.of([other], factors).id != PatchSet.of([patch], factors).id
    assert PatchSet.of([], {}) == NO_PATCHES


@pytest.mark.parametrize("data", [{"kind": "lora"}, 3, {"kind": "glora"}])
def test_broken_patches_are_refused(data: object) -> None:
    if isinstance(data, dict) and data["kind"] == "glora":
        data = {**patch_of("lora", FACTORS["lora"])[0].to_json(), **data}
    with pytest.raises(ProtocolError, match="weight patch"):
        WeightPatch.from_json(data)
