"""What families have in common: the weights of a linear layer, and the rule that tensor ranks get equal shares.

Knows no family.
"""

from __future__ import annotations

from ..errors import UserError


def linear(name: str, out_features: int, in_features: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a linear layer with a bias."""
    return {f"{name}.weight": (out_features, in_features), f"{name}.bias": (out_features,)}


def refuse_uneven(sliced: str, units: int, tensor: int) -> None:
    """`UserError` when `tensor` does not divide `units`, which stand for what is `sliced` ("24 attention heads")."""
    if units % tensor:
        nearest = min((d for d in range(1, units + 1) if units % d == 0), key=lambda d: (abs(d - tensor), d))
        raise UserError(
            f"tensor is {tensor}, but this model's {sliced} cannot be dealt to {tensor} ranks "
            f"evenly. The nearest degree that works is tensor {nearest}; ulysses works with any number of heads."
        )
