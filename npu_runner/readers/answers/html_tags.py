"""The HTML tags that may stand in the Markdown of an answer, each with the attributes that it may have.

nh3 (ammonia) reads each tag and writes it anew, so a tag that is left has the form that every parser of HTML agrees on.
Knows nothing of Markdown.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from npu_runner.errors import ConfigError

_CELL = {"colspan", "rowspan"}
_ATTRIBUTES: dict[str, set[str]] = {
    **{name: set() for name in (
        "table", "caption", "colgroup", "thead", "tbody", "tfoot", "tr", "ul", "dl", "dt", "dd", "p", "br", "hr",
        "h1", "h2", "h3", "h4", "h5", "h6", "sub", "sup", "b", "strong", "i", "em", "u", "s", "del", "ins", "mark",
        "small", "code")},
    "td": _CELL, "th": _CELL, "col": {"span"}, "ol": {"start"}, "li": {"value"}, "a": {"href"}, "math": {"display"},
    "input": {"checked", "disabled"}, "img": {"alt"},
}
BLOCKS = frozenset({"table", "caption", "thead", "tbody", "tfoot", "tr", "td", "th", "ul", "ol", "li", "dl", "dt", "dd",
                    "p", "h1", "h2", "h3", "h4", "h5", "h6", "colgroup", "math"})
"""Tags between which some renderers read no Markdown."""
TAGS = frozenset(_ATTRIBUTES)
VOID = frozenset({"br", "hr", "col", "input"})
"""Tags without an end."""
ENDS_ALONE = frozenset({"li", "dt", "dd", "p", "tr", "td", "th"})
"""Tags that the next one of their name ends."""
_PLAIN = frozenset({"div", "span", "center", "font", "html", "head", "body", "watermark", "signature"})
"""Tags that say nothing without attributes, and two of Nanonets. They are left out, and their content stays."""
# More than HTML's own form of a tag: in `a <b and c> d`, the words are no attributes.
_ATTRIBUTE = r"""[A-Za-z][\w:-]*\s*=\s*(?:"[^"<>]*"|'[^'<>]*'|[^\s"'=<>`]+)|checked|disabled|nowrap"""
_TAG = re.compile(rf"""<(/?)([A-Za-z][A-Za-z0-9]*)(?:(?:\s+|(?<=["']))(?:{_ATTRIBUTE}))*\s*/?>""")


def read_tag(run: str) -> tuple[str, str] | None:
    """The name of a tag and the text to write for it, which is empty for a tag that is left out. A name that starts
    with / ends that tag. None: this is no tag of the list."""
    found = _TAG.fullmatch(run)
    if found is None:
        return None
    end, name = found[1], found[2].lower()
    if name in _PLAIN or (end and name in {*VOID, "img"}):
        return name, ""
    if name not in _ATTRIBUTES:
        return None
    return (end + name, f"</{name}>") if end else _opening(name, run)


@functools.lru_cache(maxsize=4096)
def _opening(name: str, run: str) -> tuple[str, str] | None:
    # Under a name that HTML does not know, a tag may stand anywhere: a cell without its table, too.
    before, after = f"<x-{name}", f"></x-{name}>"
    clean = _cleaner().clean(re.sub(r"\s+", " ", "<x-" + run[1:]))
    if not (clean.startswith(before) and clean.endswith(after)):
        return None
    attributes = clean[len(before):-len(after)]
    if name == "img":
        alt = re.fullmatch(' alt="([^"]*)"', attributes)
        return name, alt[1] if alt else ""
    if name == "input" and 'type="checkbox"' not in attributes:
        return name, ""
    if name == "a" and not attributes.startswith(' href="http'):
        attributes = ""  # no address, or one that is relative to a file of ours
    # A renderer could take a backtick for the begin of code.
    return name, f"<{name}{attributes.replace('`', '%60')}>"


@functools.cache
def _cleaner() -> Any:
    nh3 = require("nh3")
    attributes = {f"x-{name}": allowed for name, allowed in _ATTRIBUTES.items()}
    return nh3.Cleaner(tags=set(attributes), attributes=attributes, url_schemes={"http", "https"}, link_rel=None,
                       tag_attribute_values={"x-input": {"type": {"checkbox"}}})


_HINTS = {"nh3": "pip install 'nh3>=0.3'", "markdownify": "pip install 'markdownify>=1.1'",
          "bs4": "pip install 'markdownify>=1.1'", "yaml": "pip install 'pyyaml>=6.0.1'"}


def require(module: str) -> Any:
    """A module of a package of the extra `pdf`. Raises ConfigError where it is not installed."""
    try:
        return __import__(module)
    except ImportError as error:
        raise ConfigError(f"Markdown of answers needs {module}, which is not installed ({error}); "
                          f"{_HINTS[module]}") from error
