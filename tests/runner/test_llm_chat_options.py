"""What LLM.chat takes beside conversations makes the prompts that transformers makes, and is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from npu_runner import LLM, SamplingParams
from npu_runner.errors import RequestError
from tests.oracle.running import SMALL

TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
    "{% if reasoning_effort %}{{ reasoning_effort }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "draw", "description": "Draw a shape.", "parameters": {}}}]
ASKED = [{"role": "user", "content": "what colour?"}]
BEGUN = [*ASKED, {"role": "assistant", "content": "the picture is"}]
LONG = [{"role": "user", "content": "colour " * 700}]
ONE = SamplingParams(temperature=0, max_tokens=1)


@pytest.fixture(scope="module")
def path(checkpoint: Callable[..., Path]) -> Path:
    path = checkpoint("qwen3", seed=5)
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    return path


@pytest.fixture(scope="module")
def llm(path: Path, platform_name: str) -> Iterator[LLM]:
    with LLM(path, platform=platform_name, preprocessing_workers=1, **{**SMALL, "max_model_len": 2048}) as llm:
        yield llm


@pytest.mark.parametrize(("messages", "options", "theirs"), [
    (ASKED, {}, {"add_generation_prompt": True}),
    (ASKED, {"add_generation_prompt": False}, {"add_generation_prompt": False}),
    (BEGUN, {"continue_final_message": True}, {"continue_final_message": True}),
    (ASKED, {"tools": TOOLS}, {"tools": TOOLS, "add_generation_prompt": True}),
    (ASKED, {"reasoning_effort": "low"}, {"reasoning_effort": "low", "add_generation_prompt": True}),
    (LONG, {"tools": TOOLS}, {"tools": TOOLS, "add_generation_prompt": True}),
], ids=["default", "no generation prompt", "continued", "tools", "effort", "in a worker"])  # fmt: skip
def test_the_prompt_is_transformers(llm: LLM, path: Path, messages: Any, options: Any, theirs: Any) -> None:
    from transformers import AutoTokenizer

    expected = AutoTokenizer.from_pretrained(path).apply_chat_template(messages, tokenize=True, return_dict=False,
                                                                       **theirs)
    (plain,) = llm.generate([expected], ONE.replace(logprobs=3))
    (chatted,) = llm.chat(messages, ONE.replace(logprobs=3), **options)
    assert chatted.num_prompt_tokens == len(expected)
    assert chatted.token_ids == plain.token_ids
    assert chatted.logprobs is not None
    assert plain.logprobs is not None
    assert [t.token_id for t in chatted.logprobs[0].top] == [t.token_id for t in plain.logprobs[0].top]


@pytest.mark.parametrize(("messages", "options", "param"), [
    (ASKED, {"continue_final_message": True}, "continue_final_message"),
    (BEGUN, {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    (ASKED, {"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    (ASKED, {"tools": "draw"}, "tools"),
    (ASKED, {"reasoning_effort": "hard"}, "reasoning_effort"),
    (ASKED, {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}, "reasoning_effort"),
])  # fmt: skip
def test_what_cannot_be_served_is_named_before_any_work(llm: LLM, messages: Any, options: Any, param: str) -> None:
    steps = llm.stats().num_prefill_steps
    with pytest.raises(RequestError) as refused:
        llm.chat([ASKED, messages], ONE, **options)
    assert refused.value.param == param
    assert llm.stats().num_prefill_steps == steps
