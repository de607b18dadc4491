"""Turns one row of the input into a prompt and its settings, or into the error it deserves. Runs in worker processes.

Imports neither torch nor transformers, which would cost each worker seconds and gigabytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from npu_runner.batch.files.input_file import MAX_ROW_BYTES, InputRow
from npu_runner.batch.rows.openai_format import custom_id_of, parse_row, read_json, refuse_half_characters
from npu_runner.batch.rows.openai_response import RowError
from npu_runner.errors import RequestError
from npu_runner.multimodal.inputs import PromptInputs
from npu_runner.multimodal.media import resolve_media
from npu_runner.sampling_params import SamplingParams


@dataclass(frozen=True, kw_only=True)
class PreparedRow:
    """A row that the engine can take. `model`: what the row calls it; `expected`: the right answer, if it knows one."""

    custom_id: str
    model: str | None
    expected: str | None
    params: SamplingParams
    prompt: PromptInputs


@dataclass(frozen=True, kw_only=True)
class RejectedRow:
    """A row that cannot be served. `custom_id` is None when it has no usable one."""

    custom_id: str | None
    error: RowError


@dataclass(frozen=True, kw_only=True)
class RowPreprocessor:
    """What every row of a job is prepared with. Picklable; `processor` is a ChatProcessor or does as one does."""

    processor: Callable[[list[dict[str, Any]]], PromptInputs]
    allowed_media_dir: Path | None = None
    generation_defaults: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    def __call__(self, row: InputRow) -> PreparedRow | RejectedRow:
        custom_id = None
        try:
            if row.is_too_long:
                raise RequestError(f"the row is longer than {MAX_ROW_BYTES >> 20} MiB", "row_too_long")
            fields = read_json(row.data)
            custom_id = custom_id_of(fields)
            refuse_half_characters(row.data, fields)
            return self._prepare(fields)
        except RequestError as error:
            return RejectedRow(
                custom_id=custom_id, error=RowError(code=error.code, message=error.message, param=error.param)
            )

    def _prepare(self, fields: dict[str, Any]) -> PreparedRow:
        row = parse_row(fields)
        # Settings first: a wrong number must not cost the decoding of sixty pictures.
        params = row.body.to_sampling_params(self.generation_defaults, _seed_of(self.seed, row.custom_id))
        conversation = resolve_media(row.body.to_conversation(), self.allowed_media_dir)
        return PreparedRow(
            custom_id=row.custom_id,
            model=row.body.model,
            expected=row.body.expected,
            params=params,
            prompt=self.processor(conversation),
        )


def _seed_of(job_seed: int, custom_id: str) -> int:
    """A row without a seed draws the same in every run of the job, whatever ran before it."""
    digest = hashlib.blake2b(f"{job_seed} {custom_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2  # seed + index of each of n completions stays within 64 bits
