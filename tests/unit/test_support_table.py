"""The README's support table is the one that the matrix of the tests gives."""

from __future__ import annotations

from pathlib import Path

from tests.support_table import section

README = Path(__file__).resolve().parents[2] / "README.md"


def test_the_readme_has_the_table_of_the_matrix() -> None:
    assert section() in README.read_text(encoding="utf-8"), "run: python -m tests.support_table"
