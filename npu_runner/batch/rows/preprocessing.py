"""Turns one row of the input into a prompt and its settings, or into an error. Runs in worker processes.

Imports neither torch nor transformers, which would cost each worker seconds and gigabytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from npu_runner.batch.rows.attempt import Change, seed_of
from npu_runner.batch.rows.endpoint import Prompts, RequestParams, RowBody
from npu_runner.batch.rows.openai_format import parse_row, read_json, refuse_half_characters
from npu_runner.batch.rows.shape import RowSource, name_of
from npu_runner.errors import RequestError
from npu_runner.prompts.media.media import MediaRules
from npu_runner.prompts.media.page_options import pages_in
from npu_runner.prompts.processor import ChatProcessor
from npu_runner.request.limits import LIMITS
from npu_runner.request.pooling_params import PoolingParams
from npu_runner.request.prompt_inputs import PromptInputs
from npu_runner.request.sampling_params import SamplingParams
from npu_runner.serving.endpoint import Prepared
from npu_runner.serving.replica import RawRow


@dataclass(frozen=True, kw_only=True)
class RowPreprocessor:
    """Prepares the rows of a job. Picklable."""

    source: RowSource
    processor: ChatProcessor
    media: MediaRules = field(default_factory=MediaRules)
    generation_defaults: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    max_row_bytes: int = LIMITS.max_row_bytes
    has_ladder: bool = False
    """Later attempts may follow the first one, so that a row must have one answer of text."""

    def __call__(self, row: RawRow) -> Prepared:
        """Raises JobError when the row has changed since the job started."""
        if row.num_bytes > self.max_row_bytes:
            message = f"the row has {row.num_bytes} bytes, at most {self.max_row_bytes} are allowed (max_row_bytes)"
            return self.failed(row, RequestError(message, "row_too_long"))
        line = self.source.read(row)
        # The name is known before the row is parsed, so that an error names its row.
        custom_id = name_of(line)
        try:
            return self._prepare(row, line, custom_id)
        except RequestError as error:
            return Prepared(number=row.number, line=row.line, name=custom_id, error=error)

    def failed(self, row: RawRow, error: RequestError) -> Prepared:
        """A row that could not be parsed; its name is searched for nevertheless."""
        return Prepared(number=row.number, line=row.line, name=self.source.name(row), error=error)

    def pages_of(self, row: RawRow) -> list[tuple[str, int]]:
        """The pages of documents that a row shows, as (document, page); none of a row that cannot be parsed."""
        try:
            return list(pages_in(read_json(self.source.read(row))))
        except RequestError:
            return []

    def _prepare(self, row: RawRow, line: bytes, custom_id: str | None) -> Prepared:
        fields = read_json(line)
        refuse_half_characters(line, fields)
        change: Change | None = row.change
        if change is not None and custom_id is not None:
            fields = change.applied(fields, seed=seed_of(self.seed, custom_id, change.number))
        body = parse_row(fields)
        if custom_id is None or fields["custom_id"] != custom_id:
            message = "the row's outermost object is too large to be searched for its name; leave out the spaces in it"
            raise RequestError(message, "custom_id_not_found", "custom_id")
        # Settings first: a wrong number must not cost the decoding of sixty images.
        self.processor.check_task(body.requested_task)
        params: Any = body.to_params(self.generation_defaults, seed_of(self.seed, custom_id))
        if self.has_ladder:
            _refuse_for_ladder(params, fields["url"])
        params = self.processor.resolve_params(body.with_forced_calls(params, self.processor))
        made, form = body.prepare(self.processor, self.media, params)
        # An answer does not repeat its prompt, so the text does not travel.
        prompt: Prompts = made.without_text() if isinstance(made, PromptInputs) else tuple(
            each.without_text() for each in made)
        label = str((body.metadata or {}).get("label", ""))
        return Prepared(number=row.number, line=row.line, name=custom_id, prompt=prompt, params=params,
                        form=replace(form, expected=body.expected, label=label),
                        may_be_copied=has_one_answer(body, params))


def has_one_answer(body: RowBody, params: RequestParams) -> bool:
    """Whether each row with this body has the same answer: it is pooled, greedy, or has a seed of its own."""
    return isinstance(params, PoolingParams) or params.is_greedy or getattr(body, "seed", None) is not None


def _refuse_for_ladder(params: RequestParams, url: str) -> None:
    name, value = ("n", params.n) if isinstance(params, SamplingParams) else ("url", url)
    if value != 1:
        raise RequestError(f"{name}: it is {value}, and the job has a ladder, which judges one answer of text; answer "
                           "such rows in a job without --ladder", "unsupported_parameter", name)
