"""The workflows of the LoRA tests: a model of each family with LoRA nodes behind the loader, and a sampler.

Does not know: which MODEL it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.comfyui import wan_workflows, workflows
from tests.comfyui.graphs import Graph, Node
from tests.comfyui.harness import Comfy
from tests.comfyui.parity import Loader, load_parallel

MODELS = {"flux": "tiny-flux", "qwen": "tiny-qwen", "wan": "wan-t2v"}
REFERENCES = {"flux": "TestReferenceFlux", "qwen": "TestReferenceQwen", "wan": "TestReferenceWan"}

Loras = Sequence[tuple[str, float]]
"""(file name, strength), in the order of the nodes."""


def parallel(family: str, plan: dict[str, Any], *, model: str = "", dtype: str = "float32") -> Loader:
    return lambda graph: load_parallel(graph, plan, model=model or MODELS[family], dtype=dtype)


def reference(family: str, *, dtype: str = "float32") -> Loader:
    return lambda graph: graph.add(REFERENCES[family], model_name=MODELS[family], dtype=dtype)


def with_loras(graph: Graph, model: Node, loras: Loras) -> Node:
    for name, strength in loras:
        model = graph.add("LoraLoaderModelOnly", model=model, lora_name=name, strength_model=strength)
    return model


def sampled(graph: Graph, family: str, model: Node, *, seed: int = 11) -> Node:
    """Positive and negative prompts of unequal length."""
    if family == "wan":
        video = wan_workflows.WanCase(name="lora", steps=2, length=5, tokens=9, negative_tokens=4, seed=seed)
        return wan_workflows.text_to_video(graph, model, video)
    case = workflows.Case(name="lora", steps=2, cfg=3.0, tokens=9, negative_tokens=4, seed=seed)
    return workflows.ksampler(graph, model, case)


def run(comfy: Comfy, family: str, load: Loader, loras: Loras) -> torch.Tensor:
    graph = Graph()
    return comfy.latents(graph, sampled(graph, family, with_loras(graph, load(graph), loras)))


Run = Callable[[str, Loras], torch.Tensor]
