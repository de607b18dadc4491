"""The answers about the layout of pages become rows of blocks, and the answers to these Markdown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from npu_runner.batch.rows.openai_format import parse_row
from npu_runner.errors import ConfigError
from npu_runner.tables.block_rows import MadeBlockRows, make_block_rows
from npu_runner.tables.make_table import make_table
from npu_runner.tables.options import RowsOptions, TableOptions
from tests.readers.answers_by_grammar import block
from tests.tables.made import answered, completion, failed

LAYOUT = "".join([
    block("doc_title", "100 50 900 100"), block("text", "100 100 450 900", "right"), block("table", "500 100 900 300"),
    block("image", "500 300 900 600"), block("text", "500 600 900 900", tail="txt_contd_tgt"),
])  # fmt: skip


def page(number: int) -> dict[str, Any]:
    address = {"url": "r/a.pdf", "page": number, "dpi": 200, "longest": 3500, "size": [1036, 1036], "version": "0f"}
    content = [{"type": "image_url", "image_url": address}, {"type": "text", "text": "\nLayout Detection:"}]
    metadata = {"document": "r/a.pdf", "page": number, "pages": 9}
    body = {"messages": [{"role": "user", "content": content}], "metadata": metadata}
    return {"custom_id": f"r/a.pdf#page={number}", "method": "POST", "url": "/v1/chat/completions", "body": body}


def made(folder: Path, num_pages: int, *answers: bytes, **options: Any) -> MadeBlockRows:
    (folder / "pages.jsonl").write_text("".join(json.dumps(page(number)) + "\n" for number in range(1, num_pages + 1)))
    (folder / "answers.jsonl").write_bytes(b"".join(answers))
    options = {"reader": "mineru2.5-blocks", "rows": str(folder / "pages.jsonl"), **options}
    return make_block_rows([str(folder / "answers.jsonl")], RowsOptions(output=str(folder / "blocks.jsonl"), **options))


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "blocks.jsonl").read_text().splitlines()]


def test_each_block_that_can_be_read_is_a_row(tmp_path: Path) -> None:
    made(tmp_path, 1, answered("r/a.pdf#page=1", completion(LAYOUT)))
    found = rows(tmp_path)
    assert [row["custom_id"] for row in found] == [f"r/a.pdf#page=1&block={number}" for number in (1, 2, 3, 5)]
    shown = [row["body"]["messages"][1]["content"] for row in found]
    base = {"url": "r/a.pdf", "page": 1, "version": "0f", "dpi": 200, "longest": 3500}
    assert [parts[0]["image_url"] for parts in shown] == [
        {**base, "box": [0.1, 0.05, 0.9, 0.1]}, {**base, "box": [0.1, 0.1, 0.45, 0.9], "rotate": 270},
        {**base, "box": [0.5, 0.1, 0.9, 0.3]}, {**base, "box": [0.5, 0.6, 0.9, 0.9]},
    ]  # fmt: skip
    assert [parts[1]["text"] for parts in shown] == [
        "\nText Recognition:", "\nText Recognition:", "\nTable Recognition:", "\nText Recognition:"]  # fmt: skip
    assert [row["body"]["frequency_penalty"] for row in found] == [0.05, 0.05, 0.005, 0.05]
    assert found[3]["body"]["metadata"] == {
        "document": "r/a.pdf", "page": 1, "pages": 9, "block": 5, "label": "text", "box": "0.5 0.6 0.9 0.9",
        "continued": True}  # fmt: skip
    for row in found:
        parse_row(row).to_params({}, 0)


@pytest.mark.parametrize("pages", [{}, {"pages": None}, {"pages": 9}])
def test_the_count_of_pages_is_that_of_the_page_s_row(pages: dict[str, Any], tmp_path: Path) -> None:
    """Null is a document that did not open. A row that somebody wrote may have no count."""
    row = page(1)
    del row["body"]["metadata"]["pages"]
    row["body"]["metadata"] |= pages
    (tmp_path / "pages.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "answers.jsonl").write_bytes(answered("r/a.pdf#page=1", completion(LAYOUT)))
    make_block_rows([str(tmp_path / "answers.jsonl")], RowsOptions(
        output=str(tmp_path / "blocks.jsonl"), reader="mineru2.5-blocks", rows=str(tmp_path / "pages.jsonl")))
    found = [each["body"]["metadata"] for each in rows(tmp_path)]
    assert [{name: each[name] for name in ("pages",) if name in each} for each in found] == [pages] * 4


def test_a_page_without_blocks_is_asked_as_a_whole(tmp_path: Path) -> None:
    figure = block("image", "0 0 1000 1000")
    answers = [
        answered("r/a.pdf#page=1", completion("")), failed("r/a.pdf#page=2", "pdf_page_broken"),
        answered("r/a.pdf#page=3", completion("no layout")), answered("r/a.pdf#page=4", completion(figure)),
        answered("r/a.pdf#page=5", completion(LAYOUT, finish_reason="length")),
    ]  # fmt: skip
    said = made(tmp_path, 5, *answers)
    found = rows(tmp_path)
    assert [row["custom_id"] for row in found[:4]] == [f"r/a.pdf#page={number}" for number in range(1, 5)]
    assert all("box" not in row["body"]["messages"][1]["content"][0]["image_url"] for row in found[:4])
    assert said.to_lines()[2:] == [
        "made of   4 blocks of 1 pages, 4 pages without a block to read",
        "layouts   cut off: 1; empty: 1; no answer: 1; refused: 1",
    ]  # fmt: skip


def test_the_answers_to_blocks_become_markdown(tmp_path: Path) -> None:
    made(tmp_path, 3, answered("r/a.pdf#page=1", completion(LAYOUT)), failed("r/a.pdf#page=2", "pdf_page_broken"),
         answered("r/a.pdf#page=3", completion(block("text"), finish_reason="length")))  # fmt: skip
    texts = {"1&block=1": "Title", "1&block=2": "One half", "1&block=3": "<fcel>a<fcel>b<nl>", "1&block=5": "and half",
             "3&block=1": "cut"}  # fmt: skip
    answers = tmp_path / "texts.jsonl"
    answers.write_bytes(
        b"".join([
            failed("r/a.pdf#page=2", "pdf_page_broken"),
            *(answered(f"r/a.pdf#page={name}", completion(text)) for name, text in texts.items()),
        ])
    )  # fmt: skip
    make_table(
        str(answers),
        TableOptions(input=str(tmp_path / "blocks.jsonl"), markdown=tmp_path / "out", blocks=str(tmp_path / "b.jsonl")),
    )
    assert (tmp_path / "out/r/a.pdf.md").read_text() == (
        "<!-- page 1 -->\n\n# Title\n\nOne half and half\n\n<table><tr><td>a</td><td>b</td></tr></table>\n\n"
        "<!-- page 2 -->\n<!-- page 2: its layout has no answer: pdf_page_broken -->\n"
        "<!-- page 2 has no answer: pdf_page_broken -->\n\n"
        "<!-- page 3 -->\n<!-- page 3: its layout is cut off at the limit of tokens -->\n\ncut\n"
    )
    found = [json.loads(line) for line in (tmp_path / "b.jsonl").read_text().splitlines()]
    assert [(each["label"], each["box"]) for each in found][2] == ("table", [0.5, 0.1, 0.9, 0.3])


def test_rows_are_a_function_of_the_answers(tmp_path: Path) -> None:
    answers = [answered(f"r/a.pdf#page={number}", completion(LAYOUT)) for number in (1, 2)]
    made(tmp_path, 2, *answers)
    before = (tmp_path / "blocks.jsonl").read_bytes()
    made(tmp_path, 2, *reversed(answers))
    assert (tmp_path / "blocks.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"reader": "mineru2.5-layout"}, "reads pages, not the blocks"),
        ({"reader": None, "prompt": "x"}, "a reader of blocks with --reader"),
        ({"prompt": "x"}, "--prompt is for rows of records"),
        ({"pages": "1-2"}, "--pages is for rows of records"),
    ],
)
def test_options_of_records_are_refused(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        made(tmp_path, 1, answered("r/a.pdf#page=1", completion(LAYOUT)), **options)
    assert not (tmp_path / "blocks.jsonl").exists()


def test_pages_without_an_answer_are_no_blocks_yet(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"1 of 2 pages have no answer in .*answers.jsonl yet"):
        made(tmp_path, 2, answered("r/a.pdf#page=1", completion(LAYOUT)))
