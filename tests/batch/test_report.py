"""The page: everything on it is from the rows, nothing in them can break it, and it needs nothing but itself."""

from __future__ import annotations

import html
import html.parser
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from base64 import b64decode
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from npu_runner.batch.files.input_file import InputFile
from npu_runner.batch.files.place import find_place
from npu_runner.batch.job.report import write_report
from npu_runner.batch.job.thumbnails import ThumbnailMaker
from npu_runner.batch.rows.chat import ChatForm
from npu_runner.batch.rows.openai_response import JobStamp, RowError, answer_row, error_row
from npu_runner.errors import JobError
from npu_runner.request.limits import LIMITS
from npu_runner.request.outputs import CompletionOutput, RequestOutput
from npu_runner.serving.workers.pool import PoolLimits
from tests.batch.scripted import row, write_rows

STAMP = JobStamp(created=1, system_fingerprint="fp", model_name="m")


def answer(name: str, text: str) -> bytes:
    output = RequestOutput(name, [CompletionOutput(0, text, [1, 2], "stop")], 5)
    return answer_row(output, custom_id=name, form=ChatForm(), stamp=STAMP)


def failure(name: str | None, line: int = 1) -> bytes:
    return error_row(RowError(code="some_code", message="<b>why</b>"), custom_id=name, line=line)


@dataclass(frozen=True)
class DyingMaker(ThumbnailMaker):
    """Images with these names do to the worker what a decoder's bug would."""

    def __call__(self, url: str) -> str | None:
        if url == "kills.png":
            os.kill(os.getpid(), signal.SIGKILL)
        if url == "hangs.png":
            time.sleep(3600)
        if url == "raises.png":
            raise ZeroDivisionError
        return super().__call__(url)


def report(
    folder: Path,
    requests: list[Any],
    results: list[bytes],
    max_rows: int = 100,
    maker: type[ThumbnailMaker] = ThumbnailMaker,
    timeout: float = 120.0,
    max_row_bytes: int = 1 << 20,
) -> str:
    write_rows(folder / "in.jsonl", requests)
    (folder / "out.jsonl").write_bytes(b"".join(results))
    with InputFile(str(folder / "in.jsonl"), folder) as file:
        write_report(
            find_place("report", folder / "report.html"),
            file,
            file.scan(),
            [folder / "out.jsonl"],
            thumbnails=maker(folder, LIMITS.max_source_pixels),
            worker=PoolLimits(num_workers=1, task_timeout_seconds=timeout),
            max_rows=max_rows,
            max_row_bytes=max_row_bytes,
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


def test_images_are_in_the_page_small_and_upright(tmp_path: Path) -> None:
    Image.new("RGB", (2000, 1000), "red").save(tmp_path / "big.png")
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in ("big.png", "missing.png", *["big.png"] * 9)]
    text = report(tmp_path, [row("a", messages=[{"role": "user", "content": parts}])], [answer("a", "x")])
    images = re.findall(r'src="data:image/jpeg;base64,(.*?)"', text)
    assert len(images) == 7
    assert Image.open(io.BytesIO(b64decode(images[0]))).size == (360, 180)
    assert "no image to show" in text
    assert "and 3 more" in text


def with_images(*urls: str) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return row("a", messages=[{"role": "user", "content": parts}])


def test_an_image_that_ends_its_worker_costs_the_page_that_image_alone(tmp_path: Path) -> None:
    Image.new("RGB", (40, 20), "red").save(tmp_path / "good.png")
    urls = ["good.png", "kills.png", "hangs.png", "raises.png", "good.png"]
    text = report(tmp_path, [with_images(*urls)], [answer("a", "x")], maker=DyingMaker, timeout=3.0)
    assert text.count('src="data:image/jpeg;base64,') == 2
    assert text.count("no image to show") == 3


def test_a_large_image_takes_the_job_no_memory(tmp_path: Path) -> None:
    Image.new("L", (7000, 7000), 99).save(tmp_path / "large.jpg")
    Image.new("L", (7000, 7000), 99).save(tmp_path / "large.png")
    # Warm up first: what the libraries take is not what an image takes.
    script = f"""
import resource
from pathlib import Path
from PIL import Image
from tests.batch.test_report import answer, report, with_images
folder = Path({str(tmp_path)!r})
Image.new("RGB", (20, 20)).save(folder / "small.jpg")
peaks = []
for names in (["small.jpg"], ["large.jpg", "large.png"]):
    text = report(folder, [with_images(*names)], [answer("a", "x")])
    assert text.count('src="data:image/jpeg;base64,') == len(names)
    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
print(peaks[1] - peaks[0])
"""
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, check=True)
    assert int(done.stdout) < 20 * 1024, "49 megapixels are 144 MiB in RGB"


def test_a_thumbnail_of_a_jpeg_decodes_an_eighth_of_its_sides(tmp_path: Path) -> None:
    Image.new("RGB", (8000, 8000), "red").save(tmp_path / "64-megapixels.jpg")
    assert ThumbnailMaker(tmp_path, LIMITS.max_source_pixels)("64-megapixels.jpg") is not None
    assert ThumbnailMaker(tmp_path, 63_999_999)("64-megapixels.jpg") is None, "refused by the job, so by the page"
    Image.new("L", (8000, 8000)).save(tmp_path / "64-megapixels.png")
    assert ThumbnailMaker(tmp_path, LIMITS.max_source_pixels)("64-megapixels.png") is None


def test_a_page_that_cannot_be_made_is_a_job_error_and_says_that_the_answers_are_there(tmp_path: Path) -> None:
    strange = json.loads(answer("a", "x"))
    del strange["response"]["body"]["usage"]
    with pytest.raises(JobError, match=r"KeyError: 'usage'.*No answer in .*out\.jsonl is affected"):
        report(tmp_path, [row("a")], [json.dumps(strange).encode() + b"\n"])
    (tmp_path / ".report.html.new").mkdir()
    with pytest.raises(JobError, match=r"Is a directory.*No answer in .*out\.jsonl is affected"):
        report(tmp_path, [row("a")], [answer("a", "x")])


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


def test_of_a_row_that_was_too_long_the_error_alone_is_shown(tmp_path: Path) -> None:
    text = report(tmp_path, [row("a", "long " * 1000), row("b", "short")], [failure("a")], max_row_bytes=4000)
    assert names(text) == ["a"]
    assert "long long" not in text
    assert "some_code" in text


def test_rows_without_an_answer_are_left_out(tmp_path: Path) -> None:
    text = report(tmp_path, [row("a"), row("b")], [answer("b", "x")])
    assert names(text) == ["b"]
    assert json.dumps("Shown: 1 of 2 rows")[1:-1] in text


def test_the_fields_of_an_answer_that_is_a_json_object_are_a_table(tmp_path: Path) -> None:
    """With all completions; what only begins like one, or was cut off, is text."""
    value = {"shape": "<b>circle</b>", "sides": 0, "of": [1, {"a": "ä"}], "none": None}
    texts = {"object": json.dumps(value), "cut": '{"shape": "cir', "list": "[1]", "empty": "{}", "text": "{circle}"}
    page = report(tmp_path, [row(name) for name in texts], [answer(name, text) for name, text in texts.items()])
    rows = re.findall(r"<tr><th>(.*?)</th><td>(.*?)</td></tr>", page)
    fields = [(name, html.unescape(text)) for name, text in rows if name in value]
    assert fields == [("shape", "<b>circle</b>"), ("sides", "0"), ("of", '[1, {"a": "ä"}]'), ("none", "null")]
    assert page.count('<table class="fields">') == 1
    assert "<b>circle</b>" not in page
    for text in ("cut", "list", "empty", "text"):
        assert html.escape(texts[text], quote=False) in html.unescape(page).replace("&#34;", '"')
