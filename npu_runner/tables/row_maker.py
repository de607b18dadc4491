"""Makes a row of a record: the bytes of a line of the job's input. The same record gives the same bytes.

The first row is parsed as the job will parse it, so that a wrong field is an error before a million rows have it.
Knows nothing of where records come from.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from npu_runner.batch.rows.logprobs_json import to_json
from npu_runner.batch.rows.openai_format import parse_row
from npu_runner.errors import ConfigError, RequestError
from npu_runner.prompts.media.file_kinds import image_kind, video_kind
from npu_runner.readers.reader import PageFields, PageReader
from npu_runner.request.limits import LIMITS, shown
from npu_runner.tables.arrow_records import IMAGE
from npu_runner.tables.document_pages import image_version
from npu_runner.tables.media_files import MediaFolder
from npu_runner.tables.options import ALL, RESERVED, RowsOptions
from npu_runner.tables.prompt_text import PromptText, read_schema
from npu_runner.tables.records import Record
from npu_runner.tables.sources import DOCUMENT, VIDEO, kind_of_name
from npu_runner.tables.sources import IMAGE as IMAGE_FILE

CHAT = "/v1/chat/completions"
_URLS = {"chat": CHAT, "completions": "/v1/completions", "embeddings": "/v1/embeddings"}
_OURS = ("messages", "prompt", "input", "metadata")
"""Fields of a body that the records fill."""
_DIGEST_CHARS = 32
_DECIMAL_COMMA = re.compile(r"[+-]?[0-9.]*,[0-9]+")


class RowMaker:
    """Makes the rows of one command. Raises ConfigError for a schema that cannot be read and for a field that users
    cannot set."""

    def __init__(self, options: RowsOptions, prompt: PromptText, media: MediaFolder, reader: PageReader | None = None,
                 *, names_versions: bool = False):
        """`names_versions`: rows of images have the version of the file, as those of pages have."""
        self.num_without_media = 0
        """Rows that should show an image or a video, and show none."""
        self.not_shown: dict[str, str] = {}
        """Columns of files that are no images, and their kinds."""
        self._options = options
        self._prompt = prompt
        self._media = media
        self._url = _URLS[options.endpoint]
        self._reader, self._names_versions = reader, names_versions
        self._system = options.system if options.system is not None or reader is None else reader.system
        self.fixed = fixed_fields(options, {} if reader is None else reader.body)
        """Fields of every body."""
        self.page = (PageFields() if reader is None else reader.page).model_copy(
            update={} if options.dpi is None else {"dpi": options.dpi})
        self._image = {} if reader is None else reader.image.to_fields()
        self._lines = RowLines()

    @property
    def needed(self) -> frozenset[str] | None:
        """Columns that are read; None: perhaps all."""
        options = self._options
        kept = [name for name, _ in options.kept]
        named = [*options.image, *options.video, *kept, options.id, options.expected, options.kind]
        needed = None if ALL in kept else self._prompt.needed
        return None if needed is None else needed.union(name for name in named if name is not None)

    def row(self, record: Record) -> tuple[str, bytes]:
        """The custom_id, and the line. Raises ConfigError, naming the record, where it cannot be a row."""
        custom_id = self._name(record)
        body = {**self._question(record), **self.fixed}
        if metadata := self._metadata(record):
            body["metadata"] = metadata
        return custom_id, self._lines.line(custom_id, self._url, body, record.where)

    def _name(self, record: Record) -> str:
        if self._options.id is None:
            return shortened(record.id)
        value = metadata_value(record.value(self._options.id), record.where)
        if value is None or value == "":
            raise ConfigError(f"{record.where}: its {self._options.id!r} is empty, and every row needs a custom_id; "
                              "name another --id, or none")
        return shortened(str(value))

    def _question(self, record: Record) -> dict[str, Any]:
        text = self._prompt.render(record)
        if self._options.endpoint == "completions":
            return {"prompt": text}
        shown = self._shown(record)
        if self._options.endpoint == "embeddings" and not shown and self._system is None:
            return {"input": text}
        return {"messages": messages_of(text, shown, self._system, self._reader)}

    def _shown(self, record: Record) -> list[dict[str, Any]]:
        """Images, then videos, as parts of a message."""
        if record.file is not None:
            kind = "video_url" if record.file.kind == VIDEO else "image_url"
            return [{"type": kind, kind: {"url": self._media.address(record.file.path), **self._fields(record)}}]
        images, videos = self._options.image, self._options.video
        if not images and not videos:
            images = tuple(name for name in record.media_columns if self._has_images(record, name))
        parts = []
        for kind, columns in (("image_url", images), ("video_url", videos)):
            for column in columns:
                where = f"{record.where}, column {column!r}"
                for url in self._media.addresses(record.value(column), where):
                    parts.append({"type": kind, kind: {"url": url, **(self._image if kind == "image_url" else {})}})
        self.num_without_media += not parts and bool(images or videos)
        return parts

    def _fields(self, record: Record) -> dict[str, Any]:
        """The fields of the address of a page or an image."""
        document = record.document
        if document is None:
            if record.file is None or record.file.kind != IMAGE_FILE:
                return {}
            named = image_version(record.file.path) if self._names_versions else None
            return self._image if named is None else {**self._image, "version": named}
        fields = self.page.to_fields(is_pdf=record.file is not None and record.file.kind == DOCUMENT)
        size = {"size": document.sizes[record.page]} if record.page in document.sizes else {}
        version = {} if document.version is None else {"version": document.version}
        return {"page": record.page, **fields, **size, **version}

    def _has_images(self, record: Record, column: str) -> bool:
        """By the schema, or where it does not say, by the first bytes or the name of each file in the cell."""
        kind = record.media_columns[column]
        if kind is None:
            kind = next(filter(None, map(_other_kind, _files_in(record.value(column)))), IMAGE)
        if kind != IMAGE:
            self.not_shown.setdefault(column, kind)
        return kind == IMAGE

    def _metadata(self, record: Record) -> dict[str, Any]:
        options = self._options
        columns: dict[str, tuple[str, str | None]] = {}
        for column, kind in options.kept:
            columns |= {name: (name, None) for name in self._all_columns(record)} if column == ALL else {
                column: (column, kind)}
        columns |= {name: (column, None) for name in RESERVED if (column := getattr(options, name)) is not None}
        found: dict[str, Any] = {}
        if record.document is not None or (self._reader is not None and record.file is not None):
            document = record.document
            # A document that did not open may have more pages than this one.
            num_pages = 1 if document is None else None if document.error is not None else document.num_pages
            found = {"document": record.columns["path"], "page": record.page, "pages": num_pages}
        for name, (column, kind) in columns.items():
            where = f"{record.where}, column {column!r}"
            value = record.value(column)
            found[name] = metadata_value(value if kind is None else typed(value, kind, where), where)
        return found

    def _all_columns(self, record: Record) -> list[str]:
        """The columns that metadata can hold. Raises ConfigError for a name that the job would use."""
        options = self._options
        named = {*options.image, *options.video, *record.media_columns, *(name for name, _ in options.kept)}
        found = [name for name, value in record.columns.items() if name not in named and not isinstance(value, bytes)]
        for name in RESERVED:
            if name in found and getattr(options, name) is None:
                raise ConfigError(f"keep: metadata called {name!r} is {RESERVED[name]}; if the column is that, say "
                                  f"--{name} {name}, else name each column to keep")
        return found


class RowLines:
    """Writes the lines of rows. The first one is parsed as the job will parse it."""

    def __init__(self) -> None:
        self._is_checked = False

    def line(self, custom_id: str, url: str, body: Mapping[str, Any], where: str) -> bytes:
        """Raises ConfigError, naming `where`, for a row that the job would refuse."""
        row = {"custom_id": custom_id, "method": "POST", "url": url, "body": body}
        try:
            line = to_json(row).encode("utf-8") + b"\n"
            if not self._is_checked:
                parse_row(json.loads(line)).to_params({}, 0)
                self._is_checked = True
        except UnicodeEncodeError as error:
            raise ConfigError(f"{where}: spells half a surrogate pair, which is no text; correct it") from error
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{where}: is no JSON ({error})") from error
        except (RequestError, ConfigError) as error:
            raise ConfigError(f"{where}: the job would refuse this row: {error}") from error
        if len(line) > LIMITS.max_row_bytes:
            raise ConfigError(f"{where}: its row has {len(line)} bytes, at most {LIMITS.max_row_bytes} are allowed; "
                              "shorten its text")
        return line


def messages_of(text: str, shown: list[dict[str, Any]], system: str | None,
                reader: PageReader | None) -> list[dict[str, Any]]:
    """The messages of a row that asks `text` about what is shown."""
    # A reader may show an image and say nothing.
    texts = [{"type": "text", "text": text}] if text or reader is None else []
    parts = [*texts, *shown] if reader is not None and reader.text_first else [*shown, *texts]
    before = [] if system is None else [{"role": "system", "content": system}]
    return [*before, {"role": "user", "content": parts if shown else text}]


def typed(value: Any, kind: str, where: str) -> Any:
    """A cell as one of TYPES; an empty one is None. Raises ConfigError for a value that cannot be converted."""
    if value is None or value == "":
        return None
    text = str(value).strip()
    try:
        if kind == "int":
            return int(_digits(text.removesuffix(".0") if isinstance(value, float) else text))
        if kind == "float" and math.isfinite(number := float(_digits(text))):
            return number
        if kind == "bool":
            return {"true": True, "false": False, "1": True, "0": False}[text.lower()]
        if kind == "text":
            return value if isinstance(value, (str, bytes, list, dict)) else text
    except (ValueError, KeyError):
        pass
    remedy = "; its numbers have a decimal comma" if kind == "float" and _DECIMAL_COMMA.fullmatch(text) else ""
    raise ConfigError(f"{where}: {shown(value)} is no {kind}{remedy}; correct it, or keep the column as it is")


def _digits(text: str) -> str:
    """Python reads 1_000 and digits of any script as numbers; tables do not."""
    if "_" in text or not text.isascii():
        raise ValueError(text)
    return text


def _files_in(value: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, list):
        for item in value:
            yield from _files_in(item)
    elif isinstance(value, dict):
        yield value


def _other_kind(file: Mapping[str, Any]) -> str | None:
    """None for an image, and for an empty cell."""
    data, path = file["bytes"], file["path"]
    if data is None:
        return None if path is None or kind_of_name(path) == IMAGE_FILE else f"files like {path!r}"
    return None if image_kind(data[:64]) else video_kind(data[:64]) or "bytes that start like no image"


def metadata_value(value: Any, where: str) -> str | int | float | bool | None:
    """The value in metadata: lists and objects become their JSON, infinities a word. Raises ConfigError for bytes."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        raise ConfigError(f"{where}: holds bytes, and metadata is text; leave the column out, or decode it before")
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, (list, tuple, dict)):
        try:
            return json.dumps(value, ensure_ascii=False, default=_refuse, separators=(",", ":"))
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"{where}: cannot be metadata ({error}); leave the column out") from error
    return str(value)


def _refuse(value: Any) -> Any:
    raise TypeError(f"a {type(value).__name__} in it is no JSON")


def shortened(name: str) -> str:
    """A custom_id that a job accepts. A longer one is cut, and a digest of all of it is added."""
    if len(name) <= LIMITS.max_custom_id_chars:
        return name
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_CHARS // 2).hexdigest()
    return f"{name[:LIMITS.max_custom_id_chars - _DIGEST_CHARS - 1]}~{digest}"


def fixed_fields(options: RowsOptions, of_reader: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of every body. The options go before those of a reader."""
    body = dict(options.body or {})
    fields: dict[str, Any] = {} if options.max_tokens is None else {"max_tokens": options.max_tokens}
    if options.schema is not None:
        schema, rule = read_schema(options.schema), body.get("structured_outputs")
        if not isinstance(schema, dict):
            raise ConfigError(f"schema: {str(options.schema)!r} holds a {type(schema).__name__}, a JSON object is "
                              "needed")
        if isinstance(rule, dict):
            if "json" in rule:
                raise ConfigError("body: structured_outputs has a schema and --schema is one; leave one of them out")
            # Its other members, such as disable_any_whitespace, belong to the schema. The row refuses two rules.
            fields["structured_outputs"] = {"json": schema, **body.pop("structured_outputs")}
        else:
            described = {"name": "answer", "schema": schema, "strict": True}
            fields["response_format"] = {"type": "json_schema", "json_schema": described}
    for name in [*body, *of_reader]:
        if name in fields and name in body:
            raise ConfigError(f"body: {name} is said by --{'schema' if name == 'response_format' else 'max-tokens'} "
                              "already; leave one of them out")
        if name in _OURS:
            raise ConfigError(f"body: {name} is made of the records; metadata comes with --keep, --expected and --kind")
    return {**of_reader, **fields, **body}
