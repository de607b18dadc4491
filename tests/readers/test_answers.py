"""An answer becomes the Markdown that its grammar says, or is refused by name; a package's own function agrees."""

from __future__ import annotations

import subprocess
import sys

import pytest

from npu_runner.errors import ConfigError
from npu_runner.readers.answers import html_tags
from npu_runner.readers.answers.block import AnswerError
from npu_runner.readers.answers.parsers import PARSERS, parse_answer
from tests.readers.answers_by_grammar import CASES, LAYOUT, LAYOUT_BLOCKS, Case, Refused, olmocr


@pytest.mark.parametrize(
    ("parser", "case"),
    [
        pytest.param(name, case, id=f"{name}-{number}")
        for name, cases in CASES.items()
        for number, case in enumerate(cases)
    ],
)
def test_an_answer_becomes_exactly_this_markdown(parser: str, case: Case) -> None:
    if isinstance(case.markdown, Refused):
        with pytest.raises(AnswerError, match=case.markdown.reason):
            parse_answer(parser, case.answer, label=case.label)
    else:
        assert parse_answer(parser, case.answer, label=case.label).markdown == case.markdown


def test_every_parser_has_ten_answers() -> None:
    assert {name: len(cases) for name, cases in CASES.items()} == dict.fromkeys(PARSERS, 10)


@pytest.mark.parametrize("number", range(len(LAYOUT_BLOCKS)))
def test_a_layout_becomes_these_blocks(number: int) -> None:
    found = parse_answer("mineru_layout", LAYOUT[number].answer).blocks
    assert [(block.label, block.box, block.rotation, block.is_continued) for block in found] == LAYOUT_BLOCKS[number]


def test_the_rotation_of_front_matter_is_counter_clockwise() -> None:
    assert [parse_answer("front_matter", olmocr("x", rotation=degrees)).rotation for degrees in (0, 90, 180, 270)] == [
        0, 270, 180, 90]  # fmt: skip


def test_headers_footers_and_page_numbers_are_blocks_alone() -> None:
    parsed = parse_answer("divs", CASES["divs"][0].answer)
    assert [(block.label, block.text) for block in parsed.blocks] == [
        ("Page-Header", "Journal 3"), ("Section-Header", "## A\\_1 & B\\*"), ("Text", "a  \nb"), ("Page-Footer", "17"),
    ]  # fmt: skip
    assert "Journal" not in parsed.markdown
    assert "17" not in parsed.markdown


def test_the_page_numbers_of_nanonets_are_blocks() -> None:
    parsed = parse_answer("markdown", "Text\n\n<watermark>DRAFT</watermark>\n\n<page_number>9/22</page_number>")
    assert parsed.markdown == "Text\n\nDRAFT"
    assert [(block.label, block.text) for block in parsed.blocks][1:] == [("page_number", "9/22")]


def test_blocks_may_lie_in_an_element_of_their_own() -> None:
    inner = CASES["divs"][0].answer
    for answer in (f"<html><body>{inner}</body></html>", f"<div>\n{inner}\n</div>", f"```html\n{inner}\n```"):
        assert parse_answer("divs", answer) == parse_answer("divs", inner)


def test_html_that_is_left_open_is_ended() -> None:
    rows = "<table><tr><td>a<td>b<tr><td>c"
    assert parse_answer("markdown", rows).markdown == (
        "<table><tr><td>a</td><td>b<tr><td>c</td></tr></td></tr></table>"
    )
    assert parse_answer("markdown", "<p>one<p>two").markdown == "<p>one</p><p>two</p>"


def test_a_box_that_is_none_loses_no_text() -> None:
    assert [block.box for block in parse_answer("divs", CASES["divs"][6].answer).blocks] == [
        None, None, (0.0, 0.0, 0.009, 0.009)]  # fmt: skip


def test_an_answer_without_tags_needs_no_package_and_one_with_tags_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for function in (html_tags._cleaner, html_tags._opening):
        function.cache_clear()
    monkeypatch.setitem(sys.modules, "nh3", None)
    assert parse_answer("markdown", "a < b and *c*").markdown == "a < b and *c*"
    with pytest.raises(ConfigError, match=r"needs nh3, which is not installed .*pip install 'nh3>=0.3'"):
        parse_answer("markdown", "a <b>c</b>")


def test_a_table_without_markdown_imports_no_package_of_parsers() -> None:
    code = "import sys, npu_runner.tables.make_table; print({'nh3', 'bs4', 'markdownify', 'yaml'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
