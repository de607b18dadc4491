"""A job over pages: each page is one result, and an answer is that to the same pixels as an image."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pypdfium2
import pytest

from npu_runner.batch.files.output_lock import job_at_work
from npu_runner.batch.rows.preprocessing import RowPreprocessor
from npu_runner.cli import main as cli
from npu_runner.processes.child import describe_exit
from npu_runner.prompts.media import pdf_fonts
from npu_runner.prompts.media.file_kinds import DOCUMENT_SUFFIXES
from npu_runner.prompts.processor import ChatProcessor
from tests.batch.job_folder import Job
from tests.batch.page_engine import PageEngine, asks
from tests.batch.scripted import OneRow, ScriptedProcessor, read_rows, row, write_rows
from tests.prompts.image_bytes import encoded
from tests.prompts.pdf_files import cjk, colour, empty, mixed, one_page, pdf, shades, text, tiff
from tests.prompts.preprocessing_checkpoints import write_qwen_vl

SMALL = ["--platform", "cpu", "--max-model-len", "512", "--kv-cache-bytes", "64M", "--progress", "off",
         "--preprocessing-workers", "2"]  # fmt: skip


def batch(folder: Path, *more: str) -> int:
    return cli.main(["batch", "-i", str(folder / "in.jsonl"), "-o", str(folder / "out.jsonl"), *SMALL,
                     "--allowed-media-dir", str(folder), *more])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job of pages that are answered and pages that are not."""
    folder = tmp_path_factory.mktemp("documents")
    (folder / "good.pdf").write_bytes(data := pdf(mixed, text("two"), empty))
    document = pypdfium2.PdfDocument(data)
    document.init_forms()
    for index in range(3):
        image = document[index].render(scale=96 / 72).to_pil()
        (folder / f"good-{index + 1}.png").write_bytes(encoded(image))
    (folder / "scan.tif").write_bytes(tiff(*shades(2, mode="1"), compression="group4"))
    (folder / "locked.pdf").write_bytes(pdf(colour(0.3), password="a secret word"))
    (folder / "broken.pdf").write_bytes(data[:300])
    (folder / "huge.pdf").write_bytes(one_page("0 0 14400 14400"))
    (folder / "cjk.pdf").write_bytes(pdf(cjk("Japan1")))
    (folder / "passwords.json").write_text('{"locked.pdf": "a secret word"}')
    pages = [asks(f"good.pdf#page={page}", dpi=96) for page in (1, 2, 3, 4)]
    images = [asks(f"good-{page}.png") for page in (1, 2, 3)]
    others = [asks(name) for name in ("scan.tif#page=2", "scan.tif", "locked.pdf", "broken.pdf#page=1", "cjk.pdf",
                                      "gone.pdf#page=7")]
    rows = [*pages, *images, *others, asks("huge.pdf", dpi=600, longest=60_000)]
    both = [part for number in (1, 2) for part in pages[number]["body"]["messages"][0]["content"][:1]]
    rows.append(row("both", messages=[{"role": "user", "content": [*both, {"type": "text", "text": "?"}]}],
                    max_tokens=2))  # fmt: skip
    write_rows(folder / "in.jsonl", rows)
    assert batch(folder, "--pdf-passwords", str(folder / "passwords.json")) == 3
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Any]:
    return {line["custom_id"]: line for line in read_rows(folder / "out.jsonl")}


def code(line: dict[str, Any]) -> str | None:
    return line["error"] and line["error"]["code"]


def test_each_page_has_one_result(folder: Path, found: dict[str, Any]) -> None:
    assert sorted(found) == sorted(line["custom_id"] for line in read_rows(folder / "in.jsonl"))
    has_font = "Japan1" not in pdf_fonts.fonts_here().missing
    assert {name: code(line) for name, line in found.items() if code(line)} == {
        "good.pdf#page=4": "pdf_page_missing", "scan.tif": "image_several_pages", "broken.pdf#page=1": "pdf_broken",
        "gone.pdf#page=7": "media_missing", "huge.pdf": "image_too_large",
        **({} if has_font else {"cjk.pdf": "pdf_font_missing"})}  # fmt: skip


@pytest.mark.parametrize("page", [1, 2, 3])
def test_the_answer_is_that_to_an_image_of_the_page(page: int, found: dict[str, Any]) -> None:
    of_page, of_image = (found[name]["response"]["body"] for name in (f"good.pdf#page={page}", f"good-{page}.png"))
    assert (of_page["choices"], of_page["usage"]) == (of_image["choices"], of_image["usage"])


def test_facts_of_a_page_stand_beside_its_name(found: dict[str, Any]) -> None:
    facts = [found[f"good.pdf#page={page}"]["page"] for page in (1, 2, 3)]
    assert facts == [{"blank": page == 3, "width": 560, "height": 794, "text_layer": page < 3} for page in (1, 2, 3)]
    assert list(found["good.pdf#page=1"]) == ["id", "custom_id", "page", "response", "error"]
    assert found["scan.tif#page=2"]["page"] == {"blank": False, "width": 65, "height": 48, "text_layer": None}
    assert found["both"]["page"] == facts[1:]
    assert not any("page" in line["response"]["body"] for line in found.values())
    assert not any("page" in found[name] for name in found if not name.partition("#")[0].endswith(DOCUMENT_SUFFIXES)
                   and name != "both")


def test_the_table_has_columns_for_pages(folder: Path) -> None:
    assert cli.main(["table", str(folder / "out.jsonl"), "-o", str(folder / "table.jsonl")]) == 0
    lines = {line["custom_id"]: line for line in read_rows(folder / "table.jsonl")}
    names = ("page_blank", "page_width", "page_height", "page_text_layer")
    assert [lines["good.pdf#page=3"][name] for name in names] == [True, 560, 794, False]
    assert [lines["good-3.png"][name] for name in names] == [None] * 4


def test_the_report_shows_pages(folder: Path) -> None:
    assert cli.main(["report", str(folder / "out.jsonl"), "-i", str(folder / "in.jsonl"), "-o",
                     str(folder / "page.html"), "--allowed-media-dir", str(folder)]) == 0
    assert (folder / "page.html").read_text().count("data:image/jpeg") >= 8


def test_a_password_is_in_no_record(folder: Path) -> None:
    assert not [path.name for path in folder.iterdir() if b"a secret word" in path.read_bytes()
                and path.name != "passwords.json"]  # fmt: skip


def test_other_fonts_or_another_pdfium_are_refused_by_name(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = folder / "out.jsonl.manifest.json"
    before = path.read_text()
    decoders = json.loads(before)["settings"]["prompts.decoders"]
    for name in ("pdfium", "pdf_fonts"):
        path.write_text(before.replace(decoders[name], "another"))
        assert batch(folder, "--retry", "errors") == 2
        assert "prompts.decoders" in capfd.readouterr().err
    path.write_text(before)


def test_generate_shows_a_page(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def generate(image: str) -> tuple[int, str]:
        status = cli.main(["generate", "--image", image, "What colour is it?", "--max-tokens", "8", *SMALL[:6],
                           "--pdf-passwords", "passwords.json"])  # fmt: skip
        return status, capfd.readouterr().out

    monkeypatch.chdir(folder)
    of_image = generate("good-1.png")
    assert of_image[0] == 0
    assert generate('{"url": "good.pdf", "page": 1, "dpi": 96}') == of_image
    assert generate("locked.pdf")[0] == generate("scan.tif#page=1")[0] == 0
    assert {generate(image)[0] for image in ("gone.pdf#page=1", "good.pdf", '{"page": 1}', "{")} == {2}


def test_pages_of_a_row_are_known_without_preparing_it() -> None:
    rows = [(asks("a.pdf", page=2), [("a.pdf", 2)]), (asks("a.pdf#page=3"), [("a.pdf", 3)]), (asks("b.png"), []),
            (row("text"), [])]  # fmt: skip
    for request, expected in rows:
        source = OneRow(json.dumps(request).encode())
        prepare = RowPreprocessor(source=source, processor=ScriptedProcessor())  # type: ignore[arg-type]
        assert prepare.pages_of(source.row) == expected
    assert prepare.pages_of(OneRow(b"{").row) == []


# -- kills ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_pages", "num_kills"), [
    pytest.param(3000, 200, marks=pytest.mark.full("200 kills")), (40, 2)])  # fmt: skip
def test_a_killed_job_answers_each_page_once(num_pages: int, num_kills: int, tmp_path: Path) -> None:
    processor = ChatProcessor(str(write_qwen_vl(tmp_path / "checkpoint")))
    job, media = Job(tmp_path), tmp_path / "media"
    media.mkdir()
    for name in "abc":
        (media / f"{name}.pdf").write_bytes(pdf(*[text(f"{name} {page}") for page in range(num_pages // 4)]))
    (media / "d.tif").write_bytes(tiff(*shades(num_pages // 4)))
    names = [f"{name}#page={page + 1}" for name in ("a.pdf", "b.pdf", "c.pdf", "d.tif")
             for page in range(num_pages // 4)]  # fmt: skip
    write_rows(job.input, [asks(name, longest=60) for name in names])
    random_delay = random.Random(0)
    for _ in range(num_kills):
        child = os.fork()
        if child == 0:
            os.setsid()
            try:
                job.run(engine=PageEngine, processor=processor, allowed_media_dir=media)
            finally:
                os._exit(0)
        time.sleep(random_delay.uniform(0.2, 2.0))
        os.kill(child, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status in (0, -signal.SIGKILL), describe_exit(status)
        while job_at_work(job.output) is not None:
            time.sleep(0.01)
    job.run(engine=PageEngine, processor=processor, allowed_media_dir=media)
    lines = read_rows(job.output)
    assert sorted(line["custom_id"] for line in lines) == sorted(names)
    assert {(code(line), line["page"]["blank"], line["page"]["text_layer"]) for line in lines} == {
        (None, False, True), (None, False, None)}  # fmt: skip
