"""A rule that forces a long text, where the model has room for it: neighbours take the steps that they take alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npu_runner import LLM, SamplingParams
from tests.oracle.running import runner_of

_TEXT = "which " * 10_000
_SMALL: dict[str, Any] = {"json": {"type": "array", "items": {"type": "boolean"}, "minItems": 60}}
_LONG: list[dict[str, Any]] = [{"choice": [_TEXT]}, {"json": {"const": _TEXT}},
                               {"grammar": "start: " + " ".join(f'"1_{number}"' for number in range(20_000))}]
_FREE = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A checkpoint whose positions reach further than the texts."""
    path = tmp_path_factory.mktemp("far")
    for file in checkpoint("qwen3").iterdir():
        (path / file.name).symlink_to(file)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").unlink()
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 250_000}))
    with LLM(path, platform="cpu", dtype="float32", max_num_seqs=9, max_model_len=200_000, preprocessing_workers=0,
             kv_cache_bytes=512 << 20, enable_prefix_caching=False) as llm:  # fmt: skip
        yield llm


def beside(llm: LLM, rule: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> tuple[int, int, int, list[Any], str]:
    """Decode steps until eight others are answered, masks, tokens that they force, the others' tokens, the text."""
    matchers: Any = runner_of(llm)._matchers
    fill, forced, engine = matchers.fill, [], llm.engine

    def counted(asked: Sequence[Any], masks_CW: np.ndarray) -> None:
        fill(asked, masks_CW)
        forced.extend(len(matcher.compute_ff_tokens()) for matcher, _ in asked)

    monkeypatch.setattr(matchers, "fill", counted)
    params = SamplingParams(temperature=0.0, max_tokens=100, structured_outputs=rule)
    engine.add_request("ruled", engine.processor.from_text("which"), engine.processor.resolve_params(params))
    for number in range(8):
        engine.add_request(f"free {number}", engine.processor.from_text("which " * (number + 1)), _FREE)
    before, found = llm.stats().num_decode_steps, {}
    while len(found.keys() - {"ruled"}) < 8:
        found |= {output.request_id: output for output in engine.step()}
    num_steps = llm.stats().num_decode_steps - before
    while engine.has_unfinished_requests():
        found |= {output.request_id: output for output in engine.step()}
    assert found["ruled"].finish_reason == "length", found["ruled"]
    tokens = [found[f"free {number}"].token_ids for number in range(8)]
    monkeypatch.undo()
    return num_steps, len(forced), sum(forced), tokens, found["ruled"].text


@pytest.mark.full("a cache for 200,000 tokens; that nothing is forced ahead stays (test_rule_bounds.py)")
def test_neighbours_of_a_long_forced_text_take_as_many_steps_as_beside_a_small_schema(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside(llm, _SMALL, monkeypatch)  # builds what all matchers share
    small = beside(llm, _SMALL, monkeypatch)
    for rule in _LONG:
        long = beside(llm, rule, monkeypatch)
        assert long[:4] == small[:4]
        assert long[4].removeprefix('"')[:12] in ("which which ", "1_01_11_21_3")
    assert small[:3] == (99, 100, 0), "a mask a token, and none forces text"
