"""What controller and ranks say to each other: frames, tensor descriptions, typed requests and replies.

Frames are a 4-byte big-endian length and that many bytes of json. Tensors never travel in frames: a `TensorRef` says
where in a shared-memory arena one lies. Knows neither how a rank is started nor what an operation computes.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 16 * 1024 * 1024


class ProtocolError(RuntimeError):
    """The other side broke the protocol; nothing after this can be trusted."""


def encode_frame(message: Mapping[str, Any]) -> bytes:
    """A frame for `message`. Raises `ProtocolError` when it is larger than `MAX_FRAME_BYTES`."""
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(f"A frame of {len(body)} bytes is over the limit of {MAX_FRAME_BYTES}.")
    return struct.pack(">I", len(body)) + body


class FrameReader:
    """Collects bytes from one socket and hands out whole frames."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray()

    def receive(self) -> dict[str, Any] | None:
        """The next frame, blocking until it is whole. None when the other side has closed."""
        while (frame := self.take()) is None:
            if not self.feed():
                return None
        return frame

    def feed(self) -> bool:
        """Reads once what is there (blocking when nothing is). False when the other side has closed."""
        try:
            data = self._sock.recv(1 << 16)
        except (ConnectionResetError, BrokenPipeError):
            return False
        self._buffer += data
        return bool(data)

    def take(self) -> dict[str, Any] | None:
        """A whole frame out of what was read so far, or None."""
        if len(self._buffer) < 4:
            return None
        (length,) = struct.unpack_from(">I", self._buffer)
        if length > MAX_FRAME_BYTES:
            raise ProtocolError(f"A frame of {length} bytes is over the limit of {MAX_FRAME_BYTES}.")
        if len(self._buffer) < 4 + length:
            return None
        frame = json.loads(bytes(self._buffer[4 : 4 + length]))
        del self._buffer[: 4 + length]
        if not isinstance(frame, dict):
            raise ProtocolError(f"A frame holds a {type(frame).__name__}; expected an object.")
        return frame


@dataclass(frozen=True, kw_only=True)
class TensorRef:
    """Where a tensor lies in an arena. `version` changes whenever the bytes at this place do."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    version: int

    def to_json(self) -> list[Any]:
        """Compact form for a frame."""
        return [self.dtype, list(self.shape), self.offset, self.version]

    @staticmethod
    def from_json(data: Any) -> TensorRef:
        """The reverse of `to_json`; `ProtocolError` on anything else."""
        try:
            dtype, shape, offset, version = data
            return TensorRef(dtype=str(dtype), shape=tuple(map(int, shape)), offset=int(offset), version=int(version))
        except (TypeError, ValueError) as error:
            raise ProtocolError(f"Not a tensor reference: {data!r} ({error}).") from None


@dataclass(frozen=True, kw_only=True)
class Request:
    """Base of all requests. `operation` is the name in the worker's table."""

    operation: ClassVar[str]

    def to_json(self) -> dict[str, Any]:
        """The fields, as json types."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Ping(Request):
    """Answers with nothing: what a round trip costs."""

    operation: ClassVar[str] = "ping"


@dataclass(frozen=True, kw_only=True)
class Status(Request):
    """Answers with the rank's memory, its store's ledger and its counters."""

    operation: ClassVar[str] = "status"


@dataclass(frozen=True, kw_only=True)
class Shutdown(Request):
    """Ends the rank after it has answered."""

    operation: ClassVar[str] = "shutdown"


@dataclass(frozen=True, kw_only=True)
class Park(Request):
    """Moves the weights of `key` from the device to the rank's host memory."""

    operation: ClassVar[str] = "park"
    key: str


@dataclass(frozen=True, kw_only=True)
class Release(Request):
    """Forgets `key` and gives its memory back."""

    operation: ClassVar[str] = "release"
    key: str


@dataclass(frozen=True, kw_only=True)
class LoadTransformer(Request):
    """Loads a transformer's weights (this rank's part of them) under `key`; nothing when it is there already.

    `folder` may be a single file; `config_from` is then a diffusers folder whose config counts, or empty. `dtype` and
    `storage` are the fields of `storage.Storage`. `shards` ranks share the weights out among them (each tensor rank's
    slices by themselves); `offload` keeps these parts in host memory. `source` is another key with the same weights in
    the rank's store, divided otherwise: they are then made of that model's parts rather than read; empty to read them.
    """

    operation: ClassVar[str] = "load_transformer"
    key: str
    folder: str
    family: str
    dtype: str
    tensor: int
    shards: int
    offload: bool
    storage: str
    config_from: str
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class CheckMode(Request):
    """Answers with nothing when the ranks can run `mode` (the fields of `plan.RunMode`): packages, compilers."""

    operation: ClassVar[str] = "check_mode"
    mode: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class PlaceTransformer(Request):
    """Loads a transformer with its layers placed over a placement group's devices; nothing when it is there already.

    `max_memory`: the user's limits in bytes, by device, "cpu" and "disk". The rest as in `LoadTransformer`.
    """

    operation: ClassVar[str] = "place_transformer"
    key: str
    folder: str
    family: str
    dtype: str
    storage: str
    config_from: str
    max_memory: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class PatchWeights(Request):
    """Makes `patches` (`weight_patches.WeightPatch`) the changes that are on the weights of `key`; none takes all off.

    Answers with the names of tensors that are "missing", and has then changed nothing.
    """

    operation: ClassVar[str] = "patch_weights"
    key: str
    patches: list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class HoldTensors(Request):
    """Keeps the frame's tensors, under their names, for patches of the weights of `key`."""

    operation: ClassVar[str] = "hold_tensors"
    key: str


@dataclass(frozen=True, kw_only=True)
class Forward(Request):
    """One transformer evaluation of several calls.

    `calls` lists, per call, its row tensors and shared tensors by name (values are keys into the frame's tensors).
    `assignments[replica]` lists batches; a batch is a list of [call, first row, one past the last row] that are run as
    one forward. `first`: a run begins, and what is measured over a run starts anew. `mode`: the fields of
    `plan.RunMode`.
    """

    operation: ClassVar[str] = "forward"
    key: str
    first: bool
    mode: dict[str, Any]
    calls: list[dict[str, dict[str, str]]]
    assignments: list[list[list[list[int]]]]


def parse_request(cls: type[Request], data: Any) -> Request:
    """A request from a frame; refuses unknown and missing fields, so that two versions never half understand."""
    names = {item.name for item in fields(cls)}
    if not isinstance(data, dict) or set(data) - names:
        raise ProtocolError(f"Operation {cls.operation!r} got {data!r}; expected the fields {sorted(names)}.")
    try:
        return cls(**data)
    except TypeError as error:
        raise ProtocolError(f"Operation {cls.operation!r}: {error}.") from None
