"""What a file is by its first bytes, where it is not what its name says: for messages only. Knows no format beyond."""

from __future__ import annotations

_STARTS = (
    (b"GGUF", "a GGUF file: give it the suffix .gguf"),
    (b"PK\x03\x04", "a pickled PyTorch file (a zip), which can run code when opened and is not read"),
    (b"\x80", "a pickled PyTorch file, which can run code when opened and is not read"),
    (b"version https://git-lfs", "a git-lfs pointer, which stands for the file: run git lfs pull, or download it"),
    (b"<", "a web page: the download gave a page (to log in, or to accept a licence) in place of the file"),
)


def describe_start(start: bytes) -> str:
    """One sentence about a file that starts so, with a space before it; "" where nothing is known."""
    text = start.lstrip()
    for mark, kind in _STARTS:
        if text.startswith(mark) and not (mark == b"\x80" and text[1:2] > b"\x05"):  # a pickle's version follows
            return f" It looks like {kind}."
    if text[8:9] == b"{":
        return " It looks like a safetensors file."
    return ""
