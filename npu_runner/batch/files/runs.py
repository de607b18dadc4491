"""The runs of a job, as its state and status have them: JSON that can be added up, with fields of later versions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from npu_runner.batch.rows.counts import ROWS, Counts

Run: TypeAlias = Mapping[str, Any]
"""The figures of one run; `run` is its id. `end` is None while it goes on, and of a killed run."""
MAX_RUNS = 100
"""Runs that a state lists; it has the sum of those before."""
FINISHED, INTERRUPTED = "finished", "interrupted"

Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Number = Annotated[float, Field(ge=0, lt=1 << 63, allow_inf_nan=False)]
Text = Annotated[str, AfterValidator(lambda text: text.encode().decode())]
"""Text without half of a surrogate pair, which cannot be printed."""
_END_OF_CALENDAR = 253_402_300_800
"""The first second of the year 10000."""


class _Sums(BaseModel):
    """The figures that are added over runs."""

    model_config = ConfigDict(strict=True)

    seconds: dict[str, Number]
    computed: dict[str, Count]
    tally: dict[str, Count | dict[str, Count]]

    @model_validator(mode="after")
    def _can_be_added(self) -> _Sums:
        """A name has a number in each run, or a mapping in each run."""
        if not (self.seconds.keys() >= {"start", "serve", "device"} and "num_answered" in self.tally):
            raise ValueError("a sum is missing")
        if any(isinstance(count, int) != name.startswith("num_") for name, count in self.tally.items()):
            raise ValueError("names of numbers begin with num_, and no others do")
        return self


class _Run(_Sums):
    run: Text
    started: Annotated[int, Field(ge=0, lt=_END_OF_CALENDAR)]
    npu_runner: Text
    platform: Text | None
    devices: Count
    rows: Count | None
    end: Text | None


class _Older(_Sums):
    runs: Count


def _is_valid(found: Any, kind: type[_Sums]) -> bool:
    try:
        kind.model_validate_json(json.dumps(found, allow_nan=False))  # the fields that no model names are kept, too
    except (ValueError, RecursionError):  # pydantic's errors are ValueErrors
        return False
    return True


def has_served(run: Run) -> bool:
    """False: the run was ended before its first row."""
    return bool(run["seconds"]["serve"] or run["tally"]["num_answered"] or run["tally"].get("num_failed"))


@dataclass(frozen=True)
class Runs:
    """The runs of one output in the order in which they began: the last ones, and the sum of those before."""

    last: tuple[Run, ...] = ()
    older: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, last: Iterable[Any], older: Any = None) -> Runs:
        """Runs that were edited into something else are left out: figures are lost by it, never rows."""
        kept = cls(older=older if _is_valid(older, _Older) else {})
        return kept.with_runs(run for run in last if _is_valid(run, _Run))

    @property
    def last_id(self) -> str | None:
        return str(self.last[-1]["run"]) if self.last else None

    def __len__(self) -> int:
        return len(self.last) + int(self.older.get("runs", 0))

    def with_runs(self, more: Iterable[Run]) -> Runs:
        """These runs as well. One that is there already is replaced, unless its end is known."""
        runs, older = {run["run"]: run for run in self.last}, self.older
        for run in more:
            known = runs.get(run["run"])
            if known is None or known["end"] is None:
                runs[run["run"]] = run  # a dict keeps the place of the first
        for name in list(runs)[: max(0, len(runs) - MAX_RUNS)]:
            run = runs.pop(name)
            older = {"runs": older.get("runs", 0) + 1,
                     **{part: _added([older.get(part, {}), run[part]]) for part in _Sums.model_fields}}
        return Runs(tuple(runs.values()), older)

    def sums(self, part: str) -> dict[str, Any]:
        """Sums over all runs of "seconds", "computed" or "tally"."""
        return _added([self.older.get(part, {}), *(run[part] for run in self.last)])

    def counts(self, rows: Counts) -> Counts:
        """`rows` as they stand in the output, and the work that the runs have counted."""
        counts = Counts.from_json({**self.sums("tally"), **{name: vars(rows)[name] for name in ROWS}})
        # Lines of earlier versions do not say that they are unparsed: only their run does.
        counts.num_unparsed += sum(run["tally"].get("num_unparsed", 0) for run in self.last
                                   if "num_not_whole" not in run["tally"])
        return counts


def _added(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Sums by name; a mapping is added by its own names."""
    sums: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            before = sums.get(name)
            if isinstance(value, Mapping):
                sums[name] = _added([before or {}, value])
            else:
                sums[name] = (before or 0) + value
    return sums
