"""Requests with and without rules for their answers, and how answers are compared."""

from __future__ import annotations

import numpy as np

from npu_runner import SamplingParams
from npu_runner.request.outputs import RequestOutput

GREEDY = SamplingParams(temperature=0.0, max_tokens=200)
DRAWN = SamplingParams(temperature=1.0, seed=3, max_tokens=200)
WORDS = ["a", "which of the pictures ", "b c", "the picture of a circle " * 3]
SHAPE = {"type": "object", "properties": {"shape": {"enum": ["circle", "square"]}, "count": {"type": "integer",
         "minimum": 0, "maximum": 99}}, "required": ["shape", "count"], "additionalProperties": False}  # fmt: skip
FREE = [
    GREEDY.replace(max_tokens=30, ignore_eos=True), DRAWN.replace(max_tokens=30),
    DRAWN.replace(max_tokens=24, top_p=0.8, top_k=20, min_p=0.02, n=2), DRAWN.replace(max_tokens=24, logprobs=3),
    DRAWN.replace(max_tokens=24, repetition_penalty=1.4, frequency_penalty=0.5), DRAWN.replace(
        max_tokens=24, bad_words=("a", "of the", "which")), GREEDY.replace(max_tokens=20, logit_bias={7: 6.0}),
]  # fmt: skip
RULED = [
    DRAWN.replace(structured_outputs={"json": SHAPE}, n=3),
    GREEDY.replace(structured_outputs={"regex": "[a-z]{40,60}"}, logprobs=2),
    DRAWN.replace(structured_outputs={"json_object": True}, max_tokens=40, repetition_penalty=1.3),
    DRAWN.replace(structured_outputs={"choice": ["circle", "square, or not", "größe"]}, top_p=0.7, top_k=9),
    DRAWN.replace(structured_outputs={"grammar": 'root ::= "x" (" y" | " z")+ "."'}, max_tokens=60),
    GREEDY.replace(structured_outputs={"regex": "[a-z ]{30}"}, bad_words=("e", "of the"), logit_bias={70: 5.0}),
    DRAWN.replace(structured_outputs={"json": {"type": "string", "maxLength": 40}}, stop=["e", "a"], min_tokens=3),
]


def same(ours: list[RequestOutput], other: list[RequestOutput]) -> None:
    """Log probabilities to float32's rounding: products of a larger batch may add up in another order."""
    for one, two in zip(ours, other, strict=True):
        assert [(c.token_ids, c.text, c.finish_reason) for c in one.completions] == \
               [(c.token_ids, c.text, c.finish_reason) for c in two.completions]  # fmt: skip
        for first, second in zip(one.completions, two.completions, strict=True):
            if first.logprobs is not None or second.logprobs is not None:
                assert first.logprobs is not None
                assert second.logprobs is not None
                np.testing.assert_allclose(first.logprobs.logprobs, second.logprobs.logprobs, atol=1e-5)
