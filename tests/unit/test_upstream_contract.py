"""What `parallel_core.upstream` relies on in diffusers. A failure means: read the new version, then move the pin."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from diffusers import FluxTransformer2DModel
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor
from torch import Tensor

from parallel_core import upstream
from parallel_core.attention import context_parallel_attention
from tests.tiny_flux import TINY, build_transformer
from tests.tiny_models import TINY_MODELS, Case

QKV = [torch.randn(2, 5, 3, 8, generator=torch.Generator().manual_seed(index)) for index in range(3)]


class Recorder:
    """Stands in for the context-parallel attention: notes its arguments, answers with what the kernel it got gives."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        names = list(inspect.signature(context_parallel_attention).parameters)
        self.calls.append({**dict(zip(names, args, strict=False)), **kwargs})
        return kwargs["forward_op"](None, *args[:3], scale=None, _save_ctx=False)


@pytest.fixture
def flux() -> FluxTransformer2DModel:
    with init_empty_weights():
        return FluxTransformer2DModel(**TINY)


def test_the_context_attention_still_has_our_signature() -> None:
    stock = inspect.signature(upstream.attention_dispatch._templated_context_parallel_attention).parameters
    ours = inspect.signature(context_parallel_attention).parameters
    assert [(p.name, p.kind) for p in stock.values()] == [(p.name, p.kind) for p in ours.values()]


def test_a_routed_processor_reaches_the_replacement_with_the_backends_own_kernel() -> None:
    processor, recorder, config = FluxAttnProcessor(), Recorder(), object()
    plain = dispatch_attention_fn(*QKV)
    upstream.replace_context_attention(recorder, owner=recorder)
    upstream.route_attention(processor, config)
    routed = dispatch_attention_fn(*QKV, parallel_config=processor._parallel_config)
    upstream.release_context_attention(recorder)
    upstream.unroute_attention(processor)
    assert torch.equal(routed, plain)
    (call,) = recorder.calls
    assert call["_parallel_config"] is config
    assert torch.equal(call["query"], QKV[0]) and call["attn_mask"] is None
    assert vars(processor) == {} and processor._parallel_config is None


def test_the_replacement_stays_until_its_last_owner_is_gone() -> None:
    stock = upstream.attention_dispatch._templated_context_parallel_attention
    first, second = object(), object()
    upstream.replace_context_attention(context_parallel_attention, owner=first)
    upstream.replace_context_attention(context_parallel_attention, owner=second)
    upstream.release_context_attention(first)
    assert upstream.attention_dispatch._templated_context_parallel_attention is context_parallel_attention
    upstream.release_context_attention(second)
    assert upstream.attention_dispatch._templated_context_parallel_attention is stock


def test_every_attention_of_flux_is_routed() -> None:
    model, inputs, recorder = (
        build_transformer(),
        TINY_MODELS["flux"].inputs(Case(text=3, size=(2, 2)), TINY),
        Recorder(),
    )
    processors = upstream.attention_processors(model)
    upstream.replace_context_attention(recorder, owner=recorder)
    for processor in processors:
        upstream.route_attention(processor, recorder)
    model(**inputs)
    upstream.release_context_attention(recorder)
    assert len(recorder.calls) == len(processors) == TINY["num_layers"] + TINY["num_single_layers"]


def test_fluxs_context_plan(flux: FluxTransformer2DModel) -> None:
    plan = upstream.context_parallel_plan(flux)
    assert plan is not None and set(plan) == {"", "proj_out"}
    rules = {name: (rule.split_dim, rule.expected_dims, rule.split_output) for name, rule in plan[""].items()}
    assert rules == {
        "hidden_states": (1, 3, False),
        "encoder_hidden_states": (1, 3, False),
        "img_ids": (0, 2, False),
        "txt_ids": (0, 2, False),
    }
    assert all(isinstance(rule, upstream.ContextParallelInput) for rule in plan[""].values())
    assert isinstance(plan["proj_out"], upstream.ContextParallelOutput) and plan["proj_out"].gather_dim == 1


def test_fluxs_forward_takes_the_planned_arguments(flux: FluxTransformer2DModel) -> None:
    plan = upstream.context_parallel_plan(flux)
    assert plan is not None
    assert set(plan[""]) <= set(inspect.signature(FluxTransformer2DModel.forward).parameters)


def test_fluxs_tensor_plan_resolves_to_slices(flux: FluxTransformer2DModel) -> None:
    plan = upstream.tensor_parallel_plan(flux)
    assert plan is not None
    specs = upstream.resolve_tp_shard_specs(flux, plan, 2)
    inner = TINY["num_attention_heads"] * TINY["attention_head_dim"]
    single = "single_transformer_blocks.1"
    assert tuple(specs["transformer_blocks.0.attn.to_q.weight"]) == (0, [inner])
    assert tuple(specs["transformer_blocks.0.attn.to_q.bias"]) == (0, [inner])
    assert tuple(specs["transformer_blocks.0.attn.to_out.0.weight"]) == (1, [inner])
    assert tuple(specs["transformer_blocks.0.attn.to_out.0.bias"]) == (None, None)
    assert tuple(specs[f"{single}.proj_out.weight"]) == (1, [inner, 4 * inner])
    planned = {name.rpartition(".")[0] for name in specs}
    linears = {name for name, module in flux.named_modules() if isinstance(module, torch.nn.Linear)}
    blocks = {name for name in linears if "blocks" in name and "norm" not in name}
    assert planned == blocks, "every linear of a block except the modulation"


def test_a_width_that_cannot_be_dealt_out_is_a_value_error(flux: FluxTransformer2DModel) -> None:
    plan = upstream.tensor_parallel_plan(flux)
    assert plan is not None
    with pytest.raises(ValueError, match="not divisible by 7"):
        upstream.resolve_tp_shard_specs(flux, plan, 7)
