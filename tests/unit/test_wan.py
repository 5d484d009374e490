"""The Wan family: declarations that agree with diffusers, a rank's side that computes what diffusers does, refusals."""

from __future__ import annotations

import itertools
from fnmatch import fnmatch
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from parallel_core.checkpoint import Checkpoint
from parallel_core.errors import UserError
from parallel_core.families.registry import find_family
from parallel_core.families.wan import FAMILY
from parallel_core.families.wan_rank import sinusoids
from parallel_core.plan import ParallelPlan, resolve
from tests.tiny_wan import TINY, VARIANTS, build_transformer, rotations


def config(variant: str = "t2v", **changed: Any) -> dict[str, Any]:
    return FAMILY.full_config({**TINY, **VARIANTS[variant], **changed})


# -- declarations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changed", [{}, {"cross_attn_norm": False, "num_layers": 3, "freq_dim": 64}])
@pytest.mark.parametrize("variant", VARIANTS)
def test_expected_weights_are_those_of_diffusers(variant: str, changed: dict[str, Any]) -> None:
    with torch.device("meta"):
        model = WanTransformer3DModel(**{**TINY, **VARIANTS[variant], **changed})
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert FAMILY.expected_shapes(config(variant, **changed)) == shapes


def test_missing_config_fields_are_diffusers_defaults() -> None:
    with torch.device("meta"):
        model = WanTransformer3DModel(num_layers=1)
    for name, value in FAMILY.defaults.items():
        if name != "num_layers":
            assert model.config[name] == value, name


def test_float32_is_kept_where_diffusers_keeps_it() -> None:
    """And in the patches' convolution, which ComfyUI runs in float32."""
    kept = {name for name in FAMILY.expected_shapes(config("flf2v")) if FAMILY.is_fp32(name)}
    by_diffusers = {
        name
        for name in FAMILY.expected_shapes(config("flf2v"))
        if set(name.split(".")) & set(WanTransformer3DModel._keep_in_fp32_modules)
    }
    assert kept == by_diffusers | {"patch_embedding.weight", "patch_embedding.bias"}


def test_tensor_parallelism_slices_every_linear_of_a_block_and_its_norms() -> None:
    names = {name.rpartition(".")[0] for name in FAMILY.expected_shapes(config("i2v")) if name.startswith("blocks.0.")}

    planned = {name for name in names if any(fnmatch(name, glob) for glob in (*FAMILY.tp_plan, *FAMILY.tp_norms))}
    assert names - planned == {"blocks.0", "blocks.0.norm2"}


@pytest.mark.parametrize(
    "changed",
    [
        {"in_channels": 52},
        {"in_channels": 32, "image_dim": 1280},
        {"image_dim": 1280, "added_kv_proj_dim": 64},
        {"in_channels": 36, "added_kv_proj_dim": 64},
        {"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 32},
        {"in_channels": 48},
        {"patch_size": [2, 2, 2]},
    ],
)
def test_unknown_variants_are_refused_by_what_the_config_says(changed: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"unknown kind: in_channels {changed.get('in_channels', 16)}, out_channels 16"):
        FAMILY.check_config(config(**changed))


@pytest.mark.parametrize("name", ["WanVACETransformer3DModel", "WanAnimateTransformer3DModel"])
def test_other_classes_are_refused_by_name(tmp_path: Any, name: str) -> None:
    with pytest.raises(UserError, match=f"holds a {name}, which is not supported"):
        find_family(Checkpoint(folder=tmp_path, class_name=name, config={}, tensors={}))


@pytest.mark.parametrize(("tensor", "nearest"), [(3, 2), (5, 4), (16, 8)])
def test_a_tensor_degree_must_divide_heads_and_feed_forward(tensor: int, nearest: int) -> None:
    """5 divides the 40 heads of the 14B model, but not its 13824 channels."""
    plan = ParallelPlan(devices=tuple(f"cpu:{i}" for i in range(tensor)), tensor=tensor)
    says = f"40 attention heads and 13824 feed-forward channels cannot be dealt to {tensor} ranks.*tensor {nearest};"
    with pytest.raises(UserError, match=says):
        FAMILY.check_plan(FAMILY.full_config({}), plan)


def test_auto_slices_into_degrees_that_work() -> None:
    """The 5B model has 24 heads, which 3 devices could share, and 14336 channels, which they could not."""
    units = FAMILY.tensor_units(FAMILY.full_config({"num_attention_heads": 24, "ffn_dim": 14336}))
    for devices, degree in ((2, 2), (3, 1), (6, 2), (8, 8)):
        plan = ParallelPlan(devices=tuple(f"cpu:{i}" for i in range(devices)), strategy="auto")
        assert resolve(plan, rows=1, heads=units, fits_one_device=False).plan.tensor == degree


def cond(**changed: Any) -> dict[str, Any]:
    return {"cross_attn": torch.zeros(1, 5, 32), **changed}


def seen(channels: int) -> Any:
    return SimpleNamespace(penultimate_hidden_states=torch.zeros(1, 7, channels))


def test_fitting_conditionings() -> None:
    FAMILY.comfy.check_conditioning(cond(clip_vision_output=seen(1280)), config("i2v"))
    FAMILY.comfy.check_conditioning(cond(clip_vision_output=seen(768)), config("i2v-2.2"))  # which reads none


@pytest.mark.parametrize(
    ("conditioning", "says"),
    [
        (cond(cross_attn=torch.zeros(1, 5, 48)), r"shape \[1, 5, 48\]; this Wan model expects \[batch, tokens, 32\]"),
        ({}, "shape none"),
        (cond(clip_vision_output=seen(768)), "clip_vision_output has 768 channels; this Wan model expects 1280"),
    ],
)
def test_conditionings_of_another_family(conditioning: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        FAMILY.comfy.check_conditioning(conditioning, config("i2v"))


# -- calls -------------------------------------------------------------------------------------------------------------


def angles(*grid: int) -> Tensor:
    """ComfyUI's freqs for a grid of tokens: (1, tokens, 1, 8, 2, 2)."""
    cos, sin = rotations(*grid).unbind(-1)
    return torch.stack([cos, -sin, sin, cos], dim=-1).unflatten(-1, (2, 2))[None, :, None]


def arguments(variant: str = "t2v", *, tokens: int = 512, rows: int = 2, **changed: Any) -> dict[str, Any]:
    """What ComfyUI gives `forward_orig` for 3 frames of 4 x 6 cells."""
    generator = torch.Generator().manual_seed(3)
    made = {
        "x": torch.randn(rows, config(variant)["in_channels"], 3, 4, 6, generator=generator),
        "t": torch.tensor([937.5, 210.25])[:rows],
        "context": torch.randn(rows, tokens, 32, generator=generator),
        "clip_fea": torch.randn(rows, 12, 1280, generator=generator) if config(variant)["image_dim"] else None,
        "freqs": angles(3, 2, 3),
    }
    return {**made, **changed}


def evaluate(model: Any, variant: str, given: dict[str, Any]) -> Tensor:
    call = FAMILY.comfy.call(None, given, config(variant))
    with torch.inference_mode():
        return FAMILY.finish(model(**FAMILY.prepare(call.rows, call.shared)))


def ours(variant: str, **changed: Any) -> Any:
    model = build_transformer(variant, **changed)
    FAMILY.on_loaded(model)
    return model


def stock(variant: str, given: dict[str, Any], timestep: Tensor | None = None) -> Tensor:
    """diffusers' own model, with the frequencies of ComfyUI's sinusoids."""
    model = build_transformer(variant)
    model.condition_embedder.timesteps_proj.forward = lambda times: sinusoids(times, 256)
    image = given["clip_fea"]
    if variant == "flf2v" and image is not None:
        image = image.reshape(-1, 6, 1280)  # two images of half the tokens each
    with torch.inference_mode():
        return model(
            given["x"],
            timestep=given["t"] if timestep is None else timestep,
            encoder_hidden_states=given["context"],
            encoder_hidden_states_image=image,
            return_dict=False,
        )[0]


def far(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_output_is_that_of_diffusers_own_model(variant: str) -> None:
    given = arguments(variant)
    output = evaluate(ours(variant), variant, given)
    assert output.shape == (2, config(variant)["out_channels"], 3, 4, 6)
    assert far(output, stock(variant, given)) <= 1e-6


def test_times_per_frame_are_diffusers_times_per_token() -> None:
    times = torch.tensor([[0.0, 500.0, 937.5], [0.0, 0.0, 20.0]])
    given = arguments("5b", t=times)
    expected = stock("5b", given, times.repeat_interleave(6, dim=1))
    assert far(evaluate(ours("5b"), "5b", given), expected) <= 1e-6
    assert far(evaluate(ours("5b"), "5b", arguments("5b")), expected) > 0.1


def test_one_time_for_all_frames_is_a_time_per_row() -> None:
    given = arguments("5b")
    assert torch.equal(
        evaluate(ours("5b"), "5b", {**given, "t": given["t"][:, None]}), evaluate(ours("5b"), "5b", given)
    )


def test_times_that_do_not_divide_the_tokens_are_cut_as_comfyui_cuts_them() -> None:
    rows = {"x": torch.zeros(1, 16, 3, 2, 2), "times": torch.tensor([[1.0, 2.0]]), "context": torch.zeros(1, 1, 32)}
    prepared = FAMILY.prepare(rows, {"rope": torch.zeros(5, 8, 2)})
    assert prepared["timestep"].tolist() == [[1, 1, 1, 2, 2]]


def test_a_scaled_rotation_wins_over_the_models_own() -> None:
    given, model = arguments("t2v"), ours("t2v")
    plain = evaluate(model, "t2v", given)
    scaled = evaluate(model, "t2v", {**given, "freqs": angles(5, 2, 3)[:, 12:]})  # two frames later
    apart = evaluate(model, "t2v", {**given, "freqs": angles(5, 2, 3).unflatten(1, (5, 6))[:, ::2].flatten(1, 2)})
    assert far(scaled, plain) <= 1e-5, "only the distances between tokens matter"
    assert far(apart, plain) > 1e-3


def test_the_rotation_is_the_output_of_the_rope_module() -> None:
    """diffusers' context-parallel plan splits it there."""
    outputs: list[Any] = []
    model = ours("t2v")
    model.rope.register_forward_hook(lambda module, args, output: outputs.append(output))
    evaluate(model, "t2v", arguments("t2v"))
    ((cos, sin),) = outputs
    expected = build_transformer("t2v").rope(arguments("t2v")["x"])
    assert cos.shape == sin.shape == (1, 18, 1, 16)
    assert torch.allclose(cos, expected[0], atol=1e-6) and torch.allclose(sin, expected[1], atol=1e-6)


@pytest.mark.parametrize("tokens", [1, 77, 600])
def test_texts_of_any_length_beside_an_image(tokens: int) -> None:
    """A text of 512 tokens whose first ones occur again and again attends like the first ones alone."""
    given, model = arguments("i2v", tokens=tokens), ours("i2v")
    alone = evaluate(model, "i2v", given)
    twice = evaluate(model, "i2v", {**given, "context": given["context"].repeat(1, 2, 1)})
    assert far(twice, alone) <= 1e-5
    assert far(evaluate(model, "i2v", {**given, "clip_fea": given["clip_fea"].flip(2)}), alone) > 1e-2


def test_without_an_image_the_text_stands_for_it() -> None:
    """What ComfyUI does when an I2V model gets no clip_vision_output: each attention reads the whole text."""
    given, model = arguments("i2v"), build_transformer("i2v")
    embedder = model.condition_embedder
    embedder.timesteps_proj.forward = lambda times: sinusoids(times, 256)
    embedder.image_embedder.forward = lambda image: embedder.text_embedder(given["context"])
    with torch.inference_mode():
        expected = model(given["x"], given["t"], given["context"], given["clip_fea"], return_dict=False)[0]
    assert far(evaluate(ours("i2v"), "i2v", {**given, "clip_fea": None}), expected) <= 1e-6


def test_one_image_alone_takes_the_first_positions_of_a_first_last_frame_model() -> None:
    given = arguments("flf2v", rows=1)
    whole = ours("flf2v").condition_embedder.image_embedder
    alone = evaluate(ours("flf2v"), "flf2v", {**given, "clip_fea": given["clip_fea"][:, :6]})
    without = build_transformer("i2v")
    without.load_state_dict({k: v for k, v in build_transformer("flf2v").state_dict().items() if "pos_embed" not in k})
    FAMILY.on_loaded(without)
    moved = given["clip_fea"][:, :6] + whole.pos_embed[:, :6]
    assert far(alone, evaluate(without, "i2v", {**given, "clip_fea": moved})) <= 1e-6


def test_images_are_left_out_where_the_model_reads_none() -> None:
    given = arguments("i2v-2.2", clip_fea=torch.zeros(2, 7, 1280))
    assert set(FAMILY.comfy.call(None, given, config("i2v-2.2")).rows) == {"x", "times", "context"}


def peak_bytes(model: Any, given: dict[str, Any], variant: str) -> int:
    """The most bytes that a forward holds at once, from torch's own record of every allocation."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        evaluate(model, variant, given)
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return max(held)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("variant", "ffn_dim", "frames"),
    [("t2v", 692, None), ("5b", 1195, None), ("5b", 1195, 5)],
    ids=["14b", "5b", "5b-times-per-frame"],
)
def test_the_estimate_of_activations_is_above_the_peak_but_near_it(
    variant: str, ffn_dim: int, frames: int | None, dtype: torch.dtype
) -> None:
    """With the proportions of the full-size models: the feed-forward is 2.7 (14B) and 4.7 (5B) times as wide."""
    sizes = {"num_attention_heads": 4, "attention_head_dim": 64, "ffn_dim": ffn_dim}
    model = ours(variant, **sizes).requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data if FAMILY.is_fp32(name) else parameter.data.to(dtype)
    channels = config(variant)["in_channels"]
    given = {
        "x": torch.randn(1, channels, 5, 32, 32).to(dtype),
        "t": torch.full((1, frames) if frames else (1,), 500.0),
        "context": torch.randn(1, 8, 32).to(dtype),
        "freqs": torch.randn(1, 5 * 16 * 16, 1, 32, 2, 2),
    }
    call = FAMILY.comfy.call(None, given, config(variant))
    estimate = FAMILY.activation_bytes(config(variant, **sizes), call, dtype.itemsize)
    assert 1 < estimate / peak_bytes(model, given, variant) < 1.5
