"""API-format prompts that read like the workflow they are.

    graph = Graph()
    model = graph.add("PD_LoadParallelTransformer", model_name="tiny-flux", weight_dtype="float32")
    latent = graph.add("KSampler", model=model, seed=1, steps=4, ...)
    client.run(graph.prompt)

An added node stands for its first output; `node[1]` is its second. Does not know: servers.
"""

from __future__ import annotations

from typing import Any

Link = list[Any]


class Node:
    """A node of a Graph."""

    def __init__(self, node_id: str) -> None:
        self.node_id = node_id

    def __getitem__(self, output: int) -> Link:
        return [self.node_id, output]


class Graph:
    """A prompt under construction."""

    def __init__(self) -> None:
        self.prompt: dict[str, dict[str, Any]] = {}

    def add(self, class_type: str, **inputs: Any) -> Node:
        """A node; an input is a value, a Node (its first output) or a link (`node[1]`); None leaves it out."""
        node_id = str(len(self.prompt) + 1)
        linked = {
            name: value[0] if isinstance(value, Node) else value for name, value in inputs.items() if value is not None
        }
        self.prompt[node_id] = {"class_type": class_type, "inputs": linked}
        return Node(node_id)
