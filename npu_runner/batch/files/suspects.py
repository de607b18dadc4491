"""The rows of the step in which several ranks failed: the next run has to run them one at a time.

One rank finds the row that makes steps fail by itself and goes on. Several cannot: a rank that fails leaves the others
in a collective, and the job ends. The state tells the next run which rows to run alone, and the one after that which
to give up. Knows nothing of what rows ask for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from npu_runner.errors import EngineDeadError
from npu_runner.serving.blame import code_given_up, why_given_up


@dataclass(frozen=True, kw_only=True)
class Suspicion:
    """`num_deaths`: how often the job ended with this row alone in the step; `code`, `message`: why it is given up."""

    num_deaths: int = 0
    code: str | None = None
    message: str = ""


SuspectRows = Mapping[str, Suspicion]
"""Rows under suspicion, by custom_id."""


class Suspects:
    """The rows under suspicion while a run serves. `save` puts them into the state whenever one joins them.

    With `retry_errors` rows that an earlier run gave up are tried again, alone.
    """

    def __init__(self, earlier: SuspectRows, save: Callable[[SuspectRows], None] = lambda rows: None, *,
                 retry_errors: bool = False):
        self.rows = dict(earlier)
        self._save = save
        if retry_errors:
            self.rows |= {name: Suspicion() for name in self.rows if self.given_up(name) is not None}

    def given_up(self, custom_id: str) -> Suspicion | None:
        """Why this row is given up without being run; None if it is not."""
        found = self.rows.get(custom_id)
        return found if found is not None and found.code is not None else None

    def record_death(self, error: EngineDeadError) -> None:
        """Record the rows that the next run has to run alone, or to give up, after this death of the engine."""
        if len(error.request_ids) == 1:
            (name,) = error.request_ids
            num_deaths = self.rows.get(name, Suspicion()).num_deaths + 1
            code = code_given_up(error, num_deaths)
            self.rows[name] = Suspicion(num_deaths=num_deaths, code=code, message=why_given_up(error) if code else "")
        self.isolate(error.request_ids)

    def isolate(self, custom_ids: Iterable[str]) -> None:
        """Record that these rows have to run alone, in this run or the next."""
        for name in custom_ids:
            self.rows.setdefault(name, Suspicion())
        if self.rows:
            self._save(self.rows)
