"""What a model may be loaded for, and what requests may ask of it then. Knows no checkpoint's files and no prompts."""

from __future__ import annotations

from npu_runner.checkpoint.model_config import PoolingConfig, VectorPooling
from npu_runner.errors import RequestError
from npu_runner.request.pooling_params import CLASSIFY, TOKEN_EMBED, PoolingParams

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


def check_pooling_params(params: PoolingParams, pooling: PoolingConfig | None, hidden_size: int | None) -> None:
    """Raises RequestError for what the model does not give. `hidden_size`: None, if it is not known."""
    if pooling is None:
        raise wrong_task(GENERATE, VectorPooling.task)
    if params.keeps_tokens:
        return
    if isinstance(pooling, VectorPooling):
        if params.use_activation is False:
            raise _refusal("use_activation", "the checkpoint's modules.json says whether vectors are normalised")
        _check_dimensions(params.dimensions, pooling, hidden_size)
    elif params.dimensions is not None:
        raise _refusal("dimensions", f"they are for vectors, and the model is loaded for task {pooling.task}")


def _check_dimensions(dimensions: int | None, pooling: VectorPooling, hidden_size: int | None) -> None:
    served = pooling.dimensions
    if dimensions is None:
        return
    if served is not None and dimensions not in served:
        named = ", ".join(map(str, served))
        raise _refusal("dimensions", f"{dimensions} is none of those the checkpoint names, {named}")
    if hidden_size is not None and dimensions > hidden_size:
        raise _refusal("dimensions", f"{dimensions} is more than the vector has, which is {hidden_size}")


def _refusal(name: str, why: str) -> RequestError:
    return RequestError(f"{name}: {why}", "invalid_pooling_parameter", name)
