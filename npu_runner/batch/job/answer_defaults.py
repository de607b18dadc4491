"""What a job asks of the answers of all rows that say nothing else. Knows nothing of rows or how they are served."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from npu_runner.batch.job.options import BatchOptions
from npu_runner.errors import ConfigError, RequestError
from npu_runner.grammars.compile import with_grammar
from npu_runner.request.limits import LIMITS
from npu_runner.request.repetition_detection import RepetitionDetectionParams
from npu_runner.request.sampling_params import SamplingParams
from npu_runner.request.structured_outputs import StructuredOutputsParams

_OPTION = "response_schema"


def answer_defaults(options: BatchOptions) -> dict[str, Any]:
    """Fields of SamplingParams. Raises ConfigError for a file that cannot be read, and for what cannot be served."""
    found: dict[str, Any] = {}
    if options.response_schema is not None:
        found["structured_outputs"] = _read_schema(options.response_schema)
    if options.max_thinking_tokens is not None:
        found["max_thinking_tokens"] = options.max_thinking_tokens
    return {**found, **_guards(options)}


def _guards(options: BatchOptions) -> dict[str, Any]:
    """What keeps answers from repeating themselves, as JSON has it."""
    found: dict[str, Any] = {}
    try:
        if options.repetition_detection is not None:
            detection = RepetitionDetectionParams.of(options.repetition_detection)
            found["repetition_detection"] = dataclasses.asdict(detection)
        if options.no_repeat_ngram_size is not None:
            found["no_repeat_ngram_size"] = options.no_repeat_ngram_size
        if options.no_repeat_ngram_window is not None:
            found["no_repeat_ngram_window"] = options.no_repeat_ngram_window
        if options.no_repeat_ngram_exempt_ids:
            found["no_repeat_ngram_exempt_ids"] = list(options.no_repeat_ngram_exempt_ids)
        SamplingParams(**found)
    except RequestError as error:  # nobody's request: an option
        raise ConfigError(error.message) from error
    return found


def shown_settings(defaults: dict[str, Any]) -> dict[str, Any]:
    """The same as they stand in a manifest: JSON."""
    rule = defaults.get("structured_outputs")
    return {**defaults, "structured_outputs": rule.json} if isinstance(rule, StructuredOutputsParams) else defaults


def _read_schema(path: Path) -> StructuredOutputsParams:
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(LIMITS.max_schema_chars + 1)  # one more says that it is too long
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{_OPTION}: {str(path)!r} cannot be read ({error})") from error
    try:
        return with_grammar(StructuredOutputsParams(json=text, origin=_OPTION))
    except RequestError as error:
        raise ConfigError(f"{error.message} ({path})") from error
