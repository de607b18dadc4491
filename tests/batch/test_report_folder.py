"""A report of many rows is a folder of pages: each row on one of them, and whole whatever happens while it is made."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from PIL import Image

from npu_runner.batch.files.folder_place import find_folder
from npu_runner.cli.main import main
from npu_runner.errors import ConfigError
from tests.batch.job_folder import Job
from tests.batch.report_pages import Page, answer, failure, names, report
from tests.batch.scripted import row, write_rows
from tests.full_set import every

HOSTILE = ["</script><script>alert(1)</script>", "<!--", "a & b", "\u2028", "' \" \\", "漢", "]]>", "__proto__"]


def rows_of(count: int) -> tuple[list[Any], list[bytes]]:
    ids = [HOSTILE[number] if number < len(HOSTILE) else f"id-{number}" for number in range(count)]
    results = [failure(name, code="broken") if number % 4 == 3 else answer(name, "word " * 30)
               for number, name in enumerate(ids)]
    return [row(name, f"ask {number} " + "x" * 60) for number, name in enumerate(ids)], results


def pages_of(folder: Path) -> list[Path]:
    """In order."""
    others = sorted(folder.glob("pages-*/*.html"), key=lambda path: int(path.stem))
    return [folder / "index.html", *others]


def test_each_row_stands_on_one_page_and_every_link_leads_somewhere(tmp_path: Path) -> None:
    requests, results = rows_of(450)
    report(tmp_path, requests, results, max_rows=5000, as_folder=True)
    pages = pages_of(tmp_path / "report")
    texts = [path.read_text(encoding="utf-8") for path in pages]
    read = {path: Page(text) for path, text in zip(pages, texts, strict=True)}
    assert [len(names(text)) for text in texts] == [200, 200, 50]
    shown = [name for text in texts for name in names(text)]
    assert sorted(shown) == sorted(request["custom_id"] for request in requests)
    assert "continued" not in texts[0]
    assert "338 rows, continued" in texts[1]
    assert [re.findall(r'href="([^"]*)">(\w+) <span>(\d+)', text) for text in texts[:2]] == [
        [("#section-1", "Failed", "112"), ("#section-2", "Answered", "338")],
        [("../index.html#section-1", "Failed", "112"), ("../index.html#section-2", "Answered", "338")],
    ]
    for path, page in read.items():
        for link in page.links:
            file, _, anchor = link.partition("#")
            there = (path.parent / file).resolve() if file else path
            assert not anchor or unquote(anchor) in read[there].ids


def test_the_index_knows_the_page_of_each_row(tmp_path: Path) -> None:
    requests, results = rows_of(450)
    index = Page(report(tmp_path, requests, results, max_rows=5000, as_folder=True))
    ((kind, table),) = [script for script in index.scripts if script[0]]
    assert kind == "application/json"
    assert "<" not in table
    pages = [Page(path.read_text(encoding="utf-8")) for path in pages_of(tmp_path / "report")]
    listed = json.loads(table)
    assert len(listed) == len(pages)
    for entries, page in zip(listed, pages, strict=True):
        anchors = [name for name in page.ids if re.match("row[-:]", name)]
        assert [entry[-1] if len(entry) > 1 else f"row-{entry[0]}" for entry in entries] == anchors
    assert {entry[0] for entries in listed for entry in entries} == {request["custom_id"] for request in requests}


def test_pictures_of_a_folder_are_files_each_once(tmp_path: Path) -> None:
    Image.new("RGB", (2000, 1000), "red").save(tmp_path / "a.png")
    Image.new("RGB", (300, 200), "blue").save(tmp_path / "b.png")
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in ("a.png", "b.png", "a.png", "none.png")]
    requests = [row(str(number), messages=[{"role": "user", "content": parts}]) for number in range(201)]
    text = report(tmp_path, requests, [answer(str(number), "x") for number in range(201)], max_rows=300, as_folder=True)
    assert len(text) < 400_000
    assert [path.name for path in pages_of(tmp_path / "report")] == ["index.html", "2.html"]
    for path in pages_of(tmp_path / "report"):
        for src in Page(path.read_text()).pictures:
            assert Image.open(path.parent / src).format == "JPEG"
    sizes = {Image.open(path).size for path in (tmp_path / "report").glob("*/*.jpg")}
    assert (300, 200) in sizes
    assert len(list((tmp_path / "report").glob("*/*.jpg"))) == 2


def test_a_card_takes_few_bytes_beside_its_text(tmp_path: Path) -> None:
    """10,000 cards with 300 characters each are to take 8 MB at most, the first page 1 MB beside its text."""
    count = 1200
    requests = [row(f"row-{number:05d}", f"{number} ".ljust(100, "p")) for number in range(count)]
    results = [answer(f"row-{number:05d}", f"{number} ".ljust(200, "a")) for number in range(count)]
    report(tmp_path, requests, results, max_rows=10_000, as_folder=True)
    sizes = [path.stat().st_size for path in pages_of(tmp_path / "report")]
    assert sum(sizes) / count < 800
    assert sizes[0] - 200 * 300 < 150_000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A report of one row, which a later one replaces."""
    report(tmp_path, [row("old")], [answer("old", "x")], as_folder=True)
    return tmp_path / "report"


def is_whole(folder: Path) -> set[str]:
    """The names of all rows of a report whose links all lead somewhere."""
    found = set()
    for path in [folder / "index.html", *(folder.glob("pages-*/*.html"))]:
        page = Page(path.read_text())
        if path.parent == folder:
            for link in page.links:
                assert not link.partition("#")[0] or (folder / link.partition("#")[0]).exists()
            found |= set(names(path.read_text()))
    return found


def make_dying(folder: Path, most: int) -> int:
    """Make a report of 201 rows in a process that dies at event `most` of the file system. Its exit status: 9, or 0
    where there were fewer."""
    child = os.fork()
    if not child:
        inside, seen = str(folder / "report"), []

        def die(event: str, arguments: tuple[Any, ...]) -> None:
            if event in EVENTS and any(str(argument).startswith(inside) for argument in arguments[:2]):
                seen.append(event)
                if len(seen) == most:
                    os._exit(9)

        sys.addaudithook(die)
        ids = [f"new-{number}" for number in range(201)]
        status = 1
        try:
            report(folder, [row(name, name) for name in ids], [answer(name, "x") for name in ids], 300, as_folder=True)
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")


def test_a_process_that_dies_leaves_the_old_report_or_the_new_one(tmp_path: Path, folder: Path) -> None:
    """At each event of the file system in turn, and at a third of them in the fast set."""
    shutil.copytree(folder, tmp_path / "before")
    seen: list[str] = []
    status, most = 9, 0
    while status == 9:
        shutil.rmtree(folder)
        shutil.copytree(tmp_path / "before", folder)
        most += every(3)
        status = make_dying(tmp_path, most)
        shown = is_whole(folder)
        assert shown == {"old"} or len(shown) == 200, "all of the first page"
        seen.append("old" if "old" in shown else "new")
    assert status == 0
    assert seen == sorted(seen, reverse=True), "from some event on it is the new one"
    assert seen.count("old") * every(3) > 5
    assert seen.count("new") * every(3) > 1


def test_what_the_dead_have_left_goes_with_the_next_report(tmp_path: Path, folder: Path) -> None:
    for most in range(4, 9):
        assert make_dying(tmp_path, most) == 9
    assert len(list(folder.iterdir())) > 4
    report(tmp_path, [row("a")], [answer("a", "x")], as_folder=True)
    assert len(list(folder.iterdir())) == 2


def test_a_folder_that_a_process_died_in_before_its_index_is_taken(tmp_path: Path) -> None:
    (tmp_path / "report" / "pages-1").mkdir(parents=True)
    (tmp_path / "report" / "pages-1" / "2.html").write_text("half")
    report(tmp_path, [row("a")], [answer("a", "x")], as_folder=True)
    assert sorted(path.name for path in (tmp_path / "report").iterdir()) == ["index.html", "pages-2"]


def test_what_is_no_report_is_not_written_into(tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    (photos / "index.html").write_text("somebody's")
    write_rows(tmp_path / "in.jsonl", [row("a")])
    for name, match in (("photos", "holds index.html and no report"), ("in.jsonl", "is no folder"),
                        ("-", "is a stream"), ("none/report", "in no existing folder")):  # fmt: skip
        with pytest.raises(ConfigError, match=match), find_folder("report", "-" if name == "-" else tmp_path / name,
                                                                  reason="it is large"):
            pass
    assert [path.read_text() for path in photos.iterdir()] == ["somebody's"]


@pytest.mark.parametrize("name", ["pages-1", ".index.html.new"])
def test_a_planted_link_is_not_followed(tmp_path: Path, folder: Path, name: str) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "2.html").write_text("somebody's")
    for path in folder.glob("pages-*"):
        path.rmdir()
    (folder / name).symlink_to(victim)
    report(tmp_path, [row("a")], [answer("a", "x")], as_folder=True)
    assert [path.read_text() for path in victim.iterdir()] == ["somebody's"]
    assert not (folder / name).is_symlink()


def test_a_job_of_many_rows_makes_a_folder(job: Job) -> None:
    write_rows(job.input, [row(f"r{number}", f"text {number}") for number in range(250)])
    target = job.folder / "report"
    assert job.run(report=target, report_rows=2001).exit_status == 0
    assert [path.name for path in pages_of(target)] == ["index.html", "2.html"]
    assert "model" in (target / "index.html").read_text()
    page = str(job.folder / "report")
    assert main(["report", str(job.output), "-o", page, "-i", str(job.input), "--report-rows", "10"]) == 0
    assert [path.name for path in pages_of(target)] == ["index.html"], "a folder stays one"
    assert sorted(path.name for path in target.iterdir()) == ["index.html", "pages-2"]


def test_what_cannot_be_a_folder_is_refused_before_the_model_loads(job: Job) -> None:
    write_rows(job.input, [row("a")])
    (job.folder / "page.html").write_text("old")
    inside = job.folder / "report"
    inside.mkdir()
    for options, match in (
        ({"report": job.folder / "page.html"}, "with report_rows 2001 the report is a folder of pages"),
        ({"report": Path("-")}, "is a stream"),
        ({"report": inside, "summary": inside / "s.json"}, "is the folder that holds the summary"),
        ({"report": job.folder}, "is the folder that holds the input"),
        ({"report": job.folder / "model"}, "and no report"),
    ):
        with pytest.raises(ConfigError, match=match):
            job.run(report_rows=2001, **options)
    assert job.engines == []
    assert (job.folder / "page.html").read_text() == "old"
