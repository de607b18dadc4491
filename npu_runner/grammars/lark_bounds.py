"""Bounds of a grammar in Lark, checked before the grammar library sees it: chains, groups, alternatives, repetitions.

Knows nothing of the library's messages, nor of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from npu_runner.errors import RequestError
from npu_runner.grammars.exact_schema import check_keys
from npu_runner.grammars.forced_text import FREE, Text, all_of, any_of, joined, text_of, times
from npu_runner.grammars.lark import LarkGrammar, Node, UnreadableGrammar, read_lark
from npu_runner.grammars.rule_size import (
    Definition,
    OutOfBounds,
    RuleSize,
    check,
    longest_chain,
    measure_all,
    num_optional_parts,
)
from npu_runner.grammars.schema_bounds import check_schema
from npu_runner.request.limits import LIMITS, plain_json

_START = "start"
_PARTS_OF_GRAMMAR = 64
"""Parts that a nested grammar counts before it is measured. Texts and names count nothing."""


@dataclass(frozen=True, slots=True)
class _Measures:
    """`alternatives`: that are open at once where it begins. `expressions`: that one text has to match."""

    alternatives: int = 1
    expressions: int = 1
    text: Text | None = FREE
    optional: int = 0
    """Parts of one expression that may be left out, with those of terminals that it is made of."""

    @property
    def can_be_empty(self) -> bool:
        return self.text is not None and self.text.num_bytes == 0


_UNKNOWN = _Measures(text=None)


def check_lark(text: str) -> Text | None:
    """The text that all sentences share; None if no sentence is found. Raises OutOfBounds."""
    try:
        grammar = read_lark(text)
    except UnreadableGrammar as error:
        raise OutOfBounds("", f"it cannot be read ({error})") from error
    if grammar.specials:
        raise OutOfBounds("", f"{grammar.specials[0][:60]} stands for a token of the model; write its text as a text, "
                              "or something else: what an answer says are characters")
    return _check_grammar(grammar, RuleSize())


def _check_grammar(grammar: LarkGrammar, size: RuleSize) -> Text | None:
    graph = {name: Definition([(other, depth) for root in _roots(grammar, name) for other, depth in _names(root, 1)],
                              max(_depth(root, 1) for root in _roots(grammar, name)))
             for name in grammar.definitions}
    chain = longest_chain(graph)
    check(chain.name, "rules and terminals that lead to each other", chain.num_links, LIMITS.max_rule_chain)
    check(chain.name, "levels of rules and groups inside each other", chain.num_levels, LIMITS.max_rule_levels)
    inside = _add_parts(grammar, size)
    for root in grammar.ignored:
        _Measuring({}, "%ignore", inside).measure(root)

    def measure(name: str, known: Mapping[str, _Measures]) -> _Measures:
        definition, *_ = (_Measuring(known, name, inside).measure(root) for root in _roots(grammar, name))
        return definition

    known = measure_all(graph, measure, lambda each: replace(each, text=FREE))
    for name in grammar.definitions:
        size.add_expression(name, known[name].optional if _is_terminal(name) else 0)
    return known[_START].text if _START in known else FREE


def _add_parts(grammar: LarkGrammar, size: RuleSize) -> dict[int, Text | None]:
    """The forced texts of grammars and schemas inside, by the node's identity."""
    inside: dict[int, Text | None] = {}
    roots = [(name, root) for name in grammar.definitions for root in _roots(grammar, name)]
    for name, node in ((name, node) for name, root in [*roots, *(("%ignore", root) for root in grammar.ignored)]
                       for node in _nodes(root)):
        if node.kind in ("json", "grammar"):
            size.add_parts(name, _PARTS_OF_GRAMMAR)
            is_json = node.kind == "json"
            inside[id(node)] = _json(name, node.value, size) if is_json else _check_grammar(node.value, size)
        elif (node.least, node.most) != (1, 1):
            size.add_parts(name, max(1, node.least.bit_length() + (node.most or 0).bit_length()))
        elif not _is_terminal(name) and node.kind == "any":
            size.add_parts(name, 1)
        elif not _is_terminal(name) and node.kind == "expression":
            size.add_expression(name, num_optional_parts(node.value))
    size.add_parts(_START, len(grammar.definitions))
    return inside


def _nodes(node: Node) -> Iterator[Node]:
    yield node
    for part in node.parts:
        yield from _nodes(part)


def _is_terminal(name: str) -> bool:
    return name.lstrip("_")[:1].isupper()


def _roots(grammar: LarkGrammar, name: str) -> Sequence[Node]:
    roots = [grammar.definitions[name]]
    return [*roots, grammar.suffixes[name]] if name in grammar.suffixes else roots


def _names(node: Node, depth: int) -> Iterator[tuple[str, int]]:
    if node.kind == "name":
        yield node.value, depth
    for part in node.parts:
        yield from _names(part, depth + 1)


def _depth(node: Node, depth: int) -> int:
    return max((_depth(part, depth + 1) for part in node.parts), default=depth)


class _Measuring:
    """Measures one definition by the known measures of others."""

    def __init__(self, known: Mapping[str, _Measures], name: str, inside: Mapping[int, Text | None]):
        self._name = name
        self._of_kind: Mapping[str, Callable[[Node], _Measures]] = {
            "all": self._sequence, "any": self._any, "both": self._both,
            "json": lambda node: _Measures(text=inside[id(node)]),
            "text": lambda node: _Measures(text=text_of(node.value)),
            "name": lambda node: known.get(node.value, _UNKNOWN),
            "not": self._complement,
            "grammar": lambda node: _Measures(text=inside[id(node)]),
            "expression": self._expression, "free": lambda node: _Measures()}

    def measure(self, node: Node) -> _Measures:
        found = self._of_kind[node.kind](node)
        if _is_terminal(self._name):  # a terminal is one expression, whatever it is made of
            found = replace(found, alternatives=1)
        found = replace(found, optional=found.optional if _is_terminal(self._name) else 0)  # a rule's texts stand apart
        check(self._name, "alternatives at one place", found.alternatives, LIMITS.max_rule_alternatives)
        check(self._name, "expressions that one text has to match", found.expressions, LIMITS.max_rule_intersections)
        return found

    def _sequence(self, node: Node) -> _Measures:
        """The measures of a sequence. A part after an optional part is an alternative to it."""
        check(self._name, "times", max(node.least, node.most or 0), LIMITS.max_rule_count)
        parts = [self.measure(part) for part in node.parts]
        alternatives, most = 0, 1
        for part in reversed(parts):
            alternatives = part.alternatives + (alternatives if part.can_be_empty else 0)
            most = max(most, alternatives)
        return _Measures(most, max((part.expressions for part in parts), default=1),
                         times(joined(part.text for part in parts), node.least),
                         sum(part.optional for part in parts) + (node.least == 0))

    def _any(self, node: Node) -> _Measures:
        parts = [self.measure(part) for part in node.parts]
        return _Measures(sum(part.alternatives for part in parts), max(part.expressions for part in parts),
                         any_of(part.text for part in parts), sum(part.optional for part in parts))

    def _both(self, node: Node) -> _Measures:
        parts = [self.measure(part) for part in node.parts]
        return _Measures(1, sum(part.expressions for part in parts), all_of([part.text for part in parts]),
                         sum(part.optional for part in parts))

    def _complement(self, node: Node) -> _Measures:
        inner = self.measure(node.parts[0])
        return _Measures(expressions=inner.expressions, optional=inner.optional)

    def _expression(self, node: Node) -> _Measures:
        check(self._name, "characters of an expression", len(node.value), LIMITS.max_regex_chars)
        return _Measures(optional=num_optional_parts(node.value))


def _json(name: str, schema: Any, size: RuleSize) -> Text | None:
    try:
        plain_json("%json", schema, max_nesting=LIMITS.max_schema_nesting, max_chars=LIMITS.max_grammar_chars)
        text = check_schema(schema, size)
        check_keys(schema)
        return text
    except RequestError as error:
        raise OutOfBounds(name, error.message) from error
    except OutOfBounds as error:
        raise OutOfBounds(f"{name}: %json {error.place}", str(error)) from error
