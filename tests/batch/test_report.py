"""The page: everything on it is from the rows, nothing in them can break it, and it needs nothing but itself."""

from __future__ import annotations

import html.parser
import io
import json
import re
from base64 import b64decode
from pathlib import Path
from typing import Any

from PIL import Image

from npu_runner.batch.files.input_file import InputFile
from npu_runner.batch.job.report import write_report
from npu_runner.batch.rows.openai_response import JobStamp, RowError, answer_row, error_row
from npu_runner.outputs import CompletionOutput, RequestOutput
from tests.batch.scripted import row, write_rows

STAMP = JobStamp(created=1, system_fingerprint="fp", model_name="m")


def answer(name: str, text: str) -> bytes:
    output = RequestOutput(name, [CompletionOutput(0, text, [1, 2], "stop")], 5)
    return answer_row(output, custom_id=name, model=None, stamp=STAMP)


def failure(name: str | None, line: int = 1) -> bytes:
    return error_row(RowError(code="some_code", message="<b>why</b>"), custom_id=name, line=line)


def report(folder: Path, requests: list[Any], results: list[bytes], max_rows: int = 100) -> str:
    write_rows(folder / "in.jsonl", requests)
    (folder / "out.jsonl").write_bytes(b"".join(results))
    with InputFile(str(folder / "in.jsonl"), folder) as file:
        write_report(
            folder / "report.html", file, file.scan(), folder / "out.jsonl", allowed_media_dir=folder, max_rows=max_rows
        )
    text = (folder / "report.html").read_text(encoding="utf-8")
    WellFormed().check(text)
    return text


class WellFormed(html.parser.HTMLParser):
    """Every element closed in order, no element that loads or runs anything."""

    def check(self, text: str) -> None:
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "iframe", "object", "b-injected")
        for name, value in attrs:
            assert not name.startswith("on")
            assert name not in ("src", "href") or str(value).startswith("data:image/jpeg;base64,")
        if tag not in ("meta", "img", "input", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def names(text: str) -> list[str]:
    return re.findall(r'<div class="foot"><span>(.*?)</span>', text)


def test_failed_rows_come_first_then_unexpected_ones(tmp_path: Path) -> None:
    expects = [row(name, f"ask {name}", metadata={"expected": "red"}) for name in "abcd"]
    text = report(
        tmp_path,
        [*expects, b"{", row("e", "ask e")],
        [
            answer("a", "Red."),
            answer("e", "free"),
            answer("b", "blue"),
            failure("c"),
            answer("d", "red"),
            failure(None, 5),
        ],
    )
    assert names(text) == ["c", "line 5", "b", "a", "d", "e"]
    assert "66.7 %" in text
    assert "1 of 3" in text
    assert "Shown:" not in text


def test_pictures_are_in_the_page_small_and_upright(tmp_path: Path) -> None:
    Image.new("RGB", (2000, 1000), "red").save(tmp_path / "big.png")
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in ("big.png", "missing.png", *["big.png"] * 9)]
    text = report(tmp_path, [row("a", messages=[{"role": "user", "content": parts}])], [answer("a", "x")])
    pictures = re.findall(r'src="data:image/jpeg;base64,(.*?)"', text)
    assert len(pictures) == 7
    assert Image.open(io.BytesIO(b64decode(pictures[0]))).size == (360, 180)
    assert "no picture to show" in text
    assert "and 3 more" in text


def test_nothing_in_a_row_becomes_markup(tmp_path: Path) -> None:
    evil = "</p></article><b-injected onload=x><script>alert(1)</script>\u2028 \" ' &amp;"
    text = report(
        tmp_path,
        [row(evil, evil, metadata={"expected": evil, "kind": evil}), row("b", evil)],
        [answer(evil, evil), failure("b")],
    )
    assert "&lt;script&gt;alert(1)" in text
    assert "&lt;b&gt;why&lt;/b&gt;" in text


def test_half_a_surrogate_pair_is_shown_as_a_question_mark(tmp_path: Path) -> None:
    assert "is \ud800 it" not in (text := report(tmp_path, [row("a", "is \ud800 it")], [failure("a")]))
    assert "is ? it" in text


def test_malformed_rows_are_shown_as_far_as_they_go(tmp_path: Path) -> None:
    bodies: list[Any] = [
        5,
        {"messages": 5},
        {"messages": [5, {"content": [5, {"type": "text"}, {"image_url": 5}, {"image_url": {"url": 5}}]}]},
        {"messages": [{"content": "shown"}], "metadata": 5},
    ]
    requests = [{"custom_id": str(index), "body": body} for index, body in enumerate(bodies)]
    text = report(tmp_path, requests, [failure(str(index), index + 1) for index in range(len(bodies))])
    assert names(text) == ["0", "1", "2", "3"]
    assert "shown" in text


def test_a_huge_job_shows_its_worst_rows_and_says_so(tmp_path: Path) -> None:
    requests = [row(str(n), metadata={"expected": "yes", "kind": f"k{n % 2}"}) for n in range(500)]
    results = [failure(str(n)) if n == 400 else answer(str(n), "no" if n == 300 else "yes") for n in range(500)]
    text = report(tmp_path, requests, results, max_rows=20)
    assert names(text) == ["400", "300", *(str(n) for n in range(18))]
    assert "Shown: 20 of 500 rows" in text
    assert "249 of 249 (100.0 %)" not in text
    assert "248 of 249 (99.6 %)" in text
    assert "250 of 250 (100.0 %)" in text


def test_rows_without_an_answer_are_left_out(tmp_path: Path) -> None:
    text = report(tmp_path, [row("a"), row("b")], [answer("b", "x")])
    assert names(text) == ["b"]
    assert json.dumps("Shown: 1 of 2 rows")[1:-1] in text
