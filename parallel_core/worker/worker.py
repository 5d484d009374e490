"""The worker: a closed table of operations over a store of models.

Owns the table and what every operation may use. Knows neither how requests come nor who asks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..arena import DTYPES
from ..protocol import Park, Ping, ProtocolError, Release, Request, Shutdown, Status, TensorRef, parse_request
from .store import ModelStore

Look = Callable[[TensorRef], torch.Tensor]


@dataclass
class Result:
    """An operation's answer: json and tensors by name."""

    data: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


class Inputs(Mapping[str, torch.Tensor]):
    """A request's tensors on the rank's device.

    On a CPU rank they are views of shared memory: not to be written to or kept. On a GPU a tensor that has not changed
    since the last request is not copied again.
    """

    def __init__(self, refs: Mapping[str, TensorRef], look: Look, device: torch.device, cache: dict[int, Any]) -> None:
        self.refs = refs
        self._look = look
        self._device = device
        self._cache = cache
        current = {ref.version for ref in refs.values()}
        for version in set(cache) - current:
            del cache[version]

    def __getitem__(self, name: str) -> torch.Tensor:
        ref = self.refs[name]
        if self._device.type == "cpu" or ref.version == 0:
            return self._look(ref).to(self._device)
        if ref.version not in self._cache:
            self._cache[ref.version] = self._look(ref).to(self._device)
        placed: torch.Tensor = self._cache[ref.version]
        return placed

    def on_host(self, name: str) -> torch.Tensor:
        """A copy in host memory, to be kept."""
        return self._look(self.refs[name]).clone()

    def __iter__(self) -> Any:
        return iter(self.refs)

    def __len__(self) -> int:
        return len(self.refs)


Handler = Callable[["Worker", Any, Inputs], Result]


class Worker:
    """One rank's state. `devices` are the controller's names of the devices it stands for."""

    def __init__(
        self, *, kind: str, rank: int, world_size: int, device: torch.device, devices: tuple[str, ...]
    ) -> None:
        self.kind = kind
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.devices = devices
        self.store = ModelStore()
        self._placed: dict[int, Any] = {}
        self._table: dict[str, tuple[type[Request], Handler]] = dict(_BASIC)

    def import_heavy(self) -> None:
        """Fills the table of this kind of group; imports diffusers or transformers, which takes seconds."""
        if self.kind == "mesh":
            from . import text, transformer, vae
            from .meshes import MeshCache

            self.meshes = MeshCache(self.device.type)
            self._table.update(transformer.OPERATIONS)
            self._table.update(vae.OPERATIONS)
            self._table.update(text.OPERATIONS)
        else:
            from . import placed_transformer, text

            self._table.update(text.OPERATIONS)
            self._table.update(placed_transformer.OPERATIONS)

    def handle(self, operation: str, arguments: Mapping[str, Any], refs: Mapping[str, TensorRef], look: Look) -> Result:
        """Runs one operation of the table. Raises whatever it raises."""
        if operation not in self._table:
            raise ProtocolError(f"Unknown operation {operation!r}; a {self.kind} rank knows {', '.join(self._table)}.")
        request_class, handler = self._table[operation]
        return handler(self, parse_request(request_class, arguments), Inputs(refs, look, self.device, self._placed))

    def describe_memory(self) -> str:
        """One line for errors."""
        memory = self.memory()
        return ", ".join(f"{name} {size / 1e9:.2f} GB" for name, size in memory.items())

    def memory(self) -> dict[str, int]:
        """Bytes this rank takes: "now" and at most, "peak", since `restart_peak`.

        On GPUs what torch has allocated on all of the rank's; on a CPU rank the process's anonymous memory, of which
        only "now" is known.
        """
        if self.device.type == "cuda":
            now = sum(torch.cuda.memory_allocated(index) for index in range(len(self.devices)))
        else:
            now = _resident_bytes()
        return {"now": now, "peak": sum(self.peak_bytes().values())}

    def peak_bytes(self) -> dict[str, int]:
        """The most that each GPU held since `restart_peak`, by the controller's names.

        CPU "devices" of one process have one memory: they are one entry, "cpu:0+cpu:1".
        """
        if self.device.type == "cuda":
            return {name: torch.cuda.max_memory_allocated(index) for index, name in enumerate(self.devices)}
        return {"+".join(self.devices): _resident_bytes()}

    def restart_peak(self) -> None:
        """Begins to measure the peak anew."""
        if self.device.type == "cuda":
            for index in range(len(self.devices)):
                torch.cuda.reset_peak_memory_stats(index)

    def synchronize(self) -> None:
        """Waits until the GPUs have done what was asked of them."""
        if self.device.type == "cuda":
            for index in range(len(self.devices)):
                torch.cuda.synchronize(index)

    def free_bytes(self) -> dict[str, int]:
        """What each GPU of this rank has free, by the controller's names; nothing for CPU ranks."""
        if self.device.type != "cuda":
            return {}
        return {name: torch.cuda.mem_get_info(index)[0] for index, name in enumerate(self.devices)}

    def close(self) -> None:
        """Gives everything back."""
        self.store.release_all()
        if self.kind == "mesh":
            self.meshes.close()


def _resident_bytes() -> int:
    """Anonymous resident memory of this process (proc(5), RssAnon): file mappings are shared and do not count."""
    with open("/proc/self/status", encoding="ascii") as status:
        for line in status:
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return 0


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of that name; only names of `arena.DTYPES`."""
    if name not in DTYPES:
        raise ProtocolError(f"Unknown dtype {name!r}.")
    return DTYPES[name]


def _ping(worker: Worker, request: Ping, tensors: Inputs) -> Result:
    return Result()


def _status(worker: Worker, request: Status, tensors: Inputs) -> Result:
    return Result(
        data={
            "memory": worker.memory(),
            "free_bytes": worker.free_bytes(),
            "models": worker.store.ledger(),
            "num_loads": worker.store.num_loads,
        }
    )


def _park(worker: Worker, request: Park, tensors: Inputs) -> Result:
    worker.store.park(request.key)
    return Result()


def _release(worker: Worker, request: Release, tensors: Inputs) -> Result:
    worker.store.release(request.key)
    return Result()


_BASIC: dict[str, tuple[type[Request], Handler]] = {
    Ping.operation: (Ping, _ping),
    Status.operation: (Status, _status),
    Park.operation: (Park, _park),
    Release.operation: (Release, _release),
    Shutdown.operation: (Shutdown, lambda worker, request, tensors: Result()),
}
