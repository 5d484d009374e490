"""The static list of attention backends: held against diffusers, and what is refused with which advice."""

from __future__ import annotations

import inspect
import re

import pytest
import torch
from diffusers.models import attention_dispatch
from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn

from parallel_core.attention_backends import (
    BACKEND_NAMES,
    BACKENDS,
    backend_named,
    check_backend,
    check_dtype,
    check_masks,
    describe_attention,
)
from parallel_core.errors import UserError

REGISTRY = attention_dispatch._AttentionBackendRegistry
NOT_OFFERED = {name for name in AttentionBackendName if "hub" in name.value} | {
    AttentionBackendName._NATIVE_NPU,
    AttentionBackendName._NATIVE_XLA,
}


def test_the_list_is_diffusers_own_without_downloads_and_other_devices() -> None:
    assert {backend.name for backend in BACKENDS} == {name.value for name in set(AttentionBackendName) - NOT_OFFERED}


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_the_context_axes_take_what_diffusers_lets_take_part(backend: object) -> None:
    name = AttentionBackendName(backend.name)
    assert backend.in_context == (name in REGISTRY._supports_context_parallel)


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b.in_context], ids=lambda backend: backend.name)
def test_a_kernel_that_is_said_to_return_the_lse_can(backend: object) -> None:
    source = inspect.getsource(REGISTRY._backends[AttentionBackendName(backend.name)])
    (kernel,) = set(re.findall(r"_\w+_forward_op", source))
    assert ("(out, lse) if return_lse else out" in inspect.getsource(getattr(attention_dispatch, kernel))) == (
        backend.returns_lse
    )


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b.on_cpu], ids=lambda backend: backend.name)
def test_cpu_backends_run_with_masks(backend: object) -> None:
    qkv = [torch.randn(1, 5, 2, 8) for _ in range(3)]
    mask = torch.tensor([True, True, False, True, True])[None, None, None]
    out = dispatch_attention_fn(*qkv, attn_mask=mask, backend=AttentionBackendName(backend.name))
    assert torch.allclose(out, dispatch_attention_fn(*qkv, attn_mask=mask), atol=1e-6)


def test_auto_is_torchs_own_and_comes_first() -> None:
    assert BACKEND_NAMES[0] == "auto"
    assert backend_named("auto").name == "native"


@pytest.mark.parametrize(
    ("name", "device", "ulysses", "says"),
    [
        (
            "flash",
            "cpu:0",
            1,
            "needs a GPU, and these are CPU ranks. What works here: 'auto', 'native', '_native_math'",
        ),
        ("_native_math", "cpu:0", 2, "cannot share one row's tokens out over ranks .*'auto', 'native'"),
        ("xformers", "cuda:0", 2, "cannot share one row's tokens out"),
        ("flash_hub", "cuda:0", 1, "download code when they are used"),
        ("none", "cuda:0", 1, "expected one of auto, native"),
    ],
)
def test_what_cannot_work_is_refused_with_what_can(name: str, device: str, ulysses: int, says: str) -> None:
    with pytest.raises(UserError, match=says):
        check_backend(name, device=device, ring=1, ulysses=ulysses)


@pytest.mark.parametrize(
    ("name", "device", "ulysses"),
    [("auto", "cpu:0", 4), ("_native_math", "cpu:0", 1), ("flash", "cuda:0", 4), ("xformers", "cuda:0", 1)],
)
def test_what_can_work_is_let_through(name: str, device: str, ulysses: int) -> None:
    check_backend(name, device=device, ring=1, ulysses=ulysses)


def test_a_16_bit_kernel_is_refused_float32_weights() -> None:
    check_dtype("flash", "bfloat16")
    check_dtype("auto", "float32")
    with pytest.raises(UserError, match="computes in 16 bits only.*'bfloat16'"):
        check_dtype("flash", "float32")


@pytest.mark.parametrize(
    ("name", "device", "ring", "says"),
    [
        ("auto", "cpu:0", 1, "attention by native"),
        ("flash", "cuda:0", 2, "attention by flash"),
        ("auto", "cpu:0", 2, "torch's flash kernel for CPUs"),
        ("auto", "cuda:0", 2, "native gives no log-sum-exp"),
    ],
)
def test_the_log_says_which_kernels_serve(name: str, device: str, ring: int, says: str) -> None:
    assert says in describe_attention(name, device=device, ring=ring)


def test_masks_need_a_backend_that_takes_them() -> None:
    check_masks("auto")
    with pytest.raises(UserError, match="'sage' takes no masks.*'native'"):
        check_masks("sage")
