"""The page: everything on it is from the rows, nothing in them can break it, and it needs nothing but itself."""

from __future__ import annotations

import html
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from base64 import b64decode
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from npu_runner.batch.files.runs import Runs
from npu_runner.reports.cards import Medium
from npu_runner.reports.thumbnails import MAX_BYTES, ThumbnailMaker, side_for
from npu_runner.request.limits import LIMITS
from tests.batch.scripted import row
from tests.reports import report_pages
from tests.reports.report_pages import Page, answer, answer_with, failure, figures, names, plain, report, sections


@dataclass(frozen=True)
class DyingMaker(ThumbnailMaker):
    """Images with these names do to the worker what a decoder's bug would."""

    def __call__(self, medium: Medium) -> bytes | None:
        if medium.url == "kills.png":
            os.kill(os.getpid(), signal.SIGKILL)
        if medium.url == "hangs.png":
            time.sleep(3600)
        if medium.url == "raises.png":
            raise ZeroDivisionError
        return super().__call__(medium)


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
    assert figures(text)["as expected"] == "2 of 3"
    assert "Shown:" not in text


def test_images_are_in_the_page_small_and_upright(tmp_path: Path) -> None:
    Image.new("RGB", (2000, 1000), "red").save(tmp_path / "big.png")
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in ("big.png", "missing.png", *["big.png"] * 9)]
    text = report(tmp_path, [row("a", messages=[{"role": "user", "content": parts}])], [answer("a", "x")])
    images = re.findall(r'src="data:image/jpeg;base64,(.*?)"', text)
    assert len(images) == 7
    assert Image.open(io.BytesIO(b64decode(images[0]))).size == (1024, 512)
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


@pytest.mark.full("a start from nothing, and 25 megapixels; that an image ends its own process alone stays")
def test_a_large_image_takes_the_job_no_memory(tmp_path: Path) -> None:
    Image.new("L", (5000, 5000), 99).save(tmp_path / "large.jpg")
    Image.new("L", (5000, 5000), 99).save(tmp_path / "large.png", compress_level=1)
    # Warm up first: what the libraries take is not what an image takes.
    script = f"""
import resource
from pathlib import Path
from PIL import Image
from tests.reports.report_pages import answer, report
from tests.reports.test_report import with_images
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
    assert int(done.stdout) < 20 * 1024, "25 megapixels are 72 MiB in RGB, and 24 in grey"


def test_a_thumbnail_of_a_jpeg_decodes_an_eighth_of_its_sides(tmp_path: Path) -> None:
    Image.new("L", (8000, 8000)).save(tmp_path / "64-megapixels.jpg")
    jpeg, png = Medium("64-megapixels.jpg", False), Medium("64-megapixels.png", False)
    assert ThumbnailMaker(tmp_path, LIMITS.max_source_pixels)(jpeg) is not None
    assert ThumbnailMaker(tmp_path, 63_999_999)(jpeg) is None, "refused by the job, so by the page"
    Image.new("L", (8000, 8000)).save(tmp_path / "64-megapixels.png", compress_level=1)
    assert ThumbnailMaker(tmp_path, LIMITS.max_source_pixels)(png) is None


def test_an_answer_of_a_form_that_is_not_known_is_shown_as_one(tmp_path: Path) -> None:
    strange = json.loads(answer("a", "x"))
    strange["response"]["body"]["choices"] = [{"index": 0, "audio": "x"}]
    text = report(tmp_path, [row("a"), row("b")], [json.dumps(strange).encode() + b"\n", answer("b", "fine")])
    assert sections(text) == {"Unknown form 1 row": ["a"], "Answered 1 row": ["b"]}
    assert figures(text)["unknown form"] == "1"


def test_a_card_has_its_metadata_and_where_its_images_lie(tmp_path: Path) -> None:
    Image.new("RGB", (40, 20), "red").save(tmp_path / "good.png")
    data = "data:image/png;base64,AAAA"
    asked = with_images("good.png", "shots/missing.png", data)
    many = {f"n{number}": "x" * 500 for number in range(50)}
    asked["body"]["metadata"] = {"city": "Rome", "part": {"floor": 2}, "expected": "y", **many}
    text = plain(report(tmp_path, [asked], [answer("a", "x")]))
    assert "good.png" in text
    assert "shots/missing.png" in text
    assert "AAAA" not in text
    assert 'city Rome part {"floor": 2} n0 xxx' in text
    assert "n21 " in text
    assert "n22 " not in text, "a page is for looking: 24 names of a row, 400 characters of a value"
    assert "x" * 401 not in text


def test_whole_answers_are_a_class_of_their_own(tmp_path: Path) -> None:
    """Neither cut off nor repetitions nor unparsed; a whole one may be other than expected."""
    rule = {"response_format": {"type": "json_object"}}
    requests = [row("whole"), row("odd", metadata={"expected": "y"}), row("cut"), row("no json", **rule), row("failed")]
    cut = json.loads(answer("cut", "x"))
    cut["response"]["body"]["choices"][0]["finish_reason"] = "length"
    results = [answer("whole", "x"), answer("odd", "x"), json.dumps(cut).encode() + b"\n", answer("no json", "x"),
               failure("failed")]  # fmt: skip
    text = report(tmp_path, requests, results)
    chips = dict(re.findall(r'<option value="([^"]*)">[^<]* \((\d+)\)</option>', text))
    assert chips == {"": "5", "failed": "1", "code-0": "1", "cut_off": "1", "unparsed": "1", "whole": "2",
                     "unexpected": "1"}  # fmt: skip
    classes = dict(re.findall(r'<article id="row-?:?([^"]*)" data-is="([^"]*)"', text))
    assert classes["whole"] == "answered whole"
    assert classes["odd"] == "unexpected whole"
    assert classes["cut"] == "answered cut_off"
    assert classes["failed"] == "failed code-0"


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


def test_a_row_takes_a_bounded_part_of_the_page(tmp_path: Path) -> None:
    turns = [{"role": "user" * 9, "content": f"turn {number} " + "x" * 5000} for number in range(200)]
    metadata = {"expected": "e" * 9999, "kind": "k" * 9999, **{f"{number}" * 999: "m" * 9999 for number in range(99)}}
    fields = json.dumps({f"{number}" * 999: "f" * 9999 for number in range(50)})
    text = report(tmp_path, [row("a", messages=turns, metadata=metadata)], [answer("a", fields)],
                  max_row_bytes=1 << 24)
    assert len(text) < 200_000
    assert "[176 turns are not shown]" in text
    assert "turn 11 " in text
    assert "turn 12 " not in text
    assert "turn 199 " in text, "the last question counts most"


def test_a_right_to_left_override_ends_where_its_text_ends(tmp_path: Path) -> None:
    evil = "\u202e\u2067evil\0\x1b[31m"
    text = report(tmp_path, [row(evil, evil, metadata={evil: evil})], [answer(evil, evil)])
    for before in re.findall(r"<([^<>]*)>[^<>]*\u202e", text[text.index("<body>") :]):
        assert 'dir="auto"' in before or before.startswith(("footer", "img")), before


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
    shown = [int(name) for name in names(text)]
    assert shown[:2] == [400, 300]
    assert shown[2:] == sorted(shown[2:])
    assert len(shown) == 20
    assert "Shown: 20 of 500 rows" in text
    assert "249 of 249 (100 %)" not in text
    assert "248 of 249 (99.6 %)" in text
    assert "250 of 250 (100 %)" in text


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
    rows = re.findall(r'<tr><th dir="auto">(.*?)</th><td dir="auto">(.*?)</td></tr>', page)
    fields = [(name, html.unescape(text)) for name, text in rows if name in value]
    assert fields == [("shape", "<b>circle</b>"), ("sides", "0"), ("of", '[1, {"a": "ä"}]'), ("none", "null")]
    assert page.count('<table class="fields">') == 1
    assert "<b>circle</b>" not in page
    for text in ("cut", "list", "empty", "text"):
        assert html.escape(texts[text], quote=False) in html.unescape(page).replace("&#34;", '"')


def test_no_failure_crowds_the_good_rows_out(tmp_path: Path) -> None:
    """542 of 900 failed, 450 of them alike."""
    codes = ["media_missing"] * 450 + ["context_length_exceeded"] * 60 + ["image_too_large"] * 25 + ["timeout"] * 7
    results = [failure(str(number), code=code) for number, code in enumerate(codes)]
    results += [answer(str(number), "fine") for number in range(542, 900)]
    text = report(tmp_path, [row(str(number), f"ask {number}") for number in range(900)], results, max_rows=300)
    shown = {heading: len(rows) for heading, rows in sections(text).items()}
    assert list(shown) == ["media_missing 450 rows, 104 shown", "context_length_exceeded 60 rows",
                           "image_too_large 25 rows", "timeout 7 rows", "Answered 358 rows, 104 shown"]  # fmt: skip
    assert list(shown.values()) == [104, 60, 25, 7, 104]
    assert "code rows of all rows media_missing 450 50.0 % context_length_exceeded 60 6.7 %" in plain(text)
    assert {link.removeprefix("#") for link in Page(text).links} <= set(Page(text).ids)


def test_the_head_says_what_the_job_was(tmp_path: Path) -> None:
    manifest = replace(report_pages.MANIFEST, model_name="<m>", created=1_700_000_000, settings={"dtype": "<bf16>"})
    runs = [{"run": name, "platform": "npu", "devices": 8, "npu_runner": "1.2", "started": 1, "rows": 2, "end": None,
             "seconds": {"start": 6.17, "serve": 2000.0, "device": 1.0}, "computed": {}, "tally": {"num_answered": 1}}
            for name in "ab"]
    text = report(tmp_path, [row("a"), row("b")], [answer("a", "x"), failure("b")], manifest=manifest,
                  runs=Runs.from_json(runs))
    assert "<m> 14 November 2023, 22:13 UTC npu × 8 2 runs npu-runner 1.2 rows 2" in plain(text)
    assert "Settings name value dtype <bf16>" in plain(text)
    assert figures(text) == {"rows": "2", "failed": "1", "whole": "1", "prompt tokens": "5", "completion tokens": "2",
                             "to serve": "1 h 06 min"}  # fmt: skip
    assert "12.3 s to start" in text


def test_long_prompts_and_answers_are_folded_and_what_is_cut_is_said(tmp_path: Path) -> None:
    long, lines, huge = "word " * 300, "line\n" * 40, "x" * 5000
    text = report(tmp_path, [row("a", long), row("b", lines), row("c", "short")],
                  [answer("a", lines), answer("b", "short"), answer("c", huge)])  # fmt: skip
    assert text.count('<details class="fold">') == 4
    assert "[the first 4,000 of 5,000 characters]" in text
    assert text.count(long.strip()) == 1, "the whole of it is there"
    folded = re.findall(r"<summary><span>(.*?) … </span>", text, re.DOTALL)
    assert all(len(beginning) <= 220 and beginning.count("\n") <= 2 for beginning in folded)


def test_each_row_has_an_address_of_its_own_that_stays(tmp_path: Path) -> None:
    ids = ["a", "a b", "a\tb", "\u202ea", "<a>", "row-a", "x" * 200, "x" * 201, "漢", "ünï", "a%20b", "#", "ids"]
    requests, results = [row(name, name) for name in ids], [answer(name, "x") for name in ids]
    page = Page(report(tmp_path, [*requests, b"{"], [*results, failure(None, len(ids) + 1)]))
    anchors = [name for name in page.ids if name.startswith("row") and name != "rows"]
    assert len(set(anchors)) == len(ids) + 1
    assert "row-a" in anchors
    assert all(re.fullmatch(r"row-[\w.-]+|row:[0-9a-f]{16}", anchor) for anchor in anchors)
    fewer = Page(report(tmp_path, requests[3:6], results[3:6]))
    assert {name for name in fewer.ids if name.startswith("row") and name != "rows"} < set(anchors)


def test_images_open_larger_without_a_script(tmp_path: Path) -> None:
    Image.new("RGB", (2000, 1000), "red").save(tmp_path / "big.png")
    text = report(tmp_path, [with_images("big.png")], [answer("a", "x")])
    assert re.search(r'<details class="image"><summary [^>]*><img src="data:[^"]*" alt=', text)


def test_the_more_images_the_smaller_each(tmp_path: Path) -> None:
    sides = [side_for(count) for count in (1, 10, 300, 2000, 20_000)]
    assert sides == sorted(sides, reverse=True)
    assert (sides[0], sides[-1]) == (1024, 160)
    assert sides[-2] > 360
    noise = np.random.default_rng(0).normal(128, 40, (48, 64, 3)).clip(0, 255).astype(np.uint8)
    Image.fromarray(noise).resize((1600, 1200), Image.Resampling.BICUBIC).save(tmp_path / "photo.png", compress_level=1)
    maker = ThumbnailMaker(tmp_path, LIMITS.max_source_pixels, side=side_for(500))
    small = maker(Medium("photo.png", False))
    assert small is not None
    assert len(small) * 500 < 1.3 * MAX_BYTES


def test_calls_of_tools_are_shown_in_question_and_answer(tmp_path: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "get_<b>", "arguments": '{"city": "Kiel", "n": 1}'}}
    broken = {"id": "2", "type": "function", "function": {"name": "other", "arguments": '{"city": '}}
    messages = [{"role": "user", "content": "ask"}, {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": "12 degrees"}]  # fmt: skip
    text = report(tmp_path, [row("a", messages=messages)], [answer_with("a", content=None, tool_calls=[call, broken])])
    read = plain(text)
    assert 'get_<b>({"city": "Kiel", "n": 1}) tool 12 degrees' in read
    assert 'calls get_<b> city Kiel n 1 calls other {"city":' in read
    assert "(empty answer)" not in text


def test_a_page_with_no_row_is_a_page(tmp_path: Path) -> None:
    text = report(tmp_path, [row("a")], [])
    assert figures(text) == {"rows": "1", "without an answer": "1"}
    assert names(text) == []


def contrast(one: str, other: str) -> float:
    """WCAG 2.2's ratio of two colours, #rrggbb."""
    def luminance(colour: str) -> float:
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        red, green, blue = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def test_every_colour_of_text_can_be_read_on_every_ground(tmp_path: Path) -> None:
    text = report(tmp_path, [row("a")], [answer("a", "x")])
    blocks = re.findall(r":root \{([^}]*#[^}]*)\}", text)
    light, dark = (dict(re.findall(r"--(\w+): (#\w{6})", block)) for block in blocks)
    assert contrast("#ffffff", "#000000") == 21
    for colours in (light, dark):
        for ground in ("page", "mat"):
            for ink in ("ink", "quiet", "link", "bad", "odd"):
                assert contrast(colours[ink], colours[ground]) >= 4.5, "level AA"
        assert contrast(colours["edge"], colours["page"]) >= 3, "the edge of a field"
