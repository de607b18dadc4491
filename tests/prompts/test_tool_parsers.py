"""What a chat template writes of calls is read as those calls, and what is no call stays text."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_runner.errors import ConfigError, RequestError
from npu_runner.prompts.text.chat_template import ChatTemplate
from npu_runner.prompts.text.tool_parsers import ToolCall, find_tool_parser, forced_calls, parse_calls, tool_parser

JSON_CALLS = ChatTemplate("""\
{%- for message in messages %}{{ message.content }}{% for call in message.tool_calls %}
<tool_call>
{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}
</tool_call>{% endfor %}{% endfor %}""", {})
TAGGED_CALLS = ChatTemplate("""\
{%- for message in messages %}{{ message.content }}{% for call in message.tool_calls %}
<tool_call>
<function={{ call.name }}>
{%- for name, value in call.arguments | items %}
<parameter={{ name }}>
{{ value if value is string else value | tojson }}
</parameter>{% endfor %}
</function>
</tool_call>{% endfor %}{% endfor %}""", {})

SCHEMA: dict[str, Any] = {
    "text": {"type": "string"}, "count": {"type": "integer"}, "share": {"type": "number"}, "is_so": {"type": "boolean"},
    "list": {"type": "array"}, "deep": {"anyOf": [{"type": "object"}, {"type": "null"}]}, "free": {},
    "maybe": {"type": ["string", "null"]},
}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": SCHEMA}}},
         {"type": "function", "function": {"name": "g"}}]
# A tag in a value cannot be told from the tag; a value has no line end of its own at its end, and "null" is null.
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="<\r"), max_size=12)
PLAIN = TEXTS.filter(lambda text: text.strip() != "null")
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), TEXTS)
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3), max_leaves=5)
OBJECTS = st.dictionaries(TEXTS, VALUES, max_size=3)
TYPED = st.fixed_dictionaries({}, optional={
    "text": TEXTS, "count": st.integers(), "share": st.floats(allow_nan=False, allow_infinity=False),
    "is_so": st.booleans(), "list": st.lists(LEAVES, max_size=3), "deep": st.one_of(st.none(), OBJECTS),
    "maybe": st.one_of(st.none(), PLAIN), "free": TEXTS,
})  # fmt: skip


def read(name: str, template: ChatTemplate, content: str, calls: list[dict[str, Any]]) -> tuple[str, list[ToolCall]]:
    return parse_calls(name, template.render([{"content": content, "tool_calls": calls}]), TOOLS)


def as_objects(calls: list[ToolCall]) -> list[dict[str, Any]]:
    return [{"name": call.name, "arguments": json.loads(call.arguments)} for call in calls]


@settings(deadline=None)
@given(TEXTS, st.lists(st.fixed_dictionaries({"name": st.sampled_from("fg"), "arguments": OBJECTS}), max_size=3))
def test_json_calls_are_read_as_the_template_writes_them(content: str, calls: list[dict[str, Any]]) -> None:
    found = read("hermes", JSON_CALLS, content, calls)
    assert as_objects(found[1]) == calls
    assert found[0].strip() == content.strip()


@settings(deadline=None)
@given(TEXTS, st.lists(st.fixed_dictionaries({"name": st.just("f"), "arguments": TYPED}), max_size=3))
def test_tagged_calls_are_read_as_the_template_writes_them(content: str, calls: list[dict[str, Any]]) -> None:
    found = read("qwen3_coder", TAGGED_CALLS, content, calls)
    assert as_objects(found[1]) == calls
    assert found[0].strip() == content.strip()


PIECES = ["<tool_call>", "</tool_call>", '{"name": "f", "arguments": ', "{}", "}", '"a"', ":", "a", "\n",
          "<function=f>", "</function>", "<parameter=a>", "</parameter>"]  # fmt: skip


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder"])
@settings(deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
def test_any_text_is_text_or_calls_with_objects_for_arguments(name: str, text: str) -> None:
    content, calls = parse_calls(name, text, TOOLS)
    assert calls or content == text
    assert all(isinstance(json.loads(call.arguments), dict) for call in calls)


NO_CALLS = [
    "I would write <tool_call> here", '<tool_call>{"name": "f", "arguments": {"a"', "<tool_call></tool_call>",
    '<tool_call>{"name": 5, "arguments": {}}</tool_call>', '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
    '<tool_call>{"name": "f", "arguments": "[1]"}</tool_call>', "<tool_call>[]</tool_call>",
    '<tool_call>{"name": "f", "arguments": "so"}</tool_call>', "<tool_call>" + "[" * 100_000,
]  # fmt: skip


@pytest.mark.parametrize("text", NO_CALLS, ids=lambda text: text[:50])
def test_calls_that_cannot_be_read_leave_the_answer_as_it_was(text: str) -> None:
    assert parse_calls("hermes", text, TOOLS) == (text, [])
    assert parse_calls("qwen3_coder", text, TOOLS) == (text, [])


GOOD = {"hermes": '<tool_call>{"name": "f", "arguments": {"count": 1}}</tool_call>',
        "qwen3_coder": "<tool_call><function=f><parameter=count>1</parameter></function></tool_call>"}  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("bad", NO_CALLS, ids=lambda text: text[:50])
def test_a_call_that_cannot_be_read_is_text_and_leaves_the_others_standing(name: str, bad: str) -> None:
    call = ToolCall("f", '{"count": 1}')
    content, calls = parse_calls(name, f"{GOOD[name]}\n{bad}", TOOLS)
    assert (content.strip(), calls) == (bad.strip(), [call])
    closed = bad if bad.endswith("</tool_call>") else bad + "</tool_call>"
    content, calls = parse_calls(name, f"{GOOD[name]}{closed}{GOOD[name]}", TOOLS)
    assert (content, calls) == (closed, [call, call])


@pytest.mark.parametrize(("member", "arguments"), [
    ("", "{}"), (', "arguments": null', "{}"), (', "arguments": ""', "{}"), (', "arguments": " "', "{}"),
    (', "arguments": "null"', "{}"), (', "arguments": "{\\"a\\": 1}"', '{"a": 1}'),
    (', "arguments": {"a": "b\nc\td"}', '{"a": "b\\nc\\td"}'),
    (', "arguments": {"a": 1e999, "b": [-1e999]}', '{"a": 1e999, "b": [-1e999]}'),
    (', "arguments": {"a": NaN, "b": [Infinity, -Infinity]}', '{"a": null, "b": [null, null]}'),
    (f', "arguments": {{"a": {"9" * 5000}}}', f'{{"a": {"9" * 5000}}}'),
], ids=lambda value: str(value)[:40])  # fmt: skip
def test_what_models_write_for_arguments_is_read(member: str, arguments: str) -> None:
    text = f'<tool_call>\n{{"name": "f"{member}}}\n</tool_call>'
    assert parse_calls("hermes", text, TOOLS) == (text[:0], [ToolCall("f", arguments)])


DEFINITIONS: dict[str, Any] = {
    "object": {"type": "object"}, "integer": {"type": "integer"}, "levels": {"enum": [1, 2]},
    "text": {"type": "string"}, "shades": {"enum": ["1", "2"], "type": "string"},
    "far": {"$ref": "#/$defs/integer"}, "a/b": {"const": True},
    "loop": {"$ref": "#/$defs/loop"}, "one": {"anyOf": [{"$ref": "#/$defs/other"}, {"type": "integer"}]},
    "other": {"$ref": "#/$defs/one"},
    **{f"d{number}": {"anyOf": [{"$ref": f"#/$defs/d{number + 1}"}] * 9} for number in range(25)},
    **{f"e{number}": {"$ref": f"#/$defs/e{number + 1}"} for number in range(5000)},
    "d25": {"type": "array"}, "e5000": {"type": "array"},
}  # fmt: skip


@pytest.mark.parametrize(("schema", "text", "value"), [
    ({"$ref": "#/$defs/object"}, '{"s": 1}', {"s": 1}), ({"$ref": "#/$defs/far"}, "5", 5),
    ({"allOf": [{"$ref": "#/$defs/object"}]}, "{}", {}), ({"$ref": "#/$defs/levels"}, "2", 2),
    ({"enum": [1, 2]}, "2", 2),
    ({"const": 2.5}, "2.5", 2.5), ({"properties": {"s": {}}}, "{}", {}), ({"items": {}}, "[1]", [1]),
    ({"anyOf": [{"$ref": "#/$defs/text"}, {"type": "null"}]}, "123", "123"), ({"$ref": "#/$defs/a~1b"}, "True", True),
    ({"anyOf": [{"$ref": "#/$defs/shades"}, {"type": "null"}]}, "1", "1"), ({"$ref": "#/$defs/loop"}, "1", "1"),
    ({"anyOf": [{"$ref": "#/$defs/shades"}, {"type": "null"}]}, "null", None), ({"$ref": "#/$defs/one"}, "1", 1),
    ({"type": ["string", "integer"], "allOf": [{"type": "number"}]}, "7", 7), ({"$ref": "#/$defs/d0"}, "[1]", [1]),
    ({"$ref": "#/$defs/e0"}, "[1]", "[1]"), ({"$ref": "#/nowhere/1"}, "1", "1"),
    ({"$ref": "https://x#/$defs/d25"}, "1", "1"),
    ({"type": "number"}, "NaN", None), ({"type": "number"}, "1e999", 1e999), ({"type": "string", "const": 1}, "1", "1"),
], ids=lambda value: str(value)[:40])  # fmt: skip
def test_a_parameter_has_the_type_that_its_schema_leads_to(schema: Any, text: str, value: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {
        "properties": {"x": schema}, "$defs": DEFINITIONS}}}]  # fmt: skip
    answer = f"<tool_call>\n<function=f>\n<parameter=x>\n{text}\n</parameter>\n</function>\n</tool_call>"
    (call,) = parse_calls("qwen3_coder", answer, tools)[1]
    found = json.loads(call.arguments)["x"]
    assert (found, type(found)) == (value, type(value))


def test_a_last_call_may_end_with_the_answer_and_one_call_may_be_all_that_is_wanted() -> None:
    text = 'So: <tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>{"name": "g", "arguments": {"a": 1}}'
    assert parse_calls("hermes", text, TOOLS) == ("So: ", [ToolCall("f", "{}"), ToolCall("g", '{"a": 1}')])
    assert parse_calls("hermes", text, TOOLS, is_parallel=False)[1] == [ToolCall("f", "{}")]


def test_a_value_that_does_not_fit_its_type_stays_text() -> None:
    values = "<parameter=count>many</parameter><parameter=is_so>True</parameter>"
    text = f"<tool_call><function=f>{values}</function></tool_call>"
    assert parse_calls("qwen3_coder", text, TOOLS)[1] == [ToolCall("f", '{"count": "many", "is_so": true}')]


HALVES = [
    ("hermes", r'<tool_call>{"name": "f", "arguments": {"x": "\ud800 é", "\udfff": ["\ud83d\ude00"]}}</tool_call>',
     r'{"x": "\ud800 é", "\udfff": ["😀"]}'),
    ("qwen3_coder", r'<tool_call><function=f><parameter=list>["\uDBFF"]</parameter></function></tool_call>',
     r'{"list": ["\udbff"]}'),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "arguments"), HALVES)
def test_half_a_surrogate_pair_keeps_its_escape(name: str, text: str, arguments: str) -> None:
    (call,) = parse_calls(name, text, TOOLS)[1]
    assert call.arguments == arguments
    assert call.arguments.encode(), "UTF-8 holds it"
    written = json.JSONDecoder().raw_decode(text, text.index("{" if name == "hermes" else "["))[0]
    assert json.loads(call.arguments) == (written["arguments"] if name == "hermes" else {"list": written})


def test_auto_follows_the_template_and_a_wrong_name_is_an_error_with_the_known_ones() -> None:
    assert find_tool_parser("auto", JSON_CALLS.source) == "hermes"
    assert find_tool_parser("auto", TAGGED_CALLS.source) == "qwen3_coder"
    assert find_tool_parser("auto", "{{ messages }}") is find_tool_parser("auto", None) is None
    assert find_tool_parser("none", JSON_CALLS.source) is None
    with pytest.raises(ConfigError, match=r"'hermess' is not one of auto, none, hermes, qwen3_coder"):
        find_tool_parser("hermess", None)


MODULE = """
from npu_runner.prompts.text.tool_parsers import ToolCall, ToolParser

class Shouting(ToolParser):
    def parse(self, text, tools):
        if text == "bug":
            raise KeyError(text)
        return text.replace("CALL", "").strip(), [ToolCall("f", "{}")] * text.count("CALL")

    def reads(self, template):
        return "CALL" in template
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with a parser, as pip would leave it."""
    (tmp_path / "shouting_calls.py").write_text(MODULE)
    info = tmp_path / "shouting_calls-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shouting-calls\nVersion: 1.0\n")
    points = ["shouting = shouting_calls:Shouting", "absent = shouting_calls:Absent", "wrong = shouting_calls:ToolCall"]
    (info / "entry_points.txt").write_text("\n".join(["[npu_runner.tool_parsers]", *points]))
    monkeypatch.syspath_prepend(str(tmp_path))
    tool_parser.cache_clear()
    yield
    tool_parser.cache_clear()
    sys.modules.pop("shouting_calls", None)


def test_a_package_brings_its_own(installed: None) -> None:
    assert find_tool_parser("shouting", None) == "shouting"
    assert parse_calls("shouting", "a CALL", []) == ("a", [ToolCall("f", "{}")])
    assert parse_calls("shouting", " a ", []) == (" a ", []), "without a call the answer is as it was"
    assert parse_calls("shouting", "bug", []) == ("bug", [])
    for name in ("absent", "wrong"):
        with pytest.raises(ConfigError, match=name):
            find_tool_parser(name, None)


def test_a_package_that_says_no_grammar_forces_no_call_and_says_so(installed: None) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    for name in (None, "f"):
        with pytest.raises(RequestError, match=r"a call cannot be forced: the parser 'shouting'") as caught:
            forced_calls("shouting", tools, name=name, is_parallel=True)
        assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "tool_choice")
