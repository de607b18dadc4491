"""Operators that leave the AI core: counted with their reason, so that a test can say that a step has none."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .emulation import calls, reset_counters
from .fused_operators import draw


def counted(group: str, body: Callable[[], object]) -> dict[str, int]:
    reset_counters()
    body()
    return calls(group)


def check_writes_along_an_axis() -> None:
    rows = torch.tensor([1, 3]).npu()
    wide, brain = draw(5, 4).npu(), draw(5, 4, dtype=torch.bfloat16).npu()
    assert counted("sorted", lambda: wide.index_add(0, rows, wide[:2])) == {}
    assert counted("sorted", lambda: brain.index_add(0, rows, brain[:2])) == {"aclnnIndexAdd: bfloat16": 1}
    assert counted("sorted", lambda: brain.index_copy_(0, rows, brain[:2].clone())) == {
        "aclnnInplaceIndexCopy: bfloat16": 1
    }
    one, first = draw(1, 4).npu(), torch.tensor([0]).npu()
    assert counted("ai_cpu", lambda: wide.index_add(0, rows, wide[:2])) == {}
    assert counted("ai_cpu", lambda: one.index_add(0, first, one)) == {"aclnnIndexAdd: axis of length 1": 1}
    assert counted("ai_cpu", lambda: one.index_copy_(0, first, one.clone())) == {
        "aclnnInplaceIndexCopy: axis of length 1": 1
    }


def check_what_the_ai_core_has_no_kernel_for() -> None:
    x = draw(5, 4).npu()
    assert counted("ai_cpu", lambda: x.masked_scatter_(x > 0, x.clone())) == {"aclnnInplaceMaskedScatter": 1}
    wide = torch.ones(5, 4, dtype=torch.float64).npu()
    assert counted("ai_cpu", lambda: wide.mul(wide)) == {"aclnnMul: float64": 1}
    assert counted("ai_cpu", lambda: torch.nn.functional.embedding(torch.tensor([1, 2]).npu(), x)) == {}
    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        values = torch.ones(2, 4, dtype=dtype).npu()
        assert counted("ai_cpu", lambda: values.cumsum(-1, dtype=dtype)) == {}  # noqa: B023 - called at once
    whole = torch.ones(2, 4, dtype=torch.int64).npu()
    assert counted("ai_cpu", lambda: whole.cumsum(-1)) == {"aclnnCumsum: integers other than int32": 1}
    assert counted("ai_cpu", lambda: torch.searchsorted(x, x)) == {"aclnnSearchSorted": 1}
