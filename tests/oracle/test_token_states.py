"""Hidden states of all tokens are transformers', however prompts are cut into steps, and a step's at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from npu_runner import LLM, PoolingParams
from npu_runner.core.batch import PromptStates
from npu_runner.errors import RequestError
from npu_runner.platforms.meta import META, LiveBytes
from npu_runner.platforms.transfers import Download
from npu_runner.prompts.tasks import text_task
from npu_runner.runner.token_results import as_float32, send_states
from tests.oracle import reference
from tests.oracle.embedding_checkpoints import assert_same, expected_vector
from tests.oracle.running import SMALL, need_devices, random_prompts, runner_of

Make = Callable[..., Path]
LENGTHS = (5, 1, 90, 33, 64, 17, 140, 48)
CHUNK = 48


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return random_prompts(LENGTHS, seed=0)


@pytest.fixture(scope="module")
def path(checkpoint: Make) -> Path:
    return checkpoint("qwen3")


@pytest.fixture(scope="module")
def llm(path: Path, platform_name: str) -> Iterator[LLM]:
    with LLM(path, platform=platform_name, runner="pooling", max_num_batched_tokens=CHUNK, **SMALL) as llm:
        yield llm


@torch.inference_mode()
def expected_states(path: Path, token_ids: Sequence[int], images: Sequence[Image.Image] = ()) -> np.ndarray:
    """transformers' last hidden state of every token, float32 (T, D)."""
    output = reference.load_model(path).model(**reference.model_inputs(path, token_ids, images))
    states: np.ndarray = output.last_hidden_state[0].numpy()
    return states


def assert_states(llm: LLM, path: Path, prompts: Sequence[Sequence[int]], **settings: Any) -> None:
    for result, prompt in zip(llm.encode(prompts, pooling_task="token_embed", **settings), prompts, strict=True):
        assert result.data.dtype == np.float32
        np.testing.assert_allclose(result.data, expected_states(path, prompt), rtol=0, atol=1e-4)
        assert result.num_prompt_tokens == len(prompt)


def test_every_token_has_transformers_state(llm: LLM, path: Path, prompts: list[list[int]]) -> None:
    assert_states(llm, path, prompts)


def test_nothing_comes_from_the_prefix_cache_and_others_may_use_what_was_computed(
        llm: LLM, path: Path, prompts: list[list[int]]) -> None:
    """A cached token has keys and values, and no hidden state."""
    longest = max(prompts, key=len)
    llm.embed([longest])
    (again,) = llm.encode([longest], pooling_task="token_embed")
    assert again.num_cached_tokens == 0
    np.testing.assert_allclose(again.data, expected_states(path, longest), rtol=0, atol=1e-4)
    other = [*longest[:100], 3, 4]
    (vector,) = llm.embed([other])
    assert vector.num_cached_tokens > 0
    assert_same(vector.embedding, expected_vector(path, other))


def test_vectors_and_states_go_together(llm: LLM, path: Path, prompts: list[list[int]]) -> None:
    """In the same steps, of the same prefixes."""
    mixed = [PoolingParams(task="token_embed" if index % 2 else None) for index in range(len(prompts))]
    outputs = llm._run(prompts, mixed, text_task, False, False, False)
    assert isinstance(outputs, list)
    for index, (output, prompt) in enumerate(zip(outputs, prompts, strict=True)):
        (completion,) = output.completions
        assert completion.pooled is not None
        if index % 2:
            np.testing.assert_allclose(completion.pooled, expected_states(path, prompt), rtol=0, atol=1e-4)
        else:
            assert_same(completion.pooled, expected_vector(path, prompt))


def test_a_vector_can_be_asked_for_by_its_task(llm: LLM, prompts: list[list[int]]) -> None:
    (result,) = llm.encode([prompts[2]], PoolingParams(dimensions=7), pooling_task="embed")
    np.testing.assert_array_equal(result.data, llm.embed([prompts[2]], PoolingParams(dimensions=7))[0].embedding)


def test_a_state_that_is_no_number_is_an_error_of_its_prompt_alone(llm: LLM, path: Path) -> None:
    poison, model = 300, runner_of(llm).model
    embed: Any = model.embed
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "embed", lambda ids_T: embed(ids_T).masked_fill((ids_T == poison)[:, None], torch.nan))
        bad, good = llm.encode([[7] * 20 + [poison] + [8] * 90, [7] * 60], pooling_task="token_embed",
                               return_errors=True)
    assert bad.outputs is None
    with pytest.raises(RequestError, match="not a number"):
        _ = bad.data
    np.testing.assert_allclose(good.data, expected_states(path, [7] * 60), rtol=0, atol=1e-4)


def test_steps_under_way_change_nothing(path: Path, prompts: list[list[int]], platform_name: str) -> None:
    settings: dict[str, Any] = {**SMALL, "max_num_seqs": 3, "max_num_batched_tokens": 64, "block_size": None}
    with LLM(path, platform=platform_name, runner="pooling", async_scheduling=True, **settings) as llm:
        results = dict(llm.encode(iter(prompts * 2), pooling_task="token_embed", stream_results=True))
    for index, prompt in enumerate(prompts * 2):
        np.testing.assert_allclose(results[index].data, expected_states(path, prompt), rtol=0, atol=1e-4)


@pytest.mark.ranks
def test_two_ranks_give_the_same(path: Path, prompts: list[list[int]], platform_name: str) -> None:
    need_devices(platform_name)
    with LLM(path, platform=platform_name, runner="pooling", tensor_parallel_size=2, max_num_batched_tokens=CHUNK,
             **SMALL) as llm:
        assert_states(llm, path, prompts)


@pytest.mark.parametrize("model_type", ["qwen3_vl", "qwen3_5"])
def test_images_and_states_of_layers(model_type: str, checkpoint: Make, platform_name: str) -> None:
    """Chunks end inside images. Qwen3.5 has states beside its cache."""
    path = checkpoint(model_type)
    rng = np.random.default_rng(1)
    with LLM(path, platform=platform_name, runner="pooling", max_num_batched_tokens=64, **SMALL) as llm:
        prompts, all_images = [], []
        for size in ((200, 160), (160, 64), None):
            images = [] if size is None else [reference.random_image(rng, *size)]
            parts = [{"type": "image", "image": image} for image in images] + [{"type": "text", "text": "which?" * 20}]
            prompts.append(llm.engine.processor([{"role": "user", "content": parts}]))
            all_images.append(images)
        assert len(prompts[0].token_ids) > 64
        for _ in ("cold", "warm"):
            results = llm.encode(prompts, pooling_task="token_embed")
            for result, prompt, images in zip(results, prompts, all_images, strict=True):
                np.testing.assert_allclose(result.data, expected_states(path, prompt.token_ids, images), rtol=0,
                                           atol=1e-4)


def test_a_long_prompt_takes_no_more_than_a_step(llm: LLM, path: Path) -> None:
    """Each step's states go to the host with it: no copy is larger than its step."""
    prompt = np.random.default_rng(3).integers(0, 290, 900).tolist()
    sent: list[tuple[int, int]] = []
    runner: Any = runner_of(llm).steps
    look = runner.prompt_results

    def record(step: Any, hidden_TD: torch.Tensor) -> Any:
        found = look(step, hidden_TD)
        sent.extend((len(download.wait()), len(hidden_TD)) for download in found.downloads)
        return found

    runner.prompt_results = record
    try:
        (result,) = llm.encode([prompt], pooling_task="token_embed")
    finally:
        del runner.prompt_results
    np.testing.assert_allclose(result.data, expected_states(path, prompt), rtol=0, atol=1e-4)
    assert sum(count for count, _ in sent) == 900
    assert all(count <= in_step <= CHUNK for count, in_step in sent)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_states_take_no_memory_of_the_device_beside_the_steps_own(dtype: torch.dtype) -> None:
    chunks = [PromptStates(0, 3, 5, 0), PromptStates(1, 9, 7, 40)]
    with LiveBytes() as live:
        hidden_TD = torch.empty(16, 64, dtype=dtype, device=META)
        before = live.now
        live.reset_peak()
        send_states(chunks, hidden_TD, Download)
        assert live.peak == before == 16 * 64 * dtype.itemsize


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_values_of_16_bits_become_float32_exactly(dtype: torch.dtype) -> None:
    hidden_TD = torch.randn(9, 6, generator=torch.Generator().manual_seed(0)).to(dtype)
    hidden_TD[0, :3] = torch.tensor([0.0, -0.0, 6e-8])
    ((_, place, states),) = send_states([PromptStates(0, 2, 6, 11)], hidden_TD, Download).to_host()
    assert place == 11
    np.testing.assert_array_equal(states, hidden_TD[2:8].float().numpy())
    whole = as_float32(hidden_TD.view(torch.int32 if dtype == torch.float32 else torch.int16).numpy(), dtype)
    np.testing.assert_array_equal(np.signbit(whole), torch.signbit(hidden_TD).numpy())


def test_what_is_not_given_is_refused_before_any_work(llm: LLM, path: Path, platform_name: str) -> None:
    steps = llm.stats().num_prefill_steps
    with pytest.raises(RequestError, match="pooling_task: 'token_classify' is not one of token_embed, embed"):
        llm.encode("a", pooling_task="token_classify")
    with pytest.raises(RequestError, match="dimensions: states of all tokens"):
        llm.encode("a", PoolingParams(dimensions=7), pooling_task="token_embed")
    with pytest.raises(RequestError, match="use_activation: states of all tokens"):
        llm.encode("a", PoolingParams(use_activation=True), pooling_task="token_embed")
    with pytest.raises(RequestError, match="task: 'classify' is not token_embed"):
        PoolingParams(task="classify")
    assert llm.stats().num_prefill_steps == steps
    assert len(llm.encode("a", PoolingParams(use_activation=False), pooling_task="token_embed")[0].data)
    with (LLM(path, platform=platform_name, **SMALL) as generating,
          pytest.raises(RequestError, match="--runner pooling")):
        generating.encode("a", pooling_task="token_embed")
