"""A job over hostile and real documents: no crash, no hang, bounded memory, and each page is one result."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pypdfium2
import pytest

from npu_runner.prompts.media import pdf_fonts
from npu_runner.prompts.processor import ChatProcessor
from tests import full_set
from tests.batch.job_folder import Job
from tests.batch.page_engine import PageEngine, asks
from tests.batch.scripted import read_rows, write_rows
from tests.faults.slow_pages import slow_pages
from tests.full_set import only_full
from tests.prompts.pdf_files import CJK, cjk, colour, empty, form, mixed, one_page, pdf, stream, text
from tests.prompts.preprocessing_checkpoints import write_qwen_vl
from tests.prompts.real_documents import damaged, real_documents

REFUSED = {"pdf_broken", "pdf_page_broken", "pdf_password", "image_not_recognised", "pdf_font_missing",
           "image_truncated", "image_broken"}  # fmt: skip
ENDED = {"preprocessing_timeout", "preprocessing_out_of_memory", "preprocessing_crashed", "image_out_of_memory"}


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> ChatProcessor:
    return ChatProcessor(str(write_qwen_vl(tmp_path_factory.mktemp("checkpoint"))))


def results(folder: Path, documents: dict[str, bytes], processor: ChatProcessor, **options: Any) -> dict[str, Any]:
    """The first page of each, by its name."""
    job, media = Job(folder / "job"), folder / "media"
    media.mkdir()
    for name, data in documents.items():
        (media / name).write_bytes(data)
    write_rows(job.input, [asks(f"{name}#page=1", dpi=100) for name in documents])
    job.run(engine=PageEngine, processor=processor, allowed_media_dir=media, **{
        "preprocessing_workers": 2, "worker_memory_bytes": 1 << 30, "preprocessing_timeout": 60.0, **options})
    lines = {line["custom_id"].removesuffix("#page=1"): line for line in read_rows(job.output)}
    assert sorted(lines) == sorted(documents)
    return lines


def code(line: dict[str, Any]) -> str | None:
    return line["error"] and line["error"]["code"]


def image_page(width: int, height: int, bits: int, colours: str, data: bytes) -> bytes:
    """A page of one image, whose packed bytes are given."""
    more = (f"/Type/XObject/Subtype/Image/Width {width}/Height {height}/BitsPerComponent {bits}/ColorSpace/{colours}"
            "/Filter/FlateDecode").encode()
    return one_page("0 0 300 300", b"q 300 0 0 300 0 0 cm /I Do Q", b"/XObject<</I 5 0 R>>", stream(data, more))


def bombs() -> dict[str, bytes]:
    """Small files that ask for much."""
    found = {
        "no_size.pdf": one_page("0 0 0 0"), "wide.pdf": one_page("0 0 14400 1"), "vast.pdf": one_page("0 0 1e9 1e9"),
        "million.pdf": one_page(f"0 0 {10**9} {10**9}", b"0 0 m 99 99 l S"), "slow.pdf": slow_pages(1)}  # fmt: skip
    if not full_set.is_fast:
        found |= {
            "bilevel.pdf": image_page(60_000, 60_000, 1, "DeviceGray", zlib.compress(bytes(60_000 * 60_000 // 8))),
            "rgb.pdf": image_page(20_000, 20_000, 8, "DeviceRGB", zlib.compress(bytes(3 * 20_000 * 20_000))),
            "lines.pdf": one_page("0 0 300 300", zlib.compress(b"0 0 m 300 300 l S\n" * 5_000_000), packed=b"/Filter"
                                  b"/FlateDecode")}  # fmt: skip
    return found


def test_bombs_end_by_themselves_or_by_their_limits(processor: ChatProcessor, tmp_path: Path) -> None:
    good = {f"good-{number}.pdf": pdf(mixed) for number in range(4)}
    seconds = 4.0 if full_set.is_fast else 40.0
    lines = results(tmp_path, {**bombs(), **good}, processor, preprocessing_timeout=seconds)
    assert {code(lines[name]) for name in good} == {None}
    assert code(lines["slow.pdf"]) in ENDED
    assert {code(line) for line in lines.values()} <= {None, "image_aspect_ratio", *ENDED}


@pytest.mark.parametrize("count", [24, *only_full("many copies", 240)])
def test_damaged_documents_fail_by_name_or_are_answered(count: int, processor: ChatProcessor, tmp_path: Path) -> None:
    originals = {"mixed.pdf": pdf(mixed, text("two")), "form.pdf": pdf(form), "text.pdf": pdf(*[text("words")] * 5)}
    if count > 24:
        originals = {name: data for name, data in real_documents().items() if name.endswith(".pdf")} or originals
    lines = results(tmp_path, damaged(originals, count), processor)
    assert {code(line) for line in lines.values()} <= {None, *REFUSED}
    for line in lines.values():
        assert (line["error"] is None) is ("page" in line)


def test_pages_without_ink_are_marked(processor: ChatProcessor, tmp_path: Path) -> None:
    documents = {"empty.pdf": pdf(empty), "grey.pdf": pdf(colour(0.4)), "text.pdf": pdf(text("a")),
                 "form.pdf": pdf(form), **{f"{name}.pdf": pdf(cjk(name)) for name in CJK}}  # fmt: skip
    lines = results(tmp_path, documents, processor)
    assert {name for name, line in lines.items() if line.get("page", {}).get("blank")} == {"empty.pdf", "grey.pdf"}
    missing = {f"{name}.pdf" for name in pdf_fonts.fonts_here().missing}
    assert {name for name, line in lines.items() if code(line) == "pdf_font_missing"} == missing


@pytest.mark.full("some hundred documents")
def test_real_documents_are_those_of_pypdfium2(processor: ChatProcessor, tmp_path: Path) -> None:
    documents = {name: data for name, data in real_documents().items() if name.endswith(".pdf")}
    if not documents:
        pytest.skip("no package in .cache/documents; scripts/test_all.sh fetches them")
    lines = results(tmp_path, documents, processor)
    assert {code(line) for line in lines.values()} <= {None, *REFUSED}
    for name, data in documents.items():
        facts = lines[name].get("page")
        if facts is None:
            continue
        page = pypdfium2.PdfDocument(data)[0]
        image = page.render(scale=min(100 / 72, 3500 / max(page.get_size()))).to_pil()
        assert (facts["width"], facts["height"]) == image.size, name
        if not facts["blank"]:
            assert np.ptp(np.asarray(image)) > 0 or "form" in name.lower(), name
    assert sum("page" in line for line in lines.values()) > 0.8 * len(lines)
