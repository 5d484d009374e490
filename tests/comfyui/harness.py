"""A ComfyUI server with the package and the test nodes in it, and what the tests ask of it.

Owns: the layout of a base folder, the server's environment, running a Graph and reading what came out, the server's
rank processes.
Does not know: what the product computes.
"""

from __future__ import annotations

import os
import re
import signal
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.comfyui.graphs import Graph, Node
from tools.comfy_client import ComfyClient, ComfyServer, Event, Outcome, PromptRejected

REPOSITORY = Path(__file__).resolve().parents[2]
REFERENCE_NODES = Path(__file__).resolve().parent / "reference_nodes"
RANK_MODULE = "parallel_core.worker"


def wait_until(condition: Callable[[], Any], *, seconds: float, what: str) -> Any:
    """Polls until `condition()` is true and returns its value; fails after `seconds` with `what` in the message."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.01)
    raise AssertionError(f"within {seconds:g} s: {what}")


def alive(pid: int) -> bool:
    """Whether the process runs (one that ended and was not reaped does not)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def descendants(pid: int) -> list[int]:
    """Every living process below `pid`."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and alive(int(entry.name)):
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
            parents.setdefault(parent, []).append(int(entry.name))
    found, queue = [], list(parents.get(pid, []))
    while queue:
        child = queue.pop()
        found.append(child)
        queue += parents.get(child, [])
    return found


def command_line(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return []


def rank_number(line: str) -> int:
    """The rank that a command line starts."""
    found = re.search(r'"rank": (\d+)', line)
    assert found, line
    return int(found[1])


def mapped_files(pid: int) -> set[str]:
    """The files that the process has mapped into memory or open."""
    try:
        mapped = Path(f"/proc/{pid}/maps").read_text().splitlines()
        opened = [os.readlink(descriptor) for descriptor in Path(f"/proc/{pid}/fd").iterdir()]
    except (FileNotFoundError, ProcessLookupError):
        return set()
    return {line.split(maxsplit=5)[5] for line in mapped if line.count(" ") > 5} | set(opened)


def shared_memory_files(pids: Sequence[int]) -> set[str]:
    """Files under /dev/shm that any of the processes uses (a memfd has no name there and cannot be left behind)."""
    return {name for pid in pids for name in mapped_files(pid) if name.startswith("/dev/shm/")}


def make_base(base: Path, models: Path, *, package: Path = REPOSITORY, name: str = "parallel-diffusion") -> Path:
    """A base folder: `models` linked in, the package under `name` and the test nodes in custom_nodes."""
    (base / "custom_nodes").mkdir(parents=True)
    (base / "tmp").mkdir()
    (base / "models").symlink_to(models)
    (base / "custom_nodes" / name).symlink_to(package)
    (base / "custom_nodes" / "reference_nodes").symlink_to(REFERENCE_NODES)
    return base


class Comfy:
    """One server and one client of it. `base`: see make_base. Use as a context manager."""

    def __init__(self, tree: Path, base: Path, python: Path, *, env: Mapping[str, str] | None = None) -> None:
        self.base = base
        self.temporary = base / "tmp"
        extra_modules = {"PYTHONPATH": os.environ["COMFYUI_PYTHONPATH"]} if "COMFYUI_PYTHONPATH" in os.environ else {}
        self.server = ComfyServer(
            tree,
            base,
            python=python,
            extra_args=["--preview-method", "latent2rgb"],
            # A temp folder of its own, so that a test sees all that the server and its ranks leave behind.
            env={"TMPDIR": str(self.temporary), **extra_modules, **(env or {})},
        )
        self.client: ComfyClient = self.server.client()

    def __enter__(self) -> Comfy:
        self.server.start()
        loaded = self.client.get("/object_info/PD_LoadParallelTransformer")
        assert loaded, f"ComfyUI could not import the package; the log:\n{self.log()[-5000:]}"
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None and self.server.alive():
            self.stop()
        self.client.close()
        self.server.stop()

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        """A normal stop, after which nothing may be left: no process, no shared memory, no temporary file."""
        pid = self.server.pid
        assert pid is not None
        family = descendants(pid)
        shared = shared_memory_files([pid, *family])
        os.kill(pid, how)
        wait_until(lambda: not alive(pid), seconds=30, what="ComfyUI has ended")
        wait_until(lambda: not any(map(alive, family)), seconds=5, what="none of its processes lives")
        wait_until(lambda: not list(self.temporary.iterdir()), seconds=5, what="the temp folder is empty")
        assert [name for name in shared if Path(name).exists()] == []

    def run(self, graph: Graph, *, on_progress: Callable[[Event], None] | None = None, timeout: float = 120) -> Outcome:
        """Runs the graph, which must succeed."""
        outcome = self.client.run(graph.prompt, on_progress=on_progress, timeout=timeout)
        assert outcome.status == "success", outcome.error_text or outcome.status
        return outcome

    def latents(self, graph: Graph, samples: Node, *, timeout: float = 120) -> torch.Tensor:
        """Runs the graph and returns `samples` (a LATENT) as the server had it."""
        name = uuid.uuid4().hex
        graph.add("TestSaveLatent", samples=samples, name=name)
        self.run(graph, timeout=timeout)
        return self.saved(name)

    def saved(self, name: str) -> torch.Tensor:
        """What TestSaveLatent wrote under `name`."""
        return load_file(self.base / "output" / f"{name}.safetensors")["samples"]

    def failure(self, graph: Graph, *, timeout: float = 60) -> str:
        """Runs the graph, which must fail or be refused, and returns the text that the user sees."""
        try:
            outcome = self.client.run(graph.prompt, timeout=timeout)
        except PromptRejected as rejected:
            return str(rejected)
        assert outcome.status == "error", f"expected an error, got {outcome.status}"
        return outcome.error_text

    def ranks(self, *, group_of: int | None = None) -> list[int]:
        """The process ids of the server's mesh ranks (not those that encoders are placed on), rank 0 first.

        group_of: only those of the group of so many ranks.
        """
        pid = self.server.pid
        assert pid is not None
        wanted = [RANK_MODULE, '"kind": "mesh"'] + ([f'"world_size": {group_of}'] if group_of else [])
        lines = {child: " ".join(command_line(child)) for child in descendants(pid)}
        chosen = {child: line for child, line in lines.items() if all(part in line for part in wanted)}
        return sorted(chosen, key=lambda child: (rank_number(chosen[child]), child))

    def groups(self) -> list[dict[str, Any]]:
        """What the status route tells about the mesh groups, once none of them is at work."""

        def idle() -> tuple[list[dict[str, Any]]] | None:
            found = self.client.get("/parallel_diffusion/status")["groups"]
            found = [group for group in found if group["kind"] == "mesh"]
            return None if any(group["busy"] for group in found) else (found,)

        groups: list[dict[str, Any]] = wait_until(idle, seconds=30, what="idle ranks")[0]
        return groups

    def free_until(self, condition: Callable[[], Any], *, seconds: float, what: str, free_memory: bool = False) -> None:
        """/free, until it has shown effect.

        It is sent again every few seconds, since ComfyUI leaves one that comes while it collects garbage lying until
        the next prompt.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.client.free(unload_models=True, free_memory=free_memory)
            ask_again = min(deadline, time.monotonic() + 3)
            while time.monotonic() < ask_again:
                if condition():
                    return
                time.sleep(0.01)
        raise AssertionError(f"within {seconds:g} s of /free: {what}")

    def state(self) -> dict[str, Any]:
        """See reference_nodes/probes.py."""
        state: dict[str, Any] = self.client.get("/test/state")
        return state

    def log(self) -> str:
        """Everything that the server has logged."""
        return self.server.log_path.read_text(encoding="utf-8", errors="replace")


def kill(pid: int) -> None:
    """kill -9."""
    os.kill(pid, signal.SIGKILL)


def resident_bytes(pid: int) -> int:
    """Anonymous memory of a process: weights that were read, not files that are mapped."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no RssAnon in /proc/{pid}/status")


def bytes_read(pid: int) -> int:
    """Bytes that a process has read, from disk or cache; what it sees of a memory map does not count (proc(5), io)."""
    for line in Path(f"/proc/{pid}/io").read_text().splitlines():
        if line.startswith("rchar:"):
            return int(line.split()[1])
    raise AssertionError(f"no rchar in /proc/{pid}/io")
