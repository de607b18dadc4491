"""bench.device on the npu platform, as an Ascend host runs it: tiny sizes here, whose times mean nothing."""

from __future__ import annotations

import csv
import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from bench.profiler import DeviceProfile, idle_share, read_kernels
from tests.cann.environment import has_real_cann, installed_wheel, run_python


def run_bench(*arguments: str, **emulation: Any) -> tuple[str, dict[str, Any]]:
    """(the table, the results of the JSON line)."""
    done = run_python(["-m", "bench.device", "--platform", "npu", "--sizes", "tiny", "--repeats", "1", "--peer",
                       *arguments], timeout=900, **emulation)
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["arguments"]["platform"] == "npu"
    return done.stdout, report["results"]


@pytest.mark.npu
@pytest.mark.full("two processes over the emulation; nothing that serves depends on it")
def test_decode_steps_of_an_npu_and_no_made_up_idle_share() -> None:
    table, results = run_bench("--part", "decode", "--graph-mode", "eager")
    for size in (1, 3):
        batch = results["decode"]["npu_runner"]["batches"][str(size)]
        assert batch["bytes"]["kv_bytes"] == size * 24 * (2 * 2 * 2 * 16 * 2)
        assert all(value > 0 for value in batch["parts"].values()), batch["parts"]
        if not has_real_cann():
            assert results["decode"]["profiled"][str(size)]["idle_share"] is None
    if not has_real_cann():
        assert table.count("not available (torch_npu's profiler left no kernel_details.csv") == 2, table


@pytest.mark.npu
@pytest.mark.full("two processes a part over the emulation; nothing that serves depends on it")
def test_every_kind_of_part_through_captured_graphs() -> None:
    parts = ("text", "pictures", "moe-decode")
    _, results = run_bench(*(word for part in parts for word in ("--part", part)), memory_bytes=4 << 30)
    assert list(results) == list(parts)
    assert results["text"]["npu_runner"]["output_tokens_per_second"][0] > 0
    assert results["pictures"]["npu_runner"][0]["pictures_per_second"] > 0
    decode = results["moe-decode"]["npu_runner"]
    assert decode["graphs"].partition(" (")[0] == "1, 2, 3"
    # Compiled code has the router inside, and nobody sees what it chose.
    assert decode["batches"]["3"]["bytes"]["expert_bytes"] is None


@pytest.mark.npu
@pytest.mark.skipif(has_real_cann(), reason="another torch_npu may be installed there")
def test_kernels_are_read_from_the_file_that_torch_npu_writes(tmp_path: Path) -> None:
    headers = installed_wheel() / "torch_npu/profiler/analysis/prof_common_func/_csv_headers.py"
    columns = runpy.run_path(str(headers))["CsvHeaders"].OP_SUMMARY_KERNEL_BASE_HEADERS
    with (tmp_path / "kernel_details.csv").open("w", newline="") as file:
        rows = csv.DictWriter(file, columns, restval="N/A")
        rows.writeheader()
        for start, duration in (("1763800000000000.125", "250000.5"), ("1763800000500000.125", "250000.0")):
            rows.writerow({"Name": "aclnnMatmul", "Start Time(us)": start, "Duration(us)": duration})
    profile = DeviceProfile()
    read_kernels(tmp_path / "kernel_details.csv", profile)
    spans = profile.spans_ns
    assert [end - start for start, end in spans] == pytest.approx([250_000_500, 250_000_000], abs=1000)
    assert idle_share(spans, 1.0) == pytest.approx(0.5, abs=1e-3)
