"""A script for ComfyUI's interpreter: its own evaluation of one prompt per image, for latents of every kind.

    python kinds_of_latents.py COMFYUI_TREE PACKAGE

prints, as json, for which shapes each row of the batch is to the bit what its prompt gives alone. The model is a
function of the latent and the text. Knows the pure part of the product's node; starts no server.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

TREE, PACKAGE = (Path(argument) for argument in sys.argv[1:3])
sys.argv[1:] = ["--cpu"]
sys.path.insert(0, str(TREE))

import comfy.options  # noqa: E402

comfy.options.enable_args_parsing()

import comfy.conds  # noqa: E402
import comfy.sampler_helpers  # noqa: E402
import comfy.samplers  # noqa: E402
import torch  # noqa: E402

SHAPES = {"sound": (3, 4, 8), "image": (3, 4, 8, 6), "one frame": (3, 4, 1, 8, 6), "as many frames": (3, 4, 3, 8, 6)}
"""The last one: a batch of masks would be taken for a mask of its frames."""


class Patcher:
    """What the evaluation asks of a model's patcher."""

    def prepare_state(self, *args: Any) -> None: ...

    def apply_hooks(self, hooks: Any) -> dict[str, Any]:
        return {}

    def get_free_memory(self, device: Any) -> int:
        return 1 << 40

    def get_additional_models_with_key(self, key: str) -> list[Any]:
        return []


class Model:
    """Any MODEL, whatever the number of its latent's dimensions."""

    current_patcher = Patcher()
    model_sampling = None

    def memory_required(self, *args: Any, **kwargs: Any) -> int:
        return 0

    def extra_conds(self, **entry: Any) -> dict[str, Any]:
        return {"c_crossattn": comfy.conds.CONDCrossAttn(entry["cross_attn"])}

    def apply_model(self, x: torch.Tensor, t: torch.Tensor, c_crossattn: torch.Tensor, **rest: Any) -> torch.Tensor:
        per_row = c_crossattn.mean(dim=(1, 2)).view(-1, *[1] * (x.ndim - 1))
        return x * per_row + per_row.sin()


def evaluate(conditioning: list[Any], x: torch.Tensor) -> torch.Tensor:
    model = Model()
    conds = {"positive": comfy.sampler_helpers.convert_cond(conditioning)}
    conds = comfy.samplers.process_conds(model, x, conds, x.device)
    options = {"transformer_options": {}}
    return comfy.samplers.calc_cond_batch(model, [conds["positive"]], x, torch.ones(x.shape[0]), options)[0]


def node() -> Any:
    """The pure part of the node, imported as ComfyUI imports packages."""
    spec = importlib.util.spec_from_file_location(
        "package", PACKAGE / "__init__.py", submodule_search_locations=[str(PACKAGE)]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules["package"] = module
    spec.loader.exec_module(module)
    return importlib.import_module("package.nodes.prompt_rows").one_prompt_per_row


def main() -> None:
    torch.manual_seed(0)
    prompts = [[[torch.randn(1, tokens, 6), {}]] for tokens in (3, 7, 5)]
    batch = node()({f"conditioning_{index}": prompt for index, prompt in enumerate(prompts)})
    exact = {}
    for kind, shape in SHAPES.items():
        x = torch.randn(shape)
        alone = torch.stack([evaluate(prompt, x)[index] for index, prompt in enumerate(prompts)])
        exact[kind] = torch.equal(evaluate(batch, x), alone) and not torch.equal(evaluate(prompts[0], x), alone)
    sys.stdout.write(json.dumps(exact) + "\n")


if __name__ == "__main__":
    main()
