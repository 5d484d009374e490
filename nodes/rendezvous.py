"""Lets several evaluations of ComfyUI's code meet at the ranks, so that they run as one operation.

Each evaluation runs in a thread of its own until it needs the ranks; when all have come that far (or ended), their
calls are sent together. Only one thread runs at a time, in a fixed order, so the outcome does not depend on timing.
Knows neither samplers nor ranks.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..parallel_core.families.base import SeamCall

Dispatch = Callable[[list[SeamCall]], list[torch.Tensor]]

_participant: contextvars.ContextVar[_Participant | None] = contextvars.ContextVar("participant", default=None)


class _Abandoned(BaseException):
    """Unwinds the other evaluations after one has failed."""


@dataclass
class _Participant:
    """One evaluation: its thread, and the baton that says whose turn it is."""

    work: Callable[[], Any]
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    yielded: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    call: SeamCall | None = None
    answer: torch.Tensor | None = None
    result: Any = None
    error: BaseException | None = None
    done: bool = False
    abandoned: bool = False

    def run(self, inference: bool, device: int | None) -> None:
        self.turn.acquire()
        if device is not None:
            torch.cuda.set_device(device)  # the current device belongs to the thread
        _participant.set(self)
        try:
            with torch.inference_mode(inference), torch.no_grad():
                if not self.abandoned:
                    self.result = self.work()
        except BaseException as error:  # handed to the caller, who raises it
            self.error = error
        self.done = True
        self.yielded.release()

    def resume(self) -> None:
        """Gives this evaluation its turn and waits until it needs the ranks or ends."""
        self.turn.release()
        self.yielded.acquire()

    def submit(self, call: SeamCall) -> torch.Tensor:
        """From the evaluation's own thread: waits for the ranks' answer."""
        self.call, self.answer = call, None
        self.yielded.release()
        self.turn.acquire()
        if self.abandoned:
            raise _Abandoned
        assert self.answer is not None
        return self.answer


def submit(call: SeamCall, dispatch: Dispatch) -> torch.Tensor:
    """The ranks' answer to `call`: together with other evaluations inside `run_together`, alone elsewhere."""
    participant = _participant.get()
    return dispatch([call])[0] if participant is None else participant.submit(call)


def run_together(work: Sequence[Callable[[], Any]], dispatch: Dispatch) -> list[Any]:
    """Runs all `work` and returns its results in order; calls that meet are given to `dispatch` as one list.

    The first exception is raised after every evaluation has been unwound.
    """
    participants = [_Participant(item) for item in work]
    inference = torch.is_inference_mode_enabled()
    device = torch.cuda.current_device() if torch.cuda.is_available() else None
    for participant in participants:
        context = contextvars.copy_context()
        threading.Thread(target=context.run, args=(participant.run, inference, device), daemon=True).start()
    error: BaseException | None = None
    waiting = list(participants)
    while waiting:
        for participant in waiting:
            participant.abandoned = error is not None
            participant.resume()
            if participant.error is not None and not isinstance(participant.error, _Abandoned):
                error = error or participant.error
        waiting = [participant for participant in waiting if not participant.done]
        if waiting and error is None:
            error = _answer(waiting, dispatch)
    if error is not None:
        raise error
    return [participant.result for participant in participants]


def _answer(waiting: Sequence[_Participant], dispatch: Dispatch) -> BaseException | None:
    """Sends the calls of all `waiting` evaluations; returns what went wrong so that the caller can unwind them."""
    calls = [participant.call for participant in waiting]
    try:
        answers = dispatch([call for call in calls if call is not None])
    except BaseException as error:  # raised by the caller after the evaluations have been unwound
        return error
    for participant, answer in zip(waiting, answers, strict=True):
        participant.answer = answer
    return None
