"""What a weight patch does to a weight, or to the rows and columns of it that a rank holds. All in float32.

The formulas are those of the files' formats: LoRA (arXiv:2106.09685) B A, LoHa (arXiv:2108.06098) (B1 A1) * (B2 A2),
LoKr (arXiv:2309.14859) C (x) B A, each times alpha / rank; DoRA (arXiv:2402.09353) as ComfyUI computes it. Knows
neither modules nor where weights lie.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .weight_patches import WeightPatch

Factors = Mapping[str, Tensor]
"""A patch's tensors by their roles, in any floating-point dtype."""
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """Which rows (dim 0) and columns (dim 1) of a tensor; None for all of them. Indices in int64."""

    rows: Tensor | None = None
    columns: Tensor | None = None

    def of(self, whole: Tensor) -> Tensor:
        """This part of a tensor; dimensions of size 1 stand for any number."""
        if self.rows is not None and whole.shape[0] > 1:
            whole = whole[self.rows.to(whole.device)]
        if self.columns is not None and whole.shape[1] > 1:
            whole = whole[:, self.columns.to(whole.device)]
        return whole


WHOLE = Part()


@dataclass(frozen=True)
class Place:
    """Where a patch meets a part of a tensor: `inside` the region that it changes, of the shape `region`, and `where`
    in the part. `inside` is None where they do not meet."""

    region: Shape
    inside: Part | None
    where: Part

    @staticmethod
    def of(patch: WeightPatch, shape: Shape, part: Part = WHOLE) -> Place:
        """For the `part` of a tensor of `shape`."""
        if patch.offset is None:
            return Place(shape, part, WHOLE)
        dim, start, length = patch.offset
        region = (*shape[:dim], length, *shape[dim + 1 :])
        held = part.columns if dim else part.rows
        indices = torch.arange(shape[dim]) if held is None else held
        places = ((indices >= start) & (indices < start + length)).nonzero().squeeze(1)
        if not len(places):
            return Place(region, None, WHOLE)
        chosen = indices[places] - start
        if dim:
            return Place(region, Part(part.rows, chosen), Part(columns=places))
        return Place(region, Part(chosen, part.columns), Part(rows=places))


def apply_patch(
    weight: Tensor, patch: WeightPatch, factors: Factors, place: Place, ratio: Tensor | None = None
) -> Tensor:
    """`weight`, part of a tensor in float32, with `patch` applied at `place`. May change `weight` itself.

    `ratio`: `dora_ratio` of the patch, where it is decomposed.
    """
    if place.inside is None:
        return weight
    where = place.where
    changed = _change(where.of(weight), patch, factors, place, ratio)
    if where.rows is not None:
        return weight.index_copy_(0, where.rows.to(weight.device), changed)
    if where.columns is not None:
        return weight.index_copy_(1, where.columns.to(weight.device), changed)
    return changed


def dora_ratio(weight: Tensor, patch: WeightPatch, factors: Factors) -> Tensor:
    """What a decomposed patch multiplies the changed tensor by, from the whole of the tensor in float32.

    Of the shape of the region that is changed, with 1 for the dimensions over which norms are taken: those of the
    weight's rows as they were, or those of the changed weight's columns, whichever the scale's shape says.
    """
    region = weight if patch.offset is None else weight.narrow(*patch.offset)
    scale = factors["dora_scale"].float()
    if scale.shape[0] == region.shape[0]:
        norm = region.flatten(1).norm(dim=1).view(-1, *[1] * (region.dim() - 1))
    else:
        changed = region + _alpha(patch, factors) * delta(patch, factors, tuple(region.shape))
        norm = changed.transpose(0, 1).flatten(1).norm(dim=1).view(1, -1, *[1] * (region.dim() - 2))
    ratio: Tensor = scale / (norm + torch.finfo(torch.float32).eps)
    if ratio.dim() != region.dim() or any(size not in (1, of) for size, of in zip(ratio.shape, region.shape)):  # noqa: B905
        raise ValueError(f"dora_scale has shape {list(scale.shape)}, which does not fit {list(region.shape)}")
    return ratio


def dora_ratios(weight: Tensor, patches: Sequence[WeightPatch], factors: Sequence[Factors]) -> list[Tensor | None]:
    """The ratios of patches that apply one after the other to the whole `weight` (float32, which is changed)."""
    ratios: list[Tensor | None] = []
    for patch, tensors in zip(patches, factors, strict=True):
        ratios.append(dora_ratio(weight, patch, tensors) if patch.is_decomposed else None)
        weight = apply_patch(weight, patch, tensors, Place.of(patch, tuple(weight.shape)), ratios[-1])
    return ratios


def _change(own: Tensor, patch: WeightPatch, factors: Factors, place: Place, ratio: Tensor | None) -> Tensor:
    region, inside = place.region, place.inside
    assert inside is not None
    if patch.kind == "set":
        return inside.of(factors["value"].float().expand(region)).contiguous()
    if patch.kind == "diff":
        return own.add_(patch.strength * delta(patch, factors, region, inside)) if patch.strength else own
    change = delta(patch, factors, region, inside)
    if ratio is None:
        return own.add_(change.mul_(patch.strength * _alpha(patch, factors)))
    decomposed = (own + change.mul_(_alpha(patch, factors))).mul_(inside.of(ratio))
    return own + patch.strength * (decomposed - own) if patch.strength != 1.0 else decomposed


def delta(patch: WeightPatch, factors: Factors, region: Shape, part: Part = WHOLE) -> Tensor:
    """The `part` of what a patch adds to a region of that shape, before strength and alpha. `ValueError` by shapes."""
    if patch.swap:  # what comes to row i is made for the row half the height away
        height = region[0]
        device = next(iter(factors.values())).device
        indices = torch.arange(height, device=device) if part.rows is None else part.rows
        part = Part((indices + height // 2) % height, part.columns)
    make = _DELTAS[patch.kind]
    whole_columns = part.columns is None or len(region) == 2
    found = make(factors, region, part if whole_columns else Part(part.rows))
    rows = region[0] if part.rows is None else len(part.rows)
    found = found.reshape((rows, *(found.shape[1:] if len(region) == 2 else region[1:])))
    return found if whole_columns else Part(None, part.columns).of(found)


def _lora(factors: Factors, region: Shape, part: Part) -> Tensor:
    up, down = _matrix(factors["up"]), _matrix(factors["down"])
    _check(up, down, region)
    return Part(part.rows).of(up) @ _columns(down, part)


def _loha(factors: Factors, region: Shape, part: Part) -> Tensor:
    products = []
    for left, right in (("w1_a", "w1_b"), ("w2_a", "w2_b")):
        up, down = _matrix(factors[left]), _matrix(factors[right])
        _check(up, down, region)
        products.append(Part(part.rows).of(up) @ _columns(down, part))
    return products[0].mul_(products[1])


def _lokr(factors: Factors, region: Shape, part: Part) -> Tensor:
    """Entry (i, j) of a Kronecker product with a matrix [p, q]: left[i // p, j // q] * right[i % p, j % q]."""
    left, right = (_matrix(_one_or_product(factors, name)) for name in ("w1", "w2"))
    height, width = left.shape[0] * right.shape[0], left.shape[1] * right.shape[1]
    if (height, width) != (region[0], _width(region)):
        raise ValueError(f"it is made for a weight of [{height}, {width}]")
    if part.rows is None and part.columns is None:
        return torch.kron(left, right)
    rows = torch.arange(height, device=left.device) if part.rows is None else part.rows.to(left.device)
    columns = torch.arange(width, device=left.device) if part.columns is None else part.columns.to(left.device)
    p, q = right.shape
    return left[rows // p][:, columns // q] * right[rows % p][:, columns % q]


def _one_or_product(factors: Factors, name: str) -> Tensor:
    if name in factors:
        return factors[name]
    return factors[f"{name}_a"].float() @ factors[f"{name}_b"].float()


def _diff(factors: Factors, region: Shape, part: Part) -> Tensor:
    value = factors["value"]
    if tuple(value.shape) != region:
        raise ValueError(f"it is made for a weight of {list(value.shape)}")
    return part.of(value.float())


_DELTAS: dict[str, Callable[[Factors, Shape, Part], Tensor]] = {
    "lora": _lora,
    "loha": _loha,
    "lokr": _lokr,
    "diff": _diff,
}


def _alpha(patch: WeightPatch, factors: Factors) -> float:
    """alpha over the rank."""
    if patch.alpha is None:
        return 1.0
    if patch.kind == "lora":
        return patch.alpha / factors["down"].shape[0]
    if patch.kind == "loha":
        return patch.alpha / factors["w1_b"].shape[0]
    inner = factors.get("w2_b", factors.get("w1_b"))  # as ComfyUI: the second product's rank where there are two
    return 1.0 if inner is None else patch.alpha / inner.shape[0]


def _matrix(factor: Tensor) -> Tensor:
    return factor.flatten(1).float()


def _columns(matrix: Tensor, part: Part) -> Tensor:
    return matrix if part.columns is None else matrix[:, part.columns.to(matrix.device)]


def _width(region: Shape) -> int:
    width = 1
    for size in region[1:]:
        width *= size
    return width


def _check(up: Tensor, down: Tensor, region: Shape) -> None:
    if (up.shape[0], up.shape[1], down.shape[1]) != (region[0], down.shape[0], _width(region)):
        raise ValueError(
            f"its factors have shapes {list(up.shape)} and {list(down.shape)}, which make no {list(region)}"
        )


def check_patch(patch: WeightPatch, factors: Factors, shape: Shape) -> None:
    """ValueError, RuntimeError or IndexError for a patch that does not fit a weight of `shape`. Computes nothing."""
    on_meta = {role: torch.empty_like(tensor, device="meta") for role, tensor in factors.items()}
    if patch.offset is not None:
        dim, start, length = patch.offset
        if dim >= len(shape) or start < 0 or start + length > shape[dim]:
            raise ValueError(f"it changes the part {patch.offset}")
    dora_ratios(torch.empty(shape, dtype=torch.float32, device="meta"), [patch], [on_meta])
