"""The rank's main loop: takes requests from the socket, answers every one, and keeps the process group.

Owns the transport on the rank's side. What an operation computes is the worker's.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..arena import ArenaReader, ArenaWriter
from ..protocol import FrameReader, ProtocolError, TensorRef, encode_frame
from .bootstrap import HangTimer, RankConfig
from .worker import Result, Worker

_LOG_CHARACTERS = 4000
_COLLECTIVE_TIMEOUT = timedelta(minutes=30)  # the controller's deadlines are shorter and say more


class _LogCollector(logging.Handler):
    """Keeps warnings and errors until the next answer takes them along."""

    def __init__(self) -> None:
        super().__init__(level=logging.WARNING)
        self.records: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append({"level": record.levelno, "message": self.format(record)[:_LOG_CHARACTERS]})

    def take(self) -> list[dict[str, Any]]:
        """What has come since the last call, at most 50 records."""
        records, self.records = self.records[-50:], []
        return records


def serve(sock: socket.socket, config: RankConfig) -> int:
    """Sets up logging, device and process group, says READY, answers until shutdown. Returns the exit code."""
    collector = _set_up_logging(config)
    device = _pick_device(config)
    torch.set_grad_enabled(False)
    if config.kind == "mesh":
        _init_process_group(config)
    worker = Worker(
        kind=config.kind, rank=config.rank, world_size=config.world_size, device=device, devices=config.devices
    )
    worker.import_heavy()
    sock.sendall(encode_frame({"event": "ready", "rank": config.rank, "device": str(device)}))
    loop = _Loop(sock, config, worker, collector)
    while loop.answer_one():
        pass
    worker.close()
    return 0


class _Loop:
    def __init__(self, sock: socket.socket, config: RankConfig, worker: Worker, logs: _LogCollector) -> None:
        self._sock = sock
        self._config = config
        self._worker = worker
        self._logs = logs
        self._frames = FrameReader(sock)
        self._inbox = ArenaReader(config.inbox)
        self._outbox = ArenaWriter(config.outbox)
        self._timer = HangTimer()
        self._poller = select.poll()
        self._poller.register(sock.fileno(), select.POLLIN)

    def answer_one(self) -> bool:
        """Waits for a request and answers it. False when it was the last one."""
        if not self._poller.poll(self._timer.REST * 1000):
            self._timer.rest()
        frame = self._frames.receive()
        if frame is None:
            return False
        operation = str(frame.get("operation"))
        self._timer.start(float(frame.get("deadline", 600.0)))
        try:
            answer = self._succeed(self._handle(operation, frame))
        except Exception as error:  # the boundary: whatever happened is reported to the controller in full
            answer = {"ok": False, "error": self._describe(error, operation)}
        answer.update(id=frame.get("id"), logs=self._logs.take())
        self._sock.sendall(encode_frame(answer))
        return operation != "shutdown"

    def _handle(self, operation: str, frame: dict[str, Any]) -> Result:
        size = int(frame.get("arena", 0))
        refs = {name: TensorRef.from_json(ref) for name, ref in frame.get("tensors", {}).items()}
        if not isinstance(frame.get("arguments"), dict):
            raise ProtocolError(f"Operation {operation!r} came without arguments.")
        return self._worker.handle(operation, frame["arguments"], refs, lambda ref: self._inbox.look(ref, size))

    def _succeed(self, result: Result) -> dict[str, Any]:
        refs = self._outbox.write(result.tensors)
        return {
            "ok": True,
            "data": result.data,
            "tensors": {name: ref.to_json() for name, ref in refs.items()},
            "arena": self._outbox.size,
        }

    def _describe(self, error: Exception, operation: str) -> dict[str, Any]:
        kind = "UserError" if isinstance(error, _user_error()) else type(error).__name__
        return {
            "type": kind,
            "message": str(error) or repr(error),
            "traceback": traceback.format_exc(),
            "device": str(self._worker.device),
            "operation": operation,
            "memory": self._worker.describe_memory(),
            "when": time.monotonic(),
        }


def _user_error() -> type[Exception]:
    from ..errors import UserError

    return UserError


def _set_up_logging(config: RankConfig) -> _LogCollector:
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format=f"%(asctime)s rank {config.rank} %(levelname)s %(name)s: %(message)s",
    )
    collector = _LogCollector()
    logging.getLogger().addHandler(collector)
    # diffusers imports it wherever it is installed, and it warns of each kernel for another GPU that it cannot load
    logging.getLogger("torchao").setLevel(logging.ERROR)
    return collector


def _pick_device(config: RankConfig) -> torch.device:
    if not config.devices[0].startswith("cuda:"):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"The rank for {config.devices[0]} sees no CUDA device (CUDA_VISIBLE_DEVICES="
            f"{os.environ.get('CUDA_VISIBLE_DEVICES')!r}). Does the ranks' torch have CUDA?"
        )
    torch.cuda.set_device(0)  # the mask shows a mesh rank one GPU; a placement rank starts with its first
    return torch.device("cuda:0")


def _init_process_group(config: RankConfig) -> None:
    on_gpu = config.devices[0].startswith("cuda:")
    dist.init_process_group(
        backend="cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        init_method=f"file://{Path.cwd() / 'store'}",
        rank=config.rank,
        world_size=config.world_size,
        timeout=_COLLECTIVE_TIMEOUT,
    )
    dist.barrier()
