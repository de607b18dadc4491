"""bench.pages and bench.rendering at sizes that a CPU does in seconds. Times mean nothing here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pypdfium2
import pytest

from bench import documents
from bench.common import ROOT, job_workers
from bench.documents import write_documents, write_reader
from bench.pages import READERS, report, time_tower
from bench.shapes import make_vision_model
from npu_runner import RunnerConfig
from npu_runner.runner.images import ImageEncoder
from npu_runner.tables.make_rows import make_rows
from npu_runner.tables.options import RowsOptions


def bench(module: str, *arguments: str) -> Any:
    """The JSON of a run."""
    command = [sys.executable, "-m", f"bench.{module}", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.full("the command read, a process each time; nothing that serves depends on it")
def test_read_at_tiny_sizes_with_and_without_drafts() -> None:
    arguments = ("--platform", "cpu", "--dtype", "float32", "--reader", "tiny", "--pages", "18", "--repeats", "1")
    found = bench("pages", *arguments)["results"]["tiny"]
    assert found.keys() == {"npu_runner", "npu_runner-mtp"}, "a CPU has no profiler, and vLLM is not installed"
    for (run,) in found.values():
        assert run["tokens"]["completion"] == 18 * 8
        assert run["tokens"]["prefill_computed"] == run["tokens"]["prompt"], "no two pages are alike"
        assert run["num_prepared"] == 18
        assert run["pages_per_second"][0] > 0
        assert all(share > 0 for share in run["shares"].values()), run["shares"]
        assert sum(run["shares"].values()) <= 1
        seconds = run["seconds"]
        assert seconds["total"] > seconds["rows"] + seconds["serve"] + seconds["results"]
    assert found["npu_runner-mtp"][0]["tokens"]["draft_proposed"] > 0


@pytest.mark.slow
@pytest.mark.full("rendering workers, started for each case; nothing that serves depends on it")
def test_rendering_has_a_figure_for_each_kind_resolution_and_number_of_cores() -> None:
    found = bench("rendering", "--cores", "1", "--pages", "1", "--dpi", "36", "72")["rates"]
    assert found.keys() == {"1"}
    assert found["1"].keys() == {f"{kind}, {dpi} DPI" for kind in ("scans", "text") for dpi in (36, 72)}
    assert all(rate > 0 for rate in found["1"].values())


def test_documents_are_scans_and_text_and_no_two_pages_are_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "_NUM_SCANS", 1)
    monkeypatch.setattr(documents, "_PAGES_EACH", 2)
    write_documents(tmp_path / "documents", 5)
    files = sorted((tmp_path / "documents").iterdir())
    assert [path.name for path in files] == ["00000-scans.pdf", "00002-text.pdf", "00004-scans.pdf"]
    pages = [page for path in files for page in pypdfium2.PdfDocument(path)]
    assert len({page.render(scale=0.5).to_numpy().tobytes() for page in pages}) == 5
    kinds = [pypdfium2.raw.FPDF_PAGEOBJ_IMAGE in {each.type for each in page.get_objects()} for page in pages]
    assert kinds == [True, True, False, False, True]
    assert [len(page.get_textpage().get_text_bounded().splitlines()) for page in pages] == [1, 1, 55, 55, 1]


@pytest.mark.parametrize("name", ["lighton-ocr-3", "chandra-ocr-2"])
def test_a_page_has_the_image_tokens_that_its_reader_names(name: str, tmp_path: Path) -> None:
    shape, rows, reader = READERS[name], tmp_path / "rows.jsonl", tmp_path / "reader.json"
    model = make_vision_model(tmp_path, shape.model, shape.longest)
    write_documents(tmp_path / "documents", 1, ["text"])
    write_reader(reader, {"longest": shape.longest, "shortest": shape.longest}, shape.prompt)
    make_rows([str(tmp_path / "documents")], RowsOptions(output=str(rows), reader=str(reader)))
    config = RunnerConfig.from_keywords(str(model), platform="cpu")
    with job_workers(config, rows, tmp_path / "documents") as (prepare, _, found):
        prepared = prepare(next(found))
    assert prepared.error is None
    assert [image.num_tokens for image in prepared.prompt.images] == [shape.image_tokens]


def test_the_seconds_of_the_tower_are_those_of_the_encoder_that_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    marks = iter([0.0, 100.0, 5.0, 6.0, 7.0, 9.0])
    monkeypatch.setattr(ImageEncoder, "encode", lambda encoder, images: images())
    monkeypatch.setattr("bench.pages.time.perf_counter", lambda: next(marks))
    tower_seconds = time_tower("cpu")
    profiling, serving = ImageEncoder.__new__(ImageEncoder), ImageEncoder.__new__(ImageEncoder)
    found: Any = [encoder.encode(lambda: "found") for encoder in (profiling, serving, serving)]  # type: ignore[arg-type]
    assert found == ["found"] * 3
    assert tower_seconds() == 3.0


def test_the_report_compares_medians_and_names_what_failed() -> None:
    sides = {"npu_runner": [{"pages_per_second": [3.0]}, {"pages_per_second": [9.0]}, {"pages_per_second": [4.0]}],
             "vllm": [{"pages_per_second": [2.0, 1.0, 5.0]}], "npu_runner-mtp": [None]}
    for side in sides["npu_runner"] + sides["vllm"]:
        side["prompt_tokens"] = 40.0
    lines = list(report("tiny", sides, 7))
    assert any("npu_runner reads 2.00 times as many pages as vLLM" in line for line in lines)
    assert any(line.split() == ["npu_runner-mtp", "failed"] for line in lines)
    assert "LightOnOCR-2 5.71" in lines[-1]
