"""The C library's heap while weights are loaded.

Owns how large blocks are taken from the system. Knows neither models nor tensors.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_APART = 256 << 10
_USUAL = 32 << 20
"""What glibc's own, growing threshold arrives at after a few large blocks (mallopt(3))."""


@contextmanager
def large_blocks_apart() -> Iterator[None]:
    """Meanwhile every block of 256 KB or more is a mapping of its own, which goes back to the system when it is freed.

    Otherwise weights come to lie between the holes that freed intermediate tensors leave, too small for the next ones:
    to unpack a scaled fp8 file to bfloat16 over two tensor ranks took 2.2 x what was then held. Not all the time: to
    map what is computed in every step anew would cost more than to reuse it. Nothing where the C library is not glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _APART)
    try:
        yield
    finally:
        if mallopt is not None:
            mallopt(_M_MMAP_THRESHOLD, _USUAL)
            mallopt(_M_TRIM_THRESHOLD, 2 * _USUAL)
