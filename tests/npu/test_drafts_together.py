"""Steps with drafts on the npu platform read the keys and values of a row once, whatever its number of drafts."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npu_runner.platforms.attention import sequences_of_tokens
from tests.cann.environment import has_real_cann, run_python
from tests.full_set import only_full
from tests.npu.running import FLOAT32, SMALL

pytestmark = pytest.mark.npu

PROMPTS = [20, 150, 300]
SPLITS = [[3, 3, 3], [0, 0, 1], [3, 0, 1], [0, 2, 0], [1, 1, 1]]
SIZES = [4, 8, 12]
MODES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "eager": ({"graph_mode": "eager"}, {}),
    "compiled": ({"graph_mode": "reduce-overhead", "graph_batch_sizes": SIZES}, {}),
    "recorded": ({"graph_mode": "reduce-overhead", "graph_batch_sizes": SIZES},
                 {"NPU_RUNNER_ASCEND_CAPTURE": "recorded"}),
    "max-autotune": ({"graph_mode": "max-autotune", "graph_batch_sizes": SIZES, "use_graph_cache": False}, {}),
}
NUM_LAYERS = 2
# Of each layer, and of a step: the queries of padding before the step's; the tables of its sequences, and zeros.
MORE_LAUNCHES = {"eager": (0, 1), "compiled": (1, 2), "recorded": (1, 2), "max-autotune": (2, 4)}
INSTEAD = "one query a row"


@pytest.mark.skipif(has_real_cann(), reason="only the emulated CANN counts")
@pytest.mark.parametrize("mode", ["eager", *only_full(
    "an engine more each, and their graphs; eager steps stay", "compiled", "recorded", "max-autotune")])
def test_keys_of_a_row_are_read_once_and_the_fallback_has_the_same_tokens(
        mode: str, checkpoint: Any, tmp_path: Path) -> None:
    together, apart = costs(mode, checkpoint, tmp_path)
    assert (together["fallbacks"], apart["fallbacks"]) == (None, f"drafts {INSTEAD}")
    assert together["tokens"] == apart["tokens"]
    for split, ours, theirs in zip(SPLITS, together["steps"], apart["steps"], strict=True):
        assert ours["queries"] == [1 + num for num in split]
        once = sum(ours["contexts"]) * together["bytes_of_a_token"]
        num_padding = 2 * (2 + SIZES[-1]) if mode != "eager" else 0
        assert once <= ours["bytes"] <= once + num_padding * together["bytes_of_a_token"]
        by_token = sum(end - place for num, end in zip(ours["queries"], ours["contexts"], strict=True)
                       for place in range(num))
        assert theirs["bytes"] >= by_token * apart["bytes_of_a_token"]
        of_layer, of_step = MORE_LAUNCHES[mode]
        assert ours["launches"] - theirs["launches"] == NUM_LAYERS * of_layer + of_step
        assert ours["new_graphs"] == [0, 0], "one graph of a size takes every split"
        assert (ours["bucket"] is None) == (mode == "eager")


def costs(mode: str, checkpoint: Any, folder: Path) -> list[dict[str, Any]]:
    """Of the first choice, then of the other one."""
    own, environment = MODES[mode]
    settings = {**SMALL, "max_num_seqs": 4, **FLOAT32, **own,
                "speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    spec = {"model": str(checkpoint("qwen3", num_hidden_layers=NUM_LAYERS)), "prompts": PROMPTS, "splits": SPLITS,
            "engines": [{"settings": settings, "fallbacks": fallbacks} for fallbacks in ({}, {"drafts": INSTEAD})]}
    (folder / "spec.json").write_text(json.dumps(spec))
    done = run_python(["-m", "tests.npu.programs.draft_cost", str(folder / "spec.json"), str(folder / "out.json")],
                      allow_fp32_attention=True, **environment)
    assert done.returncode == 0, done.stderr[-6000:]
    found: list[dict[str, Any]] = json.loads((folder / "out.json").read_text())
    return found


def test_every_split_fills_a_graphs_sequences_and_none_is_empty() -> None:
    """Up to four sequences with three drafts each, in graphs of 2 to 20 tokens."""
    for num_rows, num_tokens in itertools.product(range(1, 5), range(2, 21)):
        num_sequences = min(num_tokens, 4) + 2
        for queries in itertools.product(range(1, 5), repeat=num_rows):
            if sum(queries) > num_tokens:
                continue
            contexts = [num + 100 for num in queries]
            rows, totals, lens = sequences_of_tokens(queries, contexts, num_tokens, num_sequences)
            given = np.diff(totals, prepend=0)
            assert totals[-1] == num_sequences + num_tokens
            assert given.min() >= 1
            assert totals[0] >= 2, "a captured graph takes 1 for a constant"
            first = int(np.searchsorted(totals, num_sequences)) + 1
            assert totals[first - 1] == num_sequences, "the step's tokens begin behind as many of padding"
            of_step = slice(first, first + num_rows)
            assert given[of_step].tolist() == list(queries)
            assert lens[of_step].tolist() == contexts
            assert rows[of_step].tolist() == (np.cumsum(queries) - 1).tolist()
            is_padding = np.ones(num_sequences, dtype=bool)
            is_padding[of_step] = False
            assert (lens[is_padding] == given[is_padding]).all()
            assert (rows[is_padding] == num_tokens - 1).all()
            assert (given[is_padding] <= num_tokens + 1).all(), "tables have columns for as many"
