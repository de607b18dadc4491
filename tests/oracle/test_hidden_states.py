"""Hidden states of layers are transformers', of every token that was computed, however it was computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from npu_runner import LLM, SamplingParams
from npu_runner.errors import ConfigError, RequestError
from npu_runner.request.limits import LIMITS
from npu_runner.request.outputs import RequestOutput
from tests.families import FAMILIES, sees_images
from tests.faults.lines import Injected, raising
from tests.oracle import reference
from tests.oracle.foreign_checkpoints import make_foreign_checkpoint
from tests.oracle.image_prompts import LAYOUTS, make_prompts
from tests.oracle.returned_states import LAYERS, assert_states, expected
from tests.oracle.running import SMALL, need_devices, random_prompts, runner_of

Make = Callable[..., Path]
LENGTHS = (5, 1, 90, 33)
ASKED = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, return_hidden_states=True)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return random_prompts(LENGTHS, seed=5)


@pytest.fixture(scope="module")
def path(checkpoint: Make) -> Path:
    return checkpoint("qwen3")


@pytest.fixture(scope="module")
def llm(path: Path, platform_name: str) -> Iterator[LLM]:
    """Prompts are cut into chunks of 48 tokens."""
    with LLM(path, platform=platform_name, hidden_state_layers=LAYERS, max_num_batched_tokens=48, **SMALL) as llm:
        yield llm


def test_prompts_cut_and_answers(llm: LLM, path: Path, prompts: list[list[int]]) -> None:
    """Beside requests that want none, whose answers are the same; and once more, with all of it cached."""
    for _ in ("cold", "warm"):
        doubled = [prompt for prompt in prompts for _ in range(2)]
        results = llm.generate(doubled, [ASKED, ASKED.replace(return_hidden_states=False)] * len(prompts))
        for prompt, result, beside in zip(prompts, results[::2], results[1::2], strict=True):
            assert_states(path, prompt, result)
            assert result.num_cached_tokens == 0
            assert beside.hidden_states is None
            assert beside.token_ids == result.token_ids
    assert results[5].num_cached_tokens > 0
    others = [[7, *prompt] for prompt in prompts]
    alone = llm.generate(others, ASKED.replace(return_hidden_states=False))
    for prompt, result, beside in zip(others, llm.generate(others, ASKED), alone, strict=True):
        assert_states(path, prompt, result)
        assert beside.token_ids == result.token_ids


def test_an_end_in_the_middle_of_steps_under_way(path: Path, prompts: list[list[int]], platform_name: str) -> None:
    """The step behind an end is under way when the end arrives: its states count for nothing. Graphs of padded batches
    return what eager steps do."""
    settings: dict[str, Any] = {**SMALL, "max_num_seqs": 3}
    with LLM(path, platform=platform_name, hidden_state_layers=LAYERS, async_scheduling=True, **settings) as llm:
        plain = llm.generate(prompts, ASKED)
        stops = [ASKED.replace(max_tokens=9, stop_token_ids=[result.token_ids[2]]) for result in plain]
        for prompt, result in zip(prompts, llm.generate(prompts, stops), strict=True):
            assert result.finish_reason == "stop"
            assert_states(path, prompt, result)


def test_preempted_sequences_return_each_token_once(path: Path, prompts: list[list[int]], platform_name: str) -> None:
    """A cache of 12 blocks of 16 tokens for prompts of 90 and answers of 40."""
    settings: dict[str, Any] = {**SMALL, "max_model_len": 176, "block_size": 16, "max_num_batched_tokens": 32}
    per_block = 3 * 2 * 16 * 2 * 16 * 4
    with LLM(path, platform=platform_name, kv_cache_bytes=13 * per_block, hidden_state_layers=(2,), **settings) as llm:
        wanted = [prompts[2], prompts[3], prompts[2][:64], prompts[2][:50]]
        results = llm.generate(wanted, ASKED.replace(max_tokens=40))
        assert llm.stats().num_preemptions > 0
    for prompt, result in zip(wanted, results, strict=True):
        assert len(result.token_ids) == 40
        assert_states(path, prompt, result, (2,))


@pytest.mark.ranks
def test_two_ranks_return_the_same(path: Path, prompts: list[list[int]], platform_name: str) -> None:
    need_devices(platform_name)
    with LLM(path, platform=platform_name, hidden_state_layers=LAYERS, tensor_parallel_size=2,
             max_num_batched_tokens=48, **SMALL) as llm:
        for prompt, result in zip(prompts, llm.generate(prompts, ASKED), strict=True):
            assert_states(path, prompt, result)


@pytest.mark.parametrize("model_type", ["qwen3_vl", "qwen3_5"])
def test_images_and_layers_with_state(model_type: str, checkpoint: Make, platform_name: str) -> None:
    """Layer 1 of Qwen3-VL is followed by DeepStack's rows, which transformers adds behind it. Chunks end inside
    images."""
    path, image = checkpoint(model_type), reference.random_image(np.random.default_rng(1), 200, 160)
    layers = (0, 1, 2, -1)
    with LLM(path, platform=platform_name, hidden_state_layers=layers, max_num_batched_tokens=64, **SMALL) as llm:
        parts = [{"type": "image", "image": image}, {"type": "text", "text": "which?" * 5}]
        prompt = llm.processor([{"role": "user", "content": parts}])
        assert len(prompt.token_ids) > 64
        (result,) = llm.generate([prompt], ASKED)
    assert_states(path, prompt.token_ids, result, layers, [image])


@pytest.mark.full("all families; dense, with images and with states stay")
@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family(model_type: str, checkpoint: Make, platform_name: str) -> None:
    path = checkpoint(model_type)
    with LLM(path, platform=platform_name, hidden_state_layers=(0, 1, -1), max_num_batched_tokens=64, **SMALL) as llm:
        prompts, images = make_prompts(llm, LAYOUTS[:2]) if sees_images(model_type) else ([[5, 9, 200] * 30], [[]])
        for prompt, used, result in zip(prompts, images, llm.generate(prompts, ASKED), strict=True):
            assert_states(path, getattr(prompt, "token_ids", prompt), result, (0, 1, -1), used)


def test_an_interrupted_step_leaves_nothing_behind(llm: LLM, path: Path, prompts: list[list[int]]) -> None:
    """The sequences begin anew with the tokens that they have."""
    engine, outputs = llm.engine, list[RequestOutput]()

    def run() -> None:
        while engine.has_unfinished_requests():
            outputs.extend(engine.step())

    for prompt in prompts:
        params = engine.processor.resolve_params(ASKED.replace(max_tokens=8))
        engine.add_request(str(prompt), engine.processor.from_text(prompt), params)
    with raising(engine._executor, "collect", 8), pytest.raises(Injected):
        run()
    assert len(outputs) < len(prompts)
    run()
    assert len(outputs) == len(prompts)
    for output in outputs:
        assert output.prompt_token_ids is not None
        assert_states(path, output.prompt_token_ids, output)


def test_numbers_of_16_bits_are_returned_as_they_are(path: Path, prompts: list[list[int]], platform_name: str) -> None:
    """The last one is what the head reads, in the model's dtype."""
    settings: dict[str, Any] = {**SMALL, "dtype": "bfloat16"}
    with LLM(path, platform=platform_name, hidden_state_layers=(-1,), **settings) as llm:
        (result,) = llm.generate([prompts[3]], ASKED)
    assert result.hidden_states is not None
    states = torch.from_numpy(result.hidden_states[-1])
    assert torch.equal(states, states.bfloat16().float())
    wanted = expected(path, [*prompts[3], *result.token_ids][:-1])[-1]
    torch.testing.assert_close(states, wanted, rtol=0.05, atol=0.15)


@pytest.mark.parametrize(("layers", "more", "words"), [
    ((5,), {}, "there is no layer 5, the model has -4 to 3"),
    ((-5,), {}, "there is no layer -5"),
    ((3, -1), {}, r"\(3, -1\) names a layer twice"),
    ((1,), {"runner": "pooling"}, "the model pools its prompts"),
    ((1,), {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "speculative_config makes steps"),
    ((1.5,), {}, "is no list of layer numbers"), ("12", {}, "is no list of layer numbers"),
    ((True,), {}, "is no list of layer numbers"),
])
def test_layers_that_are_not_returned_are_refused_by_name(
        layers: Any, more: dict[str, Any], words: str, path: Path, platform_name: str) -> None:
    with pytest.raises(ConfigError, match=f"hidden_state_layers: .*{words}"):
        LLM(path, platform=platform_name, hidden_state_layers=layers, **more, **SMALL)


def test_the_generic_way_refuses_them(tmp_path: Path) -> None:
    make_foreign_checkpoint(tmp_path, "gpt_neox")
    with pytest.raises(ConfigError, match="hidden_state_layers: the network that serves gpt_neox returns those of no"):
        LLM(tmp_path, platform="cpu", hidden_state_layers=(1,), **SMALL)


def test_requests_are_refused_by_name(llm: LLM, path: Path, prompts: list[list[int]], platform_name: str,
                                      monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="return_hidden_states: n 2 is more than one answer"):
        SamplingParams(n=2, return_hidden_states=True)
    # Prompts of 33 tokens and answers of 4 have 36 states of three layers.
    limits = type(LIMITS)(max_hidden_states_bytes=4 * 3 * 64 * 36)
    monkeypatch.setattr("npu_runner.request.sampling_params.LIMITS", limits)
    assert llm.generate([prompts[3]], ASKED)[0].hidden_states is not None
    with pytest.raises(RequestError, match="3 layers x 37 tokens of prompt and answer x 64 numbers") as caught:
        llm.generate([prompts[3]], ASKED.replace(max_tokens=5))
    assert caught.value.code == "too_many_hidden_states"
    with (LLM(path, platform=platform_name, **SMALL) as plain,
          pytest.raises(RequestError, match="return_hidden_states: the model was loaded without hidden_state_layers")):
        plain.generate([prompts[0]], ASKED)


def test_a_failed_answer_has_none(llm: LLM, prompts: list[list[int]]) -> None:
    """Beside one that is served, whose states are whole."""
    nothing = ASKED.replace(structured_outputs={"choice": ["a"]}, allowed_token_ids=[5], ignore_eos=False)
    bad, good = llm.generate([prompts[0], prompts[3]], [nothing, ASKED])
    assert bad.finish_reason == "error"
    assert bad.hidden_states is None
    assert good.hidden_states is not None
    assert len(good.hidden_states[0]) == len(prompts[3]) + 3


def test_nothing_is_appended_where_no_layer_is_named(path: Path, prompts: list[list[int]], platform_name: str) -> None:
    with LLM(path, platform=platform_name, **SMALL) as llm:
        assert runner_of(llm).steps.num_appended == 0
        assert llm.generate([prompts[0]], ASKED.replace(return_hidden_states=False))[0].hidden_states is None
