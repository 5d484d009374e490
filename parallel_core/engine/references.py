"""Counts the objects that stand for a model on the ranks, and knows the models that have none left.

Knows neither groups nor requests.
"""

from __future__ import annotations

import collections

from .group import GroupKey

Item = tuple[GroupKey, str]
"""A model: its group and its key."""


class References:
    """Not safe for several threads at once, except `drop`."""

    def __init__(self) -> None:
        self._counts: collections.Counter[Item] = collections.Counter()
        self._dropped: collections.deque[Item] = collections.deque()
        self._orphans: set[Item] = set()

    def retain(self, item: Item) -> None:
        """One more object stands for `item`."""
        self._counts[item] += 1
        self._orphans.discard(item)

    def drop(self, item: Item) -> None:
        """One object less. Takes no lock and never blocks: the garbage collector calls it from any thread."""
        self._dropped.append(item)

    def orphans(self) -> list[Item]:
        """The models for which nothing stands any more."""
        while self._dropped:
            item = self._dropped.popleft()
            self._counts[item] -= 1
            if self._counts[item] <= 0:
                del self._counts[item]
                self._orphans.add(item)
        return list(self._orphans)

    def forget(self, item: Item) -> None:
        """The orphan has been released."""
        self._orphans.discard(item)
