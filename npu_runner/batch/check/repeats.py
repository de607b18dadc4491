"""What of an input's prompts is new, and what a cache may have of an earlier row: texts and images, known by hashes.

Knows nothing of caches' sizes, nor of time.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from npu_runner.request.prompt_inputs import PromptInputs


@dataclass
class Repeats:
    """The text of each prompt and each of its images: 24 bytes for each of them."""

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
