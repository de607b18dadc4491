"""Scores documents on one platform and writes the differences of logits, as JSON.

    python -m tests.npu.programs.ranking MODEL SETTINGS.json RESULTS.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from npu_runner import LLM, PoolingParams
from tests.npu.programs.reading import fallbacks
from tests.oracle.reference import random_image

QUERY = "which of the two shows a circle?"


def documents() -> list[Any]:
    """Texts, and images of two sizes."""
    rng = np.random.default_rng(0)
    images = [{"content": [{"type": "image", "image": random_image(rng, *size)}]} for size in ((64, 96), (160, 64))]
    return ["a picture of a red circle", images[0], "the colour is blue", images[1], "x" * 90]


def rank(model: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Cold and warm: what stands before the documents is shared."""
    params = PoolingParams(use_activation=False)
    with LLM(model, task="score", **settings) as llm:
        results = [llm.score(QUERY, documents(), pooling_params=params) for _ in ("cold", "warm")]
        steps = llm.stats().num_decode_steps
    return {"scores": [[result.score for result in found] for found in results], "decode_steps": steps,
            "cached": [result.num_cached_tokens for result in results[1]], "fallbacks": fallbacks()}


if __name__ == "__main__":
    Path(sys.argv[3]).write_text(json.dumps(rank(sys.argv[1], json.loads(Path(sys.argv[2]).read_text()))))
