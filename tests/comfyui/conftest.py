"""Fixtures of the end-to-end tests: where ComfyUI is, the tiny models, one server for the session.

The defaults are what `make` sets up in .dev. To run the same tests on another ComfyUI by hand, set COMFYUI_TREE,
COMFYUI_PYTHON and, where it needs modules that its interpreter lacks, COMFYUI_PYTHONPATH.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import lora_files, tiny_qwen
from tests.comfyui.broken_models import BROKEN, missing_tensor, write_broken
from tests.comfyui.harness import REPOSITORY, Comfy, make_base
from tests.comfyui.parity import PLANS
from tests.tiny_flux import write_hollow, write_pipeline, write_transformer
from tests.tiny_wan import write_all as write_all_wan


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need the same ranks follow one another: starting ranks is what takes the time."""
    order = {"cpu:2": 0, "cpu:4": 1, "cpu:1": 2}

    def ranks(item: pytest.Item) -> int:
        plan = item.callspec.params.get("plan") if hasattr(item, "callspec") else None
        return order[PLANS[plan]["devices"]] if isinstance(plan, str) else 0

    here = [index for index, item in enumerate(items) if item.path.parent == Path(__file__).parent]
    for index, item in zip(here, sorted((items[index] for index in here), key=ranks), strict=True):
        items[index] = item


def _setting(variable: str, default: Path) -> Path:
    path = Path(os.environ.get(variable, default)).absolute()
    if not path.exists():
        pytest.fail(f"{path} does not exist: run `make dev`, or set {variable}")
    return path


@pytest.fixture(scope="session")
def comfy_tree() -> Path:
    return _setting("COMFYUI_TREE", REPOSITORY / ".dev" / "comfyui")


@pytest.fixture(scope="session")
def host_python() -> Path:
    return _setting("COMFYUI_PYTHON", REPOSITORY / ".dev" / "venv" / "bin" / "python")


@pytest.fixture(scope="session")
def rank_python() -> Path:
    """The ranks' interpreter, for a package that has none beside it."""
    return _setting("PARALLEL_DIFFUSION_PYTHON", REPOSITORY / ".rank_env" / "bin" / "python")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A models folder: Flux with and without guidance, sharded, bare, large, broken; Qwen-Image; every Wan; LoRAs."""
    models = tmp_path_factory.mktemp("models")
    diffusers = models / "diffusers"
    write_pipeline(diffusers / "tiny-flux")
    write_pipeline(diffusers / "tiny-schnell", seed=1, guidance_embeds=False)
    write_pipeline(diffusers / "tiny-flux-sharded", max_shard_size="500KB")
    write_pipeline(diffusers / "other-flux", seed=2)
    write_transformer(diffusers / "bare-flux", seed=3)
    write_hollow(diffusers / "hollow-flux", num_attention_heads=64)
    tiny_qwen.write_pipeline(diffusers / "tiny-qwen")
    tiny_qwen.write_pipeline(diffusers / "tiny-qwen-2511", seed=1, zero_cond_t=True)
    layered = {"use_layer3d_rope": True, "use_additional_t_cond": True}
    tiny_qwen.write_pipeline(diffusers / "tiny-qwen-layered", **layered)
    write_broken(diffusers / "broken-qwen", diffusers / "tiny-qwen", missing_tensor)
    for breaking in BROKEN:
        write_broken(diffusers / f"broken-{breaking.__name__}", diffusers / "tiny-flux", breaking)
    write_all_wan(diffusers)
    lora_files.write_all(models / "loras")
    return models


@pytest.fixture(scope="session")
def new_comfy(
    comfy_tree: Path, host_python: Path, models: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Comfy]:
    """Makes a server of a test's own, not yet started; `env` is added to its environment, `layout` as in make_base."""

    def make(base: Path | None = None, *, env: dict[str, str] | None = None, **layout: Any) -> Comfy:
        base = base or tmp_path_factory.mktemp("base") / "comfy"
        return Comfy(comfy_tree, make_base(base, models, **layout), host_python, env=env)

    return make


@pytest.fixture(scope="session")
def comfy(new_comfy: Callable[..., Comfy]) -> Iterator[Comfy]:
    """The session's server. A test may kill its ranks, never the server."""
    with new_comfy() as comfy:
        yield comfy
