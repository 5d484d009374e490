"""The Flux family: declarations that agree with diffusers, and refusals that name what is wrong."""

from __future__ import annotations

import pytest
import torch
from diffusers import FluxTransformer2DModel

from parallel_core.errors import UserError
from parallel_core.families.base import refuse_unknown
from parallel_core.families.flux import FAMILY
from parallel_core.plan import ParallelPlan
from tests.tiny_flux import TINY

CONFIG = FAMILY.full_config(TINY)
REAL = FAMILY.full_config({"guidance_embeds": True})


@pytest.mark.parametrize("guidance", [True, False])
def test_expected_weights_are_those_of_diffusers(guidance: bool) -> None:
    config = {**TINY, "guidance_embeds": guidance}
    with torch.device("meta"):
        model = FluxTransformer2DModel(**config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert FAMILY.expected_shapes(FAMILY.full_config(config)) == shapes


def test_missing_config_fields_are_diffusers_defaults() -> None:
    with torch.device("meta"):
        model = FluxTransformer2DModel(num_layers=1, num_single_layers=1)
    for name, value in FAMILY.defaults.items():
        if name not in ("num_layers", "num_single_layers"):
            assert model.config[name] == value, name


@pytest.mark.parametrize(("tensor", "nearest"), [(5, 4), (7, 6), (16, 12)])
def test_a_tensor_degree_that_heads_cannot_serve(tensor: int, nearest: int) -> None:
    plan = ParallelPlan(devices=tuple(f"cpu:{i}" for i in range(tensor)), tensor=tensor)
    with pytest.raises(UserError, match=f"24 attention heads cannot be dealt to {tensor} ranks.*tensor {nearest}"):
        FAMILY.check_plan(REAL, plan)


def test_ulysses_serves_any_number_of_heads() -> None:
    FAMILY.check_plan(REAL, ParallelPlan(devices=tuple(f"cpu:{i}" for i in range(7)), ulysses=7))


def cond(width: int = 32, pooled: int = 16) -> dict[str, torch.Tensor]:
    return {"cross_attn": torch.zeros(1, 5, width), "pooled_output": torch.zeros(1, pooled)}


def test_a_fitting_conditioning() -> None:
    FAMILY.comfy.check_conditioning(cond(), CONFIG)


@pytest.mark.parametrize(
    ("conditioning", "says"),
    [
        (cond(width=48), "another model family"),
        (cond(pooled=8), "pooled_output has 8 channels; this Flux model expects 16"),
        ({"cross_attn": torch.zeros(1, 5, 32)}, "no pooled_output"),
        ({"pooled_output": None}, "shape none"),
    ],
)
def test_a_conditioning_of_another_family(conditioning: dict[str, torch.Tensor], says: str) -> None:
    with pytest.raises(UserError, match=says):
        FAMILY.comfy.check_conditioning(conditioning, CONFIG)


def test_unknown_arguments_are_named_unless_they_are_none() -> None:
    understood = frozenset({"img"})
    refuse_unknown("argument", {"img": 1, "later": None}, understood, "flux")
    with pytest.raises(UserError, match="argument 'timestep_zero_index'"):
        refuse_unknown("argument", {"img": 1, "timestep_zero_index": 3}, understood, "flux")


def arguments(**changed: object) -> dict[str, object]:
    base = {
        "img": torch.zeros(2, 6, 64),
        "txt": torch.zeros(2, 5, 32),
        "timesteps": torch.ones(2),
        "y": torch.zeros(2, 16),
        "guidance": torch.ones(2),
        "img_ids": torch.zeros(2, 6, 3),
        "txt_ids": torch.zeros(2, 5, 3),
    }
    return {**base, **changed}


def test_a_call_has_rows_and_what_they_share() -> None:
    call = FAMILY.comfy.call(None, arguments(y=None), CONFIG)
    assert call.num_rows == 2
    assert {name: tuple(t.shape) for name, t in call.shared.items()} == {"img_ids": (6, 3), "txt_ids": (5, 3)}
    assert call.rows["y"].shape == (2, 16), "no pooled output counts as zeros, as in ComfyUI"


def test_rows_at_different_positions_are_refused() -> None:
    ids = torch.zeros(2, 6, 3)
    ids[1] += 1
    with pytest.raises(UserError, match="different img_ids"):
        FAMILY.comfy.call(None, arguments(img_ids=ids), CONFIG)


def test_guidance_is_left_out_where_the_model_has_none() -> None:
    assert "guidance" not in FAMILY.comfy.call(None, arguments(), {**CONFIG, "guidance_embeds": False}).rows
