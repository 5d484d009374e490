"""Frames and requests: what goes in comes out, and what is broken is refused."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from parallel_core import protocol
from parallel_core.protocol import (
    FrameReader,
    LoadTransformer,
    Ping,
    ProtocolError,
    TensorRef,
    encode_frame,
    parse_request,
)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, FrameReader]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, FrameReader(theirs)


def test_frames_arrive_whole_and_in_order(pair: tuple[socket.socket, FrameReader]) -> None:
    sock, reader = pair
    messages = [{"n": 1}, {"text": "ü" * 100_000}, {"n": 3}]
    sender = threading.Thread(target=lambda: sock.sendall(b"".join(map(encode_frame, messages))))
    sender.start()
    assert [reader.receive() for _ in messages] == messages
    sender.join()


def test_a_closed_socket_ends_the_frames(pair: tuple[socket.socket, FrameReader]) -> None:
    sock, reader = pair
    sock.sendall(encode_frame({"n": 1})[:-1])
    sock.close()
    assert reader.receive() is None


def test_a_frame_over_the_limit_is_refused_before_it_is_read(
    pair: tuple[socket.socket, FrameReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    sock, reader = pair
    sock.sendall(struct.pack(">I", protocol.MAX_FRAME_BYTES + 1))
    with pytest.raises(ProtocolError, match="over the limit"):
        reader.receive()
    monkeypatch.setattr(protocol, "MAX_FRAME_BYTES", 10)
    with pytest.raises(ProtocolError, match="over the limit"):
        encode_frame({"text": "x" * 20})


def test_requests_survive_the_way() -> None:
    request = LoadTransformer(
        key="k",
        folder="f",
        family="flux",
        dtype="float32",
        tensor=2,
        shards=1,
        offload=False,
        storage="plain",
        config_from="",
    )
    assert parse_request(LoadTransformer, request.to_json()) == request


@pytest.mark.parametrize("data", [{"unknown": 1}, [], None])
def test_requests_with_unknown_fields_are_refused(data: object) -> None:
    with pytest.raises(ProtocolError, match="expected the fields"):
        parse_request(Ping, data)


def test_requests_with_missing_fields_are_refused() -> None:
    with pytest.raises(ProtocolError, match="tensor"):
        parse_request(LoadTransformer, {"key": "k", "folder": "f", "family": "flux", "dtype": "float32"})


def test_tensor_references_survive_the_way() -> None:
    ref = TensorRef(dtype="bfloat16", shape=(2, 0, 3), offset=64, version=7)
    assert TensorRef.from_json(ref.to_json()) == ref
    with pytest.raises(ProtocolError, match="Not a tensor reference"):
        TensorRef.from_json(["float32", [1]])
