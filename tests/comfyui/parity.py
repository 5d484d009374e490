"""Running one Case on the reference and on ours, and how far apart the two are.

Does not know: pytest, which cases there are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.comfyui.graphs import Graph, Node
from tests.comfyui.harness import Comfy
from tests.comfyui.workflows import WORKFLOWS, Case

FP32_TOLERANCE = 1e-4
"""Of the largest value of the reference, after the whole run."""

PLANS: dict[str, dict[str, Any]] = {
    "one rank": {"devices": "cpu:1"},
    "ulysses 2": {"devices": "cpu:2", "ulysses": 2},
    "replicas 2": {"devices": "cpu:2", "replicas": 2},
    "auto 2": {"devices": "cpu:2", "strategy": "auto"},
    "tensor 2": {"devices": "cpu:2", "tensor": 2},
    "ulysses 4": {"devices": "cpu:4", "ulysses": 4},
    "replicas 2 x ulysses 2": {"devices": "cpu:4", "replicas": 2, "ulysses": 2},
    "replicas 4": {"devices": "cpu:4", "replicas": 4},
    "tensor 4": {"devices": "cpu:4", "tensor": 4},
    "ulysses 2 x tensor 2": {"devices": "cpu:4", "ulysses": 2, "tensor": 2},
    "ring 2": {"devices": "cpu:2", "ring": 2},
    "ring 2 x ulysses 2": {"devices": "cpu:4", "ring": 2, "ulysses": 2},
    "ulysses 2, shard_weights": {"devices": "cpu:2", "ulysses": 2, "shard_weights": True},
    "ring 2 in host memory": {"devices": "cpu:2", "ring": 2, "shard_weights": True, "max_memory": "0:1KB,cpu:1GB"},
    "device_map 2": {"devices": "cpu:2", "strategy": "device_map"},
}

Loader = Callable[[Graph], Node]


def load_parallel(
    graph: Graph, plan: dict[str, Any], *, model: str = "tiny-flux", dtype: str = "float32", **more: str
) -> Node:
    settings = {"strategy": "mesh", "replicas": 1, "ulysses": 1, "tensor": 1, **plan}
    config = graph.add("PD_ParallelConfig", **settings)
    return graph.add("PD_LoadParallelTransformer", model_name=model, weight_dtype=dtype, parallel_config=config, **more)


def load_reference(graph: Graph, *, model: str = "tiny-flux", dtype: str = "float32") -> Node:
    return graph.add("TestReferenceFlux", model_name=model, dtype=dtype)


def run(comfy: Comfy, case: Case, load: Loader) -> torch.Tensor:
    graph = Graph()
    return comfy.latents(graph, WORKFLOWS[case.workflow](graph, load(graph), case))


def distance(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, as a share of the largest expected value."""
    assert ours.shape == expected.shape
    return float((ours - expected).abs().max() / expected.abs().max())
