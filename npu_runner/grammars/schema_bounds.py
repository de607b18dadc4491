"""Bounds of a JSON schema, checked before the grammar library sees it: chains, depth, alternatives, numbers.

The library recurses over what leads to what, computes with doubles, and gives up where alternatives are many. Knows
nothing of the library's messages, of tokens or of grammars.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from npu_runner.grammars.forced_text import FREE, Text, all_of, any_of, joined, text_of, times
from npu_runner.grammars.rule_size import (
    Definition,
    OutOfBounds,
    RuleSize,
    check,
    longest_chain,
    measure_all,
    num_optional_parts,
)
from npu_runner.request.limits import LIMITS, shown

_ROOT = "#"
_OF_NAMES = ("properties", "patternProperties")
_OF_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_OF_ONE = ("items", "additionalItems", "additionalProperties")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")


@dataclass(frozen=True, slots=True)
class _Measures:
    """`alternatives` and `properties`: open at one place. `multiple`: that all numbers are multiples of."""

    alternatives: int = 1
    properties: int = 0
    expressions: int = 0
    """The number of expressions that one text has to match."""
    multiple: tuple[int, int] = (1, 0)
    """A coefficient, and how many of its digits stand behind the point."""
    text: Text | None = FREE


_UNKNOWN = _Measures(text=None)


def check_schema(schema: Any, size: RuleSize | None = None) -> Text | None:
    """The text that all JSON of the schema shares; None if no instance is found. `size`: the size of the enclosing
    rule, if the schema is a part of one. Raises OutOfBounds."""
    documents = _Documents(schema, size or RuleSize())
    documents.check_values()
    return documents.measured()


class _Documents:
    """A schema with what its references lead to."""

    def __init__(self, schema: Any, size: RuleSize):
        self._schema = schema
        self._size = size
        self._targets: dict[str, Any] = {_ROOT: schema}
        self._graph: dict[str, Definition] = {}
        self._is_plain = not _has_inner_ids(schema)
        waiting = [_ROOT]
        while waiting:
            name = waiting.pop()
            references: list[tuple[str, int]] = []
            num_levels = _measure_depth(self._targets[name], 1, references)
            self._graph[name] = Definition(references, num_levels)
            for other, _ in references:
                if other not in self._targets:
                    self._targets[other] = self._resolved(other)
                    waiting.append(other)
        self._check_chains()

    def _resolved(self, reference: str) -> Any:
        """The target of a reference. Anchors and ids are not resolved; with them the whole document is one chain."""
        if reference in ("#", "#/"):
            return self._schema
        if not reference.startswith("#/") or "%" in reference:
            self._is_plain = False
            return True
        node = self._schema
        for part in reference[2:].split("/"):
            key = part.replace("~1", "/").replace("~0", "~")
            try:
                node = node[int(key)] if isinstance(node, list) else node[key]
            except (KeyError, IndexError, TypeError, ValueError):
                return True  # the library says that it is not there
        return node

    def _check_chains(self) -> None:
        chain = longest_chain(self._graph)
        num_links, num_levels = chain.num_links, chain.num_levels
        if not self._is_plain and len(self._targets) > 1:
            num_links, num_levels = len(self._targets), sum(1 for _ in _schemas(self._schema, _ROOT))
        first = [name for name, _ in self._graph[_ROOT].references]
        place = chain.name if chain.name not in ("", _ROOT) else next(iter(first), _ROOT)
        # The schema itself leads to the first definition, and is none.
        check(place, "definitions that lead to each other", num_links - 1, LIMITS.max_rule_chain)
        check(place, "levels of schemas inside each other, over references", num_levels, LIMITS.max_rule_levels)

    def check_values(self) -> None:
        for place, node in _schemas(self._schema, _ROOT):
            num_plain = sum(not isinstance(item, Mapping) for _, item in _children(node))
            num_digits = sum(_count(node, name).bit_length() for name in ("minItems", "maxItems"))
            self._size.add_parts(place, 1 + num_plain + num_digits + len(_list(node, "required")))
            for name in _BOUNDS:
                if name in node:
                    _check_bound(f"{place}/{name}", node[name])
            for name in COUNTS:
                value = node.get(name)
                if isinstance(value, (int, float)) and not isinstance(value, bool):
                    check(f"{place}/{name}", "is its value", value, LIMITS.max_rule_count)
            self._check_multiple(f"{place}/multipleOf", node.get("multipleOf"))
            for name in ("const", "enum"):
                _check_numbers(f"{place}/{name}", node.get(name))
                self._size.add_parts(f"{place}/{name}", _num_values(node.get(name), is_inside=name == "const"))
            patterns = node.get("patternProperties")
            if isinstance(patterns, Mapping):
                check(f"{place}/patternProperties", "expressions of names", len(patterns),
                      LIMITS.max_pattern_properties)
            for pattern in (*(patterns if isinstance(patterns, Mapping) else ()), node.get("pattern")):
                if isinstance(pattern, str):
                    check(f"{place}/pattern", "characters of an expression", len(pattern), LIMITS.max_regex_chars)
                    self._size.add_expression(f"{place}/pattern", num_optional_parts(pattern))

    def _check_multiple(self, place: str, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return
        if value <= 0:
            raise OutOfBounds(place, f"{shown(value)} is not greater than 0")
        number = Decimal(repr(value)).normalize()
        if not number.is_finite() or abs(number.adjusted()) > 15:
            raise OutOfBounds(place, f"{shown(value)} has more digits than can be counted with")
        coefficient = _without_factors(value)
        check(place, "is its value without the point and the factors 2 and 5", coefficient, LIMITS.max_multiple_of)
        self._size.add_multiple(place, coefficient)

    def measured(self) -> Text | None:
        """The forced text of the whole schema."""
        measures = measure_all(self._graph, lambda name, known: self._measure(self._targets[name], name, known),
                               lambda each: replace(each, text=FREE))
        return measures[_ROOT].text

    def _measure(self, node: Any, place: str, known: Mapping[str, _Measures]) -> _Measures:
        if not isinstance(node, Mapping):
            return _Measures(text=None if node is False else FREE)
        found = [self._own(node, place, known)]
        for name in ("anyOf", "oneOf"):
            branches = self._all(node, name, place, known)
            if branches:
                found.append(_one_of(branches))
        found += self._all(node, "allOf", place, known)
        if isinstance(node.get("$ref"), str):
            found.append(known.get(node["$ref"], _UNKNOWN))
        measures = _at_once(found, place)
        check(place, "alternatives and properties at one place", measures.alternatives + measures.properties,
              LIMITS.max_rule_alternatives)
        check(place, "expressions that one text has to match", measures.expressions, LIMITS.max_rule_intersections)
        return measures

    def _all(self, node: Mapping[str, Any], name: str, place: str, known: Mapping[str, _Measures]) -> list[_Measures]:
        items = node.get(name)
        return [self._measure(item, f"{place}/{name}/{number}", known)
                for number, item in enumerate(items if isinstance(items, list) else ())]

    def _own(self, node: Mapping[str, Any], place: str, known: Mapping[str, _Measures]) -> _Measures:
        """The measures of a schema without its alternatives and references."""
        inner = {name: self._measure(item, f"{place}/properties/{escaped(name)}", known)
                 for name, item in _named(node, "properties").items()}
        for name, item in _named(node, "patternProperties").items():
            self._measure(item, f"{place}/patternProperties/{escaped(name)}", known)
        items = node.get("items")
        prefix = self._all(node, "items" if isinstance(items, list) else "prefixItems", place, known)
        rest = [self._measure(node[name], f"{place}/{name}", known) for name in _OF_ONE
                if name in node and not isinstance(node[name], list)]
        of_items = rest[0] if rest and "items" in node and not isinstance(items, list) else _Measures()
        types = node.get("type")
        texts = node.get("enum")
        values = [value for value in texts if isinstance(value, (Mapping, list))] if isinstance(texts, list) else []
        num_texts = sum(isinstance(node.get(name), str) for name in ("pattern", "format"))
        return _Measures(
            alternatives=max(1, len(values)) * (len(types) or 1 if isinstance(types, list) else 1),
            properties=len(inner) + len(_named(node, "patternProperties")),
            expressions=num_texts + (num_texts > 0 and ("minLength" in node or "maxLength" in node)),
            multiple=_multiple(node.get("multipleOf")),
            text=all_of([_value_text(node), any_of(
                _typed_text(kind, node, inner, prefix, of_items) for kind in _types(node))]))


def multiples_within_bounds(schema: Any) -> dict[str, dict[str, Any]]:
    """By their place, what a schema says of numbers where it asks for multiples between bounds: too much for some.
    Raises OutOfBounds where they are too many to be tried."""
    found: dict[str, dict[str, Any]] = {}
    said, total = set(), 0
    for place, node in _schemas(schema, _ROOT):
        numbers = {name: node[name] for name in (*_BOUNDS, "multipleOf", "type") if name in node}
        if "multipleOf" in numbers and len(numbers.keys() - {"type", "multipleOf"}) and repr(numbers) not in said:
            said.add(repr(numbers))
            found[place] = numbers
            total += _without_factors(numbers["multipleOf"])
            check(place, "is the sum of what is asked for in multiples between bounds, without the point and the "
                         "factors 2 and 5", total, LIMITS.max_bounded_multiples_sum)
            check(place, "different multiples between bounds", len(found), LIMITS.max_bounded_multiples)
    return found


def escaped(name: str) -> str:
    """A name as a JSON pointer has it."""
    return name.replace("~", "~0").replace("/", "~1")


# -- what a schema holds -----------------------------------------------------------------------------------------------


def _children(node: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in _OF_NAMES:
        for key, item in _named(node, name).items():
            yield f"{name}/{escaped(key)}", item
    for name in (*_OF_LISTS, *_OF_ONE):
        items = node.get(name)
        if isinstance(items, list):
            for number, item in enumerate(items):
                yield f"{name}/{number}", item
        elif name in _OF_ONE and items is not None:
            yield name, items


def _named(node: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    items = node.get(name)
    return items if isinstance(items, Mapping) else {}


def _list(node: Mapping[str, Any], name: str) -> list[Any]:
    items = node.get(name)
    return items if isinstance(items, list) else []


def _num_values(value: Any, is_inside: bool = False) -> int:
    """The number of values in the lists and objects of a literal; an object itself does not count, a scalar is one."""
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return sum(not isinstance(item, Mapping) and (is_inside or isinstance(item, list)) for item in items) + sum(
        _num_values(item, is_inside=True) for item in items if isinstance(item, (Mapping, list)))


def _measure_depth(node: Any, depth: int, references: list[tuple[str, int]]) -> int:
    """The depth of a schema; its references are appended to `references`."""
    if not isinstance(node, Mapping):
        return depth
    if isinstance(node.get("$ref"), str):
        references.append((node["$ref"], depth))
    return max((_measure_depth(item, depth + 1, references) for _, item in _children(node)), default=depth)


def _schemas(node: Any, place: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every object in it, whether or not it is a schema: a reference may lead anywhere."""
    if isinstance(node, Mapping):
        yield place, node
        for key, item in node.items():
            yield from _schemas(item, f"{place}/{escaped(str(key))}")
    elif isinstance(node, list):
        for number, item in enumerate(node):
            yield from _schemas(item, f"{place}/{number}")


def _has_inner_ids(schema: Any) -> bool:
    """Whether references may mean something else than pointers into the whole."""
    return any(isinstance(node.get(name), str) for place, node in _schemas(schema, _ROOT) if place != _ROOT
               for name in ("$id", "id"))


# -- numbers -----------------------------------------------------------------------------------------------------------


def _check_bound(place: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return
    if not -(2**63) < value < 2**63:
        raise OutOfBounds(place, f"{shown(value)} is beyond 64 bits")
    if isinstance(value, int) and int(float(value)) != value:
        raise OutOfBounds(place, f"{value} is no double: integers are exact up to 2**53")


def _multiple(value: Any) -> tuple[int, int]:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
        return 1, 0
    number = Decimal(repr(value)).normalize().as_tuple()
    coefficient = int("".join(map(str, number.digits)))
    exponent = int(number.exponent)
    return (coefficient, -exponent) if exponent < 0 else (coefficient * 10**exponent, 0)


def _without_factors(value: Any) -> int:
    """Without the point and the factors 2 and 5, for which the last digits are enough."""
    coefficient, _ = _multiple(value)
    for factor in (2, 5):
        while coefficient % factor == 0:
            coefficient //= factor
    return coefficient


def _lcm(one: tuple[int, int], other: tuple[int, int], place: str) -> tuple[int, int]:
    """The library multiplies the two in 32 bits, and says nothing where they are more."""
    if (1, 0) in (one, other):
        return max(one, other)
    digits = max(one[1], other[1])
    a, b = one[0] * 10 ** (digits - one[1]), other[0] * 10 ** (digits - other[1])
    check(f"{place}/multipleOf", "is the product of two values that hold at once", a * b, 2**32 - 1)
    return math.lcm(a, b), digits


def _check_numbers(place: str, value: Any) -> None:
    """A value that is written out is an interval of one number to the library."""
    _check_bound(place, value)
    for item in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        _check_numbers(place, item)


# -- how measures go together ------------------------------------------------------------------------------------------


def _one_of(branches: list[_Measures]) -> _Measures:
    """The multiple of a branch holds in it alone, and an answer follows one branch: the largest counts."""
    return _Measures(
        sum(one.alternatives for one in branches), sum(one.properties for one in branches),
        max(one.expressions for one in branches), max(one.multiple for one in branches),
        any_of(one.text for one in branches))


def _at_once(found: list[_Measures], place: str) -> _Measures:
    """Each alternative of one meets each of the others."""
    alternatives = math.prod(one.alternatives for one in found)
    multiple = (1, 0)
    for one in found:
        multiple = _lcm(multiple, one.multiple, place)
    return _Measures(
        alternatives, sum(one.properties * (alternatives // one.alternatives) for one in found),
        sum(one.expressions for one in found), multiple, all_of([one.text for one in found]))


# -- the forced text ---------------------------------------------------------------------------------------------------


def _types(node: Mapping[str, Any]) -> list[str]:
    said = node.get("type")
    return [said] if isinstance(said, str) else [kind for kind in said if isinstance(kind, str)] \
        if isinstance(said, list) else ["number"]


def _value_text(node: Mapping[str, Any]) -> Text | None:
    """The text of a literal value (`const`, `enum`); any text if there is none."""
    values = [node["const"]] if "const" in node else node.get("enum")
    if not isinstance(values, list):
        return FREE
    return any_of(text_of(json.dumps(value, ensure_ascii=False, separators=(",", ":"))) for value in values)


def _typed_text(kind: str, node: Mapping[str, Any], properties: Mapping[str, _Measures], prefix: list[_Measures],
                items: _Measures) -> Text | None:
    if kind == "string":
        return joined([text_of('"'), FREE, text_of('"')])
    comma = text_of(",")
    if kind == "array":
        num_items = _count(node, "minItems")
        first = [one.text for one in prefix[:num_items]]
        rest = times(joined([comma, items.text]), num_items - len(first))
        return joined([text_of("["), *_between(comma, first), rest, text_of("]")])
    if kind == "object":
        names = [name for name in node.get("required") or () if isinstance(name, str)] \
            if isinstance(node.get("required"), list) else []
        members = [joined([text_of(json.dumps(name, ensure_ascii=False) + ":"),
                           properties[name].text if name in properties else FREE]) for name in names]
        is_closed = node.get("additionalProperties") is False and not _named(node, "patternProperties")
        more = [] if is_closed and set(names) >= properties.keys() else [FREE]
        return joined([text_of("{"), *_between(comma, members), *more, text_of("}")])
    return text_of("null") if kind == "null" else FREE


def _between(comma: Text, parts: list[Text | None]) -> list[Text | None]:
    return [item for part in parts for item in (comma, part)][1:]


def _count(node: Mapping[str, Any], name: str) -> int:
    value = node.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
