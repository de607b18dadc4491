"""What a model may be loaded for, in words: for requests that ask it for something else. Knows no checkpoint."""

from __future__ import annotations

from npu_runner.checkpoint.model_config import PoolingConfig
from npu_runner.errors import RequestError
from npu_runner.request.pooling_params import CLASSIFY, TOKEN_EMBED

GENERATE = "generate"

_LOADED_FOR = {
    GENERATE: "the model generates text and was loaded for that",
    "embed": "the model was loaded for vectors (/v1/embeddings, LLM.embed)",
    "score": "the model was loaded for scores (/v1/score, /v1/rerank, LLM.score)",
    CLASSIFY: "the model was loaded for classes (/v1/classify, LLM.classify), and has a head for nothing else",
}
_NEEDS = {
    GENERATE: "it generates no text so; load it with runner generate (--runner generate)",
    "embed": "a vector needs a checkpoint whose modules.json says how it is pooled, or runner pooling (--runner "
             "pooling)",
    "score": "a score needs a checkpoint whose modules.json has a LogitScore, or task score (--task score)",
    CLASSIFY: "classes need a checkpoint whose architectures name a *ForSequenceClassification",
    TOKEN_EMBED: "states of all tokens need runner pooling (--runner pooling)",
}  # fmt: skip
"""What a request for a task needs, in a model that was loaded for another."""


def task_of(pooling: PoolingConfig | None) -> str:
    """What a model with this pooling is loaded for."""
    return GENERATE if pooling is None else pooling.task


def wrong_task(loaded: str, asked: str) -> RequestError:
    """The error of a request for `asked` where the model is loaded for `loaded`."""
    needed = "take the checkpoint that it was made of" if loaded == CLASSIFY else _NEEDS[asked]
    return RequestError(f"{_LOADED_FOR[loaded]}: {needed}", "wrong_endpoint")
