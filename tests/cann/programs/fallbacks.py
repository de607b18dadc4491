"""Operators that leave the AI core: counted with their reason, so that a test can say that a step has none."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch_npu

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


def check_scatters_along_long_axes() -> None:
    """A flat table is one long axis: CANN's kernel takes 50 pieces of what half a core's buffer holds."""
    longest = 50 * 24_576
    for size, reasons in ((longest, {}), (longest + 1, {"aclnnScatterAdd: an axis of more than 50 pieces": 1})):
        flat, places, ones = torch.zeros(size).npu(), torch.tensor([3, size - 1]).npu(), torch.ones(2).npu()
        assert counted("ai_cpu", lambda: flat.scatter_add_(0, places, ones)) == reasons  # noqa: B023 - called at once
    table, columns = torch.zeros(8, longest // 4).npu(), torch.zeros(8, 2, dtype=torch.int64).npu()
    assert counted("ai_cpu", lambda: table.scatter_add_(1, columns, torch.ones(8, 2).npu())) == {}
    whole = torch.zeros(5, 4, dtype=torch.int64).npu()
    assert counted("ai_cpu", lambda: whole.scatter_add_(1, whole.clone(), whole.clone())) == {
        "aclnnScatterAdd: a type without a kernel": 1}


def check_gathers_along_other_axes() -> None:
    """They transpose the whole input, unless many rows are gathered."""
    blocks, few, many = draw(2, 40, 64).npu(), torch.zeros(2, 1, 64, dtype=torch.int64), torch.zeros(
        2, 16, 64, dtype=torch.int64)
    assert counted("transposed", lambda: blocks.gather(1, few.npu())) == {"aclnnGather: not along the last axis": 1}
    assert counted("transposed", lambda: blocks.gather(1, many.npu())) == {}
    assert counted("transposed", lambda: blocks.gather(2, torch.zeros(2, 40, 1, dtype=torch.int64).npu())) == {}
    assert counted("transposed", lambda: blocks.view(-1, 64).index_select(0, torch.tensor([3, 50]).npu())) == {}


def check_writes_that_rewrite_their_table() -> None:
    """An index_fill_ is another tensor, copied back. A view of a row is zeroed alone, and a scatter writes in place."""
    table, rows, updates = draw(5, 4).npu(), torch.tensor([3, 1]).npu(), draw(2, 4).npu()
    assert counted("rewritten", lambda: table.index_fill_(0, rows, 0.0)) == {"aclnnInplaceIndexFill": 1}
    assert counted("rewritten", lambda: table.index_copy_(0, rows, updates)) == {}
    assert counted("rewritten", lambda: table.index_copy_(1, rows, table[:, :2].clone())) == {
        "aclnnInplaceIndexCopy: not along the first axis": 1}
    assert counted("rewritten", lambda: (table[3].zero_(), table[1].fill_(2.0))) == {}
    assert counted("rewritten", lambda: torch_npu.npu_scatter_nd_update_(table, rows[:, None], updates)) == {}
    gaps = draw(5, 8).npu()[:, :4]
    assert counted("rewritten", lambda: torch_npu.npu_scatter_nd_update_(gaps, rows[:, None], updates)) == {
        "aclnnScatterNdUpdate: a table with gaps": 1}
