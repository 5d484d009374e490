"""The package works wherever and under whatever name it was put, and beside another ComfyUI with it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.comfyui.graphs import Graph
from tests.comfyui.harness import REPOSITORY, Comfy, alive
from tests.comfyui.parity import PLANS, load_parallel
from tests.comfyui.workflows import Case, ksampler

CASE = Case(name="layout", steps=3, cfg=3.0)
MADE_HERE = shutil.ignore_patterns(".*", "__pycache__", "output")


def sample(comfy: Comfy) -> torch.Tensor:
    graph = Graph()
    return comfy.latents(graph, ksampler(graph, load_parallel(graph, PLANS["ulysses 2"]), CASE))


@pytest.fixture(scope="module")
def copied_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as a user has it who unpacked it under another name: no repository, no environments in it."""
    folder = tmp_path_factory.mktemp("un packed") / "my pack-2"
    shutil.copytree(REPOSITORY, folder, ignore=MADE_HERE)
    return folder


def test_another_name_a_space_in_the_path_and_a_second_server(
    comfy: Comfy, new_comfy: Callable[..., Comfy], copied_package: Path, rank_python: Path, tmp_path: Path
) -> None:
    expected = sample(comfy)
    ranks = comfy.ranks(group_of=2)
    base = tmp_path / "a base folder"
    env = {"PARALLEL_DIFFUSION_PYTHON": str(rank_python)}
    with new_comfy(base, env=env, package=copied_package, name=copied_package.name) as second:
        assert torch.equal(sample(second), expected)
        others = second.ranks(group_of=2)
        assert len(others) == 2
        assert set(others).isdisjoint(ranks)
        assert torch.equal(sample(comfy), expected)
        assert comfy.ranks(group_of=2) == ranks
    assert not any(map(alive, others))
    assert torch.equal(sample(comfy), expected)
    assert comfy.ranks(group_of=2) == ranks


def collected(folder: Path) -> set[str]:
    """What pytest collects in `folder`: file::test."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return {line for line in done.stdout.splitlines() if "::" in line}


def test_pytest_collects_from_the_repository_and_from_custom_nodes(
    comfy_tree: Path, copied_package: Path, tmp_path: Path
) -> None:
    """In custom_nodes ComfyUI's own root, which has a pytest.ini and a `tests` folder too, is two folders up."""
    root = tmp_path / "ComfyUI"
    shutil.copytree(comfy_tree, root, ignore=shutil.ignore_patterns("web", "models", "*.safetensors"))
    installed = root / "custom_nodes" / copied_package.name
    shutil.copytree(copied_package, installed)
    here = collected(REPOSITORY)
    assert len(here) > 100
    assert collected(installed) == here
