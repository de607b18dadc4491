"""A job with tools: prompts are as long as transformers', calls come back as OpenAI's, wrong rows fail alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Literal

import jsonschema
import openai
import pytest
from openai.types.chat import ChatCompletion
from pydantic import BaseModel, Field
from tokenizers import AddedToken, Tokenizer

from npu_runner.cli import main as cli
from tests.batch.scripted import read_rows, row, write_rows
from tests.full_set import only_full

SMALL = ["--platform", "cpu", "--dtype", "float32", "--max-model-len", "512", "--kv-cache-bytes", "16M",
         "--progress", "off"]  # fmt: skip
TEMPLATE = r"""\
{%- if reasoning_effort is defined %}<|im_start|>system
Effort: {{ reasoning_effort }}<|im_end|>
{% endif %}{%- if tools %}<|im_start|>system
You may write <tool_call>: {{ tools | tojson }}<|im_end|>
{% endif %}{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
{{- '<|im_end|>\n' }}{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
CALL = '<tool_call>{"name": "look", "arguments": {"at": "it"}}</tool_call>'
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
ASK = {"role": "user", "content": "what is it?"}


@pytest.fixture(scope="module")
def model(checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint with a token that is a whole call, so that a bias makes it call."""
    path = shutil.copytree(checkpoint("qwen3", vocab_size=336), tmp_path_factory.mktemp("tools") / "model")
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(CALL, special=False, normalized=False)])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    return path


def good_rows(call_id: int) -> dict[str, dict[str, Any]]:
    calls = {"logit_bias": {str(call_id): 100}, "stop_token_ids": [call_id], "include_stop_str_in_output": True}
    cut_off = {"tools": [LOOK], "logit_bias": {str(call_id): 100}, "max_tokens": 2}
    replayed = [
        ASK,
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{\"at\": \"it\"}"}}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "a circle"},
    ]  # fmt: skip
    return {
        "plain": {},
        "calls": {"tools": [LOOK], "tool_choice": "auto", **calls},
        "calls twice": {"tools": [LOOK], **calls, "n": 2},
        "cut off": cut_off,
        "first alone": {**cut_off, "parallel_tool_calls": False},
        "none": {"tools": [LOOK], "tool_choice": "none", **calls},
        "effort": {"reasoning_effort": "low"},
        "same effort": {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "low"}},
        "replayed": {"messages": replayed, "tools": [LOOK]},
        "continued": {"messages": [ASK, {"role": "assistant", "content": "It is"}], "continue_final_message": True},
        "ended": {"messages": [ASK, {"role": "assistant", "content": "It is"}], "add_generation_prompt": False},
    }


BAD = {
    "required of nothing": ({"tool_choice": "required"}, "invalid_value", "tool_choice"),
    "another name": ({"tools": [LOOK], "tool_choice": {"type": "function", "function": {"name": "draw"}}},
                     "invalid_value", "tool_choice"),
    "two rules": ({"tools": [LOOK], "tool_choice": "required", "response_format": {"type": "json_object"}},
                  "unsupported_parameter", "response_format"),
    "a rule beside tools": ({"tools": [LOOK], "guided_regex": "a"}, "unsupported_parameter", "guided_regex"),
    "two efforts": ({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}, "invalid_value",
                    "reasoning_effort"),
    "strict": ({"tools": [{**LOOK, "function": {"name": "look", "strict": True}}]}, "unsupported_parameter",
               "tools[0].function.strict"),
    "continued user": ({"continue_final_message": True}, "invalid_value", "continue_final_message"),
}  # fmt: skip


def run(model: Path, folder: Path, rows: list[dict[str, Any]], *arguments: str) -> dict[str, dict[str, Any]]:
    write_rows(folder / "in.jsonl", rows)
    paths = ["-i", str(folder / "in.jsonl"), "-o", str(folder / "out.jsonl"), "--model", str(model)]
    cli.main(["batch", *paths, *SMALL, *arguments])
    return {item["custom_id"]: item for item in read_rows(folder / "out.jsonl")}


@pytest.fixture(scope="module")
def found(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    call_id = Tokenizer.from_file(str(model / "tokenizer.json")).token_to_id(CALL)
    bodies = {name: {"messages": [ASK], "max_tokens": 3, **body} for name, body in good_rows(call_id).items()}
    bodies |= {name: body for name, (body, *_) in BAD.items()}
    return run(model, tmp_path_factory.mktemp("job"), [row(name, **body) for name, body in bodies.items()])


@pytest.fixture(scope="module")
def answers(found: dict[str, dict[str, Any]]) -> dict[str, ChatCompletion]:
    bodies = {name: item["response"]["body"] for name, item in found.items() if name not in BAD}
    return {name: ChatCompletion.model_validate_json(json.dumps(body), strict=True) for name, body in bodies.items()}


def test_prompts_are_as_long_as_transformers(answers: dict[str, ChatCompletion], model: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(model)
    answered = [ASK, {"role": "assistant", "content": "It is"}]
    replayed = [
        ASK, {"role": "assistant", "content": "", "tool_calls": [
            {"function": {"name": "look", "arguments": {"at": "it"}}}]}, {"role": "tool", "content": "a circle"},
    ]  # fmt: skip
    asked: dict[str, tuple[Any, dict[str, Any]]] = {
        "plain": ([ASK], {}), "none": ([ASK], {}), "calls": ([ASK], {"tools": [LOOK]}),
        "effort": ([ASK], {"reasoning_effort": "low"}), "same effort": ([ASK], {"reasoning_effort": "low"}),
        "replayed": (replayed, {"tools": [LOOK]}), "ended": (answered, {"add_generation_prompt": False}),
        "continued": (answered, {"add_generation_prompt": False, "continue_final_message": True}),
    }  # fmt: skip
    for name, (messages, options) in asked.items():
        wanted = {"add_generation_prompt": True, **options}
        expected = theirs.apply_chat_template(messages, return_dict=False, **wanted)
        usage = answers[name].usage
        assert usage is not None
        assert usage.prompt_tokens == len(expected), name


def test_calls_come_back_as_openais(answers: dict[str, ChatCompletion]) -> None:
    choices = [*answers["calls"].choices, *answers["calls twice"].choices]
    assert [(choice.finish_reason, choice.message.content) for choice in choices] == [("tool_calls", None)] * 3
    calls = [call for choice in choices for call in choice.message.tool_calls or []]
    assert [(call.function.name, call.function.arguments) for call in calls if call.type == "function"] == [
        ("look", '{"at": "it"}')] * 3
    assert len({call.id for call in calls}) == 3


def test_an_answer_that_was_cut_off_says_so(answers: dict[str, ChatCompletion]) -> None:
    (both,), (first,) = answers["cut off"].choices, answers["first alone"].choices
    assert (both.finish_reason, len(both.message.tool_calls or [])) == ("length", 2)
    assert (first.finish_reason, len(first.message.tool_calls or [])) == ("length", 1)


def test_without_a_choice_there_are_no_tools_and_calls_are_text(answers: dict[str, ChatCompletion]) -> None:
    (choice,) = answers["none"].choices
    assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("stop", CALL, None)


@pytest.mark.parametrize("name", BAD)
def test_a_wrong_row_fails_alone_and_names_the_field(found: dict[str, dict[str, Any]], name: str) -> None:
    _, code, param = BAD[name]
    assert (found[name]["error"]["code"], found[name]["error"]["param"]) == (code, param)


POINT = {"type": "function", "function": {"name": "point", "parameters": {
    "type": "object", "properties": {"at": {"enum": ["circle", "square"]}, "times": {"type": "integer", "minimum": 1,
    "maximum": 99}}, "required": ["at", "times"], "additionalProperties": False}}}  # fmt: skip
STOP = {"type": "function", "function": {"name": "stop", "parameters": {
    "type": "object", "properties": {"now": {"type": "boolean"}}, "required": ["now"], "additionalProperties": False}}}


@pytest.mark.parametrize("parser", ["hermes", *only_full(
    "the other form of a call; its grammar stays (tests/prompts/test_tool_grammars.py)", "qwen3_coder")])
def test_forced_calls_are_calls_and_nothing_else(model: Path, tmp_path: Path, parser: str) -> None:
    tools = {"tools": [POINT, STOP], "temperature": 1, "max_tokens": 250, "messages": [ASK]}
    named = {"tool_choice": {"type": "function", "function": {"name": "stop"}}}
    rows = [row("required", tool_choice="required", n=4, **tools), row("named", **named, n=3, **tools),
            row("one", tool_choice="required", parallel_tool_calls=False, n=4, **tools),
            row("cut off", **{**tools, "max_tokens": 8}, tool_choice="required")]  # fmt: skip
    found = run(model, tmp_path, rows, "--tool-call-parser", parser, "--max-model-len", "1536")
    answers = {name: ChatCompletion.model_validate_json(json.dumps(item["response"]["body"]), strict=True)
               for name, item in found.items()}  # fmt: skip
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in (POINT, STOP)}
    whole = [(name, choice) for name, answer in answers.items() for choice in answer.choices
             if choice.finish_reason != "length"]  # fmt: skip
    assert len(whole) >= 6
    for name, choice in whole:
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        calls = choice.message.tool_calls or []
        assert len(calls) == 1 or (name == "required" and calls)
        for call in calls:
            assert call.type == "function"
            assert name != "named" or call.function.name == "stop"
            jsonschema.validate(json.loads(call.function.arguments), schemas[call.function.name])
    (cut,) = answers["cut off"].choices
    assert (cut.finish_reason, cut.message.tool_calls) == ("length", None)


class Look(BaseModel):
    """Looks at something."""

    at: Literal["circle", "square"]
    times: int = Field(ge=1, le=9)


class Turn(BaseModel):
    """Turns something round."""

    is_whole: bool


@pytest.mark.parametrize("parser", ["hermes", *only_full(
    "the other form of a call; its grammar stays (tests/prompts/test_tool_grammars.py)", "qwen3_coder")])
def test_strict_tools_as_openais_sdk_writes_them(model: Path, tmp_path: Path, parser: str) -> None:
    """Taken where the call is forced, by each parser that has a grammar; elsewhere the row fails by name."""
    kinds: dict[str, type[BaseModel]] = {"Look": Look, "Turn": Turn}
    tools = [dict(openai.pydantic_function_tool(kind)) for kind in kinds.values()]
    assert all(tool["function"]["strict"] is True for tool in tools)  # type: ignore[index]
    asks = {"tools": tools, "messages": [ASK], "temperature": 1, "max_tokens": 400, "parallel_tool_calls": False}
    named = {"type": "function", "function": {"name": "Turn"}}
    rows = [row("required", tool_choice="required", n=4, **asks), row("named", tool_choice=named, **asks),
            row("none", tool_choice="none", **{**asks, "max_tokens": 3}), row("auto", **asks)]  # fmt: skip
    found = run(model, tmp_path, rows, "--tool-call-parser", parser, "--max-model-len", "2048")
    error = found.pop("auto")["error"]
    assert (error["code"], error["param"]) == ("unsupported_parameter", "tools[0].function.strict")
    answers = {name: ChatCompletion.model_validate(item["response"]["body"]) for name, item in found.items()}
    calls = [call for answer in answers.values() for choice in answer.choices if choice.finish_reason != "length"
             for call in choice.message.tool_calls or []]  # fmt: skip
    assert len(calls) >= 3
    for call in calls:
        assert call.type == "function"
        kinds[call.function.name].model_validate_json(call.function.arguments)
    assert {call.function.name for call in answers["named"].choices[0].message.tool_calls or []} <= {"Turn"}


def test_a_call_cannot_be_forced_where_calls_are_text(model: Path, tmp_path: Path) -> None:
    found = run(model, tmp_path, [row("required", tools=[LOOK], tool_choice="required")], "--tool-call-parser", "none")
    error = found["required"]["error"]
    assert (error["code"], error["param"]) == ("unsupported_parameter", "tool_choice")


def test_calls_stay_text_where_no_parser_is_wanted(model: Path, tmp_path: Path) -> None:
    call_id = Tokenizer.from_file(str(model / "tokenizer.json")).token_to_id(CALL)
    rows = [row("calls", **good_rows(call_id)["calls"], max_tokens=3)]
    (choice,) = run(model, tmp_path, rows, "--tool-call-parser", "none")["calls"]["response"]["body"]["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", CALL)
    paths = ["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "other.jsonl"), "--model", str(model)]
    assert cli.main(["batch", *paths, *SMALL, "--tool-call-parser", "hermess"]) == 2
