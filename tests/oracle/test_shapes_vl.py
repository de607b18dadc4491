"""The embedded checkpoints against transformers' generate on freshly drawn pictures, token for token."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from npu_runner import LLM, SamplingParams
from npu_runner.assets import EMBEDDED
from npu_runner.assets.drawing import TEST_SEEDS, Example, draw_example
from tests.oracle import reference

NUM_PICTURES = 200
MAX_TOKENS = 64


def drawn() -> Iterator[Example]:
    """Examples that together hold NUM_PICTURES pictures."""
    count = 0
    for seed in TEST_SEEDS:
        if count >= NUM_PICTURES:
            return
        example = draw_example(seed)
        count += len(example.images)
        yield example


@pytest.mark.parametrize("name", EMBEDDED)
def test_every_token_equals_transformers_generate(name: str, platform_name: str) -> None:
    examples = list(drawn())
    with LLM(name, platform=platform_name, dtype="float32") as llm:
        prompts = [llm.engine.processor(example.conversation()) for example in examples]
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=MAX_TOKENS))
        end = llm.engine.model_config.eos_token_ids
    model = reference.load_model(EMBEDDED[name])
    right = 0
    for example, prompt, output in zip(examples, prompts, outputs, strict=True):
        inputs = reference.model_inputs(EMBEDDED[name], prompt.token_ids, example.images)
        sequence = model.generate(**inputs, max_new_tokens=MAX_TOKENS, do_sample=False)[0]
        assert output.token_ids == sequence[len(prompt.token_ids):].tolist(), example.question
        assert output.finish_reason == "stop"
        assert output.token_ids[-1] in end
        right += output.text == example.answer
    assert right >= 0.9 * len(examples), "the answers make sense, too"
