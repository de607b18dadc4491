"""Scores are transformers' logit of one token less that of another, of the last token of a prompt."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from npu_runner import LLM, PoolingParams
from npu_runner.errors import ConfigError, ModelError
from npu_runner.request.prompt_inputs import PromptInputs
from tests.oracle import reference
from tests.oracle.running import SMALL

Make = Callable[..., Path]
YES, NO = 7, 300


def with_score(path: Path, target: Path, **config: object) -> Path:
    """A copy of the checkpoint in `path` that says how it scores, as sentence-transformers saves it."""
    shutil.copytree(path, target, dirs_exist_ok=True)
    modules = [{"type": "sentence_transformers.base.modules.transformer.Transformer", "path": ""},
               {"type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore", "path": "1_LogitScore"}]
    (target / "modules.json").write_text(json.dumps(modules))
    (target / "1_LogitScore").mkdir(exist_ok=True)
    config = config or {"true_token_id": YES, "false_token_id": NO, "module_input_name": "causal_logits"}
    (target / "1_LogitScore" / "config.json").write_text(json.dumps(config))
    return target


@torch.inference_mode()
def expected_logits(path: Path, token_ids: list[int]) -> torch.Tensor:
    """(V,) of the last token, float64."""
    return reference.load_model(path)(**reference.model_inputs(path, token_ids)).logits[0, -1].double()


@pytest.mark.parametrize(("tied", "has_no"), [(True, True), (False, True), (False, False)])
def test_the_head_is_a_difference_of_two_logits_or_one(
        checkpoint: Make, tied: bool, has_no: bool, tmp_path: Path, platform_name: str) -> None:
    """Of one request with several prompts, in chunks."""
    whole = checkpoint("qwen3", tie_word_embeddings=tied)
    path = with_score(whole, tmp_path, true_token_id=YES, false_token_id=NO if has_no else None)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 290, length).tolist() for length in (5, 90, 33)]
    with LLM(path, platform=platform_name, max_num_batched_tokens=48, **SMALL) as llm:
        llm.engine.add_request("many", [PromptInputs(prompt) for prompt in prompts], PoolingParams())
        outputs = []
        while llm.engine.has_unfinished_requests():
            outputs += llm.engine.step()
    (output,) = outputs
    for completion, prompt in zip(output.completions, prompts, strict=True):
        logits = expected_logits(whole, prompt)
        assert completion.pooled is not None
        assert completion.pooled.shape == (1,)
        assert completion.pooled[0] == pytest.approx(float(logits[YES] - has_no * logits[NO]), abs=1e-5)


def test_a_score_that_cannot_be_is_named(checkpoint: Make, tmp_path: Path) -> None:
    whole = checkpoint("qwen3")
    with pytest.raises(ModelError, match="the tokenizer has no token 'yes'; a modules.json with a LogitScore names"):
        LLM(whole, task="score", platform="cpu", **SMALL)
    with pytest.raises(ConfigError, match="task score: runner generate answers with text"):
        LLM(whole, task="score", runner="generate", platform="cpu", **SMALL)
    for config, message in (({"true_token_id": 320}, r"made of the tokens \(320,\), the model has tokens 0 to 319"),
                            ({"true_token_id": True}, "true_token_id True is no token id"),
                            ({"true_token_id": 1, "module_input_name": "x"}, "module_input_name 'x' is not served")):
        path = with_score(whole, tmp_path, **config)
        with pytest.raises(ModelError, match=message):
            LLM(path, platform="cpu", **SMALL)
    with pytest.raises(ModelError, match="its modules are for task score, not embed"):
        LLM(with_score(whole, tmp_path), task="embed", platform="cpu", **SMALL)
