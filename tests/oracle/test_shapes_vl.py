"""The embedded checkpoints against transformers' generate on freshly drawn images, token for token."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from npu_runner import LLM, SamplingParams
from npu_runner.assets import EMBEDDED
from scripts.shapes.drawing import TEST_SEEDS, Example, draw_example
from tests.full_set import is_fast
from tests.oracle import reference

NUM_IMAGES, FEW_IMAGES = 200, 25
MAX_TOKENS = 64


@pytest.fixture(scope="module", autouse=True)
def two_threads() -> Iterator[None]:
    """Other tests compute with one (tests/conftest.py)."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def drawn(num_images: int) -> Iterator[Example]:
    """Examples that together hold so many images."""
    count = 0
    for seed in TEST_SEEDS:
        if count >= num_images:
            return
        example = draw_example(seed)
        count += len(example.images)
        yield example


@pytest.mark.parametrize("name", ["shapes-vl"])
def test_every_token_equals_transformers_generate(name: str, platform_name: str) -> None:
    assert_every_token_is_equal(name, platform_name)


@pytest.mark.full("the second embedded model; its layers stay with tiny models (test_hybrid_models)")
@pytest.mark.parametrize("name", ["shapes-hybrid"])
def test_every_token_of_the_hybrid_equals_transformers_generate(name: str, platform_name: str) -> None:
    assert_every_token_is_equal(name, platform_name)


def assert_every_token_is_equal(name: str, platform_name: str) -> None:
    assert_equals_generate(name, list(drawn(12 if is_fast else FEW_IMAGES)), platform_name)


@pytest.mark.full("200 images, through transformers one by one; 12 of them stay")
@pytest.mark.parametrize("name", ["shapes-vl", "shapes-hybrid"])
def test_every_token_of_many_images_equals_transformers_generate(name: str, platform_name: str) -> None:
    assert_equals_generate(name, list(drawn(NUM_IMAGES)), platform_name)


def assert_equals_generate(name: str, examples: list[Example], platform_name: str) -> None:
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
