"""What a request's sampling asks of the vocabulary: bad words as token ids, and ids that the model really has.

Runs where prompts are prepared, so that no step waits for a tokenizer. Knows nothing of logits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from npu_runner.errors import RequestError
from npu_runner.request.limits import shown
from npu_runner.request.sampling_params import SamplingParams


def resolve_sampling(
    params: SamplingParams, encode: Callable[[str], list[int]], vocab_size: int | None
) -> SamplingParams:
    """`params` with its bad words as token ids, both with and without a space before them, beside those that it names
    by ids. Done twice it is the same.

    encode: text to token ids without special tokens. Raises RequestError for ids that a model of `vocab_size` lacks.
    """
    _check_ids("logit_bias", params.logit_bias, vocab_size)
    _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    _check_ids("bad_words_token_ids", [i for ids in params.bad_words_token_ids for i in ids], vocab_size)
    if not params.bad_words:
        return params
    found: dict[tuple[int, ...], None] = {}
    for word in params.bad_words:
        for spelling in (word, f" {word}"):
            ids = tuple(encode(spelling))
            _check_ids(f"bad_words: {shown(word)}", ids, vocab_size)
            if ids:
                found[ids] = None
    if not found:
        raise RequestError("bad_words: this model's tokenizer makes no token of any of them; leave them out",
                           code="invalid_sampling_parameter", param="bad_words")
    found |= dict.fromkeys(map(tuple, params.bad_words_token_ids))
    resolved = tuple(sorted(found))
    return params if resolved == params.bad_words_token_ids else params.replace(bad_words_token_ids=resolved)


def _check_ids(what: str, ids: Collection[int], vocab_size: int | None) -> None:
    highest = max(ids, default=0)
    if vocab_size is not None and highest >= vocab_size:
        name = what.split(":")[0]
        raise RequestError(
            f"{what}: token id {highest} is asked for, the model has 0 to {vocab_size - 1}",
            code="invalid_sampling_parameter",
            param=name,
        )
