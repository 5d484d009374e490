"""The attention backends of diffusers that a user may choose, and what each can do.

A static list, since ComfyUI's side has no diffusers; `tests/unit/test_upstream_contract.py` holds it against the pinned
version. Left out are backends that download code from the Hub when they are first used, and those for devices that the
ranks do not run on. Imports nothing of diffusers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .errors import UserError

AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class AttentionBackend:
    """One backend under diffusers' own name."""

    name: str
    on_cpu: bool = False
    """Whether it runs on CPU ranks; all run on GPUs."""
    in_context: bool = False
    """Whether diffusers lets context-parallel attention (ring, ulysses) use its kernel. The others would attend to
    their own tokens only, in silence."""
    returns_lse: bool = False
    """Whether its kernel gives the log-sum-exp that ring merges by; else torch's own kernels serve the ring."""
    masks: bool = False
    """Whether it takes every mask over keys. Those that pack sequences ("varlen") keep a row's first keys, however the
    mask's holes lie, and diffusers hands xformers a mask as numbers to add: both would draw another picture in silence.
    """
    only_16_bits: bool = False
    """Whether its kernel refuses float32."""


BACKENDS: tuple[AttentionBackend, ...] = (
    AttentionBackend(name="native", on_cpu=True, in_context=True, masks=True),
    AttentionBackend(name="_native_cudnn", in_context=True, returns_lse=True, only_16_bits=True),
    AttentionBackend(name="_native_efficient", masks=True),
    AttentionBackend(name="_native_flash", in_context=True, returns_lse=True, only_16_bits=True),
    AttentionBackend(name="_native_math", on_cpu=True, masks=True),
    AttentionBackend(name="flash", in_context=True, returns_lse=True, only_16_bits=True),
    AttentionBackend(name="flash_varlen", only_16_bits=True),
    AttentionBackend(name="_flash_3", only_16_bits=True),
    AttentionBackend(name="_flash_varlen_3", only_16_bits=True),
    AttentionBackend(name="flex", masks=True),
    AttentionBackend(name="sage", in_context=True, returns_lse=True, only_16_bits=True),
    AttentionBackend(name="sage_varlen", only_16_bits=True),
    AttentionBackend(name="_sage_qk_int8_pv_fp8_cuda", only_16_bits=True),
    AttentionBackend(name="_sage_qk_int8_pv_fp8_cuda_sm90", only_16_bits=True),
    AttentionBackend(name="_sage_qk_int8_pv_fp16_cuda", only_16_bits=True),
    AttentionBackend(name="_sage_qk_int8_pv_fp16_triton", only_16_bits=True),
    AttentionBackend(name="xformers"),
)

BACKEND_NAMES = (AUTO, *(backend.name for backend in BACKENDS))
"""What the widget offers. "auto" is torch's own attention."""


def backend_named(name: str) -> AttentionBackend:
    """The backend of that name; "auto" is "native". `UserError` for any other."""
    wanted = "native" if name == AUTO else str(name)
    for backend in BACKENDS:
        if backend.name == wanted:
            return backend
    hub = (
        " Backends that download code when they are used ('..._hub') are not offered."
        if wanted.endswith("_hub")
        else ""
    )
    raise UserError(f"attention_backend is {name!r}; expected one of {', '.join(BACKEND_NAMES)}.{hub}")


def check_backend(name: str, *, device: str, ring: int, ulysses: int) -> None:
    """`UserError` for a backend that cannot serve the device or the context axes; names those that can."""
    backend = backend_named(name)
    on_cpu, in_context = device.startswith("cpu"), ring * ulysses > 1
    fitting = [
        other.name for other in BACKENDS if (other.on_cpu or not on_cpu) and (other.in_context or not in_context)
    ]
    if backend.name in fitting:
        return
    if on_cpu and not backend.on_cpu:
        raise UserError(
            f"attention_backend {name!r} needs a GPU, and these are CPU ranks. What works here: {_or(fitting)}."
        )
    raise UserError(
        f"attention_backend {name!r} cannot share one row's tokens out over ranks (ring {ring}, ulysses {ulysses}). "
        f"What works here: {_or(fitting)}."
    )


def check_dtype(name: str, dtype: str) -> None:
    """`UserError` for a backend that does not compute in `dtype`."""
    if backend_named(name).only_16_bits and dtype == "float32":
        fitting = [other.name for other in BACKENDS if not other.only_16_bits]
        raise UserError(
            f"attention_backend {name!r} computes in 16 bits only, and the weights are float32. Set weight_dtype to "
            f"'bfloat16', or take one of {_or(fitting)}."
        )


def describe_attention(name: str, *, device: str, ring: int) -> str:
    """For the log: which kernels serve an attention backend."""
    backend = backend_named(name)
    if ring == 1 or backend.returns_lse:
        return f"attention by {backend.name}"
    if device.startswith("cpu"):
        return "ring attention by torch's flash kernel for CPUs, which gives the log-sum-exp"
    return (
        "ring attention by torch's flash kernel, or its memory-efficient one for float32, masks and older GPUs: "
        f"{backend.name} gives no log-sum-exp"
    )


def check_masks(name: str) -> None:
    """`UserError` for a backend that takes no masks, where a prompt has one."""
    if not backend_named(name).masks:
        fitting = [other.name for other in BACKENDS if other.masks]
        raise UserError(
            f"attention_backend {name!r} takes no masks, but a prompt of this batch has one (padded text). "
            f"What works here: {_or(fitting)}."
        )


def _or(names: Sequence[str]) -> str:
    return ", ".join(map(repr, [AUTO, *names]))
