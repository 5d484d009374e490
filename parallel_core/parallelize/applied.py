"""What an apply hands out: the way back."""

from __future__ import annotations

from contextlib import ExitStack


class Applied:
    """What one apply put on a model. `remove` takes all of it back; a second `remove` does nothing."""

    def __init__(self, undo: ExitStack) -> None:
        self._undo = undo

    def remove(self) -> None:
        self._undo.close()
