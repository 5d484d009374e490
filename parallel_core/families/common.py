"""What families have in common: the weights of a linear layer, the rule that tensor ranks get equal shares, what a
transformer gives back, and how long a joint sequence is.

Knows no family.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import UserError
from .base import Config, SeamCall


def linear(name: str, out_features: int, in_features: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a linear layer with a bias."""
    return {f"{name}.weight": (out_features, in_features), f"{name}.bias": (out_features,)}


def first_output(output: Any) -> torch.Tensor:
    """The tensor of a transformer that was called with `return_dict=False`."""
    tensor: torch.Tensor = output[0]
    return tensor


def joint_lengths(config: Config, call: SeamCall) -> dict[str, int]:
    """Tokens of text and picture where attention joins the two, from the rows "txt" and "img"."""
    return {"encoder_hidden_states": call.rows["txt"].shape[1], "hidden_states": call.rows["img"].shape[1]}


def refuse_uneven(sliced: str, units: int, tensor: int) -> None:
    """`UserError` when `tensor` does not divide `units`, which stand for what is `sliced` ("24 attention heads")."""
    if units % tensor:
        nearest = min((d for d in range(1, units + 1) if units % d == 0), key=lambda d: (abs(d - tensor), d))
        raise UserError(
            f"tensor is {tensor}, but this model's {sliced} cannot be dealt to {tensor} ranks "
            f"evenly. The nearest degree that works is tensor {nearest}; ulysses works with any number of heads."
        )
