"""An answer ends with the tokenizer's end token, too: a fine-tune's config.json may still name the base model's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from npu_runner import LLM, SamplingParams
from tests.oracle import reference
from tests.oracle.running import SMALL

TEXT = "which of the two pictures shows a circle?"
COUNT = 24


def settle(path: Path, *, listed: int, tokenizer_says: Any, file: str = "tokenizer_config.json") -> None:
    """Both configs name `listed`, the tokenizer's `file` what it says."""
    for name in ("config.json", "generation_config.json"):
        values = json.loads((path / name).read_text())
        (path / name).write_text(json.dumps({**values, "eos_token_id": listed}))
    for name in {"tokenizer_config.json", file}:
        values = json.loads((path / name).read_text()) if (path / name).exists() else {}
        values.pop("eos_token", None)
        if name == file and tokenizer_says is not None:
            values["eos_token"] = tokenizer_says
        (path / name).write_text(json.dumps(values))


def greedy(**changes: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=COUNT, **changes)


@pytest.fixture
def spoken(checkpoint: Any, tmp_path: Path) -> tuple[Path, list[int], int]:
    """A copy of a checkpoint, what it says by transformers, and the place of the first token it had not said before,
    after a few others; that token becomes its end."""
    path = shutil.copytree(checkpoint("qwen3"), tmp_path / "model")
    with LLM(path, platform="cpu", **SMALL) as llm:
        prompt = llm.engine.processor.from_text(TEXT)
    tokens, _ = reference.generate(path, prompt.token_ids, max_new_tokens=COUNT)
    place = next(i for i in range(3, COUNT) if tokens[i] not in tokens[:i])
    return path, tokens, place


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("as_object", [False, True], ids=["text", "object"])
def test_the_tokenizers_end_token_ends_what_the_configs_would_let_run_on(
    spoken: tuple[Path, list[int], int], file: str, as_object: bool, platform_name: str,
) -> None:  # fmt: skip
    path, tokens, place = spoken
    end, other = tokens[place], next(i for i in range(320) if i not in tokens)
    from transformers import AutoTokenizer

    name = AutoTokenizer.from_pretrained(path).convert_ids_to_tokens(end)
    settle(path, listed=other, tokenizer_says={"content": name, "special": True} if as_object else name, file=file)
    with LLM(path, platform=platform_name, **SMALL) as llm:
        (ended,) = llm.generate([TEXT], greedy())
        (ignoring,) = llm.generate([TEXT], greedy(ignore_eos=True))
        (later,) = llm.generate([TEXT], greedy(min_tokens=place + 2))
    assert (ended.token_ids, ended.finish_reason) == (tokens[:place + 1], "stop")
    assert (ignoring.token_ids, ignoring.finish_reason) == (tokens, "length")
    assert later.token_ids[:place] == tokens[:place]
    assert later.token_ids[place] != end, "min_tokens bans it, too"


def test_the_end_tokens_of_the_configs_end_as_before(spoken: tuple[Path, list[int], int], platform_name: str) -> None:
    path, tokens, place = spoken
    settle(path, listed=tokens[place], tokenizer_says="<|a token that this tokenizer lacks|>")
    with LLM(path, platform=platform_name, **SMALL) as llm:
        (ended,) = llm.generate([TEXT], greedy())
    assert (ended.token_ids, ended.finish_reason) == (tokens[:place + 1], "stop")


def test_an_end_token_beyond_the_models_vocabulary_is_no_ban(checkpoint: Any, tmp_path: Path,
                                                             platform_name: str) -> None:
    path = shutil.copytree(checkpoint("qwen3"), tmp_path / "model")
    settle(path, listed=5000, tokenizer_says=None)
    with LLM(path, platform=platform_name, **SMALL) as llm:
        (answer,) = llm.generate([TEXT], greedy(min_tokens=3))
    assert answer.finish_reason == "length"
