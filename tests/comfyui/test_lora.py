"""LoRAs by ComfyUI's stock nodes give what they give on ComfyUI's own model: every format, family and plan.

The reference is ComfyUI's model class in ComfyUI's process, with the same LoRA node behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.comfyui.broken_models import WEIGHTS, other_weights
from tests.comfyui.graphs import Graph
from tests.comfyui.harness import Comfy
from tests.comfyui.lora_workflows import MODELS, Loras, Run, parallel, reference, run, sampled, with_loras
from tests.comfyui.parity import FP32_TOLERANCE, PLANS, Loader, distance, load_parallel
from tests.comfyui.workflows import Case, ksampler, sample
from tests.lora_files import FORMATS, lora_name
from tools.comfy_client import Event

LORA_PLANS = (
    "one rank",
    "ulysses 2",
    "tensor 2",
    "replicas 2",
    "ring 2",
    "ulysses 2, shard_weights",
    "ring 2 in host memory",
    "device_map 2",
)


@pytest.fixture(scope="session")
def expected(comfy: Comfy) -> Run:
    """What ComfyUI's own model gives, computed once."""
    known: dict[tuple[str, tuple[tuple[str, float], ...]], torch.Tensor] = {}

    def latents(family: str, loras: Loras) -> torch.Tensor:
        key = (family, tuple(loras))
        if key not in known:
            known[key] = run(comfy, family, reference(family), loras)
        return known[key]

    return latents


def _matrix() -> list[Any]:
    """Every format, family and plan; the normal run takes every format of every family once, with changing plans."""
    rows = []
    for number, family in enumerate(MODELS):
        for place, name in enumerate(FORMATS):
            for index, plan in enumerate(LORA_PLANS):
                chosen = index == (2 * place + 3 * number) % len(LORA_PLANS)
                marks = () if chosen else (pytest.mark.full,)
                rows.append(pytest.param(plan, family, name, id=f"{plan}-{family}-{name}", marks=marks))
    return rows


@pytest.mark.parametrize(("plan", "family", "name"), _matrix())
def test_a_lora_does_what_it_does_to_comfyuis_own_model(
    comfy: Comfy, expected: Run, plan: str, family: str, name: str
) -> None:
    loras = [(lora_name(name, family), 0.8)]
    wanted = expected(family, loras)
    assert distance(wanted, expected(family, [])) > 0.01, "the LoRA changes the picture"
    assert distance(run(comfy, family, parallel(family, PLANS[plan]), loras), wanted) <= FP32_TOLERANCE


STACKS: dict[str, Loras] = {
    "two": [("flux-kohya.safetensors", 0.7), ("flux-peft.safetensors", 0.5)],
    "negative, over a DoRA": [("flux-dora.safetensors", 0.6), ("flux-lokr.safetensors", -0.9)],
    "the same twice": [("flux-loha.safetensors", 0.5), ("flux-loha.safetensors", -0.25)],
    "strength zero": [("flux-kohya.safetensors", 0.0)],
}


@pytest.mark.parametrize("plan", ["ulysses 2", "tensor 2"])
@pytest.mark.parametrize("stack", STACKS)
def test_stacked_loras(comfy: Comfy, expected: Run, plan: str, stack: str) -> None:
    ours = run(comfy, "flux", parallel("flux", PLANS[plan]), STACKS[stack])
    assert distance(ours, expected("flux", STACKS[stack])) <= FP32_TOLERANCE


@pytest.mark.parametrize("plan", LORA_PLANS)
def test_added_changed_removed_and_added_again(comfy: Comfy, models: Path, plan: str) -> None:
    """Bits come back, and nobody reads the weights again: after the first run their file holds zeros."""
    load = parallel("flux", PLANS[plan], model="other-flux")
    lora, other = "flux-dora.safetensors", "flux-peft.safetensors"
    plain = run(comfy, "flux", load, [])
    ranks = comfy.ranks()
    with other_weights(models / "diffusers" / "other-flux" / "transformer" / WEIGHTS):
        added = run(comfy, "flux", load, [(lora, 1.0)])
        weaker = run(comfy, "flux", load, [(lora, 0.3)])
        assert distance(added, plain) > 0.01 < distance(weaker, added)
        run(comfy, "flux", load, [(lora, 0.3), (other, 1.0)])
        assert torch.equal(run(comfy, "flux", load, []), plain)
        assert torch.equal(run(comfy, "flux", load, [(lora, 1.0)]), added)
    assert comfy.ranks() == ranks


@pytest.mark.parametrize("plan", ["ulysses 2", "tensor 2"])
def test_models_with_and_without_loras_take_turns_in_one_workflow(comfy: Comfy, expected: Run, plan: str) -> None:
    stacks: list[Loras] = [[("flux-kohya.safetensors", 0.7)], [], [("flux-differences.safetensors", 0.5)]]
    graph = Graph()
    model = parallel("flux", PLANS[plan])(graph)
    found = [sampled(graph, "flux", with_loras(graph, model, loras)) for loras in (*stacks, *stacks[:2])]
    for index, samples in enumerate(found):
        graph.add("TestSaveLatent", samples=samples, name=f"turn-{plan}-{index}")
    comfy.run(graph)
    for index, loras in enumerate((*stacks, *stacks[:2])):
        ours = comfy.saved(f"turn-{plan}-{index}")
        assert distance(ours, expected("flux", loras)) <= FP32_TOLERANCE, loras


@pytest.mark.parametrize("for_model", [True, False])
def test_lora_loader_with_a_text_encoder(comfy: Comfy, models: Path, expected: Run, for_model: bool) -> None:
    """The older node: keys for the encoder match something, and a file may have no others."""
    tensors = load_file(models / "loras" / "flux-peft.safetensors") if for_model else {}
    encoder = "lora_te1_text_model_encoder_layers_0_mlp_fc1"
    tensors |= {f"{encoder}.lora_up.weight": torch.ones(2, 1), f"{encoder}.lora_down.weight": torch.ones(1, 2)}
    name = write_lora(models, f"with-encoder-{for_model}.safetensors", tensors)
    graph = Graph()
    loras: dict[str, Any] = {"lora_name": name, "strength_model": 0.8, "strength_clip": 1.0}
    model = parallel("flux", PLANS["ulysses 2"])(graph)
    loaded = graph.add("LoraLoader", model=model, clip=graph.add("TestClip"), **loras)
    graph.add("TestSaveLatent", samples=sampled(graph, "flux", loaded), name="with-encoder")
    texts = comfy.run(graph).texts.get(loaded.node_id, [])
    assert texts == ([] if for_model else ["None of the LoRA's keys is for the diffusion model, which stays as it is"])
    wanted = expected("flux", [("flux-peft.safetensors", 0.8)] if for_model else [])
    assert distance(comfy.saved("with-encoder"), wanted) <= FP32_TOLERANCE


@pytest.mark.parametrize("plan", ["ulysses 2"])
def test_a_cancelled_run_leaves_no_lora_behind(comfy: Comfy, plan: str) -> None:
    load = parallel("flux", PLANS[plan])
    before = run(comfy, "flux", load, [])
    graph = Graph()
    model = with_loras(graph, load(graph), [("flux-loha.safetensors", 1.0)])
    slow = Case(name="slow", width=512, height=512, steps=200)
    graph.add("TestSaveLatent", samples=ksampler(graph, model, slow), name="cancelled-lora")

    def cancel(event: Event) -> None:
        if event.kind == "progress" and event.data["value"] == 2:
            comfy.client.interrupt()

    assert comfy.client.run(graph.prompt, on_progress=cancel).status == "interrupted"
    assert torch.equal(run(comfy, "flux", load, []), before)


@pytest.mark.parametrize("plan", ["one rank", "tensor 2"])
def test_bf16_weights_are_changed_as_comfyui_changes_its_own(comfy: Comfy, plan: str) -> None:
    """Rounded once, from float32: as near to ComfyUI's picture in float32 as ComfyUI's own in bfloat16 is."""
    loras = [("flux-kohya.safetensors", 0.3), ("flux-peft.safetensors", 0.3)]

    def runs(load: Callable[[str], Loader], dtype: str) -> torch.Tensor:
        found = []
        for seed in range(6):
            graph = Graph()
            case = Case(name="bf16", seed=seed, guidance=4.0, width=96, batch=2, steps=4)
            found.append(comfy.latents(graph, ksampler(graph, with_loras(graph, load(dtype)(graph), loras), case)))
        return torch.stack(found)

    theirs, exact = (runs(lambda dtype: reference("flux", dtype=dtype), dtype) for dtype in ("bfloat16", "float32"))
    ours = runs(lambda dtype: parallel("flux", PLANS[plan], dtype=dtype), "bfloat16")
    errors = [float((found - exact).square().mean().sqrt()) for found in (ours, theirs)]
    assert errors[0] <= 1.05 * errors[1], errors


# ----- what does not match -----


def write_lora(models: Path, name: str, tensors: dict[str, torch.Tensor]) -> str:
    save_file(tensors, models / "loras" / name)
    return name


def failure(comfy: Comfy, family: str, lora: str) -> str:
    graph = Graph()
    model = with_loras(graph, parallel(family, {"devices": "cpu:3", "ulysses": 3})(graph), [(lora, 1.0)])
    graph.add("TestSaveLatent", samples=sampled(graph, family, model), name="never")
    message = comfy.failure(graph)
    assert comfy.ranks(group_of=3) == [], "refused before anything was started"
    return message


@pytest.mark.parametrize(
    ("family", "key", "kind"),
    [
        ("flux", "lora_unet_down_blocks_0_attentions_0_proj_in", "Stable Diffusion 1.5 or SDXL"),
        ("qwen", "lora_unet_double_blocks_0_img_attn_qkv", "FLUX.1"),
        ("flux", "diffusion_model.blocks.0.self_attn.q", "Wan"),
        ("wan", "lora_te1_text_model_encoder_layers_0_mlp_fc1", "a text encoder"),
        ("wan", "something_else", "No key of the LoRA matches"),
    ],
)
def test_a_file_of_which_no_key_matches_is_an_error(
    comfy: Comfy, models: Path, family: str, key: str, kind: str
) -> None:
    tensors = {f"{key}.lora_up.weight": torch.ones(8, 2), f"{key}.lora_down.weight": torch.ones(2, 8)}
    message = failure(comfy, family, write_lora(models, f"foreign-{family}-{key[:12]}.safetensors", tensors))
    assert kind in message
    assert key in message


def test_keys_that_match_nothing_are_told_and_the_rest_applies(comfy: Comfy, models: Path, expected: Run) -> None:
    tensors = load_file(models / "loras" / "flux-kohya.safetensors")
    tensors |= {f"lora_unet_elsewhere_{index}.lora_up.weight": torch.ones(4, 2) for index in range(4)}
    name = write_lora(models, "partly.safetensors", tensors)
    graph = Graph()
    model = with_loras(graph, parallel("flux", PLANS["ulysses 2"])(graph), [(name, 0.8)])
    graph.add("TestSaveLatent", samples=sampled(graph, "flux", model), name="partly")
    (text,) = comfy.run(graph).texts[model.node_id]
    assert "4 keys match nothing in the model and have no effect (lora_unet_elsewhere_0.lora_up.weight" in text
    assert "7 weights are changed" in text
    assert distance(comfy.saved("partly"), expected("flux", [("flux-kohya.safetensors", 0.8)])) <= FP32_TOLERANCE


# ----- what cannot be done -----


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"lora_up.weight": (192, 2), "lora_down.weight": (2, 65)}, ["LoRA does not fit", "img_attn.qkv", "[2, 65]"]),
        ({"diff": (191, 64)}, ["difference of weights does not fit", "[191, 64]"]),
        ({"lora_up.weight": (192, 2), "lora_down.weight": (2, 64), "dora_scale": (7, 1)}, ["does not fit"]),
        ({"oft_blocks": (4, 48, 48)}, ["oft", "LoHa, LoKr"]),
        ({"a1.weight": (2, 64), "a2.weight": (64, 2), "b1.weight": (192, 2), "b2.weight": (2, 64)}, ["glora"]),
        ({"lokr_w1": (8, 4), "lokr_w2": (24, 16, 1, 1)}, ["convolutions"]),
    ],
)
def test_a_lora_that_cannot_be_applied_exactly_is_refused(
    comfy: Comfy, models: Path, tensors: dict[str, tuple[int, ...]], words: list[str]
) -> None:
    layer = "diffusion_model.double_blocks.0.img_attn.qkv"
    named = {f"{layer}.{part}": torch.ones(shape) for part, shape in tensors.items()}
    message = failure(comfy, "flux", write_lora(models, f"refused-{abs(hash(str(tensors)))}.safetensors", named))
    for word in words:
        assert word in message


def test_a_refused_lora_leaves_the_next_run_as_it_was(comfy: Comfy, models: Path) -> None:
    load = parallel("flux", PLANS["ulysses 2"])
    loras = [("flux-kohya.safetensors", 0.7)]
    before = run(comfy, "flux", load, loras)
    layer = "diffusion_model.double_blocks.0.img_attn.qkv"
    name = write_lora(models, "wrong.safetensors", {f"{layer}.diff": torch.ones(3, 3)})
    graph = Graph()
    samples = sampled(graph, "flux", with_loras(graph, load(graph), [(name, 1.0)]))
    graph.add("TestSaveLatent", samples=samples, name="never")
    comfy.failure(graph)
    assert torch.equal(run(comfy, "flux", load, loras), before)


@pytest.mark.parametrize(("other", "words"), [("ours", "cannot be merged"), ("theirs", "model merging")])
def test_model_merging_is_refused(comfy: Comfy, other: str, words: str) -> None:
    graph = Graph()
    plan = {"devices": "cpu:3", "ulysses": 3}
    model = parallel("flux", plan)(graph)
    second = parallel("flux", plan, model="other-flux") if other == "ours" else reference("flux")
    merged = graph.add("ModelMergeSimple", model1=model, model2=second(graph), ratio=0.25)
    graph.add("TestSaveLatent", samples=sampled(graph, "flux", merged), name="never")
    assert words in comfy.failure(graph)
    assert comfy.ranks(group_of=3) == []


def test_a_lora_for_a_part_of_the_run_is_refused(comfy: Comfy) -> None:
    """Hooks change weights in the middle of a run, by the prompt that has them."""
    graph = Graph()
    model = load_parallel(graph, PLANS["ulysses 2"])
    hooks = graph.add("CreateHookLora", lora_name="flux-kohya.safetensors", strength_model=1.0, strength_clip=0.0)
    prompt = graph.add("TestConditioning", tokens=9, seed=100)
    hooked = graph.add("ConditioningSetProperties", cond_NEW=prompt, strength=1.0, set_cond_area="default", hooks=hooks)
    latent = graph.add("EmptyLatentImage", width=64, height=64, batch_size=1)
    case = Case(name="hooks")
    graph.add("TestSaveLatent", samples=sample(graph, model, case, hooked, prompt, latent), name="never")
    assert "hooks" in comfy.failure(graph)
