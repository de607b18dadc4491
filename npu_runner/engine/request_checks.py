"""What a prompt must be for the model that is to take it. Knows nothing of who asks, nor of what runs."""

from __future__ import annotations

from npu_runner.checkpoint.model_config import ModelConfig
from npu_runner.errors import RequestError
from npu_runner.request.prompt_inputs import PromptInputs
from npu_runner.request.sampling_params import SamplingParams


def check_prompt(prompt: PromptInputs, model_config: ModelConfig, max_model_len: int) -> None:
    """Raises RequestError for a prompt that is empty or too long, or holds what the model does not know."""
    length = len(prompt.token_ids)
    if length == 0:
        raise RequestError("the prompt is empty", code="empty_prompt")
    if length >= max_model_len:
        raise RequestError(
            f"the prompt has {length} tokens, the model takes {max_model_len} with at least one generated; "
            f"shorten it, send smaller pictures or raise max_model_len", code="prompt_too_long",
        )
    if min(prompt.token_ids) < 0 or max(prompt.token_ids) >= model_config.vocab_size:
        raise RequestError(f"a token id is outside 0 to {model_config.vocab_size - 1}", code="invalid_token_id")
    if prompt.images and model_config.vision is None:
        raise RequestError("the model has no vision tower; send text only", code="model_has_no_vision")


def check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    """Raises RequestError, naming the field, for an id that the model lacks."""
    bad_ids = [i for ids in params.bad_words_token_ids for i in ids]
    for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids),
                      ("bad_words_token_ids", bad_ids)):
        if any(i >= vocab_size for i in ids):
            raise RequestError(f"{name}: a token id is outside 0 to {vocab_size - 1}",
                               code="invalid_sampling_parameter", param=name)
