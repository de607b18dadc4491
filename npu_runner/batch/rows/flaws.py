"""Tells whether a result row has failed, and whether an answer is whole: one place for everybody who counts.

An answer is whole if it is not cut off, is no repetition and is not unparsed. Knows nothing of files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from npu_runner.batch.rows.endpoint import asks_for_json
from npu_runner.batch.rows.endpoints import texts_of
from npu_runner.batch.rows.flaw import WHOLE, Flaw
from npu_runner.batch.rows.openai_response import (
    FAULTS,
    UNPARSED,
    has_failed,
    is_cut_off,
    is_json,
    is_repetition,
)


def flaws_of(answer: Mapping[str, Any]) -> Flaw:
    """The flaws of a result row, as its line tells them."""
    if has_failed(answer):
        return Flaw.ERRORS
    with contextlib.suppress(*FAULTS):  # the answer is none of ours
        body = answer["response"]["body"]
        return Flaw.where(cut_off=is_cut_off(body), repetition=is_repetition(body), unparsed=UNPARSED in body)
    return WHOLE


def flaws_of_row(request: Mapping[str, Any], answer: Mapping[str, Any], *, has_rule_of_job: bool) -> Flaw:
    """The same, of an answer that an earlier version may have written: its line does not say that it is unparsed, but
    what was asked and the text do. An echo of token ids cannot be told from the text.

    `has_rule_of_job`: the job has a schema for rows without a rule of their own.
    """
    flaws, asked = flaws_of(answer), request.get("body")
    if flaws & (Flaw.ERRORS | Flaw.UNPARSED) or not isinstance(asked, dict):
        return flaws
    with contextlib.suppress(*FAULTS):  # as in flaws_of
        body = answer["response"]["body"]
        if not body.get("choices") or not asks_for_json(asked, has_rule_of_job=has_rule_of_job):
            return flaws
        echo = asked["prompt"] if asked.get("echo") else ""
        if isinstance(echo, str) and not all(is_json(text.removeprefix(echo)) for text in texts_of(body)):
            return flaws | Flaw.UNPARSED
    return flaws
