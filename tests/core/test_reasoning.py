"""Where an answer is split: at token ids, whatever the characters say, and nothing of the text is lost or moved."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from npu_runner.engine.detokenizer import IncrementalDetokenizer
from npu_runner.prompts.text.reasoning import SplitAnswer, find_reasoning_tokens, split_answer
from npu_runner.request.prompt_inputs import ReasoningTokens, Thinking
from tests.prompts.preprocessing_checkpoints import llama_tokenizer, qwen_tokenizer


def with_tags(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_tokens(["<think>", "</think>"])
    return tokenizer


TOKENIZERS = {"byte-level": with_tags(qwen_tokenizer()), "sentencepiece": with_tags(llama_tokenizer())}


def tags_of(tokenizer: Tokenizer) -> ReasoningTokens:
    tokens = find_reasoning_tokens(tokenizer)
    assert tokens is not None
    return tokens


def split(tokenizer: Tokenizer, ids: list[int], thinking: Thinking, num_chars: int | None = None) -> SplitAnswer:
    text = tokenizer.decode(ids)[:num_chars]
    return split_answer(text, ids, thinking=thinking, tokens=tags_of(tokenizer), tokenizer=tokenizer)


def test_special_tokens_that_are_text_move_no_cut() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    ids = tokenizer.encode("<|im_end|>why<|im_end|></think>so<|im_end|>", add_special_tokens=False).ids
    text = tokenizer.decode(ids, skip_special_tokens=False)
    answer = split_answer(text, ids, thinking="open", tokens=tags_of(tokenizer), tokenizer=tokenizer,
                          skip_special_tokens=False)
    assert (answer.reasoning, answer.content) == ("<|im_end|>why<|im_end|>", "so<|im_end|>")


CASES: list[tuple[Thinking, str, SplitAnswer]] = [
    ("open", "why</think>so", SplitAnswer("why", "so", 1)),
    ("open", "<think>why</think>so", SplitAnswer("why", "so", 1)),
    ("open", "why", SplitAnswer("why", "", 1)),
    ("open", "", SplitAnswer("", "", 0)),
    ("open", "</think>so", SplitAnswer("", "so", 0)),
    ("open", "why</think>", SplitAnswer("why", "", 1)),
    ("open", "\n\nwhy\n</think>\n\nso", SplitAnswer("\n\nwhy\n", "\n\nso", 5)),
    ("open", "a</think>b</think>c", SplitAnswer("a", "b</think>c", 1)),
    ("open", "a<think>b</think>c", SplitAnswer("a<think>b", "c", 3)),
    ("unsaid", "<think>\na\n</think>\n\nb", SplitAnswer("\na\n", "\n\nb", 3)),
    ("unsaid", "\n<think>a</think>b", SplitAnswer("a", "b", 1)),
    ("unsaid", "<think>a", SplitAnswer("a", "", 1)),
    ("unsaid", "a</think>b", SplitAnswer("a", "b", 1)),
    ("unsaid", "so", SplitAnswer(None, "so", 0)),
    ("unsaid", "", SplitAnswer(None, "", 0)),
    ("unsaid", "so <think>a", SplitAnswer(None, "so <think>a", 0)),
    ("closed", "so", SplitAnswer(None, "so", 0)),
    ("closed", "a</think>b", SplitAnswer(None, "a</think>b", 0)),
    ("closed", "<think>a</think>b", SplitAnswer("a", "b", 1)),
]  # fmt: skip


@pytest.mark.parametrize(("thinking", "answer", "expected"), CASES)
def test_what_is_reasoning_and_what_is_not(thinking: Thinking, answer: str, expected: SplitAnswer) -> None:
    tokenizer = TOKENIZERS["byte-level"]
    ids = tokenizer.encode(answer, add_special_tokens=False).ids
    found = split(tokenizer, ids, thinking)
    assert (found.reasoning, found.content) == (expected.reasoning, expected.content)
    tags = tags_of(tokenizer)
    if expected.reasoning is not None:
        inner = len(tokenizer.encode(expected.reasoning, add_special_tokens=False).ids)
        assert found.num_reasoning_tokens == inner
        assert inner <= len(ids) - (tags.end_id in ids)


def test_a_tag_in_ordinary_characters_ends_nothing() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    quoted = [tokenizer.token_to_id(char) for char in "</think>"]
    found = split(tokenizer, [*quoted, tags_of(tokenizer).end_id, *quoted], "open")
    assert found == SplitAnswer("</think>", "</think>", len(quoted))


def test_tags_that_are_special_tokens_are_in_no_text_and_split_all_the_same() -> None:
    tokenizer = qwen_tokenizer()
    tokenizer.add_special_tokens(["[THINK]", "[/THINK]"])
    tokens = ReasoningTokens(start="[THINK]", end="[/THINK]", start_id=tokenizer.token_to_id("[THINK]"),
                             end_id=tokenizer.token_to_id("[/THINK]"))  # fmt: skip
    ids = tokenizer.encode("[THINK]why[/THINK]so<|im_end|>", add_special_tokens=False).ids
    text = tokenizer.decode(ids)
    assert text == "whyso"
    found = split_answer(text, ids, thinking="unsaid", tokens=tokens, tokenizer=tokenizer)
    assert (found.reasoning, found.content) == ("why", "so")


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(data=st.data())
def test_the_parts_and_the_tag_are_the_whole_text_wherever_it_was_cut(kind: str, data: st.DataObject) -> None:
    """Any tokens at all: halves of characters, byte tokens, ids without a token."""
    tokenizer = TOKENIZERS[kind]
    tags = tags_of(tokenizer)
    tokens = st.lists(st.integers(0, tokenizer.get_vocab_size() + 3).filter(lambda i: i != tags.end_id), max_size=12)
    thought = data.draw(tokens)
    ids = [*thought, tags.end_id, *data.draw(tokens)]
    whole = tokenizer.decode(ids)
    found = split(tokenizer, ids, "open")
    assert found.reasoning is not None
    head = whole[: len(whole) - len(found.reasoning + "</think>" + found.content)]
    assert head + found.reasoning + "</think>" + found.content == whole
    assert head.replace("<think>", "").strip() == ""
    assert found.num_reasoning_tokens in range(len(thought) + 1)
    if tags.start_id not in thought:
        assert (head, found.num_reasoning_tokens) == ("", len(thought))
        assert found.reasoning == tokenizer.decode(thought)
        num_chars = data.draw(st.integers(0, len(whole)))
        cut = split(tokenizer, ids, "open", num_chars)
        begins = len(found.reasoning + "</think>")
        assert (cut.reasoning, cut.content) == (found.reasoning[:num_chars], whole[begins:num_chars])


def test_stop_strings_are_looked_for_in_the_reasoning_and_the_tags_too() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    ids = tokenizer.encode("one two</think>three two", add_special_tokens=False).ids
    for stop, reasoning, content in (
        ("two", "one ", ""), ("</think>", "one two", ""), ("three", "one two", ""), ("ee two", "one two", "thr"),
    ):  # fmt: skip
        detokenizer, seen = IncrementalDetokenizer(tokenizer, stop=[stop]), []
        for token in ids:
            seen.append(token)
            if detokenizer.append([token]) is not None:
                break
        found = split_answer(
            detokenizer.finish(), seen, thinking="open", tokens=tags_of(tokenizer), tokenizer=tokenizer
        )
        assert (found.reasoning, found.content) == (reasoning, content)
