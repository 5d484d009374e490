"""Strategy device_map in a real ComfyUI: what the nodes show, and workflows that change the strategy."""

from __future__ import annotations

import torch

from tests.comfyui.graphs import Graph
from tests.comfyui.harness import Comfy
from tests.comfyui.parity import PLANS, load_parallel
from tests.comfyui.test_distributed_sampler import ONE_ROW, UNEVEN, distributed_sampler, sampled
from tests.comfyui.workflows import ksampler

PLAN = PLANS["device_map 2"]


def test_the_nodes_show_which_layer_lies_where(comfy: Comfy) -> None:
    graph = Graph()
    expected = comfy.latents(graph, ksampler(graph, load_parallel(graph, PLANS["one rank"]), UNEVEN))
    for max_memory, places in (("", ["cpu:0", "cpu:1"]), ("0:1MB,1:200kB,cpu:0GB,disk:2MB", ["cpu:0", "disk"])):
        graph = Graph()
        loader = load_parallel(graph, {**PLAN, "max_memory": max_memory})
        sampler = distributed_sampler(graph, loader, UNEVEN)
        ours, text = sampled(comfy, graph, sampler, f"device-map-{len(max_memory)}")
        assert torch.equal(ours, expected), "one rank's bits"
        assert "layers placed over cpu:0, cpu:1: transformer: " in text
        assert all(f" on {place}" in text for place in places)
        assert "peak on cpu:0+cpu:1" in text


def test_a_model_without_room_is_refused_with_numbers(comfy: Comfy) -> None:
    graph, ranks = Graph(), comfy.ranks()
    sampler = ksampler(graph, load_parallel(graph, {**PLAN, "max_memory": "0:100kB,1:200kB,cpu:0GB"}), ONE_ROW)
    graph.add("TestSaveLatent", samples=sampler, name="never")
    text = comfy.failure(graph)
    assert "The weights take 2 MB" in text and "allows 300 kB in all" in text
    assert comfy.ranks() == ranks, "nothing was started for it"


def test_changing_the_strategy_gives_the_former_groups_memory_back(comfy: Comfy) -> None:
    latents = []
    for plan in ("replicas 2", "device_map 2", "replicas 2"):
        graph = Graph()
        latents.append(comfy.latents(graph, ksampler(graph, load_parallel(graph, PLANS[plan]), ONE_ROW)))
        groups = comfy.client.get("/parallel_diffusion/status")["groups"]
        holding = {group["kind"] for group in groups if group["devices"] == ["cpu:0", "cpu:1"] and group["models"]}
        assert holding == {"placement" if plan == "device_map 2" else "mesh"}
    assert torch.equal(latents[0], latents[1]) and torch.equal(latents[0], latents[2])
