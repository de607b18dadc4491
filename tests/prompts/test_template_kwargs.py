"""chat_template_kwargs: the prompts are transformers', a wrong one is named, and where thinking stands is found."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from npu_runner.errors import ConfigError, RequestError
from npu_runner.prompts.processor import ChatProcessor, ProcessorSettings
from npu_runner.prompts.text.reasoning import find_reasoning_tokens, thinking_after
from npu_runner.request.limits import LIMITS
from tests.full_set import examples
from tests.oracle.thinking_checkpoints import LEAVES_IT, OPENS, make_thinking
from tests.prompts.deep_values import nested

ASKS = [{"role": "user", "content": "which of the two?"}]
REPLAYED = [
    *ASKS, {"role": "assistant", "content": "<think>\nthe picture\n</think>\n\na circle"},
    {"role": "user", "content": "what colour?"},
]  # fmt: skip
KWARGS: list[dict[str, Any]] = [
    {}, {"enable_thinking": False}, {"enable_thinking": True}, {"enable_thinking": None}, {"effort": "low"},
    {"notes": {"é": [1, 2.5, None, "<b>"]}, "enable_thinking": False},
]  # fmt: skip


@pytest.fixture(scope="session")
def folders(checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("thinking")
    return {name: make_thinking(checkpoint, folder / name, template)
            for name, template in (("opens", OPENS), ("leaves it", LEAVES_IT))}  # fmt: skip


@pytest.fixture(scope="session")
def opens(folders: dict[str, Path]) -> ChatProcessor:
    return ChatProcessor(str(folders["opens"]))


@pytest.mark.parametrize("conversation", [ASKS, REPLAYED])
@pytest.mark.parametrize("name", ["opens", "leaves it"])
def test_prompts_with_kwargs_are_transformers(folders: dict[str, Path], name: str, conversation: Any) -> None:
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(folders[name]), ChatProcessor(str(folders[name]))
    for kwargs in KWARGS:
        expected = theirs.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False, **kwargs)
        assert ours(conversation, kwargs).token_ids == expected
        as_a_setting = ChatProcessor(str(folders[name]), ProcessorSettings(chat_template_kwargs=kwargs))
        assert as_a_setting(conversation).token_ids == expected


@pytest.mark.parametrize("conversation", [ASKS, REPLAYED])
@pytest.mark.parametrize(("name", "kwargs", "thinking"), [
    ("opens", {}, "open"), ("opens", {"enable_thinking": False}, "closed"), ("leaves it", {}, "unsaid"),
    ("leaves it", {"enable_thinking": False}, "closed"), ("leaves it", {"enable_thinking": True}, "unsaid"),
])  # fmt: skip
def test_where_the_prompt_leaves_thinking_is_found_at_its_end_alone(
    folders: dict[str, Path], conversation: Any, name: str, kwargs: dict[str, Any], thinking: str
) -> None:
    assert ChatProcessor(str(folders[name]))(conversation, kwargs).thinking == thinking
    unparsed = ChatProcessor(str(folders[name]), ProcessorSettings(reasoning_parser="none"))
    assert unparsed(conversation, kwargs).thinking is None


NO_TAGS = ("{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
           "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
OPENING_TAG = NO_TAGS.replace("assistant\n", "assistant\n<think>\n")


@pytest.mark.parametrize("tags", [("<think>", "</think>"), ("[THINK]", "[/THINK]")])
@pytest.mark.parametrize(("template", "num_written"), [(NO_TAGS, 0), (OPENING_TAG, 1), (OPENS, 1)])
@pytest.mark.parametrize("parser", ["auto", "none"])
def test_tags_that_are_typed_are_characters_but_the_assistants_own(
    checkpoint: Any, tmp_path: Path, tags: tuple[str, str], template: str, num_written: int, parser: str
) -> None:
    """Whatever the template writes of them itself: a token in a user's message would be the model's own thought."""
    folder = make_thinking(checkpoint, tmp_path / "model", template, tags)
    ours = ChatProcessor(str(folder), ProcessorSettings(reasoning_parser=parser))
    ids = [ours.tokenizer.token_to_id(tag) for tag in tags]
    for role in ("user", "system"):
        typed = f"why {tags[1]} and {tags[0]}\n"
        prompt = ours([{"role": role, "content": typed}, *ASKS]).token_ids
        assert sum(token in ids for token in prompt) == num_written
        assert typed in ours.decode(prompt)
    thought = {"role": "assistant", "content": f"{tags[0]}\nit is round\n{tags[1]}\n\na circle"}
    prompt = ours([*ASKS, thought, *ASKS]).token_ids
    assert sum(token in ids for token in prompt) == num_written + 2


def test_a_tag_that_a_user_typed_opens_nothing(folders: dict[str, Path]) -> None:
    for name, expected in (("opens", "open"), ("leaves it", "unsaid")):
        prompt = ChatProcessor(str(folders[name]))([{"role": "user", "content": "why </think> and <think>\n"}])
        assert prompt.thinking == expected


def test_raw_prompts_and_models_that_do_not_think_are_not_split(opens: ChatProcessor, qwen: ChatProcessor,
                                                                llama: ChatProcessor) -> None:  # fmt: skip
    assert opens.from_text("<think>\n").thinking is None
    assert qwen([{"role": "user", "content": "x"}]).thinking == "unsaid"
    assert (llama.reasoning_tokens, llama([{"role": "user", "content": "x"}]).thinking) == (None, None)
    assert not {"reasoning_tokens", "chat_template_kwargs"} & llama.identity().keys(), "outputs begun earlier go on"


def test_the_settings_count_where_the_request_says_nothing(folders: dict[str, Path], opens: ChatProcessor) -> None:
    kwargs = {"enable_thinking": False, "effort": "low"}
    ours = ChatProcessor(str(folders["opens"]), ProcessorSettings(chat_template_kwargs=kwargs))
    assert ours(ASKS).thinking == "closed"
    assert ours(ASKS, {"effort": "high"}).thinking == "closed"
    assert ours(ASKS, {"enable_thinking": True}).token_ids == opens(ASKS).token_ids
    assert pickle.loads(pickle.dumps(ours))(ASKS).token_ids == ours(ASKS).token_ids
    assert ours.identity()["chat_template_kwargs"] == {"enable_thinking": False, "effort": "low"}
    assert {**ours.identity(), "chat_template_kwargs": None} == {**opens.identity(), "chat_template_kwargs": None}


def looped() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["notes"] = value
    return value


WRONG: list[tuple[Any, str, str]] = [
    ("enable_thinking", "invalid_type", "an object is needed, not str"),
    ([1], "invalid_type", "an object is needed, not list"),
    ({"enable_thinkin": False}, "unknown_parameter", "reads no such name; it reads effort, enable_thinking, notes"),
    ({"messages": []}, "unsupported_parameter", "chat_template_kwargs.messages: is not for a request to set"),
    ({"tools": []}, "unsupported_parameter", "chat_template_kwargs.tools: "),
    ({"continue_final_message": True}, "unsupported_parameter", "chat_template_kwargs.continue_final_message: "),
    ({"add_generation_prompt": False}, "unsupported_parameter", "chat_template_kwargs.add_generation_prompt: "),
    ({"eos_token": "x"}, "unsupported_parameter", "chat_template_kwargs.eos_token: "),
    ({"raise_exception": 1}, "unknown_parameter", "chat_template_kwargs.raise_exception: "),
    ({"self": 1}, "unknown_parameter", "chat_template_kwargs.self: "),
    ({"m": 1}, "unknown_parameter", "chat_template_kwargs.m: "),
    ({"notes": nested(LIMITS.max_template_kwargs_nesting)}, "nested_too_deep", "more than 8 levels deep"),
    ({"notes": nested(100_000)}, "nested_too_deep", "more than 8 levels deep"),
    (looped(), "nested_too_deep", "more than 8 levels deep"),
    ({str(n): n for n in range(65)}, "limit_exceeded", "65 entries, at most 64 are allowed"),
    ({"notes": "x" * LIMITS.max_template_kwargs_chars}, "limit_exceeded", "at most 65536 are allowed"),
    ({"notes": list(range(100_000))}, "limit_exceeded", "at most 65536 are allowed"),
    ({"notes": {1: 2}}, "invalid_type", "a key is not a string"),
    ({"notes": object()}, "invalid_value", "JSON cannot say it"),
    ({"notes": float("nan")}, "invalid_value", "JSON cannot say it"),
    ({"notes": 1 << 20_000}, "invalid_value", "JSON cannot say it"),
    ({"notes": "\ud83d"}, "invalid_value", "JSON cannot say it"),
    ({"effort": "huge"}, "chat_template_error", "refuses these messages with these chat_template_kwargs: low or high"),
    ({"effort": {}}, "chat_template_error", "low or high"),
    ({"notes": "a<|im_end|>"}, "special_token_in_text", "a control token of the model"),
    ({"notes": [{"<think>": 1}]}, "special_token_in_text", "a control token of the model"),
]  # fmt: skip


@pytest.mark.parametrize(("kwargs", "code", "words"), WRONG, ids=range(len(WRONG)))
def test_a_wrong_one_is_named(opens: ChatProcessor, kwargs: Any, code: str, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        opens(ASKS, kwargs)
    assert (caught.value.code, words in caught.value.message) == (code, True), caught.value.message
    assert len(caught.value.message) < 400


@pytest.mark.parametrize("kwargs", [{"enable_thinkin": False}, {"tools": []}, {"notes": nested(9)}])
def test_a_wrong_setting_is_named_before_anything_is_prepared(folders: dict[str, Path], kwargs: Any) -> None:
    with pytest.raises(ConfigError, match="chat_template_kwargs"):
        ChatProcessor(str(folders["opens"]), ProcessorSettings(chat_template_kwargs=kwargs))


def test_without_a_template_there_is_nothing_to_set(folders: dict[str, Path], tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((folders["opens"] / name).read_bytes())
    with pytest.raises(ConfigError, match="no chat template"):
        ChatProcessor(str(tmp_path), ProcessorSettings(chat_template_kwargs={"enable_thinking": False}))


def test_a_name_counts_as_read_wherever_the_template_looks_at_it(folders: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (path / name).write_bytes((folders["opens"] / name).read_bytes())
    template = (
        "{% macro turn(m, style='plain') %}{{ m.content }}{% if loud %}!{% endif %}{% endmacro %}"
        "{% set budget = budget | default(3) %}{% for i in range(budget) %}.{% endfor %}"
        "{% for m in messages if not hidden %}{{ turn(m) }}{% endfor %}{% set later = 1 %}{{ later }}{{ strftime_now }}"
    )
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    processor = ChatProcessor(str(path))
    decoded = processor.tokenizer.decode(processor(ASKS, {"budget": 1, "loud": True, "hidden": False}).token_ids)
    assert decoded == ".which of the two?!1" or decoded.startswith(".which of the two?!1<")
    for name in ("style", "i", "m", "later", "turn", "range", "strftime_now", "loop"):
        with pytest.raises(RequestError, match="it reads budget, hidden, loud"):
            processor(ASKS, {name: 1})


def test_a_prompt_that_kwargs_make_too_long_is_refused_unseen(folders: dict[str, Path]) -> None:
    processor = ChatProcessor(str(folders["opens"]), ProcessorSettings(max_model_len=64))
    with pytest.raises(RequestError) as caught:
        processor(ASKS, {"notes": "x" * 60_000})
    assert caught.value.code == "prompt_too_long"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3), max_leaves=20,
)
NAMES = st.sampled_from(["enable_thinking", "effort", "notes"])


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kwargs=st.one_of(JSON, st.dictionaries(NAMES, JSON), st.dictionaries(NAMES | st.text(max_size=8), JSON)))
def test_any_json_is_a_prompt_or_a_request_error(kwargs: Any, opens: ChatProcessor) -> None:
    try:
        prompt = opens(ASKS, kwargs)
    except RequestError as error:
        named = error.code and error.param
    else:
        named = prompt.thinking
    assert named


@pytest.mark.parametrize("tags", [("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>")])
def test_the_tags_are_tokens_or_nothing(qwen: ChatProcessor, tags: tuple[str, str]) -> None:
    from tokenizers import AddedToken, Tokenizer, models

    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, " ": 1}, merges=[]))
    assert find_reasoning_tokens(tokenizer) is None
    tokenizer.add_tokens([tags[0]])
    assert find_reasoning_tokens(tokenizer) is None, "both, or there is nothing to split at"
    tokenizer.add_special_tokens([AddedToken(tags[1], special=True)])
    found = find_reasoning_tokens(tokenizer)
    assert found is not None
    assert (found.start, found.end, found.start_id, found.end_id) == (*tags, 2, 3)
    assert thinking_after([3, 2, 1, 1], found, tokenizer) == "open"
    assert thinking_after([2, 3], found, tokenizer) == "closed"
    assert thinking_after([2, 0, 1], found, tokenizer) == "unsaid"
    assert thinking_after([], found, tokenizer) == "unsaid"
