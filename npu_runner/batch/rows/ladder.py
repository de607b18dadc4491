"""The ladder of a job: steps that try a row again with changed fields, and when each of them fits. Knows no engine.

A step is {"when": [...], "change": {...}}. The changes of the steps of one row add up: a later one goes before.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, ValidationError

from npu_runner.batch.rows.attempt import Change
from npu_runner.batch.rows.endpoint import Strict
from npu_runner.batch.rows.flaw import Flaw
from npu_runner.batch.rows.openai_format import parse_row, refuse_half_characters
from npu_runner.errors import CODES, ConfigError, RequestError
from npu_runner.prompts.media.page_options import PageOptions
from npu_runner.prompts.media.processor_kwargs import checked_kwargs
from npu_runner.readers.answers.html_tags import require
from npu_runner.readers.reader import read_reader, shipped_readers

MOST_ATTEMPTS = 8
"""Attempts at a row, the first one included."""
UNPARSED, EMPTY, ROTATED = "unparsed", "empty", "rotated"
REASONS = (*(name for name in Flaw.all_names() if name != "errors"), EMPTY, ROTATED)
"""The reasons that an answer can give. An error gives `error:` and its code."""
AS_SAID = "as_said"
_PARSER_PACKAGES = ("nh3", "markdownify", "yaml")
_SHOWN = [{"type": "image_url", "image_url": {"url": "a.png"}}, {"type": "text", "text": "?"}]
_ROW = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions",
        "body": {"messages": [{"role": "user", "content": _SHOWN}]}}
"""A row to which each step is applied when it is read."""


class LadderChange(Strict):
    """Fields of a row that a step sets. None: the step does not set the field."""

    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    repetition_detection: dict[str, Any] | None = None
    no_repeat_ngram_size: int | None = None
    no_repeat_ngram_window: int | None = None
    no_repeat_ngram_exempt_ids: list[int] | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    longest: int | None = None
    rotate: Literal["as_said"] | int | None = None
    """Degrees, clockwise; AS_SAID: the rotation that the reader's answer asks for, on top of the present one."""
    append_prompt: str | None = None


class LadderStep(Strict):
    """A step fits an attempt that has ended for one of the reasons in `when`."""

    when: list[Annotated[str, Field(pattern=rf"^({'|'.join(REASONS)}|error:[a-z][a-z0-9_]*)$")]] = Field(min_length=1)
    change: LadderChange

    @property
    def needs_reader(self) -> bool:
        return ROTATED in self.when or self.change.rotate == AS_SAID

    def fields(self, rotation: int) -> dict[str, Any]:
        """The changed fields after an answer that asks for this rotation; {}: it changes nothing."""
        found = self.change.model_dump(exclude_none=True)
        if self.change.rotate == AS_SAID:
            del found["rotate"]
            found |= {"turn": rotation} if rotation else {}
        return found


class NextStep(NamedTuple):
    number: int
    """From 1."""
    reason: str
    fields: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """The steps, and the parser of the reader's answers; None: there is none, or no step asks it. Picklable."""

    steps: tuple[LadderStep, ...]
    parser: str | None = None

    def next_step(self, reasons: Collection[str], used: Collection[int], rotation: int) -> NextStep | None:
        """The first step that fits, was not used and changes a field. None: there is none."""
        for number, step in enumerate(self.steps, 1):
            reason = next((each for each in step.when if each in reasons), None)
            if number not in used and reason is not None and (fields := step.fields(rotation)):
                return NextStep(number, reason, fields)
        return None

    def wants_another(self, reasons: Collection[str]) -> bool:
        """Whether one of these reasons is in the `when` of any step."""
        return any(each in step.when for step in self.steps for each in reasons)

    def to_json(self) -> dict[str, Any]:
        """As it stands in a manifest."""
        return {"parser": self.parser, "steps": [step.model_dump(exclude_none=True) for step in self.steps]}


def read_ladder(name: str | None, reader: str | None) -> Ladder | None:
    """The ladder of a file of steps, or of a reader. `reader`: the one whose parser reads the answers, where a file has
    the steps. None: there is none. Raises ConfigError for a file that cannot be read and for a wrong step."""
    if name is None or name == "none":
        return None
    steps = None if name in shipped_readers() else _steps_in(Path(name))
    named = name if steps is None else reader
    read = None if named is None else read_reader(named)
    if not (steps := list(read.ladder) if steps is None and read is not None else steps):
        raise ConfigError(f"ladder {name!r}: it has no step; name a file of steps, a reader that has some, or none")
    found = tuple(_read_step(step, f"ladder {name!r}, step {number}") for number, step in enumerate(steps, 1))
    if read is None and (number := next((n for n, step in enumerate(found, 1) if step.needs_reader), None)):
        raise ConfigError(f"ladder {name!r}, step {number}: {ROTATED} and {AS_SAID} read the answers of a reader; name "
                          "it with --ladder-reader")
    is_judged = any(step.needs_reader or {UNPARSED, EMPTY} & set(step.when) for step in found)
    parser = read.parser if read is not None and is_judged else None
    for package in () if parser is None else _PARSER_PACKAGES:
        require(package)  # and not after hours of answers
    return Ladder(steps=found, parser=parser)


def _steps_in(path: Path) -> list[Any] | None:
    """None: the file is no list of steps, or there is no file."""
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"ladder {str(path)!r}: cannot be read as JSON ({error})") from error
    return value if isinstance(value, list) else None


def _read_step(given: Any, where: str) -> LadderStep:
    try:
        step = LadderStep.model_validate(given)
        if not step.change.model_dump(exclude_none=True) or step.change.append_prompt == "":
            raise ConfigError(f"{where}: changes nothing; {', '.join(LadderChange.model_fields)} can be changed")
        for code in {each.partition(":")[2] for each in step.when} - {"", *CODES}:
            near = ", ".join(difflib.get_close_matches(code, CODES)) or "docs/errors.md lists all"
            raise ConfigError(f"{where}: when: error:{code}: no row fails with this code; {near}")
        least, most = step.change.min_pixels, step.change.max_pixels
        if least is not None and most is not None and least > most:
            raise ConfigError(f"{where}: min_pixels {least} is more than max_pixels {most}; lower it, or leave one out")
        fields = step.fields(90)
        row = Change(1, fields).applied(_ROW, seed=0)
        parse_row(row).to_params({}, 0)
        checked_kwargs({name: fields[name] for name in ("min_pixels", "max_pixels") if name in fields})
        PageOptions.from_fields(row["body"]["messages"][0]["content"][0]["image_url"], "change")
        refuse_half_characters(json.dumps(row).encode(), row)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{where}: {place and place + ': '}{first['msg']}, but it is {first['input']!r:.80}"
                          ) from error
    except RequestError as error:
        raise ConfigError(f"{where}: {error.message}") from error
    return step
