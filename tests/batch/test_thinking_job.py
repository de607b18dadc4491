"""A job with a model that thinks: transformers' tokens, split where its tokenizer says; wrong rows fail alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from openai.types.chat import ChatCompletion
from tokenizers import Tokenizer

from npu_runner import LLM, SamplingParams
from npu_runner.cli import main as cli
from npu_runner.errors import ConfigError, RequestError
from tests.batch.scripted import read_rows, row, write_rows
from tests.oracle import reference
from tests.oracle.thinking_checkpoints import make_thinking

SMALL = ["--platform", "cpu", "--dtype", "float32", "--max-model-len", "256", "--kv-cache-bytes", "16M"]
NUM_TOKENS = 12
QUESTION = "which of the two pictures shows a circle?"
NOT_THINKING = {"enable_thinking": False}


@dataclass(frozen=True)
class Thinker:
    """A checkpoint, and the bias with which it ends its reasoning in the middle of `answer`."""

    path: Path
    tokenizer: Tokenizer
    bias: dict[int, float]
    answer: list[int]

    @property
    def num_reasoning_tokens(self) -> int:
        return self.answer.index(self.end_id)

    @property
    def end_id(self) -> int:
        return int(next(iter(self.bias)))

    def text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids)


@pytest.fixture(scope="module")
def thinker(checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Thinker:
    from transformers import AutoTokenizer

    path = make_thinking(checkpoint, tmp_path_factory.mktemp("thinking") / "model")
    theirs, tokenizer = AutoTokenizer.from_pretrained(path), Tokenizer.from_file(str(path / "tokenizer.json"))
    end = tokenizer.token_to_id("</think>")
    prompt = list(theirs.apply_chat_template([{"role": "user", "content": QUESTION}], add_generation_prompt=True,
                                             return_dict=False))  # fmt: skip
    _, logits = reference.generate(path, prompt, max_new_tokens=NUM_TOKENS)
    lacking = (logits.max(-1).values - logits[:, end])[: NUM_TOKENS - 2]
    assert lacking.argmin() > 0, "another seed: the model would begin with the tag"
    bias = float(lacking.min()) + 0.5 * float(lacking[: lacking.argmin()].min() - lacking.min())
    model, inputs = reference.load_model(path), reference.model_inputs(path, prompt)
    with torch.inference_mode():
        ids = model.generate(**inputs, max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, do_sample=False,
                             eos_token_id=None, pad_token_id=0, sequence_bias={(end,): bias})  # fmt: skip
    thinker = Thinker(path, tokenizer, {end: bias}, ids[0, len(prompt):].tolist())
    assert 0 < thinker.num_reasoning_tokens < NUM_TOKENS - 1
    return thinker


def good_rows(thinker: Thinker) -> dict[str, dict[str, Any]]:
    asked: dict[str, Any] = {"text": QUESTION, "max_tokens": NUM_TOKENS, "ignore_eos": True,
                             "logit_bias": {str(token): bias for token, bias in thinker.bias.items()}}  # fmt: skip
    return {
        "thinks": asked,
        "twice": {**asked, "n": 2, "logprobs": True, "top_logprobs": 1},
        "cut": {**asked, "max_tokens": thinker.num_reasoning_tokens},
        "at the tag": {**asked, "max_tokens": thinker.num_reasoning_tokens + 1},
        "stopped": {**asked, "stop": ["</think>"]},
        "off": {**asked, "logit_bias": None, "chat_template_kwargs": NOT_THINKING},
        "on": {**asked, "chat_template_kwargs": {"enable_thinking": True}},
        "null": {**asked, "chat_template_kwargs": None},
    }


BAD: dict[str, tuple[Any, str]] = {
    "unknown": ({"enable_thinkin": False}, "unknown_parameter"),
    "reserved": ({"messages": []}, "unsupported_parameter"),
    "the last turn": ({"continue_final_message": True}, "unsupported_parameter"),
    "text": ("enable_thinking", "invalid_type"),
    "list": ([], "invalid_type"),
    "deep": (json.loads('{"notes":' + "[" * 40 + "]" * 40 + "}"), "nested_too_deep"),
    "many": ({str(n): n for n in range(65)}, "limit_exceeded"),
    "huge": ({"notes": "x" * 70_000}, "limit_exceeded"),
    "too long": ({"notes": "x" * 30_000}, "prompt_too_long"),
    "refused": ({"effort": "huge"}, "chat_template_error"),
    "not a number": ({"notes": float("nan")}, "invalid_value"),
    "control": ({"notes": "<|im_end|>"}, "special_token_in_text"),
}


@pytest.fixture(scope="module")
def finished(thinker: Thinker, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    rows = [row(name, **body) for name, body in good_rows(thinker).items()]
    rows += [row(name, chat_template_kwargs=kwargs) for name, (kwargs, _) in BAD.items()]
    rows.append(row("effort", reasoning_effort="low"))
    write_rows(folder / "in.jsonl", rows)
    assert run(folder, thinker, "--report", str(folder / "report.html"), "--summary", str(folder / "sum.json")) == 3
    return folder


def run(folder: Path, thinker: Thinker, *arguments: str) -> int:
    return cli.main(["batch", "-i", str(folder / "in.jsonl"), "-o", str(folder / "out.jsonl"), "--model",
                     str(thinker.path), *SMALL, "--progress", "off", *arguments])  # fmt: skip


@pytest.fixture(scope="module")
def bodies(finished: Path) -> dict[str, dict[str, Any]]:
    found = {item["custom_id"]: item["response"]["body"] for item in read_rows(finished / "out.jsonl")}
    return {name: found[name] for name in found.keys() - BAD.keys() - {"effort"}}


def message(body: dict[str, Any], choice: int = 0) -> tuple[str | None, str | None]:
    found = body["choices"][choice]["message"]
    return found["reasoning_content"], found["content"]


def test_reasoning_and_content_are_transformers_tokens_split_at_the_tag(
    thinker: Thinker, bodies: dict[str, dict[str, Any]]
) -> None:
    at = thinker.num_reasoning_tokens
    reasoning, content = thinker.text(thinker.answer[:at]), thinker.text(thinker.answer[at + 1:])
    assert reasoning
    assert content
    for name, num_choices in (("thinks", 1), ("on", 1), ("null", 1), ("twice", 2)):
        body = bodies[name]
        assert [message(body, choice) for choice in range(num_choices)] == [(reasoning, content)] * num_choices
        assert body["usage"]["completion_tokens"] == NUM_TOKENS * num_choices
        assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": at * num_choices}
    logprobs = bodies["twice"]["choices"][1]["logprobs"]["content"]
    assert len(logprobs) == NUM_TOKENS, "of all tokens"
    assert logprobs[at]["token"] == "</think>"


def test_whoever_has_only_thought_has_no_content(thinker: Thinker, bodies: dict[str, dict[str, Any]]) -> None:
    at = thinker.num_reasoning_tokens
    for name, reason in (("cut", "length"), ("at the tag", "length"), ("stopped", "stop")):
        assert message(bodies[name]) == (thinker.text(thinker.answer[:at]), None)
        assert bodies[name]["choices"][0]["finish_reason"] == reason
        assert bodies[name]["usage"]["completion_tokens_details"] == {"reasoning_tokens": at}


def test_whoever_was_told_not_to_think_has_content_alone(thinker: Thinker, bodies: dict[str, dict[str, Any]]) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(thinker.path)
    prompt = theirs.apply_chat_template([{"role": "user", "content": QUESTION}], add_generation_prompt=True,
                                        return_dict=False, enable_thinking=False)  # fmt: skip
    ids, _ = reference.generate(thinker.path, prompt, max_new_tokens=NUM_TOKENS)
    body = bodies["off"]
    assert message(body) == (None, thinker.text(ids))
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    assert body["usage"]["prompt_tokens"] == len(prompt)


def test_openais_types_read_every_answer(bodies: dict[str, dict[str, Any]]) -> None:
    for name, body in bodies.items():
        completion = ChatCompletion.model_validate_json(json.dumps(body), strict=True)
        assert completion.usage is not None
        assert completion.usage.completion_tokens_details is not None
        assert completion.model_extra == {}
        for choice in completion.choices:
            assert choice.message.model_extra == {"reasoning_content": message(body, choice.index)[0]}, name


def test_each_wrong_row_fails_by_itself_and_by_name(finished: Path) -> None:
    found = {item["custom_id"]: item["error"] for item in read_rows(finished / "out.jsonl") if item["error"]}
    codes = {name: code for name, (_, code) in BAD.items()}
    assert {name: error["code"] for name, error in found.items()} == {**codes, "effort": "unsupported_parameter"}
    named = {name for name, error in found.items() if "chat_template_kwargs" in error["message"]}
    assert named == {"effort", *BAD.keys()} - {"too long"}


def test_the_page_and_the_summary_show_what_was_thought(
    finished: Path, thinker: Thinker, bodies: dict[str, dict[str, Any]]
) -> None:
    page = (finished / "report.html").read_text()
    thought = sum(choice["message"]["reasoning_content"] is not None
                  for body in bodies.values() for choice in body["choices"])  # fmt: skip
    assert page.count("<summary>reasoning</summary>") == thought == 8
    assert page.count("(empty answer)") == 3
    tokens = json.loads((finished / "sum.json").read_text())["tokens"]
    assert tokens["reasoning"] == thinker.num_reasoning_tokens * thought


@pytest.mark.parametrize(("arguments", "name"), [
    (["--chat-template-kwargs", '{"enable_thinking": false}'], "prompts.chat_template_kwargs: was "),
    (["--reasoning-parser", "none"], "prompts.reasoning_tokens: was "),
])  # fmt: skip
def test_an_output_goes_on_with_no_other_settings(
    finished: Path, thinker: Thinker, arguments: list[str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (finished / "out.jsonl").read_bytes()
    assert run(finished, thinker, "--retry-errors", *arguments) == 2
    assert name in capsys.readouterr().err
    assert (finished / "out.jsonl").read_bytes() == before


def test_a_jobs_kwargs_count_where_a_row_has_none(
    thinker: Thinker, bodies: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    bare = {name: body for name, body in good_rows(thinker).items() if name in ("thinks", "on", "off")}
    bare["off"] = {**bare["off"], "chat_template_kwargs": {"effort": "low"}}
    write_rows(tmp_path / "in.jsonl", [row(name, **body) for name, body in bare.items()])
    assert run(tmp_path, thinker, "--chat-template-kwargs", json.dumps(NOT_THINKING)) == 0
    found = {item["custom_id"]: item["response"]["body"] for item in read_rows(tmp_path / "out.jsonl")}
    assert message(found["on"]) == message(bodies["on"])
    assert message(found["off"]) == message(bodies["off"])
    assert message(found["thinks"])[0] is None


@pytest.mark.parametrize("text", ['{"enable_thinking"', "[1]", '{"enable_thinkin": true}', '{"tools": []}'])
def test_a_jobs_wrong_kwargs_are_refused_before_anything_is_begun(
    thinker: Thinker, tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(tmp_path / "in.jsonl", [row("a")])
    try:
        status = run(tmp_path, thinker, "--chat-template-kwargs", text)
    except SystemExit as error:  # argparse
        status = int(str(error.code))
    assert status == 2
    assert "chat" in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()


# -- the Python API and the command ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm(thinker: Thinker) -> Iterator[LLM]:
    with LLM(thinker.path, platform="cpu", dtype="float32", max_model_len=256, kv_cache_bytes=16 << 20) as llm:
        yield llm


def params(thinker: Thinker) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logit_bias=thinker.bias)


def test_llm_chat_answers_as_the_rows_do(llm: LLM, thinker: Thinker, bodies: dict[str, dict[str, Any]]) -> None:
    conversation = [{"role": "user", "content": QUESTION}]
    (result,) = llm.chat(conversation, params(thinker))
    assert (result.reasoning_content, result.text) == message(bodies["thinks"])
    assert result.token_ids == thinker.answer
    assert result.completions[0].num_reasoning_tokens == thinker.num_reasoning_tokens
    free = params(thinker).replace(logit_bias={})
    (result,) = llm.chat([conversation], free, chat_template_kwargs=NOT_THINKING)
    assert (result.reasoning_content, result.text) == message(bodies["off"])
    (result,) = llm.generate([llm.engine.processor(conversation).token_ids], params(thinker))
    assert (result.reasoning_content, result.text) == (None, thinker.text(thinker.answer)), "a raw prompt"
    with pytest.raises(RequestError, match=r"prompt 0: chat_template_kwargs.enable_thinkin: .* it reads effort"):
        llm.chat(conversation, free, chat_template_kwargs={"enable_thinkin": False})


def test_settings_of_llm_are_those_of_the_job(thinker: Thinker) -> None:
    with pytest.raises(ConfigError, match=r"chat_template_kwargs.tools"):
        LLM(thinker.path, platform="cpu", chat_template_kwargs={"tools": 1})
    with pytest.raises(ConfigError, match="chat_template_kwargs: 'x' is no object"):
        LLM(thinker.path, platform="cpu", chat_template_kwargs="x")
    with pytest.raises(ConfigError, match="reasoning_parser='qwen3' is not served: auto reads the tags"):
        LLM(thinker.path, platform="cpu", reasoning_parser="qwen3")


def test_generate_says_so_when_there_is_reasoning_alone(thinker: Thinker, capsys: pytest.CaptureFixture[str]) -> None:
    question = ["generate", QUESTION, "--model", str(thinker.path), "--max-tokens", "1", *SMALL]
    assert cli.main(question) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert thinker.text(thinker.answer[:1]) in printed.err
    assert "no answer: 1 tokens of reasoning alone (finish_reason length)" in printed.err
    assert cli.main([*question, "--reasoning-parser", "none"]) == 0
    assert capsys.readouterr().out == thinker.text(thinker.answer[:1]) + "\n"
    assert cli.main([*question, "--chat-template-kwargs", json.dumps(NOT_THINKING)]) == 0
    assert capsys.readouterr().out != ""
