"""Reads bodies of /v1/embeddings and writes their answers: vectors. No files here.

Knows nothing of tokens or of how a vector is made.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from npu_runner.batch.rows.chat import ONE_TEMPLATE
from npu_runner.batch.rows.endpoint import AnswerForm, AnswerRow
from npu_runner.batch.rows.logprobs_json import opened
from npu_runner.batch.rows.pooled import PooledBody, numbers
from npu_runner.prompts.processor import ChatProcessor
from npu_runner.request.outputs import CompletionOutput
from npu_runner.request.pooling_params import PoolingParams


class EmbeddingBody(PooledBody):
    """The embedding request, as far as it is served. None means: not asked for."""

    task: ClassVar[str] = "embed"
    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "add_special_tokens": (), "chat_template": (), "normalize": (True,), "priority": (0,), "softmax": (),
        "use_activation": (True,)}
    instead: ClassVar[Mapping[str, str]] = {
        "chat_template": f"; {ONE_TEMPLATE}",
        "add_special_tokens": "; they are added as the checkpoint's own tokenizer and processor do",
        "normalize": "; the checkpoint's modules.json says whether vectors are normalised",
        "use_activation": "; the checkpoint's modules.json says whether vectors are normalised",
    }

    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] | None = None

    @property
    def expected(self) -> str | None:
        """A vector is no text to compare."""
        return None

    def to_params(self, defaults: Mapping[str, Any], fallback_seed: int) -> PoolingParams:
        return PoolingParams(dimensions=self.dimensions, truncate_prompt_tokens=self.truncate_prompt_tokens)

    def form(self, processor: ChatProcessor) -> AnswerForm:
        return EmbeddingForm(model=self.model, is_base64=self.encoding_format == "base64", places=self.places)


@dataclass(frozen=True, kw_only=True)
class EmbeddingForm(AnswerForm):
    """A list of vectors. `is_base64`: of their float32 bytes, little end first; else JSON numbers."""

    object: ClassVar[str] = "list"
    list_name: ClassVar[str] = "data"
    item_name: ClassVar[str] = "embedding"
    has_vectors: ClassVar[bool] = True
    is_compared: ClassVar[bool] = False
    has_created: ClassVar[bool] = False
    has_text: ClassVar[bool] = False

    is_base64: bool = False

    def write_choice(self, completion: CompletionOutput, row: AnswerRow) -> None:
        assert completion.pooled is not None, "a request for vectors that ended well has them"
        row.write(opened({"object": "embedding", "index": completion.index}, "embedding"))
        row.write(_base64(completion.pooled) if self.is_base64 else numbers(completion.pooled))
        row.write("}")

    @classmethod
    def text_of(cls, item: Mapping[str, Any]) -> str:
        return f"a vector of {len(vector_of(item['embedding']))} numbers"

    @classmethod
    def cells_of(cls, item: Mapping[str, Any], num_prompt_tokens: int | None) -> dict[str, Any]:
        return {"vector": vector_of(item["embedding"])}


def vector_of(embedding: Sequence[float] | str) -> np.ndarray:
    """(D,) float32, of either form that a row may ask for: numbers, or base64 of their bytes (little end first). Raises
    ValueError for any other value."""
    if isinstance(embedding, str):
        return np.frombuffer(base64.b64decode(embedding), dtype="<f4")
    vector_D = np.array(embedding)
    if vector_D.ndim != 1 or vector_D.dtype.kind not in "fiu":
        raise ValueError("an embedding is a list of numbers, or base64")
    with np.errstate(over="ignore"):
        return vector_D.astype(np.float32)


def _base64(vector_D: np.ndarray) -> str:
    return f'"{base64.b64encode(vector_D.astype("<f4").tobytes()).decode()}"'
