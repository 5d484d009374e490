"""Two models at once on the same ranks: both stay, and after the first prompt nothing reads their files again.

While later prompts run the files hold zeros, so that who read them would make something else; and the ranks count how
often they read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.comfyui.broken_models import WEIGHTS, other_weights
from tests.comfyui.graphs import Graph, Node
from tests.comfyui.harness import Comfy
from tests.comfyui.parity import FP32_TOLERANCE, PLANS, distance, load_parallel, load_reference
from tests.comfyui.wan_workflows import WanCase, empty_latent, prompts, text_to_video, two_experts
from tests.comfyui.workflows import Case, ksampler, sample_part
from tests.tiny_files import write_file
from tests.tiny_models import family_of

DEVICES = ["cpu:0", "cpu:1"]
WAN = WanCase(name="two", negative_tokens=5, batch=2)
FLUX = Case(name="two", cfg=3.0)
FOLDER = "wan-experts"
Saved = dict[str, torch.Tensor]


@contextmanager
def zeroed(files: Sequence[Path]) -> Iterator[None]:
    with ExitStack() as stack:
        for file in files:
            stack.enter_context(other_weights(file))
        yield


def reads(comfy: Comfy) -> list[int]:
    """How often each of the two ranks has read a model from disk."""
    (group,) = (group for group in comfy.groups() if group["devices"] == DEVICES)
    return [rank["num_loads"] for rank in group["ranks"]]


def held(comfy: Comfy) -> list[tuple[str, bool]]:
    """What the two ranks hold, and whether it is on the devices."""
    (group,) = (group for group in comfy.groups() if group["devices"] == DEVICES)
    return sorted((model["label"], model["resident"]) for model in group["models"])


def run(comfy: Comfy, graph: Graph, samples: dict[str, Node]) -> Saved:
    """Runs one prompt with several results."""
    for name, latent in samples.items():
        graph.add("TestSaveLatent", samples=latent, name=name)
    comfy.run(graph)
    return {name: comfy.saved(name) for name in samples}


@pytest.fixture(scope="module")
def expert_files(models: Path) -> dict[str, tuple[str, str]]:
    """How the loader lists both experts as folders and as single files."""
    folder = models / "diffusers" / FOLDER
    names = []
    for part, expert in (("transformer", "high"), ("transformer_2", "low")):
        names.append(f"wan-{expert}-noise.safetensors")
        write_file(models / "diffusion_models" / names[-1], folder / part, family_of("wan"), "original")
    return {"folders": (FOLDER, f"{FOLDER}/transformer_2"), "files": (names[0], names[1])}


def weight_files(models: Path, kind: str, names: tuple[str, str]) -> list[Path]:
    if kind == "files":
        return [models / "diffusion_models" / name for name in names]
    return [models / "diffusers" / FOLDER / part / WEIGHTS for part in ("transformer", "transformer_2")]


Experts = Callable[[Graph, tuple[Node, Node], WanCase], Node]


def with_unloading(graph: Graph, models: tuple[Node, Node], case: WanCase) -> Node:
    """Between the experts ComfyUI unloads everything, as it does when something else needs its card."""
    both, middle = prompts(graph, case), case.steps // 2
    high = sample_part(graph, models[0], case, both, empty_latent(graph, case), 0, middle, first=True)
    high = graph.add("TestUnloadModels", samples=high)
    return sample_part(graph, models[1], case, both, high, middle, 10000, first=False)


def shifted_experts(graph: Graph, models: tuple[Node, Node], case: WanCase) -> Node:
    """Clones, as the stock Wan 2.2 workflows make them."""
    high, low = (graph.add("ModelSamplingSD3", model=model, shift=8.0) for model in models)
    return two_experts(graph, (high, low), case)


def run_experts(
    comfy: Comfy, workflow: Experts, load: Callable[[Graph, str], Node], names: tuple[str, str], seed: int
) -> torch.Tensor:
    graph = Graph()
    high, low = (load(graph, name) for name in names)
    return comfy.latents(graph, workflow(graph, (high, low), replace(WAN, seed=seed)))


@pytest.mark.parametrize(
    ("kind", "plan", "workflow"),
    [
        ("folders", "ulysses 2", two_experts),
        ("folders", "tensor 2", with_unloading),
        ("files", "ulysses 2", two_experts),
        ("files", "tensor 2", shifted_experts),
        ("files", "ulysses 2", with_unloading),
    ],
)
def test_two_experts_are_read_once(
    comfy: Comfy,
    models: Path,
    expert_files: dict[str, tuple[str, str]],
    kind: str,
    plan: str,
    workflow: Experts,
) -> None:
    names = expert_files[kind]
    config = {"config_from": FOLDER} if kind == "files" else {}

    def load(graph: Graph, name: str) -> Node:
        return load_parallel(graph, PLANS[plan], model=name, **config)

    def reference(graph: Graph, name: str) -> Node:
        folder = FOLDER if name == names[0] else f"{FOLDER}/transformer_2"
        return graph.add("TestReferenceWan", model_name=folder, dtype="float32")

    expected = [run_experts(comfy, workflow, reference, names, seed) for seed in (1, 2, 3)]
    made = [run_experts(comfy, workflow, load, names, seed=1)]
    loads, ranks = reads(comfy), comfy.ranks(group_of=2)
    with zeroed(weight_files(models, kind, names)):
        made += [run_experts(comfy, workflow, load, names, seed) for seed in (2, 3)]
        comfy.free_until(lambda: not any(on for _, on in held(comfy)), seconds=20, what="both experts are parked")
        again = run_experts(comfy, workflow, load, names, seed=1)
    assert torch.equal(again, made[0])
    assert max(map(distance, made, expected)) <= FP32_TOLERANCE
    assert (reads(comfy), comfy.ranks(group_of=2)) == (loads, ranks)
    assert {name for name, _ in held(comfy)} == {f"wan transformer {name}" for name in names}


def test_an_image_and_a_video_model_share_ranks_under_different_plans(comfy: Comfy, models: Path) -> None:
    """And several clones of one of them are one model on the ranks."""

    def prompt(seed: int, *, ours: bool) -> Saved:
        graph = Graph()
        if ours:
            flux = load_parallel(graph, PLANS["ulysses 2"], model="other-flux")
            wan = load_parallel(graph, PLANS["tensor 2"], model="wan-t2v")
        else:
            flux = load_reference(graph, model="other-flux")
            wan = graph.add("TestReferenceWan", model_name="wan-t2v", dtype="float32")
        clones = {shift: graph.add("ModelSamplingSD3", model=wan, shift=shift) for shift in (3.0, 8.0)}
        video, mark = replace(WAN, seed=seed), f"{seed}-{ours}"
        return run(
            comfy,
            graph,
            {
                f"image-{mark}": ksampler(graph, flux, replace(FLUX, seed=seed)),
                f"video-{mark}": text_to_video(graph, wan, video),
                **{f"shift-{shift}-{mark}": text_to_video(graph, model, video) for shift, model in clones.items()},
            },
        )

    expected = {seed: prompt(seed, ours=False) for seed in (1, 2)}
    made = {1: prompt(1, ours=True)}
    loads, ranks = reads(comfy), comfy.ranks(group_of=2)
    files = [models / "diffusers" / name / "transformer" / WEIGHTS for name in ("other-flux", "wan-t2v")]
    with zeroed(files):
        made[2] = prompt(2, ours=True)
        again = prompt(1, ours=True)
    for seed, results in made.items():
        for ours, theirs in zip(results.values(), expected[seed].values(), strict=True):
            assert distance(ours, theirs) <= FP32_TOLERANCE
    assert all(torch.equal(again[name], latent) for name, latent in made[1].items())
    assert distance(made[1]["shift-3.0-1-True"], made[1]["shift-8.0-1-True"]) > 1e-2
    assert (reads(comfy), comfy.ranks(group_of=2)) == (loads, ranks)
    assert held(comfy) == [("flux transformer other-flux", True), ("wan transformer wan-t2v", True)]
