"""Decides which row caused a death, for jobs, `LLM` and Ray Data alike. Knows nothing of processes or of a row's data.

A row that was under way in MAX_DEATHS deaths of replicas runs alone from then on. A row that was alone under way is
given up at once if its step failed with an error. If a rank or a replica was killed, or a device failed, the cause may
lie outside; it is given up at the MAX_DEATHS-th death.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from npu_runner.errors import EngineDeadError

MAX_DEATHS = 2


@dataclass(frozen=True, kw_only=True)
class GivenUp:
    """A row that is given up: no replica gets it again."""

    index: int
    code: str
    message: str


def code_given_up(error: EngineDeadError, num_deaths_alone: int) -> str | None:
    """The error code of a row that was alone under way in `num_deaths_alone` deaths; None: try it again. `error`: the
    last death."""
    return error.blame or ("request_failed" if num_deaths_alone >= MAX_DEATHS else None)


def why_given_up(error: EngineDeadError) -> str:
    return f"alone in its step, this request ended the engine: {str(error).partition(chr(10))[0]}"


class LoneDeaths:
    """Deaths in which a row was alone under way, for callers that remember nothing beyond their process."""

    def __init__(self) -> None:
        self._num_deaths: Counter[int] = Counter()

    def record_death(self, index: int, error: EngineDeadError) -> GivenUp | None:
        """The verdict on the row, if it is given up."""
        self._num_deaths[index] += 1
        code = code_given_up(error, self._num_deaths[index])
        return None if code is None else GivenUp(index=index, code=code, message=why_given_up(error))
