"""The planner on models of real FLUX size, without weights and on devices that do not exist."""

from __future__ import annotations

import pytest
import torch
from accelerate.utils import check_device_map, compute_module_sizes, infer_auto_device_map
from diffusers import FluxTransformer2DModel
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

from parallel_core.errors import UserError
from parallel_core.placement import Component, PlacementPlan, plan_placement
from parallel_core.text_spec import PLACEMENTS

GB = 1000**3

# The configs of FLUX.1's text encoders: T5-XXL's encoder (4.8 B weights) and CLIP-L's text model (0.1 B).
T5_XXL = {
    "vocab_size": 32128,
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
    "is_encoder_decoder": False,
    "use_cache": False,
}
CLIP_L = {
    "vocab_size": 49408,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 77,
}
FLUX_DEV = {
    "in_channels": 64,
    "num_layers": 19,
    "num_single_layers": 38,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 768,
    "guidance_embeds": True,
}


def component(name: str, module: nn.Module) -> Component:
    return Component(name=name, module=module, no_split=tuple(module._no_split_modules))


@pytest.fixture(scope="module")
def encoders() -> list[Component]:
    with torch.device("meta"):
        clip = CLIPTextModel(CLIPTextConfig(**CLIP_L)).to(torch.bfloat16)
        t5 = T5EncoderModel(T5Config(**T5_XXL)).to(torch.bfloat16)
    return [component("text_encoder", clip), component("text_encoder_2", t5)]


@pytest.fixture(scope="module")
def transformer() -> Component:
    with torch.device("meta"):
        return component("transformer", FluxTransformer2DModel(**FLUX_DEV).to(torch.bfloat16))


def devices_of(plan: PlacementPlan) -> set[str]:
    return set(plan.bytes_per_device)


def assert_holds(plan: PlacementPlan, components: list[Component], budgets: dict[str, int]) -> None:
    """Everything placed once, no budget exceeded, no module split that must stay whole."""
    total = sum(compute_module_sizes(part.module)[""] for part in components)
    assert sum(plan.bytes_per_device.values()) == total
    for device, count in plan.bytes_per_device.items():
        assert count <= budgets[device]
    for part in components:
        device_map = plan.device_map(part.name)
        check_device_map(part.module, device_map)
        whole = [name for name, module in part.module.named_modules() if type(module).__name__ in part.no_split]
        for name in whole:
            assert not any(key.startswith(f"{name}.") for key in device_map)


def test_balanced_on_two_16_gb_devices_spreads_by_bytes(encoders: list[Component]) -> None:
    budgets = {"cuda:0": 16 * GB, "cuda:1": 16 * GB}
    plan = plan_placement(encoders, budgets, "balanced")
    assert_holds(plan, encoders, budgets)
    first, second = plan.bytes_per_device["cuda:0"], plan.bytes_per_device["cuda:1"]
    assert first + second == 9_770_742_888
    block = 386 * 10**6
    assert abs(first - second) <= block
    assert plan.describe() == (
        "text_encoder: cuda:0; text_encoder_2: blocks 0-10 on cuda:0, blocks 11-23 on cuda:1; "
        "4.8 GB on cuda:0 + 5.0 GB on cuda:1"
    )


def test_auto_takes_as_few_devices_as_hold_everything(encoders: list[Component]) -> None:
    assert devices_of(plan_placement(encoders, {"cuda:0": 8 * GB, "cuda:1": 16 * GB}, "auto")) == {"cuda:1"}
    budgets = {"cuda:0": 4 * GB, "cuda:1": 6 * GB, "cuda:2": 6 * GB}
    plan = plan_placement(encoders, budgets, "auto")
    assert devices_of(plan) == {"cuda:1", "cuda:2"}
    assert_holds(plan, encoders, budgets)


def test_sequential_fills_the_first_device_first(encoders: list[Component]) -> None:
    plan = plan_placement(encoders, {"cuda:0": 16 * GB, "cuda:1": 16 * GB}, "sequential")
    assert plan.device_map("text_encoder") == {"": "cuda:0"}
    assert plan.device_map("text_encoder_2") == {"": "cuda:0"}

    plan = plan_placement(encoders, {"cuda:0": 8 * GB, "cuda:1": 8 * GB}, "sequential")
    block = 386 * 10**6
    assert 8 * GB - block < plan.bytes_per_device["cuda:0"] <= 8 * GB


def test_single_takes_the_device_with_most_memory_or_says_what_would_fit(encoders: list[Component]) -> None:
    plan = plan_placement(encoders, {"cuda:0": 12 * GB, "cuda:1": 16 * GB}, "single")
    assert devices_of(plan) == {"cuda:1"}

    with pytest.raises(UserError) as error:
        plan_placement(encoders, {"cuda:0": 8 * GB, "cuda:1": 8 * GB, "cpu": 64 * GB}, "single")
    assert "they need 9.8 GB (text_encoder 246 MB, text_encoder_2 9.5 GB)" in str(error.value)
    assert "1.9 GB are missing" in str(error.value)  # the five blocks of 386 MB that have no room
    assert "cuda:0 8.0 GB, cuda:1 8.0 GB" in str(error.value)
    assert "placement 'balanced' would fit: 4.8 GB on cuda:0 + 5.0 GB on cuda:1" in str(error.value)


def test_balanced_serves_devices_of_unequal_size(encoders: list[Component]) -> None:
    budgets = {"cuda:0": 16 * GB, "cuda:1": 2 * GB}
    plan = plan_placement(encoders, budgets, "balanced")
    assert_holds(plan, encoders, budgets)
    assert devices_of(plan) == {"cuda:0", "cuda:1"}


@pytest.mark.parametrize("strategy", ["balanced", "auto", "sequential"])
def test_the_host_takes_what_two_8_gb_devices_cannot(
    encoders: list[Component], transformer: Component, strategy: str
) -> None:
    parts = [*encoders, transformer]  # 33.6 GB
    budgets = {"cuda:0": 8 * GB, "cuda:1": 8 * GB, "cpu": 64 * GB}
    plan = plan_placement(parts, budgets, strategy)
    assert_holds(plan, parts, budgets)
    assert devices_of(plan) == {"cuda:0", "cuda:1", "cpu"}
    # Layers that stay on the host are brought in one by one: room for the largest of them is kept on each device.
    largest = max(unit.largest_layer for unit, device in zip(plan.units, plan.devices, strict=True) if device == "cpu")
    assert max(plan.bytes_per_device["cuda:0"], plan.bytes_per_device["cuda:1"]) <= 8 * GB - largest


def test_two_8_gb_devices_hold_the_encoders_without_the_host(encoders: list[Component]) -> None:
    budgets = {"cuda:0": 8 * GB, "cuda:1": 8 * GB, "cpu": 64 * GB}
    for strategy in ("balanced", "auto", "sequential"):
        assert devices_of(plan_placement(encoders, budgets, strategy)) == {"cuda:0", "cuda:1"}


def test_what_cannot_fit_is_refused_with_the_missing_bytes(encoders: list[Component]) -> None:
    with pytest.raises(UserError) as error:
        plan_placement(encoders, {"cuda:0": 3 * GB, "cuda:1": 3 * GB, "cpu": 1 * GB}, "balanced")
    text = str(error.value)
    assert "they need 9.8 GB" in text
    assert "cuda:0 3.0 GB, cuda:1 3.0 GB, cpu 1.0 GB" in text
    assert "3.5 GB are missing" in text
    assert "'disk:3.5GB' in max_memory" in text

    granted = {"cuda:0": 3 * GB, "cuda:1": 3 * GB, "cpu": 1 * GB, "disk": int(3.5 * GB)}
    assert devices_of(plan_placement(encoders, granted, "balanced")) == set(granted)


def test_limits_that_the_user_set_are_named_when_they_are_the_cause(encoders: list[Component]) -> None:
    with pytest.raises(UserError, match="without the limits in max_memory: placement 'auto', 9.8 GB on cuda:0"):
        plan_placement(encoders, {"cuda:0": 3 * GB, "cpu": 1 * GB}, "auto", free={"cuda:0": 24 * GB, "cpu": 1 * GB})


def test_tied_embeddings_lie_together(encoders: list[Component]) -> None:
    for limit in (5.2, 5.5, 6.1, 7.3):
        plan = plan_placement(encoders, {"cuda:0": int(limit * GB), "cuda:1": 8 * GB}, "sequential")
        device_map = plan.device_map("text_encoder_2")
        assert device_map["shared"] == device_map["encoder.embed_tokens"]


@pytest.mark.parametrize("strategy", PLACEMENTS)
def test_a_component_without_no_split_classes_is_placed_too(strategy: str) -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 1000))
        module.scale = nn.Parameter(torch.empty(10))
    parts = [Component(name="part", module=module)]
    budgets = {"cuda:0": 9_000_000, "cuda:1": 5_000_000}
    assert_holds(plan_placement(parts, budgets, strategy), parts, budgets)


@pytest.mark.parametrize("limit", [4.6, 4.95, 6.0, 9.9])
def test_devices_take_no_less_than_with_accelerates_own_map(encoders: list[Component], limit: float) -> None:
    """accelerate's map for T5 alone, sequential: ours never leaves more outside the devices."""
    t5 = encoders[1]
    budget = int(limit * GB)
    theirs = infer_auto_device_map(t5.module, {0: budget, 1: budget, "cpu": 64 * GB}, list(t5.no_split))
    sizes = compute_module_sizes(t5.module)
    outside = sum(sizes[name] for name, device in theirs.items() if device in ("cpu", "disk"))
    ours = plan_placement([t5], {"cuda:0": budget, "cuda:1": budget, "cpu": 64 * GB}, "sequential")
    assert ours.bytes_per_device.get("cpu", 0) <= outside
    if limit == 4.95:  # fits exactly; accelerate keeps a layer's size free on the first device and spills over
        assert "cpu" not in ours.bytes_per_device and outside > 0


def test_an_unknown_strategy_is_refused(encoders: list[Component]) -> None:
    with pytest.raises(UserError, match="placement is 'best'; expected one of balanced, auto, sequential, single"):
        plan_placement(encoders, {"cuda:0": 16 * GB}, "best")
