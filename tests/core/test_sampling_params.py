"""What a caller may write into SamplingParams: the same numbers in any type that holds them, all else named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from npu_runner.errors import RequestError
from npu_runner.request.limits import LIMITS
from npu_runner.request.sampling_params import SamplingParams

PLAIN = SamplingParams(n=2, top_k=5, temperature=0.5, seed=7, logit_bias={3: 1.0}, stop_token_ids=[1, 2], logprobs=3)


@pytest.mark.parametrize(
    "values",
    [
        {"n": np.int64(2), "top_k": np.int32(5), "temperature": np.float32(0.5), "seed": np.uint8(7)},
        {"logit_bias": {np.int64(3): np.float16(1)}, "stop_token_ids": np.array([1, 2]), "logprobs": np.int8(3)},
        {"logit_bias": {"3": 1}, "stop_token_ids": (number for number in (1, 2))},
    ],
)
def test_numbers_are_taken_in_any_type_and_kept_in_pythons(values: dict[str, Any]) -> None:
    params = PLAIN.replace(**values)
    assert params == PLAIN
    kept = [params.n, params.top_k, params.seed, params.logprobs, *params.stop_token_ids, *params.logit_bias]
    assert {type(value) for value in kept} == {int}
    assert {type(value) for value in (params.temperature, *params.logit_bias.values())} == {float}


def test_none_and_minus_one_ask_for_nothing() -> None:
    fields = {"stop": None, "bad_words": None, "stop_token_ids": None, "logit_bias": None}
    for top_k in (None, -1, 0, np.int64(-1)):
        assert SamplingParams(**fields, top_k=top_k) == SamplingParams()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("logit_bias", {"abc": 1}, "'abc'"),
        ("logit_bias", {1.7: 1}, "1.7"),
        ("logit_bias", {True: 1}, "True"),
        ("logit_bias", {"1": 1, 1: 2}, "given twice"),
        ("logit_bias", {"-1": 1}, "-1"),
        ("logit_bias", [1], "mapping"),
        ("logit_bias", {1: None}, "None"),
        ("stop", 5, "list of strings"),
        ("stop", [5], "5"),
        ("stop", {"a": 1}, "list of strings"),
        ("stop_token_ids", 5, "5"),
        ("stop_token_ids", "12", "12"),
        ("stop_token_ids", [1.0], "1.0"),
        ("bad_words", b"abc", "abc"),
        ("bad_words_token_ids", [[]], "no tokens"),
        ("bad_words_token_ids", [[1, -2]], "-2"),
        ("top_k", -2, "-2"),
        ("top_k", 1.0, "1.0"),
        ("n", np.bool_(True), "True"),
        ("n", 10**400, "outside 1 to 128"),
        ("temperature", None, "None"),
        ("temperature", 10**400, "finite"),
        ("temperature", np.float32("nan"), "finite"),
        ("top_p", "0.5", "0.5"),
        ("seed", 1.5, "1.5"),
        ("truncate_prompt_tokens", 0, "0 leaves nothing"),
        ("truncate_prompt_tokens", -2, "-2"),
        ("skip_special_tokens", 1, "neither true nor false"),
        ("include_stop_str_in_output", None, "None"),
        ("ignore_eos", "yes", "'yes'"),
        ("stop", ["x" * (LIMITS.max_stop_chars + 1)], "at most 1024"),
        ("bad_words", ["x"] * (LIMITS.max_bad_words + 1), "at most 256"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_anything_else_is_a_request_error_that_names_field_and_value(field: str, value: Any, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    assert (caught.value.code, caught.value.param) == ("invalid_sampling_parameter", field)
    assert caught.value.message.startswith(f"{field}: ")
    assert said in caught.value.message


def test_no_error_repeats_a_megabyte() -> None:
    for field, value in (("stop", ["x" * 10**6, 5]), ("temperature", "9" * 10**6), ("logit_bias", {"x" * 10**6: 1})):
        with pytest.raises(RequestError) as caught:
            SamplingParams(**{field: value})  # type: ignore[arg-type]
        assert len(str(caught.value)) < 1100
    assert len(RequestError("m" * 10**6, "code", "p" * 10**6).param or "") <= 200
