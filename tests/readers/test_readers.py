"""Readers fill rows as their models' authors ask them; a file with a mistake is refused when it is read."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pypdfium2
import pytest
from PIL import Image

from npu_runner.batch.rows.openai_format import parse_row
from npu_runner.cli import main as cli
from npu_runner.errors import ConfigError
from npu_runner.prompts.media.page_options import PageOptions
from npu_runner.readers.reader import Grid, PageReader, find_reader, read_reader, shipped_readers
from tests.tables.made import rows
from tests.tables.pages import pdf

SHIPPED = shipped_readers()
OF_PAGES = [name for name, reader in SHIPPED.items() if reader.after is None]
EXPECTED: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "chandra-ocr-2": ({"dpi": 192, "longest": 8192, "shortest": 1024, "size": [1596, 2240]},
                      {"temperature": 0, "top_p": 0.1, "max_tokens": 12384}, ["image_url", "text"]),
    "lighton-ocr-3": ({"longest": 2048, "shortest": 2048},
                      {"temperature": 0.2, "chat_template_kwargs": {"enable_thinking": False}}, ["image_url"]),
    "nuextract3": ({}, {"chat_template_kwargs": {"mode": "markdown", "enable_thinking": False}}, ["image_url"]),
    "mineru2.5-layout": ({"dpi": 200, "longest": 3500, "size": [1036, 1036]},
                         {"no_repeat_ngram_size": 100, "skip_special_tokens": False, "top_k": 1},
                         ["image_url", "text"]),
    "olmocr-2": ({"longest": 1288, "shortest": 1288}, {"temperature": 0.1, "max_tokens": 8000}, ["text", "image_url"]),
    "paddleocr-vl": ({"dpi": 144}, {"mm_processor_kwargs": {"min_pixels": 112896, "max_pixels": 1003520}},
                     ["image_url", "text"]),
}  # fmt: skip
"""Fields of the address of a page in A4, fields of the body, and the order of the parts."""


@pytest.fixture
def document(tmp_path: Path) -> Path:
    return pdf(tmp_path / "docs" / "a.pdf", num_pages=2)


def asked_by(name: str, source: Path, tmp_path: Path, **options: Any) -> list[dict[str, Any]]:
    """Rows of a reader, with words in place of a prompt that is not its own."""
    reader = read_reader(name)
    prompt = None if reader.prompt_from is None else "the prompt"
    return rows(tmp_path / "r.jsonl", source, **{"prompt": prompt, "reader": name, **options})


@pytest.mark.parametrize("name", OF_PAGES)
def test_every_shipped_reader_makes_rows_that_are_served(name: str, document: Path, tmp_path: Path) -> None:
    Image.new("RGB", (60, 40)).save(document.parent / "b.png")
    found = asked_by(name, document.parent, tmp_path)
    assert [row["custom_id"] for row in found] == ["a.pdf#page=1", "a.pdf#page=2", "b.png"]
    for row in found:
        parse_row(row).to_params({}, 0)
        reader, body = SHIPPED[name], row["body"]
        assert {key: body[key] for key in reader.body} == reader.body
        content = body["messages"][-1]["content"]
        texts = [part["text"] for part in content if part["type"] == "text"]
        assert texts == ([] if reader.prompt == "" else [reader.prompt or "the prompt"])
        assert [part["type"] for part in content].count("image_url") == 1
        systems = [message["content"] for message in body["messages"] if message["role"] == "system"]
        assert systems == ([] if reader.system is None else [reader.system])
    assert found[2]["body"]["metadata"] == {"document": "b.png", "page": 1, "pages": 1}
    image = found[2]["body"]["messages"][-1]["content"]
    (fields,) = [part["image_url"] for part in image if part["type"] == "image_url"]
    assert not fields.keys() & {"dpi", "page", "version"}, "an image has no resolution and no pages"


@pytest.mark.parametrize("name", EXPECTED)
def test_a_reader_asks_as_its_authors_do(name: str, document: Path, tmp_path: Path) -> None:
    fields, body, order = EXPECTED[name]
    row = asked_by(name, document, tmp_path)[1]
    content = row["body"]["messages"][-1]["content"]
    (found,) = [part["image_url"] for part in content if part["type"] == "image_url"]
    assert {key: value for key, value in found.items() if key != "version"} == {"url": "a.pdf", "page": 2, **fields}
    assert row["body"].items() >= body.items()
    assert [part["type"] for part in content] == order


def test_options_go_before_a_reader(document: Path, tmp_path: Path) -> None:
    (row,) = asked_by("glm-ocr", document, tmp_path, pages="1", prompt="Mine:", system="Be brief.", max_tokens=7,
                      dpi=300, body={"top_k": 3})  # fmt: skip
    system, user = row["body"]["messages"]
    assert system["content"] == "Be brief."
    assert user["content"][0]["image_url"]["dpi"] == 300
    assert user["content"][1]["text"] == "Mine:"
    assert (row["body"]["max_tokens"], row["body"]["top_k"], row["body"]["top_p"]) == (7, 3, 1e-05)


def test_images_of_a_table_have_the_readers_fields(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"scan": "a.png", "film": "b.mp4"}\n')
    (row,) = rows(tmp_path / "r.jsonl", tmp_path / "t.jsonl", prompt=None, reader="glm-ocr", image=("scan",),
                  video=("film",))  # fmt: skip
    image, video, text = row["body"]["messages"][0]["content"]
    assert image["image_url"] == {"url": "a.png", "longest": 3500}
    assert video["video_url"] == {"url": "b.mp4"}
    assert text["text"] == "Text Recognition:"


VALID = {"name": "mine", "about": "mine", "prompt": "Read."}


@pytest.mark.parametrize(("changes", "words"), [
    ({"temperature": 0}, "temperature: Extra inputs are not permitted"),
    ({"page": {"dpi": "150"}}, "page.dpi: Input should be a valid integer"),
    ({"page": {"dpi": 17}}, "page.dpi: .*greater than or equal to 18"),
    ({"page": {"size": [0, 5]}}, "page.size.0: "),
    ({"page": {"size": [9, 9], "grid": {"min_pixels": 1, "max_pixels": 9, "multiple": 1}}}, "leave one of them out"),
    ({"prompt": None}, "one of prompt and prompt_from is needed"),
    ({"prompt_from": {"package": "p", "module": "m", "constant": "C"}}, "one of prompt and prompt_from is needed"),
    ({"prompt": None, "prompt_from": {"package": "p", "module": "os; x", "constant": "C"}}, "module"),
    ({"by_label": {"table": {"prompt": "?"}}}, "by_label and unread_labels are for readers of blocks"),
    ({"name": "../up"}, "name: String should match pattern"),
    ({"about": None}, "about: Input should be a valid string"),
])  # fmt: skip
def test_a_file_with_a_mistake_is_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(VALID))
    assert read_reader(str(path)) == PageReader(name="mine", about="mine", prompt="Read.")
    path.write_text(json.dumps(VALID | changes))
    with pytest.raises(ConfigError, match=rf"reader '.*mine\.json': .*{words}"):
        read_reader(str(path))


@pytest.mark.parametrize(("body", "words"), [
    ({"temperatur": 0}, "temperatur"), ({"top_p": 2}, "top_p"), ({"messages": []}, "messages is made of the records"),
    ({"max_tokens": "9"}, "max_tokens"),
])  # fmt: skip
def test_a_field_that_a_row_refuses_fails_before_any_row(body: dict[str, Any], words: str, document: Path,
                                                         tmp_path: Path) -> None:  # fmt: skip
    (tmp_path / "mine.json").write_text(json.dumps(VALID | {"body": body}))
    with pytest.raises(ConfigError, match=words):
        asked_by(str(tmp_path / "mine.json"), document, tmp_path)
    assert not list(tmp_path.glob("*.jsonl"))


@pytest.mark.parametrize("text", ["", "[]", "{", "{}", "\xff"])
def test_what_is_no_reader_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"reader '.*mine\.json': "):
        read_reader(str(tmp_path / "mine.json"))


def test_unknown_names_are_told_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no shipped reader and no file; did you mean chandra-ocr-2\?"):
        read_reader("chandra-ocr2")
    with pytest.raises(ConfigError, match=r"the shipped ones are chandra-ocr-2, glm-ocr, lighton"):
        read_reader("zzz")
    with pytest.raises(ConfigError, match=r"mineru2\.5-blocks: reads blocks, .* answers to mineru2\.5-layout"):
        rows(tmp_path / "r.jsonl", pdf(tmp_path / "a.pdf"), prompt=None, reader="mineru2.5-blocks")


def checkpoint(folder: Path, tokens: tuple[str, ...] = (), **config: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    added = [{"content": token, "special": True} for token in tokens]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    return folder


def test_a_checkpoint_names_its_reader(tmp_path: Path) -> None:
    """By its type where one reader has it, and else by the name in config.json."""
    alone = {"paddleocr_vl": "paddleocr-vl", "glm_ocr": "glm-ocr"}
    for model_type, name in alone.items():
        assert find_reader(checkpoint(tmp_path / model_type, model_type=model_type)).name == name
    names = {"datalab-to/chandra-ocr-2": "chandra-ocr-2", "/models/LightOnOCR-3-4B": "lighton-ocr-3",
             "numind/nuextract3": "nuextract3", "datalab-to/surya-ocr-2": "surya-2"}  # fmt: skip
    for number, (model, name) in enumerate(names.items()):
        folder = checkpoint(tmp_path / str(number), model_type="qwen3_5", _name_or_path=model)
        assert find_reader(folder).name == name
    folder = checkpoint(tmp_path / "m", ("<|rotate_up|>",), model_type="qwen2_vl")
    assert find_reader(folder).name == "mineru2.5-layout"


@pytest.mark.parametrize(("config", "words"), [
    ({"model_type": "qwen3_5"}, "chandra-ocr-2, lighton-ocr-3, nuextract3, surya-2 match its files alike"),
    ({"model_type": "qwen3_5", "_name_or_path": "Qwen/Qwen3.5-4B"}, "match its files alike"),
    ({"model_type": "qwen2_5_vl"}, "nanonets-ocr2, olmocr-2 match its files alike"),
    ({"model_type": "qwen2_vl"}, "no shipped reader matches its files"),
    ({"model_type": "llama", "_name_or_path": "chandra-ocr-2"}, "no shipped reader matches its files"),
])  # fmt: skip
def test_no_reader_is_guessed(config: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        find_reader(checkpoint(tmp_path / "chandra-ocr-2", **config))


def test_a_folder_without_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        find_reader(tmp_path)


def test_the_command_shows_a_file_that_can_be_read_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models", "--reader"]) == 0
    listed = capsys.readouterr().out
    for name, reader in SHIPPED.items():
        assert f"{reader.about}\n" in listed
        assert cli.main(["models", "--reader", name]) == 0
        (tmp_path / "copy.json").write_text(capsys.readouterr().out)
        assert read_reader(str(tmp_path / "copy.json")) == reader
    assert cli.main(["models", "--reader", "nothing"]) == 2
    assert cli.main(["models", "a-model", "--reader", "glm-ocr"]) == 2


@pytest.mark.parametrize("size", [(1, 1), (28, 4000), (595, 842), (1588, 2246), (9000, 11), (5000, 5000), (1792, 28)])
def test_a_size_on_a_grid_keeps_its_bounds_and_its_ratio(size: tuple[int, int]) -> None:
    grid = Grid(min_pixels=50176, max_pixels=6291456, multiple=28)
    width, height = grid.size(*size)
    assert width % 28 == height % 28 == 0
    assert width * height <= 6291456
    ratio = size[0] / size[1]
    if 1 / 50 < ratio < 50:
        assert width * height > 50176 * 0.8
        # No side is wrong by more than a cell.
        assert abs(width - ratio * height) <= 28 * (1 + ratio)
    assert math.isfinite(width / height)


@pytest.mark.parametrize("name", ["lighton-ocr-3", "olmocr-2"])
def test_a_page_has_exactly_the_longer_side_that_its_reader_names(name: str, tmp_path: Path) -> None:
    """As pypdfium2 renders it at that scale, which may round up to one pixel more."""
    page = SHIPPED[name].page
    sizes = [(595.28, 841.89), (841.89, 595.28), (612, 792), (210, 298), (2384, 3370), (227, 850), (960, 540)]
    document = pypdfium2.PdfDocument(pdf(tmp_path / "a.pdf", *sizes))
    for (width, height), found in zip(sizes, document, strict=True):
        assert page.longest is not None
        rendered = found.render(scale=page.longest / max(found.get_size()))
        options = PageOptions(longest=page.longest, shortest=page.shortest)
        size = options.size_of_points(*found.get_size(), 1 << 40)
        assert max(size) == page.longest, (width, height)
        assert max(abs(size[0] - rendered.width), abs(size[1] - rendered.height)) <= 1, (width, height)


def test_no_prompt_of_another_author_is_shipped() -> None:
    """Only commands of a few words stand in the project."""
    for reader in SHIPPED.values():
        texts = [reader.prompt or "", *(label.prompt for label in reader.by_label.values())]
        assert all(len(text.split()) <= 3 for text in texts)
