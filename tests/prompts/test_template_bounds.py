"""A template takes a bounded time and memory, also while it is compiled; all others render as in transformers."""
# ruff: noqa: E501 - a template is one line

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import _compile_jinja_template

from npu_runner.errors import ConfigError, ModelError, RequestError
from npu_runner.prompts.text import template_sandbox
from npu_runner.prompts.text.chat_template import ChatTemplate
from npu_runner.tables.options import RowsOptions
from npu_runner.tables.prompt_text import PromptText
from npu_runner.tables.records import Record

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What,\tis <this> & that?\nTwo\nlines"}]},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nA circle.", "tool_calls": [
        {"function": {"name": "look", "arguments": {"place": "é", "count": 3, "deep": [1, [2.5, None, True]]}}}]},
    {"role": "user", "content": "und nun?"},
]  # fmt: skip
BOMBS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% set b = range(99999) | list %}{% endfor %}",
    "{% for a in range(99999) %}{% set b = range(99999) | select('lt', 0) | first %}{% endfor %}",
    "{% for a in range(99999) %}{% set b = range(99999) | sum %}{% endfor %}",
    "{% for a in [1, 2] recursive %}{{ loop([1, 2]) if loop.depth < 60 }}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{{ ('x' * 100000000) * 60 }}",
    "{{ 60 * ('x' * 100000000) }}",
    "{% set l = [1] * 10000000000 %}",
    "{% set n = namespace(x='xy') %}{% for a in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% set n = namespace(x='xy') %}{% for a in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{% set n = namespace(x=[1]) %}{% for a in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    "{% set n = namespace(x=[1]) %}{% for a in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x | tojson }}",
    "{% set n = namespace(x=3) %}{% for a in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "{% set n = namespace(x=1) %}{% for a in range(99999) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{{ 9 ** 999999999 }}",
    "{{ 7 | round(999999999, 'ceil') }}",
    "{{ '%9999999999d' % 1 }}",
    "{{ '%*d' % (9999999999, 1) }}",
    "{{ '%.9999999999f' % 1.5 }}",
    "{{ '%99999999d' | format(1) }}",
    "{{ '{:>9999999999}'.format(1) }}",
    "{{ '{:>{w}}'.format(1, w=9999999999) }}",
    "{{ '{a:>9999999999}'.format_map({'a': 1}) }}",
    "{{ 'x' | center(9999999999) }}",
    "{{ ['x'] | map('center', 9999999999) | list }}",
    "{{ 'x'.ljust(9999999999) }}",
    "{{ 'x'.zfill(9999999999) }}",
    "{{ ('\t' * 1000).expandtabs(99999999) }}",
    "{{ 5.to_bytes(9999999999, 'big') }}",
    "{{ ('x' * 100000) | replace('x', 'y' * 100000) }}",
    "{{ ('x' * 100000).replace('x', 'y' * 100000) }}",
    "{{ ('x' * 100000).join('y' * 100000) }}",
    "{{ range(99999) | map('string') | join('y' * 100000) }}",
    "{{ (['y' * 100000] * 100000) | join }}",
    "{{ ('\n' * 100000) | indent(99999, true) }}",
    "{{ [[1, 2]] | tojson(indent=9999999999) }}",
    "{{ [[1] * 99999] | tojson(separators=('y' * 9999, 'z')) }}",
    "{{ [1] | batch(9999999999, 'x') | list }}",
    "{{ [1] | slice(9999999999) | list }}",
    "{{ (('<' * 10000) | striptags) ~ (('<!--' * 20000) | striptags) }}",
    "{{ ('ü' * 1000000).encode('punycode') }}",
    "{% for a in range(99999) %}{{ 'y' * 100000 }}{% endfor %}",
    "{% set x = 'y' * 9000000 %}{% set y = 'y' * 9000000 %}{% for a in range(99999) %}{{ x == y }}{% endfor %}",
    "{% set x = 'y' * 9000000 %}{% for a in range(99999) %}{{ 'z' in x }}{% endfor %}",
    "{% set x = 'y' * 9000000 %}{% for a in range(99999) %}{{ x.count('z') }}{% endfor %}",
    "{% set x = 'y' * 9000000 %}{% for a in range(99999) %}{% set z = x[1:] %}{% endfor %}",
]
USES = [
    "{{ messages[0].content }}|{{ messages[0]['content'] }}|{{ messages[-1].nothing }}|{{ messages[0].items() | list }}",
    "{% for m in messages[::-1] %}{{ loop.index0 }}{{ loop.last }}{{ m.role }}{{ loop.changed(m.role) }}{% endfor %}",
    "{% for m in messages if m.role == 'user' %}{{ loop.length }}{{ m.content is string }}{% else %}none{% endfor %}",
    "{% for a in [[1, [2]], [3]] recursive %}{{ loop(a) if a is iterable else a }},{% endfor %}",
    "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% break %}{% endfor %}",
    "{% macro f(a, b='x') %}{{ a }}{{ b }}{{ caller() if caller }}{% endmacro %}{{ f(1) }}{% call f(2, b=3) %}4{% endcall %}",
    "{% set n = namespace(a=1, l=[]) %}{% for m in messages %}{% set n.a = n.a + 1 %}{% set n.l = n.l + [m.role] %}"
    "{% endfor %}{{ n.a }}{{ n.l }}{{ n.l | unique | list }}{{ n.b }}",
    "{% set x %}a{{ messages[0].role }}{% endset %}{{ x | upper }}{% filter trim %}  y {% endfilter %}",
    "{% set c = messages[2].content %}{{ c.split('</think>')[-1].lstrip('\n') }}{{ c.rsplit('\n', 1) }}{{ c.split() }}"
    "{{ c.startswith('<think>') }}{{ c.endswith(('a', '.')) }}{{ c.find('h') }}{{ c.splitlines() }}{{ '</think>' in c }}",
    "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list }}",
    "{{ messages | rejectattr('tool_calls', 'defined') | list | length }}{{ messages | groupby('role') | map('first') | list }}",
    "{{ messages[2].tool_calls | tojson }}{{ messages[2].tool_calls[0] | tojson(indent=2) }}"
    "{{ messages[2] | tojson(separators=(',', ':'), sort_keys=true, ensure_ascii=true) }}",
    "{{ messages[2].tool_calls[0].function.arguments | items | list }}{{ messages[0] | dictsort }}{{ messages[0] | string }}",
    "{{ 'a' ~ 1 ~ none ~ [1] }}{{ 'x' * 3 }}{{ 3 * 'x' }}{{ [1, 2] * 2 }}{{ 2 ** 10 }}{{ 7 // 2 }}{{ 7 % 4 }}{{ 7 / 2 }}{{ -3 + 1.5 }}",
    "{{ '%s-%05.1f-%%' % ('a', 2.25) }}{{ '%(a)s' % {'a': 1} }}{{ '%s %s' | format('a', 'b') }}{{ '%*d' % (5, 3) }}",
    "{{ '{0} {a:>5} {0!r}'.format('x', a=1) }}{{ '{a[b]}'.format_map({'a': {'b': 2}}) }}{{ ('<{}>' | safe).format('<') }}",
    "{{ 'ab' | center(9) }}{{ 'ab'.ljust(4) }}{{ 'a\tb'.expandtabs(4) }}{{ 'a\nb' | indent(2, true) }}{{ '7'.zfill(3) }}",
    "{{ 'a b' | title }}{{ 'aXa' | replace('a', 'bb') }}{{ 'aXa'.replace('a', 'c', 1) }}{{ ', '.join(['a', 'b']) }}"
    "{{ [1, 2] | join('-') }}{{ messages | join(',', attribute='role') }}{{ ['a', 'b'] | map('upper') | join }}",
    "{{ [3, 1, 2] | sort }}{{ [3, 1] | max }}{{ [[1], [2]] | sum(start=[]) }}{{ range(5) | batch(2, 'x') | list }}"
    "{{ range(5) | slice(2) | map('list') | list }}{{ [1, 2] | reverse | list }}{{ 'abc' | reverse }}{{ 'abc' | list }}",
    "{{ 3.7 | round }}{{ 3.14159 | round(2) }}{{ '42' | int + 1 }}{{ '2.5' | float }}{{ -3 | abs }}{{ 'ff' | int(base=16) }}",
    "{{ '<a href=\"x\">b</a>' | striptags }}{{ '<&>' | escape }}{{ 'a b/é' | urlencode }}{{ 'one two three' | wordwrap(5) }}"
    "{{ 'see http://a.b ok' | urlize }}{{ 'some words here' | truncate(9) }}{{ 'a b' | wordcount }}{{ 12345 | filesizeformat }}",
    "{{ 'x'.encode() }}{{ 'é'.encode('utf-8').decode('utf-8') }}{{ 'abc'.translate({97: 'z'}) }}{{ {'a': 1}.get('b', 2) }}",
    "{{ [1, 2] == [1, 2] }}{{ 1 < 2 <= 2 }}{{ 'a' not in 'bcd' }}{{ 'role' in messages[0] }}{{ 2 in [1, 2] }}{{ 1 is odd }}",
    "{{ nothing is defined }}{{ nothing | default('d') }}{{ nothing }}{{ messages[0].x.y if false }}{{ [1, 2][1:] }}",
    "{{ ['b', 'a'] | first }}{{ ['b', 'a'] | last }}{{ messages | length }}{{ dict(a=1).a }}{{ cycler('a', 'b').next() }}",
    "{% generation %}{{ messages[2].content | trim }}{% endgeneration %}{% if messages[1].content is not string %}parts{% endif %}",
]


@pytest.mark.parametrize("source", BOMBS)
def test_a_template_that_takes_too_much_is_refused_by_name(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_TURNS", 20_000)
    with pytest.raises(RequestError, match=r"loop turns|characters|bits|digits") as caught:
        ChatTemplate(source, {}).render(MESSAGES)
    assert caught.value.code == "chat_template_error"


@pytest.mark.parametrize("constant", [
    "('x' * 10000000) * 8", "'x' | center(80000000)", "'%80000000d' % 1", "9 ** 99999999",
    "'a' | replace('a', 'b' * 80000000)",
    "(('x' * 9000) ~ ('x' * 9000)) | center(99999)"])  # fmt: skip
def test_a_large_constant_costs_nothing_where_it_is_not_reached(constant: str) -> None:
    ChatTemplate("warm", {})
    tracemalloc.start()
    try:
        template = ChatTemplate("{{ messages[0].content }}{% if false %}{{ " + constant + " }}{% endif %}", {})
        text = template.render(MESSAGES)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert text == "Be brief."
    assert peak < 4 << 20


@pytest.mark.parametrize("source", USES)
def test_what_templates_do_is_done_as_in_transformers(source: str) -> None:
    expected = _compile_jinja_template(source).render(messages=MESSAGES, add_generation_prompt=True)
    assert ChatTemplate(source, {}).render(MESSAGES) == expected


def test_a_long_conversation_is_no_bomb() -> None:
    long = [{"role": role, "content": "word " * 40_000} for _ in range(60) for role in ("user", "assistant")]
    source = ("{% for m in messages %}{% set c = m.content | trim %}{% if '</think>' in c %}?{% endif %}"
              "{{ c.split('</think>')[-1].lstrip('\n') + '\n' ~ c }}{% endfor %}")
    assert ChatTemplate(source, {}).render(long) == _compile_jinja_template(source).render(messages=long)


@pytest.mark.parametrize("source", ["{{ " + "9" * 5000 + " }}", "{% for a in b %}" * 30 + "{% endfor %}" * 30])
def test_a_template_that_python_cannot_compile_is_named(source: str) -> None:
    with pytest.raises(ModelError, match="the chat template does not compile"):
        ChatTemplate(source, {})


@pytest.mark.parametrize("source", [BOMBS[0], BOMBS[7], BOMBS[18]])
def test_rows_are_made_within_the_same_bounds(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_TURNS", 20_000)
    (tmp_path / "t.jinja").write_text(source)
    text = PromptText(RowsOptions(output="o.jsonl", template=tmp_path / "t.jinja"))
    with pytest.raises(ConfigError, match=r"loop turns|characters"):
        text.render(Record(id="1", where="t.jsonl line 1", columns={"a": "x"}))
