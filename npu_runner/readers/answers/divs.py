"""Reads answers in HTML that have a <div> with data-label and data-bbox for each block, as chandra's and Surya's.

Markdown comes from markdownify; tables stay HTML. Knows nothing of the page.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from npu_runner.readers.answers.block import PAGE, AnswerError, Block, ParsedAnswer, box_of
from npu_runner.readers.answers.html_tags import TAGS, require
from npu_runner.readers.answers.markdown_text import COMMENT, clean_markdown

_BLANK = "Blank-Page"
_OUTSIDE = "Text"
"""The label of text that stands outside of all divs."""
_FENCE = re.compile(r"\A\s*```[a-zA-Z]*\n(.*?)(?:\n```\s*)?\Z", re.DOTALL)
_TAG_LIKE = re.compile(r"<(?=[A-Za-z/!?<])|&(?=#?\w+;)")
_RAW = ("pre", "code", "math", "chem")
# Anything else in angle brackets is text, so that no parser hides what stands behind <script> or in #include <vector>.
_TAGS = "|".join((*TAGS, "div", "span", "pre", "big", "chem", "blockquote", "figure", "figcaption", "form", "label",
                  "html", "head", "body"))
# So is a tag that does not end before the next one, which costs html.parser a walk to the end of the text.
_REST = r"""(?:[^<>]*|(?:[^<>"']|"[^"]{0,500}"|'[^']{0,500}'){0,1000})"""
_TEXT = re.compile(rf"<(?!/?(?:{_TAGS})(?:[\s/]{_REST})?>)", re.IGNORECASE)
_MAX_TAGS = 20_000


def parse_divs(text: str, label: str) -> ParsedAnswer:
    """A block for each outer <div> with a data-label, and one for text beside them. HTML without such a <div> is one
    block, the page. Raises AnswerError for a text without HTML."""
    text = _TEXT.sub("&lt;", re.sub(COMMENT, "", _FENCE.sub(r"\1", text)))
    if not text.strip():
        return ParsedAnswer(blocks=())
    if text.count("<") > _MAX_TAGS:
        raise AnswerError(f"has more than {_MAX_TAGS} tags")
    if "<" not in text:
        raise AnswerError("has no HTML")
    soup = require("bs4").BeautifulSoup(text, "html.parser")
    try:
        first = soup.find("div", attrs={"data-label": True})
        if first is None:
            return ParsedAnswer(blocks=(Block(label=PAGE, text=_markdown(soup)),))
        while first.parent is not soup:  # a <div> or <body> around all blocks
            first.parent.unwrap()
        return ParsedAnswer(blocks=tuple(block for node in list(soup.children) if (block := _block(node))))
    except RecursionError as error:
        raise AnswerError("has tags within tags, too deep to read") from error


def _block(node: Any) -> Block | None:
    named = getattr(node, "attrs", None) or {}
    text = "" if named.get("data-label") == _BLANK else _markdown(node)
    if "data-label" in named:
        return Block(label=named["data-label"], text=text, box=box_of(named.get("data-bbox", "").split()))
    return Block(label=_OUTSIDE, text=text) if text else None


def _markdown(node: Any) -> str:
    return clean_markdown(_converter().process_element(node, parent_tags=set()).strip())


@functools.cache
def _converter() -> Any:
    markdownify = require("markdownify")

    class Converter(markdownify.MarkdownConverter):  # type: ignore[name-defined, misc]
        """The reader's own tags beside those of HTML. Each method is called by the name of its tag."""

        def escape(self, text: str, parent_tags: set[str]) -> str:
            if parent_tags.intersection(_RAW):
                return text
            escaped = super().escape(text, parent_tags).replace("$", r"\$")
            return _TAG_LIKE.sub(lambda found: "&lt;" if found[0] == "<" else "&amp;", escaped)

        def convert_math(self, node: Any, text: str, parent_tags: set[str]) -> str:
            formula = node.get_text().strip().strip("$").strip()
            if not formula:
                return ""
            return f"\n\n$$\n{formula}\n$$\n\n" if node.get("display") == "block" else f"${formula}$"

        def convert_chem(self, node: Any, text: str, parent_tags: set[str]) -> str:
            return node.get_text().strip()

        def convert_table(self, node: Any, text: str, parent_tags: set[str]) -> str:
            return "\n\n" + re.sub(r"\n\s*\n", "\n", str(node)) + "\n\n"

        def convert_input(self, node: Any, text: str, parent_tags: set[str]) -> str:
            if node.get("type") != "checkbox":
                return ""
            is_apart = str(node.next_sibling or "")[:1].isspace()
            return ("[x]" if node.has_attr("checked") else "[ ]") + ("" if is_apart else " ")

        def convert_img(self, node: Any, text: str, parent_tags: set[str]) -> str:
            return self.escape(node.get("alt") or "", parent_tags)

        def convert_pre(self, node: Any, text: str, parent_tags: set[str]) -> str:
            code = node.get_text().strip("\n")
            fence = "`" * max(3, 1 + max(map(len, re.findall("`+", code)), default=0))
            return f"\n\n{fence}\n{code}\n{fence}\n\n" if code else ""

    return Converter(heading_style="ATX", bullets="-", sub_symbol="<sub>", sup_symbol="<sup>")
