"""What a job asks of the answers of all rows that say nothing else. Knows nothing of rows or how they are served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from npu_runner.batch.job.options import BatchOptions
from npu_runner.errors import ConfigError, RequestError
from npu_runner.grammars.compile import with_grammar
from npu_runner.request.limits import LIMITS
from npu_runner.request.structured_outputs import StructuredOutputsParams

_OPTION = "response_schema"


def answer_defaults(options: BatchOptions) -> dict[str, Any]:
    """Fields of SamplingParams. Raises ConfigError for a file that cannot be read or a schema that cannot be served."""
    found: dict[str, Any] = {}
    if options.response_schema is not None:
        found["structured_outputs"] = _read_schema(options.response_schema)
    if options.max_thinking_tokens is not None:
        found["max_thinking_tokens"] = options.max_thinking_tokens
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
