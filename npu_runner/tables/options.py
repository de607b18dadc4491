"""Every option of `rows`, `table` and `merge`, checked once. Knows nothing of their work.

Imports nothing heavy: --help and mistakes answer at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from npu_runner.config import READ, WRITTEN, check_choices, one_of
from npu_runner.errors import ConfigError
from npu_runner.request.limits import LIMITS
from npu_runner.serving.options import PreprocessingOptions

_COLUMN = {"values": "COLUMN"}
_FORMATS = ("parquet", "csv", "jsonl", "npy")
ALL = "*"
TYPES = ("text", "int", "float", "bool")
"""The types of kept columns."""
RESERVED = {"expected": "the right answer, with which the job compares", "kind": "the group on the report's page"}
"""Names in metadata that a job uses, and their meaning."""


@dataclass(frozen=True, kw_only=True)
class RowsOptions:
    """The contents of rows, and the place where they go."""

    output: str = field(metadata={"short": "-o", "values": "FILE", "file": WRITTEN})
    """JSONL file of rows, for npu-runner batch; an earlier one is replaced. - writes standard output."""
    prompt: str | None = None
    """The question about every record. It goes before that of a reader."""
    prompt_file: Path | None = field(default=None, metadata={"file": READ})
    """The question from a file, as it stands; a newline at its end does not count."""
    template: Path | None = field(default=None, metadata={"file": READ})
    """A jinja template of the question, from a file. It sees the columns of a record by name, and all of them as
    `record`. The columns of a file are path, name and folder."""
    system: str | None = None
    """Instructions that come before the question."""
    reader: str | None = field(default=None, metadata={"values": "NAME|FILE", "file": READ})
    """A page reader, which fills the fields of rows as its model expects them: a shipped one (npu-runner models
    --reader lists them), or a file of the same form."""
    rows: str | None = field(default=None, metadata={"values": "FILE", "file": READ})
    """The rows of pages whose answers the source is. A reader of blocks makes rows of the blocks in these answers."""
    model: Path | None = field(default=None, metadata={"values": "DIR", "file": READ})
    """A checkpoint whose JSON files say which reader is used. No weights are read."""
    prompt_python: str | None = field(default=None, metadata={"values": "PYTHON"})
    """The Python interpreter that imports a reader's prompt from its authors' package. None: the one that runs this."""
    pages: str | None = field(default=None, metadata={"values": "1-5,r3-r1"})
    """The pages of each document; r1 is the last one. None: all."""
    dpi: int | None = None
    """Resolution of the pages of PDFs, 18 to 600. None: the reader's, else 150."""
    pdf_passwords: Path | None = field(default=None, metadata={"file": READ})
    """JSON file of an object: for the path of a PDF, as rows name it, or * for all others, its password."""
    append: bool = False
    """Keep the rows that are there, and add those of documents and images that they lack. A document that has changed
    since is refused."""
    image: tuple[str, ...] = field(default=(), metadata=_COLUMN)
    """A column of images: paths, data: URLs, bytes, or lists of them; may be repeated. Without --image and --video,
    the columns of images of a Hugging Face dataset are used."""
    video: tuple[str, ...] = field(default=(), metadata=_COLUMN)
    """A column of videos; may be repeated."""
    media_dir: Path | None = field(default=None, metadata={"file": READ})
    """The folder that the job gets as --allowed-media-dir. Paths in rows start there. Images that are bytes in a record
    are written into it once, under a name made of their content. None: the common root of the sources."""
    id: str | None = field(default=None, metadata=_COLUMN)
    """The column whose value becomes the custom_id. None: the file's path below the common root of the sources, with
    the number of the record behind #."""
    keep: tuple[str, ...] = field(default=(), metadata=_COLUMN)
    """A column that goes along as metadata, and into the table of answers; may be repeated. COLUMN:TYPE converts its
    values (price:float; text, int, float or bool). '*' is all columns but those of images, videos and other bytes. None
    does by default."""
    expected: str | None = field(default=None, metadata=_COLUMN)
    """The column of right answers: the job compares its answers with them."""
    kind: str | None = field(default=None, metadata=_COLUMN)
    """The column by which the report's page counts rows."""
    schema: Path | None = field(default=None, metadata={"file": READ})
    """Answers are JSON that fits the schema in this file."""
    max_tokens: int | None = None
    """Most tokens of an answer."""
    body: Mapping[str, Any] | None = None
    """More fields of every row's body: a JSON object such as {"temperature": 0}."""
    endpoint: str = one_of("chat", "completions", "embeddings")
    """The endpoint of the rows."""
    sample: int | None = None
    """Only N records, evenly over all of them; their ids are the same."""
    delimiter: str | None = None
    """The character between the cells of a CSV. None: the one of a first line like sep=; else a comma, in .tsv files a
    tab."""
    encoding: str | None = None
    """Encoding of CSV files, such as cp1252 or utf-16. None: UTF-8."""
    preprocessing_workers: int | None = None
    """Processes that open documents. None: half of the CPU cores, 16 at most."""
    preprocessing_timeout: float = 120.0
    """Seconds after which the opening of one document is given up; inf: never."""

    def __post_init__(self) -> None:
        check_choices(self)
        prompts = [name for name in ("prompt", "prompt_file", "template") if getattr(self, name) is not None]
        if len(prompts) > 1 or not (prompts or self.has_reader):
            flags = " and ".join(f"--{name.replace('_', '-')}" for name in prompts) or "none of them"
            raise ConfigError(f"one of --prompt, --prompt-file and --template is needed, not {flags}; or a --reader")
        if self.append and self.sample is not None:
            raise ConfigError("append: adds the rows of whole documents; leave --sample out")
        if self.append and self.output == "-":
            raise ConfigError("append: rows are added to a file, and standard output is none; name one")
        if self.prompt_python is not None and not self.has_reader:
            raise ConfigError("prompt_python: is for the prompt of a reader; name one with --reader")
        if self.workers.preprocessing_workers == 0:
            raise ConfigError("preprocessing_workers: 0 is not a positive number; documents need one at least")
        for name, _ in self.kept:
            if name in RESERVED:
                raise ConfigError(f"keep: metadata called {name!r} is {RESERVED[name]}; if the column is that, say "
                                  f"--{name} {name}")
        if len({name for name, _ in self.kept}) < len(self.kept):
            raise ConfigError(f"keep: {', '.join(self.keep)}: a column is named twice")
        try:
            "".encode("utf-8" if self.encoding is None else self.encoding)
        except (LookupError, ValueError) as error:
            raise ConfigError(f"encoding: {self.encoding!r} is no encoding of text that Python knows ({error}); name "
                              "one like cp1252, utf-16 or gb18030") from error
        for name in ("sample", "max_tokens"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"{name}: {value} is not a positive number")
        if self.delimiter is not None and (len(self.delimiter) != 1 or self.delimiter in '"\r\n'):
            raise ConfigError(f"delimiter: {self.delimiter!r} is not one character that can stand between cells")
        if self.endpoint != "chat" and self.schema is not None:
            raise ConfigError(f"schema: rows for {self.endpoint} have no response_format; use --endpoint chat")
        if self.endpoint == "completions" and (self.system is not None or self.image or self.video):
            raise ConfigError("endpoint completions: a raw prompt has no system message, images or videos; use chat")

    @property
    def has_prompt(self) -> bool:
        return any(each is not None for each in (self.prompt, self.prompt_file, self.template))

    @property
    def has_reader(self) -> bool:
        return self.reader is not None or self.model is not None

    @property
    def workers(self) -> PreprocessingOptions:
        return PreprocessingOptions(preprocessing_workers=self.preprocessing_workers,
                                    preprocessing_timeout=self.preprocessing_timeout)

    @property
    def kept(self) -> tuple[tuple[str, str | None], ...]:
        """Columns, and the type to which each is converted; None: it stays. The name of all columns is ALL."""
        parts = [(each.rpartition(":"), each) for each in self.keep]
        return tuple((name, kind) if mark and kind in TYPES else (each, None) for (name, mark, kind), each in parts)


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """The contents of a table of answers, and the place where it goes."""

    output: str | None = field(default=None, metadata={"short": "-o", "values": "FILE", "file": WRITTEN})
    """The table; an earlier one is replaced. Its name ends in .parquet, .csv, .jsonl or .npy. None: with --markdown or
    --blocks there is none."""
    markdown: Path | None = field(default=None, metadata={"values": "DIR"})
    """A folder for a Markdown file of each document, DOCUMENT.md. Earlier ones are replaced, and other files stay. It
    needs --input."""
    blocks: str | None = field(default=None, metadata={"values": "FILE", "file": WRITTEN})
    """A table of the blocks of all pages: document, page, label, box (from 0 to 1 of the page), text. Its name ends in
    .parquet, .csv or .jsonl. It needs --input."""
    reader: str | None = field(default=None, metadata={"values": "NAME|FILE", "file": READ})
    """The page reader whose answers these are, for --markdown and --blocks. None: the one that made the rows, as the
    file beside them says, else one that answers in Markdown."""
    input: str | None = field(default=None, metadata={"short": "-i", "values": "FILE", "file": READ})
    """The rows that the job has answered; the file may be compressed. With them the table has their metadata, and their
    order. None: no metadata, and the order in which answers finished."""
    format: str = one_of("auto", *_FORMATS)
    """The format of the table; auto: as its name ends."""
    schema: Path | None = field(default=None, metadata={"file": READ})
    """The schema of the answers, for the types of their columns. None: the rows' own, or the job's."""
    excel_safe: bool = False
    """In a CSV, every text is quoted, and a =, +, -, @, tab or carriage return gets ' in front where a cell may start
    with it: no spreadsheet runs it then, wherever it splits the file."""
    max_row_bytes: int = LIMITS.max_row_bytes
    """Most bytes of an answer; a longer one is an error. The table has no metadata of a longer row."""

    def __post_init__(self) -> None:
        check_choices(self)
        if self.max_row_bytes < 1:
            raise ConfigError(f"max_row_bytes: {self.max_row_bytes} is not a positive number")
        if self.output is None and not self.has_pages:
            raise ConfigError("output: is missing; name a table with -o, or --markdown or --blocks")
        if self.has_pages and self.input is None:
            raise ConfigError("input: --markdown and --blocks need the rows of the job, which name documents and "
                              "pages; name them with --input")
        if self.reader is not None and not self.has_pages:
            raise ConfigError("reader: is for --markdown and --blocks; name one of them, or leave it out")
        if self.blocks is not None and _kind("blocks", self.blocks) == "npy":
            raise ConfigError(f"blocks {self.blocks}: .npy is for vectors; name a .parquet, .csv or .jsonl")
        if self.excel_safe and "csv" not in (self.kind, self.kind_of_blocks):
            raise ConfigError(f"excel_safe: a table in {self.kind} has no formulas; it goes with CSV")

    @property
    def has_pages(self) -> bool:
        return self.markdown is not None or self.blocks is not None

    @property
    def kind(self) -> str | None:
        """The format; None: there is no table. Raises ConfigError where neither the option nor the name says it."""
        if self.output is None or self.format != "auto":
            return None if self.output is None else self.format
        return _kind("output", self.output)

    @property
    def kind_of_blocks(self) -> str | None:
        return None if self.blocks is None else _kind("blocks", self.blocks)


def _kind(option: str, name: str) -> str:
    """The format that a file's name says."""
    ending = Path(name).suffix[1:].lower()
    if ending not in _FORMATS:
        raise ConfigError(f"{option} {name}: does not end in {', '.join('.' + each for each in _FORMATS)}; name it so"
                          f"{', or say --format' if option == 'output' else ''}")
    return ending


@dataclass(frozen=True, kw_only=True)
class MergeOptions:
    """The place where two outputs of one input go together."""

    output: str = field(metadata={"short": "-o", "values": "FILE", "file": WRITTEN})
    """JSONL file of the answers of both; an earlier one is replaced."""
    dropped: Path | None = field(default=None, metadata={"file": WRITTEN})
    """JSONL file of the lines that are left out, whole. None: a line that is no result row is an error."""
