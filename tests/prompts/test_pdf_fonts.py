"""The process that finds the fonts of a host: it runs once, and its failure is said."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from npu_runner.cli.doctor import _check_pdf_fonts
from npu_runner.platforms.cpu.platform import CpuPlatform
from npu_runner.platforms.examination import Examination, Findings
from npu_runner.platforms.host import Host
from npu_runner.prompts.media import pdf_fonts
from tests.prompts.failing_fonts import KILLED, with_fonts_child


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """No answer of an earlier process is kept, nor left."""
    pdf_fonts._fonts_of_child.cache_clear()
    yield
    pdf_fonts._fonts_of_child.cache_clear()


def test_a_process_of_its_own_finds_the_same_fonts() -> None:
    assert pdf_fonts.fonts_of_host() == pdf_fonts.fonts_here()


@pytest.mark.parametrize(("code", "cause"), [
    (KILLED, "killed by SIGKILL"),
    ("sys.stderr.write('no such glyph'); sys.stderr.flush(); os._exit(3)", "exit status 3: no such glyph"),
    ("print('{}'); sys.stdout.flush(); os._exit(0)", "pdfium"),
    ("time.sleep(60)", "timed out after 1"),
])  # fmt: skip
def test_a_process_that_fails_is_named_once_with_its_cause(
    code: str, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    starts = with_fonts_child(tmp_path, code, monkeypatch)
    if "sleep" in code:
        monkeypatch.setattr(pdf_fonts, "_CHILD_SECONDS", 1)
    with caplog.at_level(logging.WARNING):
        assert pdf_fonts.fonts_of_host() is None
        assert pdf_fonts.fonts_of_host() is None
    (line,) = caplog.messages
    assert cause in line
    assert "no missing script is named before the job" in line
    assert starts.read_text() == "started\n", "the answer is kept"


def test_without_pypdfium2_no_process_starts_and_nothing_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    starts = with_fonts_child(tmp_path, KILLED, monkeypatch)
    monkeypatch.setattr(pdf_fonts, "find_spec", lambda name: None)
    assert pdf_fonts.fonts_of_host() is None
    assert (starts.read_text(), caplog.messages) == ("", [])


def test_threads_that_ask_at_once_have_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starts = with_fonts_child(tmp_path, "time.sleep(1)", monkeypatch)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: pdf_fonts.fonts_of_host(), range(4)))
    assert found == [pdf_fonts.fonts_here()] * 4
    assert starts.read_text() == "started\n"


@pytest.mark.from_nothing  # a process that is forked reads no sitecustomize
def test_the_doctor_tells_a_failure_from_a_package_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(packages: dict[str, str | None]) -> tuple[str, str]:
        found = _check_pdf_fonts(Examination(CpuPlatform(), Findings(Host(), packages)))
        return found.status, found.found

    assert check({}) == ("skipped", "pypdfium2 is not installed; pip install 'pypdfium2>=5.15' adds PDFs")
    assert check({"pypdfium2": "5.15.2"})[0] in ("ok", "warning")
    with_fonts_child(tmp_path, KILLED, monkeypatch)
    status, found = check({"pypdfium2": "5.15.2"})
    assert status == "failed"
    assert "SIGKILL" in found
