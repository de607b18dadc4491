"""The cache of a GE graph is written as it is read, also where torch_npu's own converter would write PA_NZ."""

from __future__ import annotations

import pytest

from tests.cann.environment import has_real_cann, run_python

pytestmark = [pytest.mark.npu, pytest.mark.skipif(has_real_cann(), reason="the installed converter is what it is")]


def test_our_converter_is_the_one_in_use() -> None:
    done = run_python(["-m", "tests.npu.programs.old_converter"])
    assert "AS ASKED" in done.stdout, done.stderr[-4000:]


@pytest.mark.full("shows that the test above can fail")
def test_the_old_one_would_not_do() -> None:
    done = run_python(["-m", "tests.npu.programs.old_converter", "shipped"])
    assert done.returncode != 0
    assert "cache_mode" in done.stderr
