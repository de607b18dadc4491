"""The Markdown of documents: every page is in it or named with its reason, and no name leads out of the folder."""

from __future__ import annotations

import json
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from npu_runner.errors import ConfigError
from npu_runner.tables import page_markdown
from npu_runner.tables.make_table import MadeTable, make_table
from npu_runner.tables.options import TableOptions
from tests.readers.answers_by_grammar import div, olmocr
from tests.tables.made import answered, completion, failed, request


def page(document: str, number: int, **more: Any) -> bytes:
    block = f"&block={more['block']}" if "block" in more else ""
    metadata = {"document": document, "page": number, "pages": 9, **more}
    return request(f"{document}#page={number}{block}", metadata=metadata)


REPEATED = completion("on and on", finish_reason="length", stop_reason="repetition_detected")


def with_facts(answer: bytes, **facts: Any) -> bytes:
    """The line as a job writes it for a row that shows a page."""
    row = json.loads(answer)
    row["page"] = {"blank": False, "width": 9, "height": 9, "text_layer": False, **facts}
    return json.dumps(row).encode() + b"\n"


def pages(folder: Path, rows: list[bytes], answers: list[bytes], **options: Any) -> MadeTable:
    (folder / "rows.jsonl").write_bytes(b"".join(rows))
    (folder / "answers.jsonl").write_bytes(b"".join(answers))
    options = {"markdown": folder / "out", **options}
    return make_table(str(folder / "answers.jsonl"), TableOptions(input=str(folder / "rows.jsonl"), **options))


def files(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_each_page_is_there_or_marked_with_its_reason(tmp_path: Path) -> None:
    made = pages(
        tmp_path,
        [*(page("r/a.pdf", number) for number in range(1, 8)), page("b.tif", 1), request("c.png")],
        [
            answered("c.png", completion("an image")),
            answered("r/a.pdf#page=7", completion("", finish_reason="stop")),
            with_facts(answered("r/a.pdf#page=6", completion("")), blank=True),
            answered("r/a.pdf#page=4", REPEATED),
            answered("r/a.pdf#page=3", completion("cut <!-- page 9 -->off", finish_reason="length")),
            with_facts(answered("r/a.pdf#page=1", completion("# One\n"))),
            failed("r/a.pdf#page=2", "pdf_page_broken"),
            failed("b.tif#page=1", "image_too_large"),
        ],
    )
    assert files(tmp_path / "out") == {
        "r/a.pdf.md": (
            "<!-- page 1 -->\n\n# One\n\n"
            "<!-- page 2 -->\n<!-- page 2 has no answer: pdf_page_broken -->\n\n"
            "<!-- page 3 -->\n<!-- page 3 is cut off at the limit of tokens -->\n\ncut off\n\n"
            "<!-- page 4 -->\n<!-- page 4 is cut off because its answer repeats itself -->\n\non and on\n\n"
            "<!-- page 5 -->\n<!-- page 5 has no answer yet -->\n\n"
            "<!-- page 6 -->\n<!-- page 6 is blank -->\n\n"
            "<!-- page 7 -->\n<!-- page 7 has an empty answer -->\n"
        ),
        "b.tif.md": "<!-- page 1 -->\n<!-- page 1 has no answer: image_too_large -->\n",
        "c.png.md": "<!-- page 1 -->\n\nan image\n",
    }
    assert made.pages == [
        f"markdown  {tmp_path / 'out'}: 9 pages of 3 documents, 2 of them with gaps; blank: 1; cut off: 1; empty: 1; "
        "no answer: 3; repeated: 1"
    ]  # fmt: skip


def test_a_blank_page_is_no_gap(tmp_path: Path) -> None:
    made = pages(tmp_path, [page("a.pdf", 1)], [with_facts(answered("a.pdf#page=1", completion("")), blank=True)])
    assert "1 pages of 1 documents, 0 of them with gaps; blank: 1" in made.pages[0]


def test_an_answer_about_a_document_that_did_not_open_hides_no_page(tmp_path: Path) -> None:
    """A job that knows the password answers the only row of a document whose pages were never counted."""
    made = pages(tmp_path, [page("a.pdf", 1, pages=None), page("b.pdf", 1, pages=None)],
                 [answered("a.pdf#page=1", completion("one")), failed("b.pdf#page=1", "pdf_broken")])  # fmt: skip
    assert files(tmp_path / "out") == {
        "a.pdf.md": "<!-- page 1 -->\n<!-- page 1 may not be the last one: the document did not open when its rows "
                    "were made, so make its rows anew -->\n\none\n",
        "b.pdf.md": "<!-- page 1 -->\n<!-- page 1 has no answer: pdf_broken -->\n"}  # fmt: skip
    assert made.pages[0].endswith("2 pages of 2 documents, 2 of them with gaps; no answer: 1; of a document that did "
                                  "not open: 1")  # fmt: skip


def test_an_answer_that_its_parser_refuses_is_named(tmp_path: Path) -> None:
    pages(tmp_path, [page("a.pdf", 1)], [answered("a.pdf#page=1", completion("no HTML --> at all"))],
          reader="surya-2")  # fmt: skip
    assert files(tmp_path / "out")["a.pdf.md"] == (
        "<!-- page 1 -->\n"
        "<!-- page 1 has its answer as it came, which is not in its reader's form: it has no HTML -->\n\n"
        "no HTML --> at all\n"
    )


def test_a_reason_that_quotes_the_answer_ends_no_comment(tmp_path: Path) -> None:
    front = olmocr("text", is_table="'--><script>'")
    pages(tmp_path, [page("a.pdf", 1)], [answered("a.pdf#page=1", completion(front))], reader="olmocr-2")
    (text,) = files(tmp_path / "out").values()
    head = text.partition("\n\n")[0]
    assert head.count("-->") == head.count("<!--") == 2
    assert "is_table is '   script '" in head
    assert "<script" not in text


def test_headers_and_page_numbers_are_in_the_table_of_blocks_alone(tmp_path: Path) -> None:
    answer = div("Page-Header", "Journal", "0 0 1000 50") + div("Text", "<p>words</p>") + div("Table", "x", "1 2")
    rows, answers = [page("a.pdf", 1)], [answered("a.pdf#page=1", completion(answer))]
    expected = [
        ["a.pdf", 1, "Page-Header", [0.0, 0.0, 1.0, 0.05], "Journal"],
        ["a.pdf", 1, "Text", [0.1, 0.2, 0.3, 0.4], "words"],
        ["a.pdf", 1, "Table", None, "x"],
    ]
    pages(tmp_path, rows, answers, reader="chandra-ocr-2", blocks=str(tmp_path / "b.jsonl"))
    assert files(tmp_path / "out")["a.pdf.md"] == "<!-- page 1 -->\n\nwords\n\nx\n"
    assert [list(json.loads(line).values()) for line in (tmp_path / "b.jsonl").read_text().splitlines()] == expected
    pages(tmp_path, rows, answers, reader="chandra-ocr-2", blocks=str(tmp_path / "b.parquet"), markdown=None)
    found = pd.read_parquet(tmp_path / "b.parquet")
    assert list(found.columns) == ["document", "page", "label", "box", "text"]
    assert [None if box is None else list(box) for box in found["box"]] == [line[3] for line in expected]
    both = {"blocks": str(tmp_path / "b.csv"), "output": str(tmp_path / "t.csv")}
    pages(tmp_path, rows, answers, reader="chandra-ocr-2", **both)
    assert list(pd.read_csv(tmp_path / "b.csv")["text"]) == ["Journal", "words", "x"]
    assert list(pd.read_csv(tmp_path / "t.csv")["custom_id"]) == ["a.pdf#page=1"]


def test_the_file_beside_the_rows_names_the_reader(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl.documents.jsonl").write_text('{"reader": "my.json", "parser": "divs", "settings": ""}\n')
    rows, answers = [page("a.pdf", 1)], [answered("a.pdf#page=1", completion(div("Text", "<i>x</i>")))]
    pages(tmp_path, rows, answers)
    assert files(tmp_path / "out")["a.pdf.md"] == "<!-- page 1 -->\n\n*x*\n"
    with pytest.raises(ConfigError, match="is no shipped reader"):
        pages(tmp_path, rows, answers, reader="chandra-ocr")


def test_blocks_of_a_page_are_joined_in_the_order_of_rows(tmp_path: Path) -> None:
    rows = [
        page("a.pdf", 1, block=1, label="title", box="0.1 0.1 0.9 0.2"),
        page("a.pdf", 1, block=2, label="text", box="0.1 0.2 0.4 0.9"),
        page("a.pdf", 1, block=3, label="table", box="0.5 0.2 0.9 0.4"),
        page("a.pdf", 1, block=4, label="text", box="0.5 0.4 0.9 0.9", continued=True),
        page("a.pdf", 1, block=5, label="page_number", box="0.5 0.9 0.6 1.0"),
        page("a.pdf", 2),
    ]
    answers = [
        answered("a.pdf#page=1&block=4", completion("of a sentence")),
        answered("a.pdf#page=1&block=1", completion("Title")),
        answered("a.pdf#page=1&block=2", completion("One half")),
        failed("a.pdf#page=1&block=3", "preprocessing_timeout"),
        answered("a.pdf#page=1&block=5", completion("7")),
        answered("a.pdf#page=2", completion("a page")),
    ]
    made = pages(tmp_path, rows, answers, reader="mineru2.5-blocks", blocks=str(tmp_path / "b.jsonl"))
    assert files(tmp_path / "out")["a.pdf.md"] == (
        "<!-- page 1 -->\n<!-- page 1, block 3 has no answer: preprocessing_timeout -->\n\n"
        "# Title\n\nOne half of a sentence\n\n<!-- page 2 -->\n\na page\n"
    )
    assert "2 pages of 1 documents, 1 of them with gaps; no answer: 1" in made.pages[0]
    blocks = [json.loads(line) for line in (tmp_path / "b.jsonl").read_text().splitlines()]
    assert [(block["label"], block["box"]) for block in blocks] == [
        ("title", [0.1, 0.1, 0.9, 0.2]), ("text", [0.1, 0.2, 0.4, 0.9]), ("text", [0.5, 0.4, 0.9, 0.9]),
        ("page_number", [0.5, 0.9, 0.6, 1.0]), ("page", None),
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["../x.pdf", "a/../../x", "..", "", "/", "a\0b", "\ud800x"])
def test_a_name_that_leads_out_is_refused_before_anything_is_written(tmp_path: Path, name: str) -> None:
    rows = [page("good.pdf", 1), page(name, 1)]
    with pytest.raises(ConfigError, match="would lie outside of the folder"):
        pages(tmp_path, rows, [answered("good.pdf#page=1", completion("x"))])
    assert not (tmp_path / "out").exists()


def test_an_absolute_name_lies_below_the_folder(tmp_path: Path) -> None:
    pages(tmp_path, [page("/etc/a.pdf", 1)], [answered("/etc/a.pdf#page=1", completion("x"))])
    assert list(files(tmp_path / "out")) == ["etc/a.pdf.md"]


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "kept").write_text("kept")
    rows = [page("a.pdf", 1), page("dir/b.pdf", 1)]
    answers = [answered(f"{name}#page=1", completion("x")) for name in ("a.pdf", "dir/b.pdf")]
    (tmp_path / "out/a.pdf.md").symlink_to(tmp_path / "kept")
    (tmp_path / "out/.a.pdf.md.new").symlink_to(tmp_path / "kept")
    (tmp_path / "out/dir").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"markdown of 'dir/b.pdf'"):
        pages(tmp_path, rows, answers)
    assert not (tmp_path / "out/a.pdf.md").is_symlink()
    assert (tmp_path / "kept").read_text() == "kept"
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_names_that_differ_in_case_or_form_alone_get_a_digest(tmp_path: Path) -> None:
    composed, decomposed = unicodedata.normalize("NFC", "é.pdf"), unicodedata.normalize("NFD", "é.pdf")
    names = ["r/a.pdf", "R/A.pdf", "r/A.PDF", composed, decomposed, "a.tif", "/a.tif"]
    pages(tmp_path, [page(name, 1) for name in names],
          [answered(f"{name}#page=1", completion(str(place))) for place, name in enumerate(names)])  # fmt: skip
    found = files(tmp_path / "out")
    assert len({unicodedata.normalize("NFC", name.casefold()) for name in found}) == len(names) == len(found)
    assert {"r/a.pdf.md", f"{composed}.md", "a.tif.md"} <= found.keys()
    assert all("~" in name or text.strip()[-1] in "035" for name, text in found.items())
    twin = next(name for name in found if name.startswith("R/A"))
    for other in ([*names, twin.removesuffix(".md")], [twin.removesuffix(".md"), *names]):
        answers = [answered(f"{name}#page=1", completion("x")) for name in other]
        if other[0] == names[0]:
            pages(tmp_path, [page(name, 1) for name in other], answers)
            assert set(files(tmp_path / "out")) > set(found), "the earlier documents keep their files"
        else:
            with pytest.raises(ConfigError, match="is the file of another document"):
                pages(tmp_path, [page(name, 1) for name in other], answers)


@pytest.mark.parametrize("names", [("a.pdf", "a.pdf.md/b.png"), ("a.pdf.MD/b.png", "a.pdf")])
def test_a_folder_and_a_file_may_have_one_name(names: tuple[str, str], tmp_path: Path) -> None:
    pages(tmp_path, [page(name, 1) for name in names],
          [answered(f"{name}#page=1", completion(name)) for name in names])  # fmt: skip
    found = {name: text.split()[-1] for name, text in files(tmp_path / "out").items()}
    assert found == {"a.pdf.md": "a.pdf", "a.pdf~md/b.png.md": next(name for name in names if "b.png" in name)}


def test_a_long_name_is_cut(tmp_path: Path) -> None:
    names = ["é" * 125 + ".pdf", "é" * 125 + ".tif", "a" * 231 + ".pdf", "A" * 231 + ".pdf"]
    pages(tmp_path, [page(name, 1) for name in names],
          [answered(f"{name}#page=1", completion(name[-3:])) for name in names])  # fmt: skip
    assert sorted(text.split()[-1] for text in files(tmp_path / "out").values()) == ["pdf", "pdf", "pdf", "tif"]


def test_the_pages_of_a_document_stand_together(tmp_path: Path) -> None:
    rows = [page("a.pdf", 1), page("b.pdf", 1), page("a.pdf", 2)]
    with pytest.raises(ConfigError, match="row 3 is a page of a document whose other pages stand further up"):
        pages(tmp_path, rows, [answered("a.pdf#page=1", completion("x"))])


def test_a_file_is_whole_or_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [page("a.pdf", 1), page("b.pdf", 1), page("b.pdf", 2)]
    answers = [answered(f"{name}#page={number}", completion("old")) for name, number in
               (("a.pdf", 1), ("b.pdf", 1), ("b.pdf", 2))]  # fmt: skip
    pages(tmp_path, rows, answers)
    (tmp_path / "out/note.txt").write_text("of the user")
    before = files(tmp_path / "out")
    read = page_markdown.read_page

    def killed(row: Any, *more: Any) -> Any:
        if row.document == "b.pdf" and row.page == 2:
            raise KeyboardInterrupt
        return read(row, *more)

    monkeypatch.setattr(page_markdown, "read_page", killed)
    with pytest.raises(KeyboardInterrupt):
        pages(tmp_path, rows, [line.replace(b"old", b"new") for line in answers])
    assert files(tmp_path / "out") == before | {"a.pdf.md": before["a.pdf.md"].replace("old", "new")}


def test_a_document_without_rows_keeps_its_file(tmp_path: Path) -> None:
    pages(tmp_path, [page("a.pdf", 1)], [answered("a.pdf#page=1", completion("x"))])
    pages(tmp_path, [page("b.pdf", 1)], [answered("b.pdf#page=1", completion("x"))])
    assert list(files(tmp_path / "out")) == ["a.pdf.md", "b.pdf.md"]


def test_a_file_that_is_read_is_never_replaced(tmp_path: Path) -> None:
    answers = tmp_path / "out" / "a.md"
    answers.parent.mkdir()
    answers.write_bytes(answered("a#page=1", completion("x")))
    (tmp_path / "rows.jsonl").write_bytes(page("a", 1))
    with pytest.raises(ConfigError, match=r"would replace 'a.md'"):
        make_table(str(answers), TableOptions(input=str(tmp_path / "rows.jsonl"), markdown=tmp_path / "out"))
    assert b"custom_id" in answers.read_bytes()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "output: is missing"),
        ({"markdown": "out"}, "input: --markdown and --blocks need the rows"),
        ({"blocks": "b.npy", "input": "r"}, ".npy is for vectors"),
        ({"blocks": "b.txt", "input": "r"}, r"blocks b.txt: does not end in"),
        ({"output": "t.csv", "reader": "x"}, "reader: is for --markdown and --blocks"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any], words: str) -> None:
    if "markdown" in options:
        options = {**options, "markdown": Path(options["markdown"])}
    with pytest.raises(ConfigError, match=words):
        TableOptions(**options)


@pytest.mark.full("a hundred thousand pages take a minute")
def test_the_memory_does_not_grow_with_the_documents(tmp_path: Path) -> None:
    code = ("import resource, sys; from pathlib import Path; "
            "from npu_runner.tables.make_table import make_table; "
        "from npu_runner.tables.options import TableOptions; d = Path(sys.argv[1]); "
            "make_table(str(d / 'answers.jsonl'), TableOptions(input=str(d / 'rows.jsonl'), markdown=d / 'out')); "
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)")  # fmt: skip
    peaks = []
    for num_documents, num_pages in ((10, 100), (10, 10_000)):
        folder = tmp_path / str(num_pages)
        folder.mkdir()
        with (folder / "rows.jsonl").open("wb") as rows, (folder / "answers.jsonl").open("wb") as answers:
            for document in range(num_documents):
                for number in range(1, num_pages + 1):
                    rows.write(page(f"{document}.pdf", number))
                    answers.write(answered(f"{document}.pdf#page={number}", completion(f"{number} words " * 200)))
        done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout) * 1024)
        assert (folder / "out/0.pdf.md").read_text().count("<!-- page ") == num_pages
    assert peaks[1] - peaks[0] < 100_000 * 200, f"{peaks} bytes"
