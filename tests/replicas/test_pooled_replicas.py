"""Numbers of prompts over several replicas are those of one: arrays of any size travel. Processes are real."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npu_runner import LLM
from npu_runner.errors import RequestError
from tests.batch.pooled_jobs import classify_row, job, probs
from tests.oracle.classifiers import expected_logits, make_classifier
from tests.oracle.running import SMALL

LONG = 900


@pytest.mark.full("starts replicas; what travels is pickled as any answer is")
def test_two_replicas_pool_as_one(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    path = make_classifier(checkpoint("qwen3"), tmp_path / "classifier")
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, 290, length).tolist() for length in (3, LONG, 40, 7, 130, LONG, 1, 64)]
    settings: dict[str, Any] = {**SMALL, "platform": "cpu", "kv_cache_bytes": 1 << 25, "max_num_batched_tokens": 128}
    with LLM(path, **settings) as one:
        expected = one.encode(prompts, pooling_task="token_embed")
    with LLM(path, data_parallel_size=2, **settings) as several:
        for result, wanted, prompt in zip(several.encode(prompts, pooling_task="token_embed"), expected, prompts,
                                          strict=True):
            assert result.data.shape == (len(prompt), 64)
            np.testing.assert_allclose(result.data, wanted.data, atol=1e-5)
        for result, prompt in zip(several.classify(prompts), prompts, strict=True):
            assert result.outputs is not None
            np.testing.assert_allclose(result.outputs.logits, expected_logits(path, prompt), atol=1e-4)
        with pytest.raises(RequestError, match="loaded for classes"):
            several.embed(prompts)


@pytest.mark.full("starts replicas; a row of classes goes the way of any row")
def test_a_job_over_two_replicas_classifies_as_over_one(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    path = make_classifier(checkpoint("qwen3"), tmp_path / "classifier")
    rows = [classify_row(str(number), input=[f"{number} circles", "or none"]) for number in range(12)]
    rows.append(classify_row("bad", input=["a", ""]))
    found = {}
    for count in ("1", "2"):
        (folder := tmp_path / count).mkdir()
        found[count] = job(folder, path, rows, "--data-parallel-size", count)
    assert found["1"].keys() == found["2"].keys()
    assert found["1"]["bad"] == found["2"]["bad"]
    assert found["2"]["bad"]["error"]["param"] == "input[1]"
    for number in range(12):
        np.testing.assert_allclose(probs(found["1"][str(number)]), probs(found["2"][str(number)]), atol=1e-5)
