"""Reads llguidance's Lark far enough to measure it: which names lead where, what is written out, what is nested.

What it cannot read is refused, though the library might take it: nothing unmeasured gets to the library. What it reads
and the library does not is the library's to refuse. Knows no limit but that of groups within groups.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["all", "any", "both", "not", "text", "name", "json", "grammar", "expression", "free"]
_MAX_GROUPS = 30  # the library's own
_OF_JSON = ("%json", "%llguidance", "%regex")
# The longest match comes first where two could begin alike, as the library has it.
_TOKENS = re.compile(r"""
    (?P<skip>[ \t]+|(?:\#|//)[^\n]*)
  | (?P<newline>(?:\r?\n)+[ \t]*)
  | (?P<string>"(?:\\(?:["\\/bfnrt]|u[a-fA-F0-9]{4}|x[a-fA-F0-9]{2})|[^"\\\x00-\x1F\x7F])*"i?)
  | (?P<expression>/(?:\\.|[^/\\])+/[imslux]*)
  | (?P<number>0[xX][0-9a-fA-F]+|[+-]?[0-9]+(?:\.(?!\.)[0-9]*)?(?:[eE][+-]?[0-9]+)?)
  | (?P<special><[^<>\s]+>|@[a-zA-Z0-9_\-]+)
  | (?P<keyword>%[a-z]+)
  | (?P<name>!?[_?]?[a-z][_a-z0-9\-]*|_?[A-Z][_A-Z0-9\-]*)
  | (?P<mark>->|::|\.\.|[:,.(){}\[\]~|&=_+*?])
""", re.VERBOSE)


class UnreadableGrammar(ValueError):
    """The message says where."""


@dataclass(frozen=True, slots=True)
class Node:
    """A part of a definition. `value`: its text, name, schema, grammar or expression; least and most: how often."""

    kind: Kind
    parts: Sequence[Node] = ()
    value: Any = None
    least: int = 1
    most: int | None = 1


@dataclass
class LarkGrammar:
    """Definitions by name: what an alternative may be. `suffixes`: what stands in the brackets behind a rule's name."""

    definitions: dict[str, Node] = field(default_factory=dict)
    ignored: list[Node] = field(default_factory=list)
    suffixes: dict[str, Node] = field(default_factory=dict)
    num_groups: int = 0
    """Groups within groups, at most."""
    specials: list[str] = field(default_factory=list)
    """Tokens of the model that it names, as <|these|> or <[7]>."""


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    value: Any
    line: int
    start: int
    end: int


def read_lark(text: str) -> LarkGrammar:
    """Parse the definitions. Raises UnreadableGrammar."""
    return _grammar(_tokens(text), 0)


def with_schemas(text: str, change: Callable[[Any], Any]) -> str:
    """The grammar with each %json schema in it that is an object changed. Raises UnreadableGrammar."""
    pieces: list[str] = []
    at = 0
    for token in _tokens(text):
        if token.text == "%json" and isinstance(token.value, dict):
            pieces += [text[at:token.start], f"%json {json.dumps(change(token.value))}"]
            at = token.end
    return "".join([*pieces, text[at:]])


def _tokens(text: str) -> list[_Token]:
    tokens: list[_Token] = []
    at, line, decoder = 0, 1, json.JSONDecoder()
    while at < len(text):
        match = _TOKENS.match(text, at)
        if match is None:
            raise UnreadableGrammar(f"line {line}: {text[at:at + 20]!r} cannot be read")
        kind, found, value = str(match.lastgroup), match.group(), None
        start, at = at, match.end()
        if kind == "keyword" and found in _OF_JSON:
            at += len(text[at:at + 4096]) - len(text[at:at + 4096].lstrip())
            try:
                value, at = decoder.raw_decode(text, at)
            except (ValueError, RecursionError) as error:
                raise UnreadableGrammar(f"line {line}: {found}: not JSON ({error})") from error
        if kind == "string":
            value = _string(found)
        if kind != "skip":
            tokens.append(_Token(kind, found, value, line, start, at))
        line += text.count("\n", start, at)
    return tokens


def _string(found: str) -> str:
    inner = found.removesuffix("i") if found.endswith('"i') else found
    return str(json.loads(re.sub(r"\\(x([a-fA-F0-9]{2})|.)", lambda m: f"\\u00{m[2]}" if m[2] else m[0], inner)))


def _grammar(tokens: Sequence[_Token], num_groups: int) -> LarkGrammar:
    if num_groups > _MAX_GROUPS:
        raise UnreadableGrammar(f"more than {_MAX_GROUPS} groups within each other")
    grammar = LarkGrammar(num_groups=num_groups)
    for statement in _statements(tokens):
        first = statement[0]
        if first.kind == "keyword":
            if first.text == "%ignore":
                grammar.ignored.append(_Reader(statement[1:], grammar, num_groups).whole_rule())
            continue  # others say nothing that is built, or the library refuses them
        colon = _colon(statement)
        name = first.text.lstrip("!?")
        if first.kind != "name" or name in grammar.definitions:
            raise UnreadableGrammar(f"line {first.line}: {first.text[:60]!r} begins no rule, or one a second time")
        brackets = [token for token in statement[1:colon] if token.value is not None or token.kind in
                    ("name", "expression", "special")]
        if brackets:
            grammar.suffixes[name] = _Reader(brackets, grammar, num_groups).whole_rule()
        grammar.definitions[name] = _Reader(statement[colon + 1:], grammar, num_groups).whole_rule()
    return grammar


def _statements(tokens: Sequence[_Token]) -> list[list[_Token]]:
    """A line each; the next one belongs to it where it begins with `|`, and where a nested grammar is open."""
    statements: list[list[_Token]] = [[]]
    depth = 0
    for number, token in enumerate(tokens):
        following = tokens[number + 1].text if number + 1 < len(tokens) else ""
        if token.text == "{" and (depth or tokens[number - 1].text == "%lark"):
            depth += 1
        elif token.text == "}" and depth:
            depth -= 1
        if token.kind != "newline" or depth:
            statements[-1].append(token)
        elif following != "|":
            statements.append([])
    return [statement for statement in statements if statement]


def _colon(statement: Sequence[_Token]) -> int:
    is_in_brackets = False
    for number, token in enumerate(statement):
        if token.kind == "mark" and token.text in "[]":
            is_in_brackets = token.text == "["
        elif token.text == ":" and not is_in_brackets:
            return number
    raise UnreadableGrammar(f"line {statement[0].line}: no colon behind {statement[0].text[:60]!r}")


class _Reader:
    """Parses the right side of a definition."""

    def __init__(self, tokens: Sequence[_Token], grammar: LarkGrammar, num_groups: int):
        self._tokens = tokens
        self._at = 0
        self._grammar = grammar
        self._num_groups = num_groups

    def whole_rule(self) -> Node:
        node = self._alternatives()
        if self._at < len(self._tokens):
            raise self._unreadable()
        return node

    def _alternatives(self) -> Node:
        self._num_groups += 1
        self._grammar.num_groups = max(self._grammar.num_groups, self._num_groups)
        if self._num_groups > _MAX_GROUPS:
            raise UnreadableGrammar(f"more than {_MAX_GROUPS} groups within each other")
        found = [self._conjunction()]
        while self._accepts("|"):
            found.append(self._conjunction())
        self._num_groups -= 1
        return found[0] if len(found) == 1 else Node("any", found)

    def _conjunction(self) -> Node:
        found = [self._sequence()]
        while self._accepts("&"):
            found.append(self._sequence())
        if self._accepts("->"):
            self._at += 1
        if self._here() == "%if":
            while self._at < len(self._tokens) and self._here() != "|":
                self._at += 1
        return found[0] if len(found) == 1 else Node("both", found)

    def _sequence(self) -> Node:
        found = []
        while self._at < len(self._tokens) and self._here() not in ("|", "&", "->", ")", "]", "}", "%if"):
            found.append(self._repeated())
        return found[0] if len(found) == 1 else Node("all", found)

    def _repeated(self) -> Node:
        node = self._atom()
        mark = self._here()
        if mark in ("?", "*", "+"):
            self._at += 1
            return Node("all", [node], None, int(mark == "+"), 1 if mark == "?" else None)
        if mark == "~":
            numbers = self._tokens[self._at + 1: self._at + 4: 2]
            if numbers and numbers[0].kind == "number":
                has_two = len(numbers) == 2 and self._tokens[self._at + 2].text == ".." and numbers[1].kind == "number"
                self._at += 4 if has_two else 2
                return Node("all", [node], None, _count(numbers[0]), _count(numbers[-1] if has_two else numbers[0]))
        return self._counted(node) if mark == "{" else node

    def _counted(self, node: Node) -> Node:
        """{2}, {2,}, {,3}, {2,3}."""
        end = next((at for at in range(self._at, len(self._tokens)) if self._tokens[at].text == "}"), None)
        inner = self._tokens[self._at + 1: end]
        if end is None or any(token.kind != "number" and token.text != "," for token in inner) or not inner:
            raise self._unreadable()
        self._at = end + 1
        has_comma = any(token.text == "," for token in inner)
        least = _count(inner[0]) if inner[0].kind == "number" else 0
        most = (None if inner[-1].text == "," else _count(inner[-1])) if has_comma else least
        return Node("all", [node], None, least, most)

    def _atom(self) -> Node:
        if self._accepts("~"):
            return Node("not", [self._atom()])
        for opening, closing in (("(", ")"), ("[", "]")):
            if self._accepts(opening):
                node = self._alternatives()
                if not self._accepts(closing):
                    raise self._unreadable()
                return node if opening == "(" else Node("all", [node], None, 0, 1)
        if self._at >= len(self._tokens):
            raise self._unreadable()
        token = self._tokens[self._at]
        self._at += 1
        return self._value(token)

    def _value(self, token: _Token) -> Node:
        if token.kind == "string":
            if self._accepts(".."):
                self._at += 1
                return Node("free")
            return Node("text", value=token.value)
        if token.kind == "expression":
            return Node("expression", value=token.text)
        if token.kind == "name":
            if self._accepts("::"):  # rules with parameters
                self._skip_parameter()
            return Node("name", value=token.text.lstrip("!?"))
        if token.kind == "special":
            self._grammar.specials.append(token.text)
            return Node("free")
        if token.text == "%json":
            return Node("json", value=token.value)
        if token.text == "%regex":
            return Node("free")
        if token.text == "%lark" and self._accepts("{"):
            return Node("grammar", value=self._nested())
        self._at -= 1
        raise self._unreadable()

    def _skip_parameter(self) -> None:
        """A number, `_`, or a function of it and numbers."""
        self._at += 1
        if self._accepts("("):
            while self._at < len(self._tokens) and not self._accepts(")"):
                self._at += 1

    def _nested(self) -> LarkGrammar:
        start, depth = self._at, 1
        while depth and self._at < len(self._tokens):
            depth += {"{": 1, "}": -1}.get(self._tokens[self._at].text, 0)
            self._at += 1
        nested = _grammar(self._tokens[start: self._at - 1], self._num_groups + 1)
        self._grammar.num_groups = max(self._grammar.num_groups, nested.num_groups)
        self._grammar.specials += nested.specials
        return nested

    def _here(self) -> str:
        return self._tokens[self._at].text if self._at < len(self._tokens) else ""

    def _accepts(self, mark: str) -> bool:
        if self._here() != mark:
            return False
        self._at += 1
        return True

    def _unreadable(self) -> UnreadableGrammar:
        if self._at < len(self._tokens):
            token = self._tokens[self._at]
            return UnreadableGrammar(f"line {token.line}: {token.text[:60]!r} is not expected there")
        return UnreadableGrammar("it ends too early" if not self._tokens else
                                 f"line {self._tokens[-1].line}: it ends too early")


def _count(token: _Token) -> int:
    try:
        return int(token.text)
    except ValueError as error:
        raise UnreadableGrammar(f"line {token.line}: {token.text[:60]!r} is no number of times") from error
