"""Every error a user can meet, in one tree; and the base of classes of other packages. Knows nothing of what raises it.

Each message says the value, the limit and the remedy. Anything that is not one of these is a bug in the runner.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

_CODES = """
    chat_template_error custom_id_not_found custom_id_too_long document_changed document_given_up duplicate_request_id
    empty_messages empty_prompt forked_llm generation_aborted generation_failed image_aspect_ratio image_broken
    image_count_mismatch image_empty image_mode image_not_measured image_not_recognised image_out_of_memory
    image_refused image_role image_several_pages image_too_large image_truncated internal_error
    invalid_pooling_parameter invalid_request invalid_role invalid_sampling_parameter invalid_structured_outputs
    invalid_token_id invalid_type invalid_unicode invalid_value limit_exceeded llm_busy media_bad_data_url
    media_missing media_not_allowed media_scheme media_too_large media_unreadable missing_field
    missing_required_parameter model_has_no_chat_template model_has_no_video model_has_no_vision nested_call
    nested_too_deep no_token_left no_user_text not_an_object not_json not_pooled not_unicode not_utf8 out_of_memory
    pdf_broken pdf_font_missing pdf_page_broken pdf_page_missing pdf_password preprocessing_crashed
    preprocessing_out_of_memory preprocessing_timeout prompt_not_truncated prompt_too_long reasoning_open
    request_failed results_ended row_too_long several_images special_token_in_text too_many_hidden_states
    too_many_images too_many_json_values too_many_logprobs unknown_parameter unknown_part unsupported_field
    unsupported_parameter unsupported_part unsupported_value video_aspect_ratio video_broken video_count_mismatch
    video_empty video_no_stream video_not_recognised video_out_of_memory video_package_missing video_positions
    video_rotation video_size_changes video_too_large video_too_long video_too_many_frames video_truncated
    wrong_endpoint
"""
CODES = frozenset(_CODES.split())
"""All codes of failed rows, as docs/errors.md explains them."""
_MAX_MESSAGE_CHARS = 1000
_MAX_PARAM_CHARS = 200


class NpuRunnerError(Exception):
    """Base of everything this package raises on purpose."""


class ConfigError(NpuRunnerError):
    """A setting, or a combination of settings, that cannot work. The command line exits with status 2."""


class Contract:
    """Base of a class that another package implements. A subclass that still has a member of an earlier release is
    refused with ConfigError, because nothing would call that member."""

    _REPLACED: ClassVar[Mapping[str, str]] = {}
    """Members of earlier releases, and what replaces each."""

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        for name in vars(cls).keys() & cls._REPLACED.keys():
            raise ConfigError(f"{cls.__module__}.{cls.__qualname__}: {name} is a name of npu_runner 0.5; "
                              f"now it is {cls._REPLACED[name]}")


class ModelError(ConfigError):
    """The model folder, its config or its weights cannot be used."""


class WeightsError(ModelError):
    """A tensor is missing, left over, misshapen or of an unusable type; the message names it."""


class OutOfMemoryError(ConfigError):
    """The device's memory is too small for the settings, or for one step's requests. The message has the memory ledger
    and the remedy."""


class RequestError(NpuRunnerError):
    """One request cannot be served, by the caller's fault. Other requests are not affected.

    `code` is a short machine-readable name (`image_too_large`), `param` the offending field if there is one. Both are
    shortened, because they may repeat a megabyte of the request. `prompt_index`: which of several prompts it is about.
    """

    status_code = 400
    """It stands in the result row, as in OpenAI's: 400 blames the request, 500 this program."""

    def __init__(self, message: str, code: str = "invalid_request", param: str | None = None,
                 prompt_index: int | None = None):
        self.message = _shortened(message, _MAX_MESSAGE_CHARS)
        self.code = code
        self.param = None if param is None else _shortened(param, _MAX_PARAM_CHARS)
        self.prompt_index = prompt_index
        super().__init__(self.message)

    def __reduce__(self) -> tuple[type, tuple[str, str, str | None, int | None]]:
        return type(self), (self.message, self.code, self.param, self.prompt_index)  # crosses process borders whole


class ServerError(RequestError):
    """A request has no answer, and that is not its own fault."""

    status_code = 500


class StepError(NpuRunnerError):
    """A step raised an unexpected error on a working device: one of its requests is the cause."""


class GenerationError(NpuRunnerError):
    """One request was accepted and given up while it was answered; the message says why."""


class EngineDeadError(NpuRunnerError):
    """A rank or the engine died; the message names the rank and the phase. The job can be resumed.

    `request_ids` were in the step that did not end. `blame`: the error code, if one of them is the likely cause (the
    step raised an error, or memory ran out). None if a device failed or a rank was killed.
    """

    def __init__(self, message: str, *, request_ids: tuple[str, ...] = (), blame: str | None = None):
        super().__init__(message)
        self.request_ids = request_ids
        self.blame = blame


class ReplicaDeadError(EngineDeadError):
    """A replica died, or its engine did; the message says which one and how. Picklable.

    `rows`: the indices of those that were in the step that did not end; None if unknown (it was killed).
    """

    def __init__(self, message: str, *, request_ids: tuple[str, ...] = (), blame: str | None = None,
                 rows: tuple[int, ...] | None = None):
        super().__init__(message, request_ids=request_ids, blame=blame)
        self.rows = rows

    def __reduce__(self) -> tuple[Callable[..., ReplicaDeadError], tuple[str, tuple[str, ...], str | None,
                                                                         tuple[int, ...] | None]]:
        return _replica_dead, (str(self), self.request_ids, self.blame, self.rows)


class JobError(NpuRunnerError):
    """The job cannot go on (disk full, output gone, interrupted). What is written stays; the same command resumes."""


class TooManyFailuresError(JobError):
    """More rows failed than `max_failures` allows. The command line exits with status 4. What is written stays."""


class OutputLostError(JobError):
    """The output was removed, replaced, cut or written by another process during the job."""


def _replica_dead(message: str, request_ids: tuple[str, ...], blame: str | None,
                  rows: tuple[int, ...] | None) -> ReplicaDeadError:
    return ReplicaDeadError(message, request_ids=request_ids, blame=blame, rows=rows)


def _shortened(text: str, num_chars: int) -> str:
    """The beginning and the end of a text that is too long, and how much is left out."""
    if len(text) <= num_chars:
        return text
    half = num_chars // 2 - 20
    return f"{text[:half]}... ({len(text) - 2 * half} characters) ...{text[-half:]}"


def blame_for(error: NpuRunnerError) -> str:
    """The code of a request that alone makes steps end with `error`."""
    if isinstance(error, RequestError):
        return error.code
    return "out_of_memory" if isinstance(error, OutOfMemoryError) else "request_failed"
