"""The Qwen-Image family: declarations that agree with diffusers, its way to the ranks and back, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import QwenImageTransformer2DModel

from parallel_core.errors import UserError
from parallel_core.families.base import SeamCall
from parallel_core.families.qwen import FAMILY
from parallel_core.parallelize import tensor_shards
from parallel_core.plan import ParallelPlan
from tests.tiny_qwen import TINY, build_transformer
from tests.unit.live_bytes import PeakBytes

CONFIG = FAMILY.full_config(TINY)


# -- declarations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [TINY, {**TINY, "zero_cond_t": True}, {"num_layers": 1}])
def test_expected_weights_are_those_of_diffusers(config: dict[str, Any]) -> None:
    with torch.device("meta"):
        model = QwenImageTransformer2DModel(**config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert FAMILY.expected_shapes(FAMILY.full_config(config)) == shapes


def test_missing_config_fields_are_diffusers_defaults() -> None:
    with torch.device("meta"):
        model = QwenImageTransformer2DModel(num_layers=1)
    assert {**FAMILY.defaults, "num_layers": 1} == {name: model.config[name] for name in FAMILY.defaults}


def test_tensor_ranks_slice_modulation_too() -> None:
    with torch.device("meta"):
        model = QwenImageTransformer2DModel(**TINY)
    whole = set(model.state_dict()) - set(tensor_shards(model, FAMILY, 2))
    assert {name.split(".")[0] for name in whole} == {
        "txt_norm", "txt_in", "img_in", "time_text_embed", "proj_out", "transformer_blocks",
    }  # fmt: skip
    assert {name.split(".")[-2] for name in whole if name.startswith("transformer_blocks")} == {
        "norm_q", "norm_k", "norm_added_q", "norm_added_k",
    }  # fmt: skip


@pytest.mark.parametrize(("tensor", "nearest"), [(5, 4), (7, 6), (16, 12)])
def test_a_tensor_degree_that_heads_cannot_serve(tensor: int, nearest: int) -> None:
    plan = ParallelPlan(devices=tuple(f"cpu:{i}" for i in range(tensor)), tensor=tensor)
    with pytest.raises(UserError, match=f"24 attention heads cannot be dealt to {tensor} ranks.*tensor {nearest}"):
        FAMILY.check_plan(FAMILY.full_config({}), plan)


def test_the_real_models_are_run() -> None:
    assert FAMILY.check_config is not None
    FAMILY.check_config(FAMILY.full_config({"pooled_projection_dim": 768}))  # as Qwen-Image's own config.json has it
    FAMILY.check_config(FAMILY.full_config({"zero_cond_t": True}))


@pytest.mark.parametrize(
    "field",
    [{"use_layer3d_rope": True}, {"use_additional_t_cond": True}, {"guidance_embeds": True}, {"in_channels": 4}],
)
def test_variants_that_are_other_models_are_refused(field: dict[str, Any]) -> None:
    assert FAMILY.check_config is not None
    name, value = next(iter(field.items()))
    with pytest.raises(UserError, match=f"{name} = {value!r}"):
        FAMILY.check_config(FAMILY.full_config(field))


def test_only_a_2511_model_needs_a_newer_comfyui() -> None:
    assert FAMILY.comfy.needs.keys() & FAMILY.comfy.unet_config(CONFIG).keys() == set()
    edit = FAMILY.comfy.unet_config({**CONFIG, "zero_cond_t": True})
    assert FAMILY.comfy.needs.keys() & edit.keys() == {"default_ref_method"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("clean", [0, 400])
def test_activations_are_estimated_from_above(dtype: torch.dtype, clean: int) -> None:
    model = tuned(dtype=dtype, num_layers=1, attention_head_dim=32, axes_dims_rope=[8, 12, 12])
    call = seam_call(tokens=1600 + clean, text=200, dtype=dtype)
    shared = {"img_ids": torch.zeros(1600, 3), "txt_ids": torch.zeros(200, 3)}
    shared |= {"clean_ids": torch.zeros(clean, 3)} if clean else {}
    arguments = FAMILY.prepare(call.rows, shared)
    with torch.no_grad(), PeakBytes() as measured:
        model(**arguments)
    per_row = FAMILY.activation_bytes({**CONFIG, "attention_head_dim": 32}, call, dtype.itemsize)
    assert measured.peak < call.num_rows * per_row < 1.5 * measured.peak


# -- from ComfyUI ------------------------------------------------------------------------------------------------------


class Model:
    """What of ComfyUI's model a call uses: patches of 2 x 2, positions that are centred on 0."""

    def process_img(self, x: torch.Tensor, index: int = 0, h_offset: int = 0, w_offset: int = 0) -> tuple[Any, ...]:
        batch, channels, frames, height, width = x.shape
        x = torch.nn.functional.pad(x, (0, width % 2, 0, height % 2))
        rows, columns = x.shape[-2] // 2, x.shape[-1] // 2
        patches = x.reshape(batch, channels, frames, rows, 2, columns, 2).permute(0, 2, 3, 5, 1, 4, 6)
        grid = torch.meshgrid(
            torch.tensor([float(index)]),
            torch.arange(rows) + float(h_offset // 2 - rows // 2),
            torch.arange(columns) + float(w_offset // 2 - columns // 2),
            indexing="ij",
        )
        ids = torch.stack(grid, dim=-1).reshape(1, -1, 3).repeat(batch, 1, 1)
        return patches.reshape(batch, frames * rows * columns, 4 * channels), ids, x.shape


class NewerModel(Model):
    default_ref_method = "index"


def arguments(*, height: int = 6, width: int = 9, **changed: Any) -> dict[str, Any]:
    base = {"x": torch.randn(2, 16, 1, height, width), "timesteps": torch.ones(2), "context": torch.zeros(2, 5, 32)}
    return {**base, **changed}


def call(model: Any = None, **changed: Any) -> SeamCall:
    return FAMILY.comfy.call(model or NewerModel(), arguments(**changed), CONFIG)


def test_a_call_has_rows_and_what_they_share() -> None:
    made = call()
    assert made.num_rows == 2
    assert {name: tuple(t.shape) for name, t in made.rows.items()} == {
        "img": (2, 15, 64), "txt": (2, 5, 32), "timesteps": (2,),
    }  # fmt: skip
    assert {name: tuple(t.shape) for name, t in made.shared.items()} == {"img_ids": (15, 3), "txt_ids": (5, 3)}


@pytest.mark.parametrize(("height", "width", "start"), [(6, 9, 2), (9, 6, 2), (16, 4, 4), (8, 40, 10), (5, 7, 2)])
def test_text_starts_behind_the_target(height: int, width: int, start: int) -> None:
    references = [torch.zeros(2, 16, 1, 64, 64)]  # larger than the target, and of no influence
    ids = call(height=height, width=width, ref_latents=references).shared["txt_ids"]
    assert ids.tolist() == [[start + k] * 3 for k in range(5)]


REFERENCES = [torch.zeros(2, 16, 1, *size) for size in ((8, 4), (4, 8), (6, 6), (6, 6))]


@pytest.mark.parametrize(
    ("method", "corners"),
    [
        ("index", [[1, -2, -1], [2, -1, -2], [3, -1, -1], [4, -1, -1]]),
        (None, [[1, -2, -1], [2, -1, -2], [3, -1, -1], [4, -1, -1]]),
        ("negative_index", [[-1, -2, -1], [-2, -1, -2], [-3, -1, -1], [-4, -1, -1]]),
        # 8 high, 4 wide; to its right would be 12 wide, below it 12 high: below; the third right, the last below.
        ("offset", [[1, -2, -1], [1, 3, -2], [1, -1, 3], [1, 5, -1]]),
        ("uxo", [[1, -2, -1], [1, 3, -2], [1, -1, 3], [1, 5, -1]]),
    ],
)
def test_places_of_references(method: str | None, corners: list[list[int]]) -> None:
    made = call(ref_latents=REFERENCES, ref_latents_method=method)
    sizes = [15, 8, 8, 9, 9]
    first_tokens = [ids[0].tolist() for ids in made.shared["img_ids"].split(sizes)[1:]]
    assert first_tokens == corners
    assert made.rows["img"].shape == (2, sum(sizes), 64)


@pytest.mark.parametrize("how", ["by the prompt", "by the model"])
def test_references_without_noise_are_told_apart(how: str) -> None:
    model = NewerModel()
    if how == "by the model":
        model.default_ref_method = "index_timestep_zero"
    method = "index_timestep_zero" if how == "by the prompt" else None
    made = call(model, ref_latents=REFERENCES, ref_latents_method=method)
    assert {name: ids.shape[0] for name, ids in made.shared.items()} == {"img_ids": 15, "clean_ids": 34, "txt_ids": 5}
    assert "clean_ids" not in call(model, ref_latents_method=method).shared


@pytest.mark.parametrize("method", ["index_timestep_zero", "negative_index"])
def test_a_reference_method_that_this_comfyui_does_not_have(method: str) -> None:
    with pytest.raises(UserError, match=f"'{method}', which this version of ComfyUI does not have"):
        call(Model(), ref_latents=REFERENCES, ref_latents_method=method)


LOWEST = torch.finfo(torch.float32).min


@pytest.mark.parametrize(
    "hidden",
    [
        torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]),
        torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]).bool(),
        torch.tensor([[0, 0, 0, LOWEST, -torch.inf], [0, 0, 0, 0, 0]]),
        torch.tensor([[0, 0, 0, -10000, -65504], [0, 0, 0, 0, 0]]).half(),
    ],
    ids=["integers", "bool", "bias", "half-bias"],
)
def test_masks_of_padded_text(hidden: torch.Tensor) -> None:
    assert call(attention_mask=hidden).rows["txt_mask"].tolist() == [[True] * 3 + [False] * 2, [True] * 5]


@pytest.mark.parametrize("mask", [None, torch.ones(2, 5).long(), torch.zeros(2, 5)], ids=["none", "ones", "no-bias"])
def test_a_mask_that_hides_nothing_does_not_cross(mask: torch.Tensor | None) -> None:
    assert "txt_mask" not in call(attention_mask=mask).rows


@pytest.mark.parametrize(
    ("mask", "says"),
    [
        (torch.tensor([[0, 0, 0, -1.5, 0]] * 2), "holds -1.5; expected 0"),
        (torch.ones(2, 5), "holds 1; expected 0"),
        (torch.ones(2, 4).long(), r"shape \[2, 4\]; expected \[2, 5\]"),
        (torch.zeros(2, 1, 5), r"shape \[2, 1, 5\]; expected \[2, 5\]"),
    ],
)
def test_masks_that_cannot_cross(mask: torch.Tensor, says: str) -> None:
    with pytest.raises(UserError, match=says):
        call(attention_mask=mask)


@pytest.mark.parametrize("frames", [1, 3])
@pytest.mark.parametrize("size", [(6, 8), (7, 9)])
def test_tokens_become_the_latent_again(frames: int, size: tuple[int, int]) -> None:
    x = torch.randn(2, 16, frames, *size)
    made = call(x=x, ref_latents=REFERENCES)
    assert FAMILY.comfy.restore is not None
    assert torch.equal(FAMILY.comfy.restore(NewerModel(), {"x": x}, made.rows["img"]), x)


def cond(width: int = 32, **entries: Any) -> dict[str, Any]:
    return {"cross_attn": torch.zeros(1, 5, width), **entries}


@pytest.mark.parametrize("method", ["index", "offset", "uxo", "index_timestep_zero"])
def test_a_fitting_conditioning(method: str) -> None:
    entries = {"reference_latents": REFERENCES, "reference_latents_method": method}
    FAMILY.comfy.check_conditioning(cond(**entries), CONFIG)


@pytest.mark.parametrize(
    ("conditioning", "says"),
    [
        (cond(width=4096), "another model family"),
        ({"pooled_output": None}, "shape none"),
        (cond(reference_latents=[torch.zeros(1, 16, 8, 8)]), r"\[1, 16, 8, 8\].*Qwen-Image's own VAE"),
        (cond(reference_latents=[torch.zeros(1, 4, 1, 8, 8)]), r"\[1, 4, 1, 8, 8\].*Qwen-Image's own VAE"),
        (cond(reference_latents_method="spiral"), "'spiral'; expected one of index, index_timestep_zero"),
    ],
)
def test_a_conditioning_that_does_not_fit(conditioning: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        FAMILY.comfy.check_conditioning(conditioning, CONFIG)


# -- on the ranks ------------------------------------------------------------------------------------------------------


def tuned(**settings: Any) -> QwenImageTransformer2DModel:
    """The tiny model as the ranks have it."""
    model = build_transformer(**settings)
    assert FAMILY.on_loaded is not None
    FAMILY.on_loaded(model)
    return model


def seam_call(*, tokens: int, text: int = 5, dtype: torch.dtype = torch.float32) -> SeamCall:
    generator = torch.Generator().manual_seed(3)
    rows = {
        "img": torch.randn(2, tokens, 64, generator=generator).to(dtype),
        "txt": torch.randn(2, text, 32, generator=generator).to(dtype),
        "timesteps": torch.tensor([0.9873, 0.4]),
    }
    return SeamCall(rows=rows, shared={})


def grid(index: int, rows: int, columns: int) -> torch.Tensor:
    """Positions as diffusers has them, for an even number of rows and columns."""
    steps = torch.arange(rows) - rows // 2, torch.arange(columns) - columns // 2
    return torch.cartesian_prod(torch.tensor([index]), *steps).float()


TARGET, REFERENCE = (4, 6), (2, 4)
POSITIONS = {"img_ids": grid(0, *TARGET), "txt_ids": torch.arange(3.0, 8.0)[:, None].repeat(1, 3)}


@torch.inference_mode()
def run(model: Any, rows: dict[str, torch.Tensor], shared: dict[str, torch.Tensor]) -> torch.Tensor:
    return FAMILY.finish(model(**FAMILY.prepare(rows, shared)))


@torch.inference_mode()
def theirs(rows: dict[str, torch.Tensor], *shapes: tuple[int, int], **config: Any) -> torch.Tensor:
    """diffusers' own model, by its own positions and times."""
    made: torch.Tensor = build_transformer(**config)(
        hidden_states=rows["img"],
        encoder_hidden_states=rows["txt"],
        encoder_hidden_states_mask=rows.get("txt_mask"),
        timestep=rows["timesteps"],
        img_shapes=[[(1, *shape) for shape in shapes]] * 2,
        return_dict=False,
    )[0]
    return made


@pytest.mark.parametrize("masked", [False, True])
def test_the_model_is_diffusers_where_positions_agree(masked: bool) -> None:
    rows = dict(seam_call(tokens=24).rows)
    if masked:
        rows["txt_mask"] = torch.tensor([[True, True, False, True, False], [True] * 5])
    expected = theirs(rows, TARGET)
    torch.testing.assert_close(run(tuned(), rows, POSITIONS), expected, atol=1e-5, rtol=0)
    if masked:
        assert (theirs({**rows, "txt_mask": None}, TARGET) - expected)[0].abs().max() > 1e-2


@pytest.mark.parametrize("zero_cond_t", [False, True])
def test_references_with_and_without_noise(zero_cond_t: bool) -> None:
    """What the config says is only a default of ComfyUI's: one model runs both, call by call."""
    rows = dict(seam_call(tokens=32).rows)
    places = {**POSITIONS, "clean_ids": grid(1, *REFERENCE)}
    noisy = {**POSITIONS, "img_ids": torch.cat([POSITIONS["img_ids"], places["clean_ids"]])}
    model = tuned(zero_cond_t=zero_cond_t)
    for shared, clean in ((places, True), (noisy, False), (places, True)):
        expected = theirs(rows, TARGET, REFERENCE, zero_cond_t=clean)
        torch.testing.assert_close(run(model, rows, shared), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("name", "axis"), [(name, axis) for name in POSITIONS for axis in range(3)])
def test_every_position_matters(name: str, axis: int) -> None:
    rows = dict(seam_call(tokens=24).rows)
    ids = POSITIONS[name].clone()
    ids[2, axis] += 5
    model = tuned()
    assert (run(model, rows, {**POSITIONS, name: ids}) - run(model, rows, POSITIONS)).abs().max() > 1e-2


def test_times_are_not_rounded_to_the_models_dtype() -> None:
    """In bfloat16 0.9873 becomes 0.98828, which is further from it than the next step of a schedule can be."""
    model = tuned(dtype=torch.bfloat16)
    rows = dict(seam_call(tokens=24, dtype=torch.bfloat16).rows)
    moved = {**rows, "timesteps": rows["timesteps"].bfloat16().float()}
    assert not torch.equal(run(model, rows, POSITIONS), run(model, moved, POSITIONS))
