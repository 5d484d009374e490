"""An engine for the tests of real ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from parallel_core.engine import Engine
from tests.ranks.engines import make_engine
from tests.tiny_flux import write_transformer


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """One engine for all tests: starting ranks takes seconds. A test may kill ranks; the next one gets new ones."""
    engine = make_engine()
    yield engine
    engine.shutdown()


@pytest.fixture(scope="session")
def tiny_flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bare transformer folder that no test changes."""
    return write_transformer(tmp_path_factory.mktemp("models") / "tiny")
