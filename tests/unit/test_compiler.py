"""What torch.compile needs is asked for before anything is loaded."""

from __future__ import annotations

import importlib.util
import shutil

import pytest
import torch

from parallel_core.errors import UserError
from parallel_core.parallelize.compiled import check_compiler

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def everything_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(torch, "__file__", "/venv/torch/__init__.py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())


def test_with_everything_it_is_let_through() -> None:
    check_compiler(CPU)
    check_compiler(CUDA)


def test_cpu_ranks_need_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    check_compiler(CUDA)
    with pytest.raises(UserError, match=r"neither g\+\+ nor clang\+\+"):
        check_compiler(CPU)


def test_cpu_ranks_need_a_path_without_a_space(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__file__", "/my venv/torch/__init__.py")
    check_compiler(CUDA)
    with pytest.raises(UserError, match="a space in its path"):
        check_compiler(CPU)


def test_gpus_need_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_compiler(CPU)
    with pytest.raises(UserError, match="needs triton"):
        check_compiler(CUDA)
