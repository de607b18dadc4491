"""Schemas that an answer has to fit to the letter: jsonschema, pydantic, the calendar and the official suite judge."""

from __future__ import annotations

import contextlib
import datetime
import json
import random
import re
from collections.abc import Sequence
from decimal import Decimal
from enum import Enum
from importlib.metadata import version
from typing import Annotated, Any, Literal
from uuid import UUID

import jsonschema
import pydantic
import pytest

from npu_runner.errors import RequestError
from npu_runner.grammars.compile import with_grammar
from npu_runner.grammars.exact_schema import as_rust
from npu_runner.request.structured_outputs import StructuredOutputsParams
from scripts import schema_suite
from tests.full_set import examples, some_of

is_old = tuple(map(int, version("llguidance").split(".")[:2])) < (1, 8)
needs_escapes = pytest.mark.skipif(is_old, reason="this llguidance cannot say which escapes a text may hold")


def admits(text: str, **asked: Any) -> bool:
    return schema_suite.follower(with_grammar(StructuredOutputsParams(**asked)).compiled)(text)


def refusal(**asked: Any) -> str:
    with pytest.raises(RequestError) as refused:
        with_grammar(StructuredOutputsParams(**asked))
    assert refused.value.code == "invalid_structured_outputs"
    return refused.value.message


@pytest.mark.full("every group of the official suite, which pip fetches; a small covering choice stays")
def test_the_official_suite_has_no_forbidden_instance_that_is_admitted() -> None:
    try:
        file = schema_suite.fetch()
    except OSError as error:
        pytest.skip(f"the suite is not there: {error}")
    found, wrong = schema_suite.count(schema_suite.read(file), schema_suite.ours)
    assert wrong == []
    if not is_old:
        assert found["served"] >= 205
        assert found["forbidden"] >= 425
        assert found["valid_admitted"] >= 536


INTEGER = {"type": "integer"}
TYPED = {"properties": {"a": {}}, "additionalProperties": INTEGER}
ESCAPES = [
    ({"properties": {"a": INTEGER}}, {"a": "x"}), ({"properties": {"a": INTEGER}, "required": ["a"]}, {"a": []}),
    ({"properties": {"年龄": INTEGER}}, {"年龄": "x"}), ({"properties": {"🐲": INTEGER}}, {"🐲": "x"}),
    ({"required": ["a"], "properties": {"b": False}}, {"a": 1, "b": 1}),
    ({"allOf": [{"properties": {"a": INTEGER}}, {"properties": {"b": INTEGER}}]}, {"a": 1, "b": "x"}),
    ({"$defs": {"o": {"properties": {"a": INTEGER}}}, "items": {"$ref": "#/$defs/o"}}, [{"a": "x"}]),
    ({"unknown": {"o": {"properties": {"a": INTEGER}}}, "items": {"$ref": "#/unknown/o"}}, [{"a": "x"}]),
    *(pytest.param(*case, marks=needs_escapes) for case in (
        (TYPED, {"a": 1, "b": "x"}), ({"patternProperties": {"^[a-z]$": INTEGER}}, {"a": "x"}),
        ({"properties": {"\n": INTEGER, 'q"': INTEGER, "\x1f": INTEGER}}, {"\n": "x", 'q"': "x", "\x1f": "x"}),
        ({"properties": {"\n": INTEGER}, "patternProperties": {"\n": {}}}, {"\n": "x"}),
    )),
]  # fmt: skip


def hexes(text: str) -> Sequence[str]:
    return text, re.sub(r"\\u[0-9a-f]{4}", lambda found: "\\u" + found[0][2:].upper(), text)


@pytest.mark.parametrize(("schema", "forbidden"), ESCAPES)
def test_a_key_has_one_spelling(schema: Any, forbidden: Any) -> None:
    assert not jsonschema.Draft202012Validator(schema).is_valid(forbidden)
    admitted = schema_suite.follower(with_grammar(StructuredOutputsParams(json=schema)).compiled)
    lark = f'start: "x" value\nvalue: %json {json.dumps(schema)}'
    for text in {each for spelling in schema_suite.spellings(forbidden) for each in hexes(spelling)}:
        assert not admitted(text)
        assert not admits("x" + text, grammar=lark)


@pytest.mark.parametrize(("schema", "texts"), [
    ({"properties": {"a": INTEGER}}, ['{"a":1,"b":"x"}', '{"b":{"c":[null]}}', '{"é年🐲":"\\u0001\\n"}', "5"]),
    ({"properties": {"a": {}}, "required": ["z"]}, ['{"a":1,"z":2,"y":3}']),
    ({"type": "object", "additionalProperties": INTEGER}, ['{"a":1,"b":2}']),
    ({"allOf": [{"properties": {"a": INTEGER}}, {"properties": {"b": {}}}]}, ['{"a":1,"b":2,"c":3}']),
    ({"oneOf": [{"type": "null"}, {"type": "string", "format": "date"}]}, ['"2024-02-29"', "null"]),
    ({"type": "string", "format": "date", "pattern": "^2"}, ['"2024-02-29"']),
    ({"type": ["string", "null"], "format": "date"}, ['"2024-02-29"', "null"]),
    ({"items": INTEGER, "maxItems": 2.0, "minItems": 1e0}, ["[1,2]"]),
    ({"type": "string", "minLength": 1.0, "maxLength": 2.0}, ['"ab"']),
    ({"type": "object", "minProperties": 1.0, "maxProperties": 2.0}, ['{"a":1,"b":2}']),
    ({"const": {"minProperties": 9, "format": "date", "pattern": ".", "properties": {"a": 1}}},
     ['{"minProperties":9,"format":"date","pattern":".","properties":{"a":1}}']),
    ({"properties": {"format": INTEGER, "pattern": INTEGER, "required": INTEGER, "minProperties": INTEGER}},
     ['{"format":1,"pattern":2,"required":3,"minProperties":4,"x":5}']),
    pytest.param(TYPED, ['{"a":"x","b":1}', '{"b":1}'], marks=needs_escapes),
    pytest.param({"patternProperties": {"^x": INTEGER}}, ['{"x1":1,"y":"z"}'], marks=needs_escapes),
    pytest.param({"properties": {"\n": INTEGER, 'q"': {}}}, ['{"\\n":1,"q\\"":2,"\\t":3}'], marks=needs_escapes),
])  # fmt: skip
def test_what_fits_is_still_admitted(schema: Any, texts: list[str]) -> None:
    for text in texts:
        jsonschema.validate(json.loads(text), schema)
        assert admits(text, json=schema), text


@pytest.mark.parametrize(("schema", "place"), [
    ({"type": "object", "minProperties": 2}, "#/minProperties"),
    ({"items": {"required": ["a"], "minProperties": 3}}, "#/items/minProperties"),
    ({"patternProperties": {"a": {}}, "additionalProperties": False, "minProperties": 2.0}, "#/minProperties"),
])  # fmt: skip
def test_keys_that_may_repeat_each_other_are_not_counted(schema: Any, place: str) -> None:
    said = refusal(json=schema)
    assert f"cannot be served at {place}:" in said
    assert "different keys cannot be asked for where keys are free" in said
    assert "%json #" in refusal(grammar=f"start: %json {json.dumps(schema)}")


@pytest.mark.parametrize("schema", [
    {"type": "object", "minProperties": 1}, {"required": ["a"], "minProperties": 2},
    {"type": "string", "minProperties": 9},
    {"properties": {"a": {}, "b": {}}, "required": ["a", "b"], "additionalProperties": False, "minProperties": 2},
])  # fmt: skip
def test_a_count_that_one_free_key_meets_is_served(schema: Any) -> None:
    assert with_grammar(StructuredOutputsParams(json=schema)).compiled


WRONG = (None, True, 5, 2.5, "x", [], [1], {}, {"a": 1}, [[]], ["a", None])
KEYWORDS = ("type", "properties", "required", "patternProperties", "additionalProperties", "minProperties", "format",
            "pattern", "allOf", "anyOf", "const", "enum", "maxItems", "$defs", "items", "$ref")  # fmt: skip


def test_what_is_no_schema_is_refused_by_name_or_served() -> None:
    rng = random.Random(6)
    for _ in range(examples(800)):
        schema: dict[str, Any] = {name: rng.choice(WRONG) for name in rng.sample(KEYWORDS, 3)}
        schema = {"properties": {"a": schema}, "format": "date"} if rng.random() < 0.3 else schema
        options = {"x-guidance": rng.choice(WRONG)} if rng.random() < 0.1 else {}
        for asked in ({"json": schema}, {"grammar": f"start: %json {json.dumps(schema | options)}"}):
            with contextlib.suppress(RequestError):
                with_grammar(StructuredOutputsParams(**asked))


# -- days and times ----------------------------------------------------------------------------------------------------


def is_day(text: str) -> bool:
    try:
        datetime.date.fromisoformat(text)
    except ValueError:
        return False
    return True


def test_days_are_those_of_the_calendar() -> None:
    date = schema_suite.follower(with_grammar(StructuredOutputsParams(json={"format": "date"})).compiled)
    moment = schema_suite.follower(with_grammar(StructuredOutputsParams(json={"format": "date-time"})).compiled)
    years = (0, 1, 4, 1900, 2000, 2023, 2024, *random.Random(1).sample(range(10_000), examples(40)))
    for year in years:
        days = [f"{year:04}-02-{day:02}" for day in (28, 29, 30)]
        for text in days:
            assert date(f'"{text}"') == is_day(text), text
            assert moment(f'"{text}T00:00:00Z"') == is_day(text), text
    for text in [f"2023-{month:02}-{day:02}" for month in range(14) for day in (0, 1, 30, 31, 32)]:
        assert date(f'"{text}"') == is_day(text), text


def leap_second(hour: int, minute: int, day: int, month: int, offset: str) -> bool:
    """Whether it is 23:59 in UTC at the end of June or December."""
    sign = -1 if offset[0] == "-" else 1
    ahead = sign * datetime.timedelta(hours=int(offset[1:3]), minutes=int(offset[4:]))
    utc = datetime.datetime(2016, month, day, hour, minute) - ahead
    return (utc.hour, utc.minute) == (23, 59) and (utc.month, utc.day) in ((6, 30), (12, 31))


def test_leap_seconds_come_when_they_do() -> None:
    kinds = {kind: schema_suite.follower(with_grammar(StructuredOutputsParams(json={"format": kind})).compiled)
             for kind in ("time", "date-time")}  # fmt: skip
    rng, num_leaps = random.Random(2), 0
    offsets = [f"{sign}{hours:02}:{minutes}" for sign in "+-" for hours in range(24) for minutes in ("00", "30")]
    offsets = list(some_of(offsets, 24))
    for offset in offsets:
        ahead = datetime.timedelta(hours=int(offset[1:3]), minutes=int(offset[4:])) * (1 if offset[0] == "+" else -1)
        right = datetime.datetime(2016, 12, 31, 23, 59) + ahead
        others = [right + datetime.timedelta(minutes=rng.randint(-2000, 2000)) for _ in range(2)]
        for local in (right, right - datetime.timedelta(days=184), *others):
            is_leap = leap_second(local.hour, local.minute, local.day, local.month, offset)
            num_leaps += is_leap
            assert kinds["date-time"](f'"{local:%Y-%m-%dT%H:%M}:60{offset}"') == is_leap, (local, offset)
            assert kinds["time"](f'"{right:%H:%M}:60.5{offset}"')
        assert not kinds["time"](f'"{right + datetime.timedelta(minutes=1):%H:%M}:60{offset}"')
    assert num_leaps >= 2 * len(offsets)
    for text in ("23:59:60Z", "23:59:60.25z", "12:00:00+05:45", "00:00:00.1Z"):
        assert kinds["time"](f'"{text}"')
    for text in ("23:58:60Z", "22:59:60Z", "24:00:00Z", "12:00:61Z", "12:00:00"):
        assert not kinds["time"](f'"{text}"')


def test_among_many_times_leap_seconds_are_those_of_utc() -> None:
    item = {"type": "string", "format": "date-time"}
    for count in (4, 5):
        rule = StructuredOutputsParams(json={"prefixItems": [item] * count})
        admitted = schema_suite.follower(with_grammar(rule).compiled)
        assert admitted('["2016-12-31T23:59:60Z"]')
        assert admitted('["2016-12-31T22:59:60-01:00"]') == (count == 4)
        assert admitted('["2016-12-31T22:59:00-01:00"]')
        for text in ("", "2016-12-31T", "2016-12-31T22:59:60Z", "2016-12-30T23:59:60Z"):
            assert not admitted(f'["{text}"]')


# -- expressions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("expression", "yes", "no"), [
    (r"^\S$", "a\x1f\x85é", " \t\n\ufeff\u3000\u2028\u00a0"), (r"^\s$", " \t\n\v\ufeff\u3000\u2029", "a\x85\u200b"),
    (r"^[\s]$", "\ufeff ", "\x85"), (r"^[^\s]$", "\x85a", "\ufeff "), (r"^[\Sx]$", "\x85", "\ufeff"),
    (r"^.$", "a\x85🐲", "\n\r\u2028\u2029"), (r"^[.]$", ".", "a"), (r"^\.$", ".", "a"), (r"^[\]a.]$", "].a", "b"),
    (r"^[a&&b]$", "a&b", "c"), (r"^[a~~b]$", "a~b", "c"), (r"^[[a]$", "[a", "b"), (r"^[+--]$", "+,-", "."),
    (r"^\\s$", "", " s"), (r"^\d$", "5", "٣"), (r"^\w$", "a_", "é"),
])  # fmt: skip
def test_expressions_are_those_of_ecma_262(expression: str, yes: str, no: str) -> None:
    admitted = schema_suite.follower(with_grammar(StructuredOutputsParams(json={"pattern": expression})).compiled)
    assert [character for character in yes if not admitted(json.dumps(character, ensure_ascii=False))] == []
    assert [character for character in no if admitted(json.dumps(character, ensure_ascii=False))] == []


def test_flags_keep_their_dot() -> None:
    assert as_rust("(?s:a.b)") == "(?s:a.b)"
    assert admits('"a\\nb"', json={"pattern": "^(?s:a.b)$"})


# -- values that are written out ---------------------------------------------------------------------------------------

CHARACTERS = ("a", '"', "\\", "/", "\n", "\r", "\t", "\b", "\f", "\0", "\x1f", "\x7f", "\x80", "é", "\u2028", "日",
              "🐲", "\ufeff", "\\u0061", "\\n", "<", "&")  # fmt: skip


def random_value(rng: random.Random, depth: int = 2) -> Any:
    kind = rng.randrange(6 if depth else 4)
    if kind == 0:
        return rng.choice((0, -1, 7, 2**53, -(2**53), 0.125, -2.5, 100.75, None, True, False))
    if kind < 4:
        return "".join(rng.choices(CHARACTERS, k=rng.randint(0, 5)))
    items = [random_value(rng, depth - 1) for _ in range(rng.randint(0, 3))]
    return items if kind == 4 else {"".join(rng.choices(CHARACTERS, k=3)).replace("\x7f", ""): item for item in items}


def mutated(text: str, rng: random.Random) -> str:
    at = rng.randrange(len(text))
    return text[:at] + rng.choice((*CHARACTERS, "1", "u0061", '\\"', "")) + text[at + rng.randint(0, 2):]


def equal(one: Any, other: Any) -> bool:
    return bool(jsonschema.Draft202012Validator({"const": one}).is_valid(other))


def test_a_value_that_is_written_out_is_said_and_nothing_else() -> None:
    rng = random.Random(3)
    for _ in range(examples(160)):
        values = [random_value(rng) for _ in range(rng.randint(1, 4))]
        schema = {"const": values[0]} if len(values) == 1 else {"enum": values}
        admitted = schema_suite.follower(with_grammar(StructuredOutputsParams(json=schema)).compiled)
        for value in values:
            text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
            assert admitted(text) or admitted(text.replace("\x7f", "\\u007f")), (schema, text)
            for other in (mutated(text, rng) for _ in range(8)):
                if admitted(other):
                    assert any(equal(each, json.loads(other)) for each in values), (schema, other)


def test_lengths_count_characters_however_they_are_written() -> None:
    rng = random.Random(4)
    for _ in range(examples(80)):
        low = rng.randint(0, 3)
        schema = {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 2)}
        admitted = schema_suite.follower(with_grammar(StructuredOutputsParams(json=schema)).compiled)
        for _ in range(10):
            value = "".join(rng.choices(CHARACTERS, k=rng.randint(0, 6)))
            is_valid = jsonschema.Draft202012Validator(schema).is_valid(value)
            for text in schema_suite.spellings(value):
                assert not admitted(text) or is_valid, (schema, text)
            assert admitted(json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")) == is_valid


# -- pydantic ----------------------------------------------------------------------------------------------------------


class Colour(Enum):
    RED = "red"
    BLUE = "dark blue"


class Point(pydantic.BaseModel):
    x: float
    y: float = 0.0


class Closed(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    name: str
    size: int | None = None


class Open(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    name: str


class TypedExtra(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, int]
    name: str


class Tree(pydantic.BaseModel):
    value: int
    children: list[Tree] = []


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: int = pydantic.Field(ge=0, le=9)


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]
    name: str = pydantic.Field(min_length=1, max_length=8)


class Aliased(pydantic.BaseModel):
    when: datetime.date = pydantic.Field(alias="出生日期", description="a day")


class Quoted(pydantic.BaseModel):
    line: str = pydantic.Field(alias='the "line"')


def model(**fields: Any) -> type[pydantic.BaseModel]:
    return pydantic.create_model("Model", **{name: (kind, ...) for name, kind in fields.items()})


Code = Annotated[str, pydantic.StringConstraints(pattern=r"^[A-Z]{2}\d{3}$")]
MODELS: list[tuple[Any, Any]] = [
    (Point, {"x": 1.5, "y": 2.0}), (Closed, {"name": "a", "size": None}), (Open, {"name": "a", "other": [1]}),
    (Tree, {"value": 1, "children": [{"value": 2, "children": []}]}), (Aliased, {"出生日期": "2024-02-29"}),
    (model(day=datetime.date, at=datetime.datetime), {"day": "2024-02-29", "at": "2024-02-29T12:00:00Z"}),
    (model(at=datetime.time, took=datetime.timedelta), {"at": "12:00:00Z", "took": "P1DT2H"}),
    (model(colour=Colour, point=Point), {"colour": "dark blue", "point": {"x": 1, "y": 2}}),
    (model(pet=Cat | Dog), {"pet": {"kind": "cat", "lives": 9}}),
    (model(points=dict[str, Point]), {"points": {"a": {"x": 1, "y": 2}}}),
    (model(counts=dict[str, int], any=dict[str, Any]), {"counts": {"a": 1, "b": 2}, "any": {"c": [None]}}),
    (model(code=Code, codes=list[Code]), {"code": "AB123", "codes": ["CD456"]}),
    (model(pair=tuple[int, str], many=Annotated[list[int], pydantic.Field(min_length=1, max_length=3)]),
     {"pair": [1, "a"], "many": [1, 2]}),
    (model(id=UUID, flag=bool, none=type(None)),
     {"id": "2eb8aa08-aa98-11ea-b4aa-73b441d16380", "flag": True, "none": None}),
    (model(text=str | None, number=int | float), {"text": None, "number": 1.5}),
    (model(choice=Literal["a", 1, None]), {"choice": 1}),
    (model(some=Annotated[int, pydantic.Field(gt=0, multiple_of=5)]), {"some": 10}),
    (model(first=Closed, second=Closed | None), {"first": {"name": "a", "size": 1}, "second": None}),
    (pydantic.RootModel[list[Point]], [{"x": 1, "y": 2}]), (pydantic.RootModel[dict[str, str]], {"a": "b", "c": "d"}),
    *(pytest.param(*case, marks=needs_escapes) for case in (
        (TypedExtra, {"name": "a", "b": 1}), (Quoted, {'the "line"': "x"}),
        (model(by_code=dict[Code, int]), {"by_code": {"AB123": 1}}),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "value"), MODELS)
def test_every_schema_that_pydantic_writes_is_served(kind: type[pydantic.BaseModel], value: Any) -> None:
    schema = kind.model_json_schema()
    text = json.dumps(value, ensure_ascii=False)
    kind.model_validate_json(text)
    jsonschema.validate(value, schema)
    admitted = schema_suite.follower(with_grammar(StructuredOutputsParams(json=schema)).compiled)
    assert admitted(text)
    rng = random.Random(5)
    for other in {each for _ in range(examples(200)) for each in schema_suite.spellings(mutate(value, rng))}:
        if admitted(other):
            jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker(["date"])).validate(
                json.loads(other, parse_float=Decimal if "multiple" in str(schema) else float))  # fmt: skip


def mutate(value: Any, rng: random.Random) -> Any:
    """A value with something else somewhere in it."""
    if rng.random() < 0.3 or not isinstance(value, (dict, list)) or not value:
        return rng.choice((None, True, 0, -1, 7.5, "", "x", "2023-02-29", [], {}, [1], {"x": "y"}))
    if isinstance(value, list):
        at = rng.randrange(len(value))
        return [*value[:at], mutate(value[at], rng), *value[at + 1:], *([1] if rng.random() < 0.2 else [])]
    name = rng.choice(list(value))
    changed = {key: mutate(item, rng) if key == name else item for key, item in value.items()}
    return changed | ({"additional": rng.choice((1, "x"))} if rng.random() < 0.3 else {})
