"""PDFium and the fonts are a setting of a job that has answered pages of PDFs, and of no other."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from npu_runner.batch.files.names import manifest_path
from npu_runner.errors import ConfigError, JobError
from npu_runner.prompts.media import pdf_fonts
from npu_runner.prompts.processor import ChatProcessor
from npu_runner.request.prompt_inputs import PromptInputs
from npu_runner.request.sampling_params import SamplingParams
from tests.batch.job_folder import Job
from tests.batch.page_engine import PageEngine, asks
from tests.batch.scripted import read_rows, row, write_rows
from tests.prompts.failing_fonts import KILLED, with_fonts_child
from tests.prompts.image_bytes import encoded, photo
from tests.prompts.pdf_files import pdf, text, tiff
from tests.prompts.preprocessing_checkpoints import write_qwen_vl

IMAGES = [asks("a.png"), asks("a.tif#page=1")]
PAGES = [*IMAGES, asks("a.pdf#page=1", longest=60)]
MORE = [*PAGES, asks("a.pdf#page=2", longest=60)]
Run = Callable[..., Any]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    (tmp_path / "a.png").write_bytes(encoded(photo(40, 60)))
    (tmp_path / "a.tif").write_bytes(tiff(photo(40, 60)))
    (tmp_path / "a.pdf").write_bytes(pdf(text("one"), text("two")))
    return Job(tmp_path)


@pytest.fixture
def run(job: Job) -> Iterator[Run]:
    """Runs the job over these rows."""
    processor = ChatProcessor(str(write_qwen_vl(job.folder / "checkpoint")))

    def run(rows: list[dict[str, Any]], engine: Any = PageEngine, **options: Any) -> Any:
        write_rows(job.input, rows)
        return job.run(engine=engine, processor=processor, allowed_media_dir=job.folder, **options)

    pdf_fonts._fonts_of_child.cache_clear()
    yield run
    pdf_fonts._fonts_of_child.cache_clear()


def decoders(job: Job) -> dict[str, str]:
    """The renderer in the job's record."""
    found = json.loads(manifest_path(job.output).read_text())["settings"]["prompts.decoders"]
    return {name: value for name, value in found.items() if name not in ("pillow-heif", "pdf")}


def with_decoders(job: Job, **others: str) -> None:
    """As a host with another renderer would have written the record."""
    path = manifest_path(job.output)
    fields = json.loads(path.read_text())
    fields["settings"]["prompts.decoders"] |= others
    path.write_text(json.dumps(fields))


def test_a_job_of_images_has_no_fonts_and_no_process_finds_them(
    job: Job, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = with_fonts_child(tmp_path, "", monkeypatch)
    run(IMAGES)
    assert [line["error"] for line in read_rows(job.output)] == [None, None]
    assert decoders(job) == {}
    assert starts.read_text() == ""


def test_the_first_answer_to_a_page_of_a_pdf_records_its_renderer(job: Job, run: Run) -> None:
    """Also in a job that was begun with images, whose answers keep the name of their settings."""
    run(IMAGES)
    run(PAGES)
    assert decoders(job) == pdf_fonts.fonts_here().renderer
    lines = read_rows(job.output)
    assert [line["error"] for line in lines] == [None] * 3
    assert len({line["response"]["body"]["system_fingerprint"] for line in lines}) == 1
    assert run(MORE).tally.num_answered == 1


def test_a_page_that_fails_records_nothing_and_its_remedy_is_accepted(job: Job, run: Run) -> None:
    run([asks("a.pdf#page=3")])
    assert decoders(job) == {}
    run([asks("a.pdf#page=3"), *IMAGES], retry=("errors",), accept_changed=("prompts.decoders",))
    assert len(read_rows(job.output)) == 3


def test_the_remedy_is_accepted_where_no_decoder_is_recorded(job: Job) -> None:
    write_rows(job.input, [row("a"), row("b", "bad")])
    job.run()
    assert "prompts.decoders" not in json.loads(manifest_path(job.output).read_text())["settings"]
    write_rows(job.input, [row("a"), row("b")])
    assert job.run(retry=("errors",), accept_changed=("prompts.decoders",)).exit_status == 0


@pytest.mark.parametrize("name", ["pdfium", "pdf_fonts"])
def test_another_renderer_is_refused_before_the_model_is_loaded(name: str, job: Job, run: Run) -> None:
    run(PAGES)
    with_decoders(job, **{name: "another"})
    before, num_engines = job.output.read_bytes(), len(job.engines)
    with pytest.raises(ConfigError, match=rf'prompts.decoders: was .*"{name}": "another".* is .*{name}'):
        run(MORE)
    assert (job.output.read_bytes(), len(job.engines)) == (before, num_engines)
    run(MORE, accept_changed=("prompts.decoders",))
    assert decoders(job) == pdf_fonts.fonts_here().renderer
    assert [change["name"] for change in json.loads(manifest_path(job.output).read_text())["changes"]] == [
        "prompts.decoders"]  # fmt: skip


def test_where_fonts_are_not_known_the_first_page_is_refused(
    job: Job, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The process that finds them is killed; hosts of a cluster find them in their workers alone."""
    run(PAGES)
    with_decoders(job, pdf_fonts="another")
    before = job.output.read_bytes()
    with_fonts_child(tmp_path, KILLED, monkeypatch)
    with pytest.raises(ConfigError, match=r'renders pages of PDFs with other.* pdf_fonts: was "another", is') as e:
        run(MORE)
    assert "--accept-changed prompts.decoders" in str(e.value)
    assert [("killed by SIGKILL" in line) for line in caplog.messages] == [True]
    assert job.output.read_bytes() == before
    run(MORE, accept_changed=("prompts.decoders",))
    assert decoders(job) == pdf_fonts.fonts_here().renderer
    assert len(read_rows(job.output)) == 4


def test_an_output_that_recorded_the_package_goes_on(job: Job, run: Run) -> None:
    run(PAGES)
    with_decoders(job, pypdfium2="5.14")
    run(MORE)
    assert decoders(job) == {**pdf_fonts.fonts_here().renderer, "pypdfium2": "5.14"}


@dataclass
class LosesTheRecord(PageEngine):
    """From its first request on, the record cannot be replaced."""

    record: Path = Path()

    def add_request(self, request_id: str, prompt: PromptInputs, params: SamplingParams) -> list[int]:
        added = super().add_request(request_id, prompt, params)
        self.record.unlink(missing_ok=True)
        self.record.mkdir()
        return added


def test_the_record_is_on_disk_before_the_answer(job: Job, run: Run) -> None:
    with pytest.raises(JobError, match="manifest"):
        run(PAGES[-1:], engine=lambda config: LosesTheRecord(config, record=manifest_path(job.output)))
    assert read_rows(job.output) == []
