"""The fast set and the full one differ by one mark. tests/conftest.py refuses a mark without a reason."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_fast_set_and_the_full_one_differ_by_that_mark_alone() -> None:
    fast, everything, ci = ((ROOT / name).read_text() for name in ("scripts/test.sh", "scripts/test_all.sh", ".ci/run"))
    assert '-m "${TEST_MARKS-not full}" "$@"' in fast
    assert "TEST_MARKS='' bash scripts/test.sh" in everything
    assert "bash scripts/test.sh\n" in ci
