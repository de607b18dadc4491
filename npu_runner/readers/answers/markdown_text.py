"""Markdown of an answer without anything that a renderer of Markdown or HTML would run, load or hide.

HTML passes `html_tags`. Another tag becomes visible text, so that a page about HTML or C++ loses nothing. Comments are
removed. Fenced code stays as it is; where renderers disagree on what is code, the text is escaped.
"""

from __future__ import annotations

import re

from npu_runner.readers.answers.block import AnswerError
from npu_runner.readers.answers.html_tags import BLOCKS, ENDS_ALONE, VOID, read_tag

_MAX_PASSES = 20
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufeff\ufffe\uffff]")
# It ends before the next comment begins: else a run of <!-- is scanned to its end from each of them.
COMMENT = r"<!--(?:-?>|[^<-]*(?:(?:<(?!!--)|-(?!-!?>))[^<-]*)*--!?>)"
# A comment of the form that separates the pages of a document. It is removed from code as well.
_PAGE_MARK = re.compile(r"<!--\s*page\b[^<>]*-->", re.IGNORECASE)
_FENCE = re.compile(r"( {0,3})(`{3,}(?=[^`]*$)|~{3,})")
# Between such a line and the next blank one, renderers may read HTML alone.
_HTML_LINE = re.compile(r"[\s>*+.):\d-]*<")
# A formula has no empty line and no line that starts with a tag.
_IN_MATH = r"\n(?![ \t]*[\n<])"
_STARTS_HTML = re.compile(r"^[\s>*+.):\d-]*<(?!https?:)", re.MULTILINE)
_PART = re.compile(
    r"(?P<escape>\\[\\`])"
    # Addresses in angle brackets. None could be a tag with an attribute that runs something.
    r"|(?P<address><https?://[^\s<>\"'=`]+(?:\?[^\s<>\"'/`]*)?>|<[\w.+-]+@[\w-]+(?:\.[\w-]+)+>)"
    r"|(?P<ticks>(?<!`)`+)(?!`)(?P<code>[^\n]*?[^`\n])(?P=ticks)(?!`)"
    rf"|(?P<comment>{COMMENT})"
    r"|(?P<tag>\\?</?[A-Za-z][^<>]*>)"
    # Formulas: $$x$$, $x$ but no prices, \(x\) and \[x\].
    rf"|\$\$(?P<display>(?:[^$\n]|{_IN_MATH})+)\$\$|(?<![\\$])\$(?![\s$])(?P<inline>[^$\n]*[^\s$\\])\$(?![\d$])"
    rf"|\\[(\[](?P<tex>(?:[^\\\n]|\\[^()\[\]\n]|{_IN_MATH})+?)\\[)\]]"
    # Anything else that a parser of HTML could take for the begin of a tag.
    r"|(?P<open>\\?<(?=[A-Za-z/!?<]))"
    r"|(?P<image>!+\[)|(?P<link>\]\()"
    # [name]: at the begin of a line defines a link for the whole document.
    r"|(?P<definition>^[ >*+.)\d-]*\[(?=[^\]]{1,999}\]:))", re.MULTILINE)
_LESS = re.compile(r"<(?=[A-Za-z/?<])")
_MARKUP = re.compile(r"[\\`*_\[\]~$!&<:]")
_IN_CODE = re.compile(r"<[A-Za-z/!?<]|\]\(")
_PLACE = r"(?:https?://[^\s<>()\\]*(?:\([^\s<>()\\]*\)[^\s<>()\\]*)*|mailto:[\w.+@-]+|(?!//)[\w./~+-]*(?:#[^\s<>()\\]*)?)"
_LINK = re.compile(rf"\s*(?:{_PLACE}|<{_PLACE}>)(?=[\s)])")
# No address of another scheme: a renderer without footnotes takes it for the definition of a link.
_FOOTNOTE = re.compile(r"\^[\w-]+\]:[ \t]+(?!(?!https?:)\S*:\S)\S")
_IMAGE = re.compile(r"[^\[\]\n]*\]\((?!//)[\w./-]+\)")


def clean_markdown(text: str) -> str:
    """The same Markdown without comments, without tags and attributes that are not in the list, and without links but
    those of http, https, mailto and relative ones. Fences and tags that the text leaves open are ended. Raises
    AnswerError for a text that is made of parts within parts."""
    text = _CONTROL.sub("", text.replace("\r\n", "\n").replace("\r", "\n")).strip("\n").rstrip()
    for _ in range(_MAX_PASSES):
        # What is left after a removal may be something to remove: the result is what no pass changes any more.
        clean = _Pass().run(text).strip("\n").rstrip()
        if clean == text:
            return clean
        text = clean
    raise AnswerError(f"removing tags and comments makes new ones, {_MAX_PASSES} times over")


class _Pass:
    """One pass over a text."""

    def __init__(self) -> None:
        self._open: list[str] = []
        """Names of the HTML tags that are open."""
        self._done: list[str] = []
        self._lines: list[str] = []
        """Lines of text that are not cleaned yet."""

    def run(self, text: str) -> str:
        fence, indent, is_html = "", 0, False
        for line in text.split("\n"):
            if fence:
                # At the left edge a fence belongs to no list, and no renderer ends it before its end.
                line = line[min(indent, len(line) - len(line.lstrip(" "))):]
                self._done.append(_PAGE_MARK.sub("", line))
                if re.fullmatch(rf" {{0,3}}{re.escape(fence[0])}{{{len(fence)},}}[ \t]*", line):
                    fence = ""
                continue
            if found := _FENCE.match(line):
                self._clean_lines()
                if not is_html and not BLOCKS.intersection(self._open):
                    self._end_tags()
                    indent, fence = len(found[1]), found[2]
                    self._done.append(_PAGE_MARK.sub("", line[indent:]))
                    continue
                line = f"{found[1]}&#{ord(found[2][0])};{line[len(found[1]) + 1:]}"
            is_html = bool(line.strip()) and (is_html or bool(_HTML_LINE.match(line)))
            self._lines.append(line)
        self._clean_lines()
        if fence:
            self._done.append(fence)
        self._end_tags()
        return "\n".join(self._done)

    def _end_tags(self) -> None:
        if self._open:
            self._done[-1] += "".join(f"</{name}>" for name in reversed(self._open))
            self._open = []

    def _clean_lines(self) -> None:
        if self._lines:
            self._done.append(_PART.sub(self._part, "\n".join(self._lines)))
            self._lines = []

    def _part(self, found: re.Match[str]) -> str:
        kind, text = found.lastgroup, found[0]
        if kind == "escape":
            return text
        if kind == "address":
            # HTML has no such links: there it would be a tag that shows nothing.
            before = found.string[:found.start()].rpartition("\n\n")[2]
            return "&lt;" + text[1:] if self._open or _STARTS_HTML.search(before) else text
        if kind == "comment":
            return ""
        if kind == "code":
            # An element is code to every renderer.
            return f"<code>{_entities(found['code'])}</code>" if _IN_CODE.search(found["code"]) else text
        if kind == "tag":
            written = None if text[0] == "\\" else self._tag(text)
            return "&lt;" + text.lstrip("\\")[1:] if written is None else written
        if kind in ("display", "inline", "tex"):
            # TeX reads no space here, and HTML no tag behind one.
            start, end = found.span(kind)
            return text[:start - found.start()] + self._math(found[kind]) + text[end - found.start():]
        if kind == "open":
            return "&lt;"
        if kind == "image":
            return text if _IMAGE.match(found.string, found.end()) else "["
        if kind == "link":
            return text if _LINK.match(found.string, found.end()) else "]&#40;"
        return text if _FOOTNOTE.match(found.string, found.end()) else text[:-1] + "&#91;"

    def _math(self, text: str) -> str:
        return _PART.sub(lambda found: found[0] if found.lastgroup == "definition" else self._part(found),
                         _LESS.sub("< ", text))

    def _tag(self, run: str) -> str | None:
        """The text to write for a tag; None: it is none of the list."""
        found = read_tag(run)
        if found is None or not found[1]:
            return None if found is None else found[1]
        name, written = found
        if name in VOID:
            return written
        if not name.startswith("/"):
            if name in ENDS_ALONE and self._open[-1:] == [name]:
                return f"</{name}>{written}"
            self._open.append(name)
            return written
        if name[1:] not in self._open:
            return ""
        ended = ""
        while (inner := self._open.pop()) != name[1:]:
            ended += f"</{inner}>"
        return ended + written


def _entities(text: str) -> str:
    return _MARKUP.sub(lambda found: f"&#{ord(found[0])};", text)
