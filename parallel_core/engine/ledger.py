"""Who holds what on each physical device, over all groups; and who yields when room is needed.

Plain bookkeeping: it moves no weight itself. Knows no process and no model.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .group import GroupKey


@dataclass
class Holding:
    """One model of one group. `device_bytes` is what it takes on each device while it is resident."""

    group: GroupKey
    key: str
    label: str
    device_bytes: dict[str, int]
    weights: str
    """Equal for models with the same weights, however they are divided."""
    resident: bool = True
    last_use: int = 0


@dataclass
class Ledger:
    """All holdings of this process's groups."""

    _holdings: dict[tuple[GroupKey, str], Holding] = field(default_factory=dict)
    _clock: itertools.count[int] = field(default_factory=itertools.count)

    def record(
        self, group: GroupKey, key: str, label: str, device_bytes: Mapping[str, int], weights: str = ""
    ) -> Holding:
        """Notes that `key` is resident now. `weights` is its own key where nothing else has the same weights."""
        holding = Holding(group=group, key=key, label=label, device_bytes=dict(device_bytes), weights=weights or key)
        self._holdings[(group, key)] = holding
        self.touch(group, key)
        return holding

    def touch(self, group: GroupKey, key: str) -> None:
        """Notes a use: the model is resident and was used last."""
        holding = self._holdings[(group, key)]
        holding.resident = True
        holding.last_use = next(self._clock)

    def park(self, group: GroupKey, key: str) -> None:
        """Notes that the weights lie in host memory now."""
        self._holdings[(group, key)].resident = False

    def drop(self, group: GroupKey, key: str) -> None:
        """Forgets a model."""
        self._holdings.pop((group, key), None)

    def drop_group(self, group: GroupKey) -> None:
        """Forgets everything of a group that has ended."""
        for holding in self.of_group(group):
            self.drop(group, holding.key)

    def get(self, group: GroupKey, key: str) -> Holding | None:
        """The holding, if there is one."""
        return self._holdings.get((group, key))

    def of_group(self, group: GroupKey) -> list[Holding]:
        """Everything a group holds."""
        return [holding for holding in self._holdings.values() if holding.group == group]

    def sibling(self, group: GroupKey, key: str, weights: str) -> Holding | None:
        """A resident model of the group with the same weights as `key`, divided in another way."""
        for holding in self.of_group(group):
            if holding.weights == weights and holding.key != key and holding.resident:
                return holding
        return None

    def to_yield(self, needed: Mapping[str, int], free: Mapping[str, int], keep: Sequence[Holding]) -> list[Holding]:
        """The holdings to park so that `needed` bytes fit into `free` bytes on every device: least recently used first.

        Returns what there is to park even if that is not enough; whether it then fits shows when the load runs.
        """
        short = {device: needed[device] - free.get(device, 0) for device in needed}
        chosen: list[Holding] = []
        for holding in sorted(self._holdings.values(), key=lambda h: h.last_use):
            if not any(amount > 0 for amount in short.values()):
                break
            helps = any(short.get(device, 0) > 0 and size > 0 for device, size in holding.device_bytes.items())
            if holding.resident and helps and holding not in keep:
                chosen.append(holding)
                for device, size in holding.device_bytes.items():
                    short[device] = short.get(device, 0) - size
        return chosen
