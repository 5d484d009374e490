"""Downloads that went wrong, damaged headers and byte soup: a `UserError` each time, soon and without much memory."""

from __future__ import annotations

import json
import os
import random
import resource
import struct
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from parallel_core.errors import UserError
from tests import wrong_files as wrong
from tests.unit.test_wrong_files import flux, read, refused


def safetensors(header: Any, body: int = 0) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(body)


def entry(begin: Any, end: Any, *, shape: Any = (4,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape) if isinstance(shape, tuple) else shape, "data_offsets": [begin, end]}


BYTES: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "empty": (b"", ("has 0 bytes", "download")),
    "five-bytes": (b"\x01\x00\x00\x00\x00", ("has 5 bytes", "download")),
    "zeros": (bytes(4096), ("zeros", "not finished")),
    "page": (b"<!DOCTYPE html><html><head><title>Log in</title>", ("a web page",)),
    "page-after-a-line": (b"\n\n<html lang='en'>\n<head>", ("a web page",)),
    "message": (b'{"error":"Access to model is restricted"}', ("json text",)),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", ("Git LFS pointer",)),
    "pickle": (b"\x80\x02}q\x00X\x06\x00\x00\x00weightq\x01" + bytes(50), ("pickled", "can run code")),
    "torch-zip": (b"PK\x03\x04\x00\x00\x08\x08\x00\x00\x00\x00archive/data.pkl" + bytes(50), ("pickled",)),
    "gguf": (wrong.gguf_head(1, 1) + bytes(50), ("a GGUF file", ".gguf")),
    "header-longer-than-the-file": (struct.pack("<Q", 10_000) + b"{}", ("10000", "download")),
    "header-of-exabytes": (struct.pack("<Q", (1 << 64) - 1) + b"{}" + bytes(90), (str((1 << 64) - 1),)),
    "no-header": (struct.pack("<Q", 0) + b"x" * 90, ("claims 0",)),
    "not-json": (safetensors(b"what is this?" + bytes(90)), ("not json",)),
    "not-utf8": (safetensors(b'{"\xff\xfe": 3}'), ("not json",)),
    "utf16": (safetensors('{"a": 3}'.encode("utf-16")), ("not json",)),
    "list": (safetensors([1, 2, 3]), ("not json",)),
    "nan": (safetensors(b'{"a": NaN}'), ("not json",)),
    "deep": (safetensors(b'{"a":' + b"[" * 200_000), ("not json",)),
    "number-of-many-digits": (safetensors(b'{"a":' + b"9" * 10_000 + b"}"), ("not json",)),
    "half-a-surrogate": (safetensors(b'{"\\ud800": {}}'), ("not json",)),
    "entry-is-a-list": (safetensors({"a": []}), ("entry for 'a'",)),
    "entry-is-null": (safetensors({"a": None}), ("entry for 'a'",)),
    "no-shape": (safetensors({"a": {"dtype": "F32", "data_offsets": [0, 16]}}), ("entry for 'a'",)),
    "shape-is-text": (safetensors({"a": entry(0, 16, shape="4")}, 16), ("entry for 'a'",)),
    "shape-of-floats": (safetensors({"a": entry(0, 16, shape=[4.0])}, 16), ("entry for 'a'",)),
    "shape-of-bools": (safetensors({"a": entry(0, 4, shape=[True])}, 4), ("entry for 'a'",)),
    "negative-shape": (safetensors({"a": entry(0, 64, shape=[-4, -4])}, 64), ("entry for 'a'",)),
    "offsets-are-text": (safetensors({"a": entry("0", "16")}, 16), ("entry for 'a'",)),
    "three-offsets": (safetensors({"a": entry(0, 16) | {"data_offsets": [0, 8, 16]}}, 16), ("entry for 'a'",)),
    "negative-offset": (safetensors({"a": entry(-16, 0)}, 16), ("entry for 'a'",)),
    "backwards": (safetensors({"a": entry(16, 0)}, 16), ("-16 bytes", "expected 16")),
    "dtype-is-a-list": (safetensors({"a": entry(0, 16, dtype=["F32"])}, 16), ("dtype ['F32']",)),
    "dtype-unknown": (safetensors({"a": entry(0, 2, dtype="F4")}, 2), ("dtype F4",)),
    "astronomic": (safetensors({"a": entry(0, 16, shape=[1 << 62, 1 << 62])}, 16), ("'a' claims shape",)),
    "beyond-64-bits": (safetensors({"a": entry(0, 16, shape=[1 << 70])}, 16), ("entry for 'a'",)),
    "overlap": (safetensors({"a": entry(0, 16), "b": entry(8, 24)}, 24), ("'b'", "overlap")),
    "same-bytes": (safetensors({"a": entry(0, 16), "b": entry(0, 16)}, 16), ("overlap",)),
    "gap": (safetensors({"a": entry(0, 16), "b": entry(32, 48)}, 48), ("'b'", "gap")),
    "cut-off": (safetensors({"a": entry(0, 16)}, 10), ("is cut off",)),
    "too-long": (safetensors({"a": entry(0, 16)}, 20), ("4 more than",)),
    "metadata-is-a-list": (safetensors({"__metadata__": ["pt"], "a": entry(0, 16)}, 16), ("__metadata__",)),
    "metadata-of-numbers": (safetensors({"__metadata__": {"n": 1}, "a": entry(0, 16)}, 16), ("__metadata__",)),
}  # fmt: skip


@pytest.mark.parametrize("name", BYTES)
def test_bytes_that_are_no_model(tmp_path: Path, name: str) -> None:
    data, fragments = BYTES[name]
    file = tmp_path / f"{name}.safetensors"
    file.write_bytes(data)
    refused(file, *fragments)


HEAD = wrong.gguf_head
ENTRY = wrong.gguf_entry
U32, U64, TEXT, LIST = 4, 10, wrong.STRING, wrong.ARRAY


def tensor(name: str = "a", shape: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0) -> bytes:
    return wrong.gguf_tensor(name, shape, kind, offset)


def nested(depth: int) -> bytes:
    return struct.pack("<IQ", LIST, 1) * depth


GGUF: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "empty": (b"", ("damaged",)),
    "two-bytes": (b"GG", ("damaged",)),
    "zeros": (bytes(4096), ("zeros",)),
    "page": (b"<!DOCTYPE html><html>" + bytes(50), ("a web page",)),
    "safetensors": (safetensors({"a": entry(0, 16)}, 16), ("a safetensors file",)),
    "version-1": (HEAD(0, 0, version=1), ("version 2 or 3", "1")),
    "version-9": (HEAD(0, 0, version=9), ("version 2 or 3", "9")),
    "big-endian": (HEAD(0, 0, version=3 << 24), ("version 2 or 3",)),
    "other-magic": (HEAD(0, 0, magic=b"GGML"), ("GGML",)),
    "a-billion-tensors": (HEAD(10**9, 0) + bytes(200), ("1000000000 tensors",)),
    "a-billion-entries": (HEAD(0, 10**9) + bytes(200), ("1000000000 entries",)),
    "many-tensors-that-are-not-there": (HEAD(90_000, 0) + bytes(200), ("damaged",)),
    "an-array-of-a-billion": (HEAD(0, 1) + ENTRY("a", LIST, struct.pack("<IQ", U32, 10**9)), ("array of 1000000000",)),
    "a-text-of-exabytes": (HEAD(0, 1) + struct.pack("<Q", 1 << 63), ("text of",)),
    "a-text-that-ends-early": (HEAD(0, 1) + struct.pack("<Q", 1000) + b"abc", ("damaged",)),
    "text-not-utf8": (HEAD(0, 1) + struct.pack("<Q", 2) + b"\xff\xfe" + bytes(20), ("damaged",)),
    "arrays-in-arrays": (HEAD(0, 1) + ENTRY("a", LIST, nested(50_000)), ("damaged",)),
    "entry-of-unknown-type": (HEAD(0, 1) + ENTRY("a", 77, b""), ("entry of type 77",)),
    "alignment-zero": (HEAD(0, 1) + ENTRY("general.alignment", U32, bytes(4)), ("general.alignment is 0",)),
    "alignment-text": (HEAD(0, 1) + ENTRY("general.alignment", TEXT, wrong.text("x")), ("general.alignment is 'x'",)),
    "nine-dimensions": (HEAD(1, 0) + tensor(shape=(1,) * 9) + bytes(200), ("9 dimensions",)),
    "unknown-type": (HEAD(1, 0) + tensor(kind=99) + bytes(200), ("GGUF type 99",)),
    "i-quants": (HEAD(1, 0) + tensor(shape=(256,), kind=19) + bytes(200), ("IQ1_S", "Q4_K")),
    "odd-rows": (HEAD(1, 0) + tensor(shape=(33,), kind=8) + bytes(200), ("[33]", "blocks of 32")),
    "twice": (HEAD(2, 0) + tensor() + tensor(offset=128) + bytes(512), ("the same name",)),
    "overlap": (HEAD(2, 0) + tensor() + tensor("b", offset=64) + bytes(512), ("overlap",)),
    "cut-off": (HEAD(1, 0) + tensor(shape=(1 << 40,)), ("is cut off", "4398046")),
    "shape-entry-is-a-number": (
        HEAD(1, 1) + ENTRY("comfy.gguf.orig_shape.a", U32, bytes(4)) + tensor() + bytes(200), ("shape of 'a' is 0",)
    ),
    "shape-entry-of-texts": (
        HEAD(1, 1) + ENTRY("comfy.gguf.orig_shape.a", LIST, struct.pack("<IQ", TEXT, 1) + wrong.text("4")) + tensor()
        + bytes(200),
        ("shape of 'a' is ['4']",),
    ),
    "shape-entry-that-does-not-fit": (
        HEAD(1, 1) + ENTRY("comfy.gguf.orig_shape.a", LIST, struct.pack("<IQI", U32, 1, 31)) + tensor() + bytes(200),
        ("[31]",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GGUF)
def test_bytes_that_are_no_gguf_model(tmp_path: Path, name: str) -> None:
    data, fragments = GGUF[name]
    file = tmp_path / f"{name}.gguf"
    file.write_bytes(data)
    refused(file, *fragments)


@pytest.mark.slow
def test_claims_cost_neither_time_nor_memory(tmp_path: Path) -> None:
    """Sparse files of 2 GB, whose headers claim as much as they may."""
    array = struct.pack("<IQ", 0, 1_000_000) + bytes(1_000_000)
    soups = {
        "tensors.gguf": HEAD(100_000, 0),
        "entries.gguf": HEAD(0, 100_000),
        "texts.gguf": HEAD(0, 1) + ENTRY("a", LIST, struct.pack("<IQ", TEXT, 1_000_000)),
        "arrays.gguf": HEAD(0, 100) + b"".join(ENTRY(f"general.{i}", LIST, array) for i in range(100)),
        "header.safetensors": struct.pack("<Q", 99_999_999) + b"{",
        "longer.safetensors": struct.pack("<Q", 1_999_999_000) + b"{",
    }
    for name, begin in soups.items():
        file = tmp_path / name
        file.write_bytes(begin)
        os.truncate(file, 2_000_000_000)
        start, held = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        refused(file)
        kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held
        assert time.process_time() - start < 10 and kilobytes < 700_000, name


# ----- places -----


def test_links_out_of_the_folder_are_followed(tmp_path: Path) -> None:
    (tmp_path / "link.safetensors").symlink_to(wrong.write(tmp_path / "elsewhere" / "m.safetensors", flux()))
    assert read(tmp_path / "link.safetensors").variant == "flux-dev"


@pytest.mark.parametrize("suffix", ["safetensors", "gguf"])
def test_a_link_to_nothing(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"link.{suffix}"
    file.symlink_to(tmp_path / "gone")
    refused(file, "not there", "link")


@pytest.mark.parametrize("suffix", ["safetensors", "gguf"])
def test_a_pipe_is_not_waited_for(tmp_path: Path, suffix: str) -> None:
    os.mkfifo(tmp_path / f"pipe.{suffix}")
    refused(tmp_path / f"pipe.{suffix}", "no file")


def test_a_folder_with_a_files_name(tmp_path: Path) -> None:
    (tmp_path / "folder.safetensors").mkdir()
    refused(tmp_path / "folder.safetensors", "model_index.json", "config.json")


# ----- byte soup -----

SOUND = ("original", "new-scaled", "metadata", "gguf")


def sound(folder: Path, kind: str) -> tuple[Path, int]:
    """A sound file, and the bytes of its header."""
    tensors = wrong.original_tensors("wan")
    if kind == "gguf":
        file = wrong.write_gguf(folder / "sound.gguf", tensors)
        return file, file.read_bytes().rindex(list(tensors)[-1].encode()) + 60
    metadata = None
    if kind != "original":
        tensors = wrong.scaled(tensors, new=True)
    if kind == "metadata":
        tensors = {name: info for name, info in tensors.items() if not name.endswith("comfy_quant")}
        layers = {name.removesuffix(".weight"): {"format": "float8_e4m3fn"} for name, (dtype, _) in tensors.items()
                  if dtype == "F8_E4M3"}  # fmt: skip
        metadata = {"_quantization_metadata": json.dumps({"layers": layers})}
    file = wrong.write(folder / "sound.safetensors", tensors, metadata=metadata)
    return file, 8 + struct.unpack("<Q", file.read_bytes()[:8])[0]


def spoil(data: bytearray, header: int, chance: random.Random) -> bytearray:
    """A few bytes changed, a piece repeated or left out, or the end cut off."""
    way, place = chance.choice(["flip", "flip", "digits", "cut", "drop", "repeat"]), chance.randrange(header)
    if way == "cut":
        return data[: chance.choice([place, chance.randrange(len(data))])]
    if way == "digits":  # keeps json sound
        digits = [i for i in range(header) if chr(data[i]).isdigit()]
        for index in chance.sample(digits, 3):
            data[index] = chance.choice(b"0123456789")
        return data
    length = chance.randrange(1, 40)
    if way == "drop":
        return data[:place] + data[place + length :]
    if way == "repeat":
        return data[:place] + data[place : place + length] + data[place:]
    for _ in range(chance.randrange(1, 4)):
        data[chance.choice([chance.randrange(header), chance.randrange(32)])] = chance.choice(b'\x00\xff"[]{},:-9e\x08')
    return data


@pytest.mark.parametrize("kind", SOUND)
def test_byte_soup_is_read_or_refused(tmp_path: Path, kind: str) -> None:
    """Nothing but `UserError` comes out, and what is read here the library opens too."""
    file, header = sound(tmp_path, kind)
    data = file.read_bytes()
    refusals = 0
    for seed in range(120):
        chance = random.Random(seed)
        soup = tmp_path / f"soup{file.suffix}"
        soup.write_bytes(spoil(bytearray(data), header, chance))
        try:
            read(soup)
        except UserError as error:
            refusals += 1
            assert len(str(error)) < 3000, seed
            continue
        if kind != "gguf":
            with safe_open(soup, framework="np"):
                pass
    assert 60 < refusals <= 120
