"""An engine for the tests of real ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from parallel_core.engine import Engine
from tests.ranks.engines import make_engine


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """One engine for all tests: starting ranks takes seconds. A test may kill ranks; the next one gets new ones."""
    engine = make_engine()
    yield engine
    engine.shutdown()
