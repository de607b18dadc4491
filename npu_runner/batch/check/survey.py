"""Counts the rows of an input: each is prepared as a job does it, and checked as the engine does it, without weights.

Knows nothing of where rows lie, of devices, or of time.
"""

from __future__ import annotations

import bisect
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np

from npu_runner.batch.rows.logprobs_json import encoded
from npu_runner.errors import RequestError
from npu_runner.request.prompt_inputs import PromptInputs
from npu_runner.request.sampling_params import SamplingParams
from npu_runner.serving.endpoint import Prepared

CheckRequest = Callable[[PromptInputs, Any], None]
"""Raises RequestError for a prompt and settings that the engine would refuse."""
_EXAMPLES = 3
_QUANTILES = (0.0, 0.5, 0.95, 1.0)


@dataclass
class Repeats:
    """Finds the texts and images that several rows share, which a cache may have. The text of each prompt and each of
    its images is known by a hash: 24 bytes for each of them."""

    rows: array[int] = field(default_factory=lambda: array("Q"))
    keys: array[int] = field(default_factory=lambda: array("Q"))
    num_tokens: array[int] = field(default_factory=lambda: array("Q"))

    def add(self, row: int, prompt: PromptInputs) -> None:
        """`row`: the index of its row in the input."""
        text = blake2b(np.asarray(prompt.token_ids, dtype=np.int64).tobytes(), digest_size=8)
        in_images = 0
        for span in prompt.spans:
            content = prompt.images[span.image_index].content_hash
            text.update(content)
            in_images += span.num_tokens
            self._add(row, blake2b(content, digest_size=8).digest(), span.num_tokens)
        self._add(row, text.digest(), len(prompt.token_ids) - in_images)

    def num_new_tokens(self, rows: np.ndarray | None = None) -> int:
        """Tokens of different texts and images, each counted once; of these rows (uint64), or of all."""
        keys, num_tokens = (np.frombuffer(values, dtype=np.uint64) for values in (self.keys, self.num_tokens))
        if rows is not None:
            is_wanted = np.isin(np.frombuffer(self.rows, dtype=np.uint64), rows)
            keys, num_tokens = keys[is_wanted], num_tokens[is_wanted]
        return int(num_tokens[np.unique(keys, return_index=True)[1]].sum())

    def _add(self, row: int, digest: bytes, num_tokens: int) -> None:
        self.rows.append(row)
        self.keys.append(int.from_bytes(digest, "little"))
        self.num_tokens.append(num_tokens)


@dataclass(frozen=True)
class Example:
    """A row that would fail. `custom_id` is None where it has no usable one; `line` counts from 1."""

    custom_id: str | None
    line: int
    message: str


@dataclass
class Survey:
    """Counts over all rows. Three numbers are kept of each row and of each of its texts and images, 24 bytes; of
    failures the first ones of each code."""

    max_model_len: int
    failures: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[Example]] = field(default_factory=dict)
    places: array[int] = field(default_factory=lambda: array("Q"))
    """Which rows of the input would be served, by their index."""
    prompt_tokens: array[int] = field(default_factory=lambda: array("L"))
    """Tokens of each row that would be served, all of its prompts together."""
    images: array[int] = field(default_factory=lambda: array("L"))
    """Images of each of these rows; a pair of a video's frames counts as one."""
    repeats: Repeats = field(default_factory=Repeats)
    """Texts and images of the rows that would be served."""
    num_image_tokens: int = 0
    num_sequences: int = 0
    most_output_tokens: int = 0
    num_short: int = 0
    """Rows whose prompt leaves fewer tokens to an answer than their max_tokens asks for."""
    num_unlimited: int = 0
    """Rows that generate text and do not say how many tokens: as many as the model's length leaves."""

    @property
    def num_failed(self) -> int:
        return sum(self.failures.values())

    @property
    def num_served(self) -> int:
        return len(self.places)

    def to_json(self) -> dict[str, Any]:
        return {
            "rows": {"total": self.num_served + self.num_failed, "served": self.num_served, "failed": self.num_failed,
                     "failures_by_code": dict(self.failures.most_common())},
            "examples": {code: [vars(example) for example in self.examples[code]] for code in self.failures},
            "prompt_tokens": {"total": sum(self.prompt_tokens), **_quantiles(self.prompt_tokens)},
            "images": {"total": sum(self.images), "tokens": self.num_image_tokens, **_quantiles(self.images)},
            "answers": {"sequences": self.num_sequences, "tokens_at_most": self.most_output_tokens,
                        "max_model_len": self.max_model_len, "cut_short": self.num_short,
                        "without_max_tokens": self.num_unlimited},
        }

    def add(self, prepared: Prepared, check: CheckRequest) -> None:
        line, number = prepared.line, prepared.number
        if prepared.error is not None:
            self._fail(prepared.error.code, Example(prepared.name, line, encoded(prepared.error.message).decode()))
            return
        prompts = [prepared.prompt] if isinstance(prepared.prompt, PromptInputs) else list(prepared.prompt)
        try:
            for prompt in prompts:
                check(prompt, prepared.params)
        except RequestError as error:
            self._fail(error.code, Example(prepared.name, line, error.message))
            return
        self.places.append(number)
        for prompt in prompts:
            self.repeats.add(number, prompt)
        self.prompt_tokens.append(sum(len(prompt.token_ids) for prompt in prompts))
        self.images.append(sum(len(prompt.spans) for prompt in prompts))
        self.num_image_tokens += sum(span.num_tokens for prompt in prompts for span in prompt.spans)
        self.num_sequences += prepared.num_sequences
        if isinstance(prepared.params, SamplingParams):
            self._add_answers(prompts[0], prepared.params)

    def _fail(self, code: str, example: Example) -> None:
        self.failures[code] += 1
        examples = self.examples.setdefault(code, [])
        bisect.insort(examples, example, key=lambda example: example.line)  # rows come as workers finish them
        del examples[_EXAMPLES:]

    def _add_answers(self, prompt: PromptInputs, params: SamplingParams) -> None:
        room = self.max_model_len - len(prompt.token_ids)
        self.num_unlimited += params.max_tokens is None
        self.num_short += params.max_tokens is not None and params.max_tokens > room
        self.most_output_tokens += params.n * min(room, params.max_tokens or room)


def _quantiles(values: array[int]) -> dict[str, int]:
    if not values:
        return {}
    found = np.quantile(np.asarray(values), _QUANTILES, method="higher")
    return dict(zip(("least", "median", "95_percent_below", "most"), map(int, found), strict=True))
