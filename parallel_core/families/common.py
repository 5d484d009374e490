"""What families have in common: the weights of a linear layer, and the rule that tensor ranks share out whole heads.

Knows no family.
"""

from __future__ import annotations

from ..errors import UserError
from ..plan import ParallelPlan


def linear(name: str, out_features: int, in_features: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a linear layer with a bias."""
    return {f"{name}.weight": (out_features, in_features), f"{name}.bias": (out_features,)}


def check_heads(heads: int, plan: ParallelPlan) -> None:
    """`UserError` for a tensor degree that does not divide the attention heads."""
    if heads % plan.tensor:
        nearest = min((d for d in range(1, heads + 1) if heads % d == 0), key=lambda d: (abs(d - plan.tensor), d))
        raise UserError(
            f"tensor is {plan.tensor}, but this model's {heads} attention heads cannot be dealt to {plan.tensor} ranks "
            f"evenly. The nearest degree that works is tensor {nearest}; ulysses works with any number of heads."
        )
