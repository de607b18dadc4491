"""The pages of documents become rows: each page once, a broken document one row that fails by name."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pypdfium2
import pytest
from PIL import Image

from npu_runner.batch.rows.openai_format import parse_row
from npu_runner.errors import ConfigError
from npu_runner.serving.workers.pool import PoolLimits
from npu_runner.tables.document_pages import DocumentOpener, Documents, PageRanges
from npu_runner.tables.sources import DOCUMENT, Source
from tests.full_set import only_full
from tests.prompts.real_documents import real_documents
from tests.tables.made import made, rows
from tests.tables.pages import pdf


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two PDFs, a TIFF of three pages and one of one page, and a PNG."""
    found = tmp_path / "docs"
    pdf(found / "reports" / "a.pdf", num_pages=12)
    pdf(found / "b.PDF", num_pages=3)
    frames = [Image.new("L", (30, 40), 20 * shade) for shade in range(3)]
    frames[0].save(found / "scan.tif", save_all=True, append_images=frames[1:])
    frames[0].save(found / "one.tiff")
    frames[0].save(found / "c.png")
    return found


def documents(output: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The first line of the documents beside rows, and the others by path."""
    head, *lines = map(json.loads, (output.parent / f"{output.name}.documents.jsonl").read_bytes().splitlines())
    return head, {line["path"]: line for line in lines}


def address(row: dict[str, Any]) -> dict[str, Any]:
    (found,) = [part["image_url"] for part in row["body"]["messages"][-1]["content"] if part["type"] == "image_url"]
    return dict(found)


def test_each_page_is_a_row(folder: Path, tmp_path: Path) -> None:
    result = made(tmp_path / "r.jsonl", folder, prompt="Read it.")
    found = [json.loads(line) for line in (tmp_path / "r.jsonl").read_bytes().splitlines()]
    names = [*(f"b.PDF#page={number}" for number in (1, 2, 3)), "c.png", "one.tiff",
             *(f"reports/a.pdf#page={number}" for number in range(1, 13)),
             *(f"scan.tif#page={number}" for number in (1, 2, 3))]  # fmt: skip
    assert [row["custom_id"] for row in found] == names
    assert "made of   18 pages of 3 documents, 2 images" in result.to_lines()
    row = found[names.index("reports/a.pdf#page=10")]
    assert row["body"]["metadata"] == {"document": "reports/a.pdf", "page": 10, "pages": 12}
    assert address(row) == {"url": "reports/a.pdf", "page": 10,
                            "version": documents(tmp_path / "r.jsonl")[1]["reports/a.pdf"]["version"]}  # fmt: skip
    for row in found:
        parse_row(row)
    counts = {path: line["pages"] for path, line in documents(tmp_path / "r.jsonl")[1].items()}
    assert counts == {"b.PDF": 3, "reports/a.pdf": 12, "scan.tif": 3}


def test_images_alone_are_rows_as_before(folder: Path, tmp_path: Path) -> None:
    """Also a TIFF of one page: its row has no page, and no file of documents is there."""
    (one, png) = rows(tmp_path / "r.jsonl", folder / "one.tiff", folder / "c.png")
    for row, name in ((one, "one.tiff"), (png, "c.png")):
        assert row["custom_id"] == name
        assert address(row) == {"url": name}
        assert "metadata" not in row["body"]
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["r.jsonl"]
    rows(tmp_path / "r.jsonl", folder)
    assert documents(tmp_path / "r.jsonl")[1]
    rows(tmp_path / "r.jsonl", folder / "c.png")
    assert not (tmp_path / "r.jsonl.documents.jsonl").exists(), "it described rows that are gone"


@pytest.mark.parametrize(("text", "chosen"), [
    (None, [1, 2, 3, 4, 5, 6]), ("2", [2]), ("1-3", [1, 2, 3]), ("r1", [6]), ("r3-r1", [4, 5, 6]), ("3-r3", [3, 4]),
    ("1-2,r2-r1", [1, 2, 5, 6]), ("2-4, 3-5", [2, 3, 4, 5]), ("5-9", [5, 6]), ("9", []), ("r9-2", [1, 2]),
    ("4-r3", [4]),
])  # fmt: skip
def test_pages_are_chosen(text: str | None, chosen: list[int]) -> None:
    assert list(PageRanges.parse(text).numbers(6)) == chosen


@pytest.mark.parametrize("text", ["", "0", "1-", "-3", "r0", "a", "1,,2", "1-2-3", "1 2", "\u0663"])
def test_other_texts_are_no_pages(text: str) -> None:
    with pytest.raises(ConfigError, match=r"pages: .* is no range of pages; write 3, 1-5 or r3-r1"):
        PageRanges.parse(text)


@pytest.mark.parametrize("text", ["4-2", "1,r1-r3"])
def test_a_range_that_ends_before_it_begins_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="ends before it begins; write the earlier page first"):
        PageRanges.parse(text)


def test_documents_without_a_chosen_page_name_the_option(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"so there are no rows; left out: 3 pages that --pages does not name"):
        rows(tmp_path / "r.jsonl", folder / "b.PDF", pages="9")


def test_pages_that_are_left_out_are_counted(folder: Path, tmp_path: Path) -> None:
    result = made(tmp_path / "r.jsonl", folder / "reports", folder / "b.PDF", prompt="?", pages="1,r2-r1")
    assert "made of   6 pages of 2 documents" in result.to_lines()
    assert "left out  9 pages that --pages does not name" in result.to_lines()


def test_a_document_that_does_not_open_is_one_row(folder: Path, tmp_path: Path) -> None:
    (folder / "broken.pdf").write_bytes(b"%PDF-1.7\nnothing")
    (folder / "empty.pdf").write_bytes(b"")
    pdf(folder / "locked.pdf", num_pages=4, password="secret")
    result = made(tmp_path / "r.jsonl", folder, prompt="?")
    found = {row["custom_id"]: row for row in map(json.loads, (tmp_path / "r.jsonl").read_bytes().splitlines())}
    _, lines = documents(tmp_path / "r.jsonl")
    for name, code in (("broken.pdf", "pdf_broken"), ("empty.pdf", "pdf_broken"), ("locked.pdf", "pdf_password")):
        assert lines[name]["error"]["code"] == code
        assert lines[name]["pages"] is None
        assert lines[name]["encrypted"] == (code == "pdf_password")
        assert [each for each in found if each.startswith(name)] == [f"{name}#page=1"]
        assert address(found[f"{name}#page=1"])["page"] == 1
        assert found[f"{name}#page=1"]["body"]["metadata"]["pages"] is None, "which is not known"
    assert any(line.startswith("broken    3 documents did not open (2 pdf_broken, 1 pdf_password)")
               for line in result.to_lines())  # fmt: skip
    passwords = tmp_path / "passwords.json"
    passwords.write_text(json.dumps({"locked.pdf": "secret"}))
    made(tmp_path / "r.jsonl", folder, prompt="?", pdf_passwords=passwords)
    assert documents(tmp_path / "r.jsonl")[1]["locked.pdf"]["pages"] == 4
    for path in (tmp_path / "r.jsonl", tmp_path / "r.jsonl.documents.jsonl"):
        assert b"secret" not in path.read_bytes()


def bomb(num_sections: int) -> bytes:
    """A small PDF, each of whose sections of cross-references unpacks to a gigabyte: each takes seconds and 2 GiB."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    block = packer.compress(bytes(1 << 24)) + packer.flush(zlib.Z_FULL_FLUSH)  # 16 MiB, which may be repeated
    checksum = ((1 << 30) % 65_521 << 16 | 1).to_bytes(4, "big")
    packed = zlib.compress(b"\x78\xda" + block * 64 + packer.flush() + checksum, 9)
    data, start, earlier = b"%PDF-1.7\n", 0, b""
    for number in range(1, num_sections + 1):
        start = len(data)
        data += (b"%d 0 obj\n<</Type /XRef /Size 9 /W [1 4 2] /Root 2 0 R %s /Filter [/FlateDecode /FlateDecode] "
                 b"/Length %d>>\nstream\n%s\nendstream\nendobj\n" % (number, earlier, len(packed), packed))  # fmt: skip
        earlier = b"/Prev %d" % start
    return data + b"startxref\n%d\n%%%%EOF\n" % start


@pytest.mark.parametrize(("num_sections", "memory", "seconds", "code"), [
    (1, 256 << 20, 60.0, "preprocessing_crashed"),
    *only_full("waits for a timeout", (40, 4 << 30, 4.0, "preprocessing_timeout")),
])  # fmt: skip
def test_a_document_that_ends_its_worker_or_its_time_ends_nothing_else(
    num_sections: int, memory: int, seconds: float, code: str, tmp_path: Path
) -> None:
    found = [pdf(tmp_path / f"{name}.pdf", num_pages=3) for name in "abcd"]
    found[1].write_bytes(bomb(num_sections))
    limits = PoolLimits(num_workers=1, task_timeout_seconds=seconds, worker_memory_bytes=memory)
    opened = Documents(DocumentOpener(), limits, lambda source, name: False, str)
    results = [document for _, _, document in opened.opened((Source(DOCUMENT, str(path)), path.name) for path in found)]
    assert [each is not None and each.num_pages for each in results] == [3, 1, 3, 3]
    assert results[1] is not None
    assert results[1].error is not None
    assert results[1].error[0] == code


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    pdf(tmp_path / "docs" / "a.pdf", num_pages=2)
    os.mkfifo(tmp_path / "docs" / "slow.pdf")
    found = rows(tmp_path / "r.jsonl", tmp_path / "docs" / "*.pdf", preprocessing_workers=1)
    assert [row["custom_id"] for row in found] == ["a.pdf#page=1", "a.pdf#page=2", "slow.pdf#page=1"]
    assert documents(tmp_path / "r.jsonl")[1]["slow.pdf"]["error"]["code"] == "media_missing"


def test_added_documents_leave_the_rows_there_as_they_are(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "r.jsonl"
    rows(output, folder)
    before, lines = output.read_bytes(), documents(output)[1]
    pdf(folder / "a_first.pdf", num_pages=2)
    Image.new("L", (9, 9)).save(folder / "new.png")
    os.unlink(folder / "b.PDF")
    said = made(output, folder, prompt="What is this?", append=True).to_lines()
    after = output.read_bytes()
    assert after.startswith(before)
    names = [json.loads(line)["custom_id"] for line in after.removeprefix(before).splitlines()]
    assert names == ["a_first.pdf#page=1", "a_first.pdf#page=2", "new.png"]
    assert documents(output)[1] == lines | {"a_first.pdf": documents(output)[1]["a_first.pdf"]}
    assert "made of   2 pages of 1 document, 1 image" in said
    assert any(line.startswith("gone      1 document, as 'b.PDF'") for line in said)
    made(output, folder, prompt="What is this?", append=True)
    assert output.read_bytes() == after, "there is nothing new"


def test_a_document_that_changed_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "r.jsonl"
    rows(output, folder)
    before = output.read_bytes()
    pdf(folder / "b.PDF", num_pages=4)
    with pytest.raises(ConfigError, match=r"document 'b\.PDF': has changed since its rows were made.*without --append"):
        rows(output, folder, append=True)
    assert output.read_bytes() == before


def test_rows_of_other_settings_are_not_mixed(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "r.jsonl"
    rows(output, folder / "b.PDF")
    for options in ({"prompt": "Another?"}, {"pages": "1"}, {"dpi": 300}, {"reader": "glm-ocr"}, {"max_tokens": 9}):
        with pytest.raises(ConfigError, match="were made with another reader, prompt or option"):
            rows(output, folder / "b.PDF", append=True, **options)
    rows(output, folder / "b.PDF", append=True)
    whole = output.read_bytes()
    for broken in (whole[whole.index(b"\n") + 1 :], whole + whole.replace(b"page=", b"&page=")):
        output.write_bytes(broken)
        with pytest.raises(ConfigError, match=r"have [26] of the 3 rows of 'b\.PDF'; put the file back"):
            rows(output, folder / "b.PDF", append=True)
    output.write_bytes(whole + b"no row")
    with pytest.raises(ConfigError, match=r"r\.jsonl', line 4: the row is not JSON"):
        rows(output, folder / "b.PDF", append=True)
    (tmp_path / "r.jsonl.documents.jsonl").write_text('{"root": 1}\n')
    with pytest.raises(ConfigError, match="describes no rows and their documents"):
        rows(output, folder / "b.PDF", append=True)
    with pytest.raises(ConfigError, match=r"there is no other\.jsonl\.documents\.jsonl"):
        rows(tmp_path / "other.jsonl", folder / "b.PDF", append=True)


def test_a_table_cannot_be_added(folder: Path, tmp_path: Path) -> None:
    rows(tmp_path / "r.jsonl", folder / "b.PDF")
    (tmp_path / "t.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(ConfigError, match="is a record of a table; documents, images and videos are added"):
        rows(tmp_path / "r.jsonl", folder / "b.PDF", tmp_path / "t.jsonl", append=True)


def test_an_inbox_may_be_emptied_before_new_documents_come(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "r.jsonl"
    rows(output, folder / "reports")
    before = output.read_bytes()
    for path in (folder / "reports").rglob("*"):
        if path.is_file():
            path.unlink()
    pdf(folder / "reports" / "new.pdf")
    rows(output, folder / "reports", append=True)
    after = output.read_bytes()
    assert after.startswith(before)
    assert [json.loads(line)["custom_id"] for line in after.removeprefix(before).splitlines()] == ["new.pdf#page=1"]


@pytest.mark.parametrize(("first", "then"), [(".", "reports"), ("pictures", "b.PDF"), ("reports", "b.PDF")])
def test_another_folder_than_the_first_is_refused(first: str, then: str, folder: Path, tmp_path: Path) -> None:
    """The paths in rows would begin at two places, and a job has one --allowed-media-dir."""
    (folder / "pictures").mkdir()
    Image.new("L", (9, 9)).save(folder / "pictures" / "a.png")
    output = tmp_path / "r.jsonl"
    rows(output, folder / first, reader="glm-ocr")
    before = output.read_bytes()
    with pytest.raises(ConfigError, match=r"none of their documents and images is below .*name that folder"):
        rows(output, folder / then, reader="glm-ocr", append=True)
    assert output.read_bytes() == before
    moved = folder.rename(folder.with_name("moved"))
    rows(output, moved / first, reader="glm-ocr", append=True)
    assert output.read_bytes() == before, "it is the same folder, in another place"


KILLED = """
import os, sys
from npu_runner.cli import main as cli

left, replace = int(sys.argv.pop(1)), os.replace

def killed(*paths):
    global left
    left -= 1
    replace(*paths) if left else os._exit(9)

os.replace = killed
cli.main(sys.argv[1:])
"""


@pytest.mark.parametrize("at", [1, *only_full("a kill at another write", 2)])
def test_a_killed_command_is_continued(at: int, folder: Path, tmp_path: Path) -> None:
    """It dies before one of its two files is put in place. A document whose rows are there gets its line."""
    output = tmp_path / "r.jsonl"
    rows(output, folder)
    before = output.read_bytes(), documents(output)
    pdf(folder / "a_first.pdf", num_pages=2)
    arguments = [str(folder), "--prompt", "What is this?", "-o", str(output), "--append"]
    done = subprocess.run([sys.executable, "-c", KILLED, str(at), "rows", *arguments], capture_output=True, check=False)
    assert done.returncode == 9, done.stderr
    assert (output.read_bytes() == before[0]) == (at == 1)
    assert documents(output) == before[1]
    said = made(output, folder, prompt="What is this?", append=True).to_lines()
    assert f"made of   {'2 pages of 1 document' if at == 1 else 'nothing new'}" in said
    after = output.read_bytes()
    assert len(after.splitlines()) == 22
    assert documents(output)[1].keys() == before[1][1].keys() | {"a_first.pdf"}
    made(output, folder, prompt="What is this?", append=True)
    assert output.read_bytes() == after


def test_a_killed_command_leaves_no_description_of_other_rows(folder: Path, tmp_path: Path) -> None:
    """The pages of the documents that it describes would be missing, and nothing would say so."""
    output = tmp_path / "r.jsonl"
    rows(output, folder)
    arguments = [str(folder / "reports"), "--prompt", "What is this?", "-o", str(output)]
    done = subprocess.run([sys.executable, "-c", KILLED, "2", "rows", *arguments], capture_output=True, check=False)
    assert done.returncode == 9, done.stderr
    with pytest.raises(ConfigError, match=r"there is no r\.jsonl\.documents\.jsonl beside them"):
        rows(output, folder, append=True)


def test_versions_are_those_of_the_files(folder: Path, tmp_path: Path) -> None:
    """A row names the file by size, first and last 4 KiB; the definition is written out here."""
    large = folder / "large.pdf"
    pdf(large, num_pages=40)
    rows(tmp_path / "r.jsonl", folder)
    for name, line in documents(tmp_path / "r.jsonl")[1].items():
        data = (folder / name).read_bytes()
        meant = hashlib.blake2b(len(data).to_bytes(8, "little") + data[:4096] + data[-4096:], digest_size=16)
        assert line["version"] == meant.hexdigest()
        assert line["bytes"] == len(data)
    assert large.stat().st_size > 3 * 4096


def test_sampled_pages_have_the_same_ids(folder: Path, tmp_path: Path) -> None:
    every = [row["custom_id"] for row in rows(tmp_path / "r.jsonl", folder)]
    some = [row["custom_id"] for row in rows(tmp_path / "s.jsonl", folder, sample=5)]
    assert some == [every[place * len(every) // 5 + (place * len(every) % 5 > 0)] for place in range(5)]


MEMORY = """
import sys
from npu_runner.cli import main as cli

def run(folder):
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    assert cli.main(["rows", folder, "--prompt", "?", "-o", f"{folder}.jsonl", "--preprocessing-workers", "2"]) == 0
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))

run("few")
few = run("few")
print(run("many") - few)
"""


def grown_bytes(tmp_path: Path, num_documents: int) -> int:
    """The resident bytes that documents of 100 pages take at the peak, beyond those of ten."""
    one = pdf(tmp_path / "one.pdf", num_pages=100)
    for name, count in (("few", 10), ("many", num_documents)):
        for number in range(count):
            (tmp_path / name / f"{number % 50}").mkdir(parents=True, exist_ok=True)
            os.link(one, tmp_path / name / f"{number % 50}" / f"{number}.pdf")
    done = subprocess.run([sys.executable, "-c", MEMORY], cwd=tmp_path, stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL, check=True)  # fmt: skip
    assert sum(1 for _ in (tmp_path / "many.jsonl").open("rb")) == 100 * num_documents
    return int(done.stdout)


def test_thousands_of_pages_are_not_held(tmp_path: Path) -> None:
    """A row of a page has 300 bytes; 16 are held, and twice as many while they are sorted."""
    assert grown_bytes(tmp_path, 150) < 15_000 * 100 + (4 << 20)


@pytest.mark.full("makes rows of a million pages, to see their memory")
def test_a_million_pages_take_a_hundred_bytes_each(tmp_path: Path) -> None:
    assert grown_bytes(tmp_path, 10_000) < 1_000_000 * 100


def test_numbers_of_pages_are_pdfiums(folder: Path, tmp_path: Path) -> None:
    rows(tmp_path / "r.jsonl", folder)
    for name, line in documents(tmp_path / "r.jsonl")[1].items():
        if name.lower().endswith("pdf"):
            assert line["pages"] == len(pypdfium2.PdfDocument(folder / name))


@pytest.mark.full("opens the real documents that scripts/test_all.sh fetches")
def test_real_documents_are_counted_as_pdfium_counts_them(tmp_path: Path) -> None:
    found = real_documents()
    if not found:
        pytest.skip("no package with documents was fetched")
    (tmp_path / "docs").mkdir()
    for name, data in found.items():
        (tmp_path / "docs" / name).write_bytes(data)
    result = made(tmp_path / "r.jsonl", tmp_path / "docs", prompt="?")
    _, lines = documents(tmp_path / "r.jsonl")
    num_pages = 0
    for name in [name for name in found if name.lower().endswith(".pdf")]:
        try:
            pages = len(pypdfium2.PdfDocument(tmp_path / "docs" / name))
        except pypdfium2.PdfiumError:
            pages = 0
        assert (lines[name]["pages"] or 0) == pages, name
        assert (lines[name]["error"] is None) == (pages > 0), name
        num_pages += pages or 1
    assert result.num_rows >= num_pages
