"""The errors a user can meet, by kind. Knows nothing about what raised them.

`UserError` is a wrong input: it is raised before any weight is read or process started. `RankError` and its subclasses
come from the ranks and carry the evidence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_SHOWN_MODULE = "parallel_diffusion"
"""ComfyUI shows an exception's type with its module, which for a custom node is the path of its folder."""


class UserError(ValueError):
    """A wrong input: the message says what was given, what was expected and the nearest thing that works."""


class Cancelled(Exception):
    """The caller's poll function asked to stop; the ranks have answered and stay warm."""


@dataclass(frozen=True, kw_only=True)
class RankFailure:
    """One rank's account of what went wrong.

    `when` is the rank's CLOCK_MONOTONIC time in seconds (comparable between processes of one machine).
    """

    rank: int
    device: str
    operation: str
    type: str
    message: str
    traceback: str = ""
    memory: str = ""
    when: float = 0.0

    def line(self) -> str:
        """One line: who, where, what."""
        return f"rank {self.rank} ({self.device}) in {self.operation}: {self.type}: {self.message}"


class RankError(RuntimeError):
    """Ranks failed. The earliest failure is the cause; the others follow, one line each."""

    def __init__(self, failures: Sequence[RankFailure], advice: str = "") -> None:
        self.failures = tuple(sorted(failures, key=lambda failure: failure.when))
        cause, *others = self.failures
        lines = [cause.line()]
        if cause.memory:
            lines.append(f"memory of rank {cause.rank}: {cause.memory}")
        lines += [f"also: {other.line()}" for other in others]
        if advice:
            lines.append(advice)
        if cause.traceback:
            lines.append(cause.traceback.rstrip())
        super().__init__("\n".join(lines))


class RankOutOfMemory(RankError):
    """A rank ran out of device memory."""


class RankUserError(RankError, UserError):
    """Every rank refused the same wrong input (for example a damaged file); the group is still healthy.

    The message alone is shown: rank, memory and traceback say nothing about a wrong input.
    """

    def __str__(self) -> str:
        return "\n".join(dict.fromkeys(failure.message for failure in self.failures))


for _error in (UserError, Cancelled, RankError, RankOutOfMemory, RankUserError):
    _error.__module__ = _SHOWN_MODULE
