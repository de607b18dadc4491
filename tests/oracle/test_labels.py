"""Labels behind a prompt have transformers' log-likelihoods in float32, one label at a time and uncached."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from npu_runner import LLM, PoolingParams
from npu_runner.errors import RequestError
from npu_runner.request.limits import LIMITS
from npu_runner.request.prompt_inputs import PromptInputs
from npu_runner.serving.endpoint import Prepared
from tests.full_set import every
from tests.oracle import reference
from tests.oracle.image_prompts import make_prompts
from tests.oracle.running import SMALL, greedy, need_devices

Make = Callable[..., Path]
LABELS = ["red", "red circle", "a red circle with many squares", "12", "blue", " ", "<|im_end|>"]
"""The first begins others, and the last is no control token here."""
TOLERANCE = 2e-4
RAW = PoolingParams(use_activation=False)


@torch.inference_mode()
def expected(path: Path, llm: LLM, prompt: PromptInputs, images: Sequence[Any] = ()) -> list[float]:
    """The sums of LABELS."""
    model = reference.load_model(path)
    ends = torch.tensor(llm.engine._eos_token_ids)
    sums = []
    for label in LABELS:
        label_ids = llm.processor.encode_plainly(label)
        ids = [*prompt.token_ids, *label_ids]
        log_probs_TV = model(**reference.model_inputs(path, ids, images)).logits[0].double().log_softmax(-1)
        first = len(prompt.token_ids) - 1
        own = sum(log_probs_TV[first + place, token].item() for place, token in enumerate(label_ids))
        sums.append(own + log_probs_TV[-1, ends].logsumexp(0).item())
    return sums


def assert_right(path: Path, llm: LLM, prompts: list[PromptInputs], images: list[list[Any]] | None = None) -> None:
    results = llm.classify(prompts, RAW, labels=LABELS)
    shares = llm.classify(prompts, labels=LABELS)
    for prompt, seen, raw, share in zip(prompts, images or [[]] * len(prompts), results, shares, strict=True):
        right = expected(path, llm, prompt, seen)
        assert raw.probs == pytest.approx(right, abs=TOLERANCE)
        probs = torch.tensor(right, dtype=torch.float64).softmax(0)
        assert share.probs == pytest.approx(probs.tolist(), abs=TOLERANCE)
        assert raw.label == share.label == LABELS[int(probs.argmax())]
        assert raw.num_prompt_tokens == len(prompt.token_ids)


def texts(llm: LLM) -> list[PromptInputs]:
    rng = np.random.default_rng(3)
    chat = llm.processor([{"role": "user", "content": "Which colour is it?"}])
    return [chat, *(llm.processor.from_text(rng.integers(0, 290, length).tolist()) for length in (1, 2, 33, 64, 140))]


@pytest.mark.parametrize("settings", [
    pytest.param({}, id="cached"), pytest.param({"enable_prefix_caching": False}, id="uncached"),
    pytest.param({"async_scheduling": True}, id="ahead"),
    pytest.param({"tensor_parallel_size": 2}, id="ranks", marks=pytest.mark.ranks)])
def test_prompts_cut_and_mixed(checkpoint: Make, platform_name: str, settings: dict[str, Any]) -> None:
    if "tensor_parallel_size" in settings:
        need_devices(platform_name)
    path = checkpoint("qwen3")
    with LLM(path, platform=platform_name, max_num_batched_tokens=48, **settings, **SMALL) as llm:
        prompts = texts(llm)
        assert_right(path, llm, prompts)
        plain = llm.generate(prompts, greedy(4))
        both = [each for _ in range(2) for each in llm.generate(prompts, greedy(4))]
        assert [output.token_ids for output in both] == [output.token_ids for output in plain] * 2


def test_a_model_with_states_and_a_preempted_one(checkpoint: Make, platform_name: str) -> None:
    path = checkpoint("qwen3_5_text")
    with LLM(path, platform=platform_name, max_num_batched_tokens=64, **SMALL) as llm:
        assert_right(path, llm, texts(llm))
    path = checkpoint("qwen3")
    settings: dict[str, Any] = {**SMALL, "max_model_len": 176, "block_size": 16, "max_num_batched_tokens": 32}
    with LLM(path, platform=platform_name, kv_cache_bytes=13 * 3 * 2 * 16 * 2 * 16 * 4, **settings) as llm:
        assert_right(path, llm, texts(llm))


def test_images_stand_before_labels(checkpoint: Make, platform_name: str) -> None:
    path = checkpoint("qwen3_vl")
    with LLM(path, platform=platform_name, max_num_batched_tokens=96, **SMALL) as llm:
        prompts, images = make_prompts(llm, ["0t", "t01t", "3t4"])
        assert_right(path, llm, prompts, images)
        assert llm.stats().num_images_encoded == len({id(image) for seen in images for image in seen})


def test_the_prompt_is_computed_once(checkpoint: Make, platform_name: str) -> None:
    """512 labels behind 4,000 tokens: no more than the prompt, and of each label a block and its tokens."""
    path = checkpoint("qwen3", max_position_embeddings=8192)
    labels = [f"label {number}" for number in range(LIMITS.max_labels)][:: every(8)]
    settings: dict[str, Any] = {**SMALL, "max_model_len": 4200, "max_num_seqs": 64}
    with LLM(path, platform=platform_name, **settings) as llm:
        most = 4000 + sum(llm.engine.info.block_size + len(llm.processor.encode_plainly(label)) for label in labels)
        (result,) = llm.classify([[token % 290 for token in range(4000)]], labels=labels)
        assert llm.stats().num_prefill_tokens <= most
        assert llm.stats().num_decode_tokens == 0
    assert sum(result.probs) == pytest.approx(1.0, abs=1e-5)


def test_a_replica_counts_each_label_as_a_sequence_that_waits(checkpoint: Make) -> None:
    """Else it takes hundreds of rows more than it has room for, and believes those to wait that run."""
    with LLM(checkpoint("qwen3"), platform="cpu", **SMALL) as llm:
        params = llm.processor.resolve_params(PoolingParams(labels=LABELS))
        prepared = Prepared(number=0, name="a", prompt=tuple(texts(llm)[:2]), params=params)
        llm.engine.add_request("a", prepared.prompt, params)
        assert llm.engine.num_waiting == prepared.num_sequences == 2 * len(LABELS)
        llm.engine.reset()


def test_each_request_brings_labels_of_its_own(checkpoint: Make) -> None:
    """Equal to a call for each, of `classify` and `encode`, with lists and iterators."""
    with LLM(checkpoint("qwen3"), platform="cpu", **SMALL) as llm:
        prompts = ["which colour", "what shape", "how many"]
        asked = [PoolingParams(labels=["red", "blue", "a circle"], use_activation=False),
                 PoolingParams(labels=["circle", "square"]), PoolingParams(labels=("1", "2"), use_activation=True)]
        alone = [llm.classify(prompt, labels=params.labels, pooling_params=params.replace(labels=None))[0]
                 for prompt, params in zip(prompts, asked, strict=True)]
        streamed = dict(llm.classify(iter(prompts), iter(asked), stream_results=True))
        for found in (llm.classify(prompts, asked), [streamed[index] for index in range(3)]):
            for one, right, params in zip(found, alone, asked, strict=True):
                assert one.probs == pytest.approx(right.probs, abs=TOLERANCE)
                assert one.label == right.label
                assert params.labels is not None
                assert one.label in params.labels
        arrays = llm.encode(prompts, asked, pooling_task="classify")
        for array, right in zip(arrays, alone, strict=True):
            np.testing.assert_allclose(array.data, right.probs, rtol=0, atol=TOLERANCE)
        (array,) = llm.encode(prompts[:1], asked[0], pooling_task="classify")
        np.testing.assert_allclose(array.data, alone[0].probs, rtol=0, atol=TOLERANCE)
        asked[1] = PoolingParams()
        with pytest.raises(RequestError, match="prompt 1: labels: missing") as missing:
            llm.classify(prompts, asked)
        assert missing.value.code == "missing_required_parameter"
        first, lost, last = llm.classify(prompts, asked, return_errors=True)
        assert (first.label, last.label) == (alone[0].label, alone[2].label)
        assert "labels: missing" in str(lost.error)


def test_what_is_refused(checkpoint: Make) -> None:
    with LLM(checkpoint("qwen3"), platform="cpu", **SMALL) as llm:
        for labels, said in ((["a"], "1 of them"), (["a", "a"], r"labels\[1\].*labels\[0\]"),
                             (["a", ""], r"labels\[1\]"), (["a", 3], r"labels\[1\]"), ("ab", "a list of texts"),
                             ([str(number) for number in range(LIMITS.max_labels + 1)], "513 labels")):
            with pytest.raises(RequestError, match=said):
                llm.classify("text", labels=labels)  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="labels: missing") as missing:
            llm.classify("text")
        assert missing.value.code == "missing_required_parameter"
        room = SMALL["max_model_len"] - 2
        with pytest.raises(RequestError, match="the longest has 200 tokens") as long:
            llm.classify([[5] * room], labels=["a", "1" * 200])
        assert long.value.code == "prompt_too_long"
