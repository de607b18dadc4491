"""A page reader: the fields of the rows that ask a model to read a page, as a JSON file.

Readers are shipped in files/, and a user's file has the same form. Knows nothing of documents, rows or the engine.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from npu_runner.errors import ConfigError

_FOLDER = Path(__file__).parent / "files"
_MOST_BYTES = 1 << 20
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json")
_Pixels = Annotated[int, Field(ge=1, le=1 << 30)]
_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$", max_length=200)]


class _Strict(BaseModel):
    """No conversions, no unknown fields, and no warning of a field named model_... (pydantic before 2.10)."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())


class ModelMatch(_Strict):
    """Facts of a checkpoint's JSON files by which `--model` finds the reader."""

    model_type: str
    names: tuple[str, ...] = ()
    """One of them occurs in `_name_or_path` of config.json: such a reader goes before readers without such a name."""
    tokens: tuple[str, ...] = ()
    """The tokenizer's files have all of these tokens."""


class ImageFields(_Strict):
    """Fields of an `image_url` part. None: the row does not set the field."""

    longest: _Pixels | None = None
    shortest: _Pixels | None = None
    size: tuple[_Pixels, _Pixels] | None = None

    def to_fields(self, *, is_pdf: bool = False) -> dict[str, Any]:
        """The fields that the row sets. Only PDFs have a resolution."""
        return self.model_dump(mode="json", exclude_none=True, exclude={"grid"} if is_pdf else {"grid", "dpi"})


class Grid(_Strict):
    """An area in pixels, and sides that are multiples of a number."""

    min_pixels: _Pixels
    max_pixels: _Pixels
    multiple: _Pixels

    def size(self, width: int, height: int) -> tuple[int, int]:
        """The size of an image of `width` x `height` pixels: as near to its ratio as cells of `multiple` allow."""
        area = width * height
        scale = math.sqrt(min(max(area, self.min_pixels), self.max_pixels) / area)
        cells = [max(1, round(side * scale / self.multiple)) for side in (width, height)]
        while cells[0] * cells[1] > self.max_pixels // self.multiple**2 and cells != [1, 1]:
            # Both sides may have been rounded up: the one goes down whose loss changes the ratio less.
            smaller = [[cells[0] - down, cells[1] - 1 + down] for down in (0, 1) if cells[1 - down] > 1]
            cells = min(smaller, key=lambda each: abs(each[0] / each[1] - width / height))
        return cells[0] * self.multiple, cells[1] * self.multiple


class PageFields(ImageFields):
    """Fields of an `image_url` part that shows a page of a document."""

    dpi: Annotated[int, Field(ge=18, le=600)] | None = None
    grid: Grid | None = None
    """`size` is the size on this grid of the page at `dpi`, `longest` and `shortest`."""

    @model_validator(mode="after")
    def _has_one_size(self) -> PageFields:
        if self.grid is not None and self.size is not None:
            raise ValueError("grid makes a size for each page and size is one; leave one of them out")
        return self


class PromptSource(_Strict):
    """A prompt that its authors publish as a constant, or as the result of a function without arguments."""

    package: _Name
    module: Annotated[str, Field(pattern=r"^\w+(\.\w+)*$")]
    constant: Annotated[str, Field(pattern=r"^\w+$")]


class PromptCard(_Strict):
    """A prompt that its authors publish in the text of a model card alone."""

    card: str


class LabelFields(_Strict):
    """The prompt of a block with a certain label, and the fields of `body` that differ for it."""

    prompt: str
    body: dict[str, Any] = {}


class PageReader(_Strict):
    """The questions to a model about a page. One of `prompt` and `prompt_from` is given."""

    name: _Name
    about: str
    """A line for users."""
    match: ModelMatch | None = None
    """None: `--model` does not find it."""
    prompt: str | None = None
    """An empty one shows the image alone."""
    prompt_from: PromptSource | PromptCard | None = None
    system: str | None = None
    text_first: bool = False
    """The prompt stands before the image."""
    page: PageFields = PageFields()
    image: ImageFields = ImageFields()
    """The fields of images that are no pages of a document."""
    body: dict[str, Any] = {}
    """More fields of a row's body: sampling, guards, max_tokens, pixels of the model's own processor."""
    parser: Literal["markdown", "front_matter", "divs", "mineru_layout", "mineru_block", "otsl"] = "markdown"
    """The parser of its answers."""
    ladder: tuple[dict[str, Any], ...] = ()
    """Steps that try a page again, as the job's --ladder reads them."""
    after: str | None = None
    """The reader whose answers have the blocks that this one reads; None: it reads pages."""
    by_label: dict[str, LabelFields] = {}
    """With `after`: what differs for blocks of these labels."""
    unread_labels: tuple[str, ...] = ()
    """With `after`: labels of blocks for which there is no question."""

    @model_validator(mode="after")
    def _has_one_prompt(self) -> PageReader:
        if (self.prompt is None) == (self.prompt_from is None):
            raise ValueError("one of prompt and prompt_from is needed; an empty prompt shows the image alone")
        if (self.by_label or self.unread_labels) and self.after is None:
            raise ValueError("by_label and unread_labels are for readers of blocks, which name another reader in after")
        return self

    def to_json(self) -> str:
        """The file, without fields that say nothing."""
        return json.dumps(self.model_dump(mode="json", exclude_defaults=True), indent=2, ensure_ascii=False)


def shipped_readers() -> dict[str, PageReader]:
    """The readers of this package, by name."""
    return {path.stem: _read(path) for path in sorted(_FOLDER.glob("*.json"))}


def read_reader(name: str) -> PageReader:
    """A shipped reader, or a user's file. Raises ConfigError for a name that is neither, and for a wrong file."""
    shipped = {path.stem: path for path in _FOLDER.glob("*.json")}
    if name in shipped:
        return _read(shipped[name])
    if not Path(name).is_file():
        near = difflib.get_close_matches(name, shipped, n=1)
        more = f"did you mean {near[0]}?" if near else f"the shipped ones are {', '.join(sorted(shipped))}"
        raise ConfigError(f"reader {name!r}: is no shipped reader and no file; {more}")
    return _read(Path(name))


def find_reader(folder: Path) -> PageReader:
    """The shipped reader of this checkpoint, by its JSON files alone. Raises ConfigError where none or several match.
    """
    config = _read_json(folder / "config.json")
    known = str(config.get("_name_or_path", "")).lower()
    found = [each for each in shipped_readers().values() if each.match is not None and _matches(each.match, folder,
                                                                                                config)]
    named = [each for each in found if each.match is not None and any(name.lower() in known
                                                                      for name in each.match.names)]
    if len(named or found) == 1:
        return (named or found)[0]
    names = ", ".join(each.name for each in named or found)
    why = f"{names} match its files alike" if names else "no shipped reader matches its files"
    raise ConfigError(f"model {str(folder)!r}: {why}; name one with --reader (a file of your own has the form that "
                      "npu-runner models --reader NAME shows)")


def _matches(match: ModelMatch, folder: Path, config: Mapping[str, Any]) -> bool:
    if config.get("model_type") != match.model_type:
        return False
    texts = [(folder / name).read_text("utf-8", "replace") for name in _TOKENIZER_FILES
             if match.tokens and (folder / name).is_file()]
    return all(any(json.dumps(token) in text for text in texts) for token in match.tokens)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"model {str(path.parent)!r}: config.json cannot be read ({error}); name its folder, or a "
                          "reader with --reader") from error
    return value if isinstance(value, dict) else {}


def _read(path: Path) -> PageReader:
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"reader {str(path)!r}: cannot be read ({error.strerror})") from error
    if len(data) > _MOST_BYTES:
        raise ConfigError(f"reader {str(path)!r}: has more than {_MOST_BYTES} bytes; is it the right file?")
    try:
        return PageReader.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"reader {str(path)!r}: {where and where + ': '}{first['msg']}; npu-runner models --reader "
                          "NAME shows a file of the same form") from error
