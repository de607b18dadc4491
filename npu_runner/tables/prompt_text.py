"""The question about a record: one text for all, or a jinja template that sees the record's columns.

Templates run in jinja2's sandbox with nothing but the record, and an empty cell is never printed as a word. Knows
nothing of files of images or of rows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta

from npu_runner.errors import ConfigError
from npu_runner.prompts.text.template_sandbox import TEMPLATE_FAULTS, BoundedEnvironment
from npu_runner.readers.package_prompt import ReaderPrompt, prompt_of
from npu_runner.readers.reader import PageReader, find_reader, read_reader
from npu_runner.tables.options import RowsOptions
from npu_runner.tables.records import Record, without_nan

_RECORD = "record"
_MAX_BYTES = 1 << 20


class PromptText:
    """Makes the text of a prompt. Raises ConfigError for a file that cannot be read, and a template that does not
    compile."""

    def __init__(self, options: RowsOptions, default: str | None = None):
        """`default`: the prompt where the options have none."""
        self._name = str(options.template)
        self._template: jinja2.Template | None = None
        self.needed: frozenset[str] | None = frozenset()
        """Columns that it reads; None: perhaps all."""
        self.source: str | None
        """The text, or that of the template."""
        if options.template is None:
            file = options.prompt_file
            given = options.prompt if file is None else read_text("prompt_file", file)
            self.source = self._text = default if given is None else given
            return
        environment = BoundedEnvironment(
            undefined=jinja2.StrictUndefined, finalize=_printed, extensions=["jinja2.ext.loopcontrols"],
            trim_blocks=True, lstrip_blocks=True)
        environment.globals = {"range": environment.globals["range"]}
        self.source = source = read_text("template", options.template)
        try:
            self._template = environment.from_string(source)
            read = jinja2.meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"template {self._name}, line {error.lineno}: {error.message}") from error
        except TEMPLATE_FAULTS as error:
            raise ConfigError(f"template {self._name}: {error or type(error).__name__}") from error
        self.needed = None if _RECORD in read else frozenset(read)

    def render(self, record: Record) -> str:
        """Raises ConfigError where the template and the record do not fit together."""
        if self._template is None:
            assert self._text is not None, "the options have one of three"
            return self._text
        columns = record.cells
        try:
            return self._template.render({**columns, _RECORD: columns})
        except TEMPLATE_FAULTS as error:
            known = ", ".join(map(repr, list(columns)[:20]))
            raise ConfigError(f"template {self._name}: {record.where}: {error or type(error).__name__}; its columns "
                              f"are {known}") from error


def find_page_reader(options: RowsOptions) -> tuple[PageReader | None, ReaderPrompt | None]:
    """The reader that the options name, and its prompt where they have none. Raises ConfigError."""
    if not options.has_reader:
        return None, None
    if options.reader is None:
        assert options.model is not None, "one of the two is named"
        reader = find_reader(options.model)
    else:
        reader = read_reader(options.reader)
    if reader.after is not None:
        raise ConfigError(f"reader {reader.name}: reads blocks, which are in the answers to {reader.after}; name that "
                          "reader for pages, and for their answers this one with --rows")
    return reader, None if options.has_prompt else prompt_of(reader, options.prompt_python)


def read_text(option: str, path: Path) -> str:
    """A small file of text, without the newline at its end."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        text = data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option}: {str(path)!r} cannot be read ({error})") from error
    if len(data) > _MAX_BYTES:
        raise ConfigError(f"{option}: {str(path)!r} has more than {_MAX_BYTES} bytes; name a smaller file")
    return text.removesuffix("\n").removesuffix("\r")


def read_schema(path: Path) -> Any:
    """Raises ConfigError for a file that is no JSON."""
    try:
        return json.loads(read_text("schema", path))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"schema: {str(path)!r} is not JSON ({error})") from error


def _printed(value: Any) -> Any:
    """The value that `{{ }}` prints. An empty cell is no word: the model would read "None" or "nan" as one."""
    if without_nan(value) is None:
        raise ValueError("an empty cell is printed; write {{ column or '' }}, or {% if column is none %}")
    if isinstance(value, bytes):
        raise ValueError("bytes are printed; an image goes with --image COLUMN")
    return value
