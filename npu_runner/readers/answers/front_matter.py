"""Reads answers that are Markdown behind YAML front matter, as olmOCR's. Knows nothing of the page."""

from __future__ import annotations

import re

from npu_runner.readers.answers.block import PAGE, AnswerError, Block, ParsedAnswer
from npu_runner.readers.answers.html_tags import require
from npu_runner.readers.answers.markdown_text import clean_markdown

_FRONT = re.compile(r"---\n(.{0,500}?)\n---[ \t]*(?:\n|$)", re.DOTALL)
_FIELDS = {"primary_language": (str, type(None)), "is_rotation_valid": (bool,), "rotation_correction": (int,),
           "is_table": (bool,), "is_diagram": (bool,)}


def parse_front_matter(text: str, label: str) -> ParsedAnswer:
    """Raises AnswerError where the front matter is missing or not of this form."""
    text = text.replace("\r\n", "\n").lstrip()
    found = _FRONT.match(text)
    if found is None:
        raise AnswerError("does not begin with front matter between two lines of ---")
    values = _read(found[1])
    # The number is counter-clockwise, as in the reader's training, though its schema says clockwise.
    rotation = -values["rotation_correction"] % 360
    block = Block(label=PAGE, text=clean_markdown(text[found.end():]), rotation=rotation)
    return ParsedAnswer(blocks=(block,), rotation=rotation)


def _read(front: str) -> dict[str, int]:
    yaml = require("yaml")
    try:
        values = yaml.safe_load(front)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise AnswerError(f"has front matter that is no YAML ({str(error).splitlines()[0]})") from error
    if not isinstance(values, dict) or values.keys() != _FIELDS.keys():
        raise AnswerError(f"has front matter with other fields than {', '.join(_FIELDS)}")
    if values["primary_language"] is False:  # YAML reads the language of Norway as a word for false
        values["primary_language"] = "no"
    for name, types in _FIELDS.items():
        if type(values[name]) not in types:
            raise AnswerError(f"has front matter in which {name} is {values[name]!r}")
    if values["rotation_correction"] not in (0, 90, 180, 270):
        raise AnswerError(f"has front matter with a rotation_correction of {values['rotation_correction']}, which is "
                          "none of 0, 90, 180, 270")
    return values
