"""generation_config.json: answers that nobody set anything for are transformers' own, and what is wrong is named."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from npu_runner import LLM, SamplingParams
from npu_runner.batch.job.row_server import CheckpointSide
from npu_runner.batch.rows.openai_format import parse_row
from npu_runner.config import RunnerConfig
from npu_runner.errors import ModelError
from tests.batch.scripted import row
from tests.oracle import reference
from tests.oracle.running import SMALL

TEXTS = ["which", "which of the two pictures shows a circle?", "a b c d e f g", "colour"]


def with_generation(checkpoint: Any, folder: Path, **generation: Any) -> Path:
    """A tiny checkpoint whose generation_config.json says this and nothing else."""
    path = shutil.copytree(checkpoint("qwen3"), folder / "model")
    (path / "generation_config.json").write_text(json.dumps(generation))
    return path


@pytest.mark.parametrize("wanted", [{"repetition_penalty": 1.3, "max_new_tokens": 9}, {"max_new_tokens": 5}], ids=str)
def test_greedy_defaults_give_what_transformers_generate_gives(wanted: dict[str, Any], checkpoint: Any, tmp_path: Path,
                                                               platform_name: str) -> None:
    path = with_generation(checkpoint, tmp_path, do_sample=False, **wanted)
    model = reference.load_model(path)
    with LLM(path, platform=platform_name, **SMALL) as llm:
        prompts = [llm.engine.processor.from_text(text) for text in TEXTS]
        ours = [output.token_ids for output in llm.generate(prompts)]
        plain = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=9))
        unsaid = SamplingParams(temperature=0, ignore_eos=True)
        others = [*llm.generate(prompts[:1], unsaid), *llm.chat([{"role": "user", "content": "which"}], unsaid)]
        assert [len(output.token_ids) for output in others] == [wanted["max_new_tokens"]] * 2
        assert llm.get_default_sampling_params() == SamplingParams(
            temperature=0, max_tokens=wanted["max_new_tokens"],
            repetition_penalty=wanted.get("repetition_penalty", 1.0))  # fmt: skip
    theirs = [model.generate(**reference.model_inputs(path, prompt.token_ids))[0, len(prompt.token_ids):].tolist()
              for prompt in prompts]
    assert ours == theirs
    assert any(output.token_ids != tokens for output, tokens in zip(plain, ours, strict=True)), "the file had no effect"


def test_a_row_comes_before_the_checkpoint_and_that_before_the_defaults(checkpoint: Any, tmp_path: Path) -> None:
    path = with_generation(checkpoint, tmp_path, do_sample=False, repetition_penalty=1.3, max_new_tokens=9, top_p=0.5,
                           temperature=0.6, max_length=20)
    defaults = CheckpointSide(RunnerConfig(model=str(path), platform="cpu")).generation_defaults

    def served(**body: Any) -> SamplingParams:
        return parse_row(row("a", **body)).to_params(defaults, 1)

    asked = {"repetition_penalty": 1.3, "top_p": 0.5, "seed": 1}
    assert served() == SamplingParams(temperature=0, max_tokens=9, **asked)
    assert served(temperature=0.7, max_tokens=30) == SamplingParams(temperature=0.7, max_tokens=30, **asked)
    assert served(repetition_penalty=1.0).repetition_penalty == 1.0
    assert served(min_tokens=12) == SamplingParams(temperature=0, min_tokens=12, max_tokens=12, **asked)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("temperature", "hot", "temperature: 'hot' is not a finite number"),
        ("top_p", 0, "top_p: must be greater than 0"),
        ("top_k", 2.5, "top_k: 2.5 is not an integer"),
        ("repetition_penalty", [1], "repetition_penalty: [1] is not a finite number"),
        ("max_new_tokens", 0, "max_new_tokens: 0 is outside 1 to unlimited"),
        ("do_sample", "no", "do_sample 'no' is neither true nor false"),
        ("eos_token_id", ["<|im_end|>"], "eos_token_id ['<|im_end|>'] is no token id and no list of them"),
    ],
)
def test_a_value_that_no_request_could_be_served_with_is_named_at_load(field: str, value: Any, words: str,
                                                                       checkpoint: Any, tmp_path: Path) -> None:
    path = with_generation(checkpoint, tmp_path, **{field: value})
    with pytest.raises(ModelError) as caught:
        CheckpointSide(RunnerConfig(model=str(path), platform="cpu"))
    assert f"{path / 'generation_config.json'}: {words}" in str(caught.value)


def test_what_is_asked_for_and_not_done_is_said_once(checkpoint: Any, tmp_path: Path, caplog: Any) -> None:
    asked = {"num_beams": 4, "no_repeat_ngram_size": 3, "suppress_tokens": [5]}
    nothing = {"num_beam_groups": 1, "typical_p": 1.0, "begin_suppress_tokens": [], "guidance_scale": None,
               "transformers_version": "5.0", "pad_token_id": 3, "max_length": 20, "use_cache": True}
    path = with_generation(checkpoint, tmp_path, **asked, **nothing)
    with caplog.at_level(logging.WARNING), LLM(path, platform="cpu", **SMALL):
        pass
    (said,) = [record.getMessage() for record in caplog.records if "generation_config.json" in record.getMessage()]
    assert said.endswith("{'num_beams': 4, 'no_repeat_ngram_size': 3, 'suppress_tokens': [5]}")
