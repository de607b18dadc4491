"""`<output>.suspects.json`: the rows of the step in which several ranks failed, for the next run to run one at a time.

One rank finds the row that makes steps fail by itself and goes on. Several cannot: who fails leaves the others in a
collective, and the job ends. The next run knows from here whom to run alone, and the one after that whom to give up.
Killed at any moment, the old or the new file is there, whole. Knows nothing of what rows ask for.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from npu_runner.batch.files.durable import clear_file_errors, replacing
from npu_runner.batch.files.names import suspects_path
from npu_runner.errors import ConfigError, EngineDeadError
from npu_runner.serving.blame import code_given_up, why_given_up

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Suspicion:
    """`num_deaths`: how often the job ended with this row alone in the step; `code`, `message`: why it is given up."""

    num_deaths: int = 0
    code: str | None = None
    message: str = ""


class Suspects:
    """What is known of rows by custom_id. Without an output file (`path` None) it lasts as long as the job.

    With `retry_errors` rows that an earlier run gave up are tried again, alone.
    """

    def __init__(self, output: Path | None, *, overwrite: bool = False, retry_errors: bool = False):
        self._path = None if output is None else suspects_path(output)
        self._rows: dict[str, Suspicion] = {}
        if self._path is not None and not overwrite:  # what an earlier output says goes when that goes, by `clear`
            self._rows = _load(self._path)
        if retry_errors:
            self._rows |= {name: Suspicion() for name in self._rows if self.given_up(name) is not None}

    def names(self) -> list[str]:
        """The rows that have to run alone, or are given up."""
        return list(self._rows)

    def given_up(self, custom_id: str) -> Suspicion | None:
        """Why this row is given up without being run; None if it is not."""
        found = self._rows.get(custom_id)
        return found if found is not None and found.code is not None else None

    def record_death(self, error: EngineDeadError) -> None:
        """Note whom the next run has to run alone, or to give up, after the engine died like that."""
        if len(error.request_ids) == 1:
            (name,) = error.request_ids
            num_deaths = self._rows.get(name, Suspicion()).num_deaths + 1
            code = code_given_up(error, num_deaths)
            self._rows[name] = Suspicion(num_deaths=num_deaths, code=code, message=why_given_up(error) if code else "")
        self.isolate(error.request_ids)

    def isolate(self, custom_ids: Iterable[str]) -> None:
        """Note that these have to run alone, in this run or the next."""
        for name in custom_ids:
            self._rows.setdefault(name, Suspicion())
        if self._rows and self._path is not None:
            with clear_file_errors(f"suspects {self._path}"), replacing(self._path) as file:
                rows = {name: _to_json(row) for name, row in self._rows.items()}
                file.write(json.dumps({"format": FORMAT, "rows": rows}, indent=1).encode() + b"\n")

    def clear(self) -> None:
        """All rows are finished, or an earlier output is overwritten: nobody is under suspicion."""
        self._rows.clear()
        if self._path is not None:
            with clear_file_errors(f"suspects {self._path}"):
                self._path.unlink(missing_ok=True)


def _to_json(row: Suspicion) -> dict[str, Any]:
    """The names in the file, which stay whatever becomes of those in the code; `_from_json` reads the same."""
    return {"num_deaths": row.num_deaths, "code": row.code, "message": row.message}


def _from_json(fields: dict[str, Any]) -> Suspicion:
    return Suspicion(num_deaths=fields["num_deaths"], code=fields["code"], message=fields["message"])


def _load(path: Path) -> dict[str, Suspicion]:
    try:
        with clear_file_errors(f"suspects {path}"):
            if not path.exists():
                return {}
            fields = json.loads(path.read_bytes())
        if fields["format"] != FORMAT:
            raise ValueError("it is of another version of this program")
        return {str(name): _from_json(row) for name, row in fields["rows"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"suspects {path}: cannot be read ({error}); without it all rows run together") from error
