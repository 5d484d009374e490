"""What processes take and read while something happens: memory and bytes, from proc(5).

Does not know: what happens.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


def _fields(pid: int, file: str) -> dict[str, int]:
    """Numbers of /proc/PID/FILE by name; kB as bytes."""
    found = {}
    for line in Path(f"/proc/{pid}/{file}").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if words and words[0].isdigit():
            found[name] = int(words[0]) * (1024 if words[-1] == "kB" else 1)
    return found


@dataclass
class Taken:
    """Of one process, in bytes, above what it had before."""

    anonymous_peak: int = 0
    """Memory of its own at most, sampled."""
    resident_peak: int = 0
    """With what it sees of mapped files, which the system can take back."""
    from_disk: int = 0
    by_calls: int = 0
    """Read by system calls, from disk or cache."""


@contextmanager
def watched(pids: Sequence[int]) -> Iterator[dict[int, Taken]]:
    """What each process takes inside the block; filled when it ends."""
    before, taken = {}, {pid: Taken() for pid in pids}
    for pid in pids:
        Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")  # the peak begins anew
        before[pid] = {**_fields(pid, "status"), **_fields(pid, "io")}
    done = threading.Event()

    def sample() -> None:
        while not done.wait(0.005):
            for pid in pids:
                grown = _fields(pid, "status")["RssAnon"] - before[pid]["RssAnon"]
                taken[pid].anonymous_peak = max(taken[pid].anonymous_peak, grown)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield taken
    finally:
        done.set()
        thread.join()
    for pid in pids:
        after, old = {**_fields(pid, "status"), **_fields(pid, "io")}, before[pid]
        taken[pid].resident_peak = after["VmHWM"] - old["VmRSS"]
        taken[pid].from_disk = after["read_bytes"] - old["read_bytes"]
        taken[pid].by_calls = after["rchar"] - old["rchar"]
