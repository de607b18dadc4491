"""Every file and stream that a job was given: found, told apart, and held while it runs.

No name may stand for two, nor for what the job keeps beside its files. Knows nothing of what is written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from npu_runner.batch.files.place import Place, find_place
from npu_runner.batch.files.taken_names import read_by, refuse_taken
from npu_runner.batch.job.options import BatchOptions
from npu_runner.config import RunnerConfig
from npu_runner.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where a job writes. A Destination enters the output and the error file."""

    output: Place
    error_file: Place | None
    report: Place | None
    summary: Place | None
    metrics_file: Place | None

    def __iter__(self) -> Iterator[Place]:
        return (place for place in self._all if place is not None)

    @property
    def _all(self) -> tuple[Place | None, ...]:
        return self.output, self.error_file, *self._beside

    @property
    def _beside(self) -> tuple[Place | None, ...]:
        return self.report, self.summary, self.metrics_file

    @contextlib.contextmanager
    def beside_the_answers(self) -> Iterator[None]:
        """Report, summary and metrics can be written, or it raises ConfigError; within, their streams are open."""
        with contextlib.ExitStack() as entered:
            for place in self._beside:
                if place is not None:
                    entered.enter_context(place)
            yield


def find_places(options: BatchOptions, config: RunnerConfig | None = None) -> Places:
    """Looks at every name before anything is begun. Raises ConfigError for a name that cannot be what it was given for.

    `config`: the files that it names are no places to write to; None: no model is used.
    """
    read = read_by(options, *([] if config is None else [config]))
    places = Places(
        output=find_place("output", options.output), error_file=_found("error_file", options.error_file),
        report=_found("report", options.report), summary=_found("summary", options.summary),
        metrics_file=_found("metrics_file", options.metrics_file))
    if places.metrics_file is not None and places.metrics_file.is_stream:
        raise ConfigError(f"{places.metrics_file.title}: is a stream, and it is replaced every other second; name a "
                          "file")
    if options.ordered and places.output.is_stream:
        raise ConfigError(f"ordered: {places.output.title} is a stream, whose rows go out as they finish and cannot be "
                          "sorted afterwards; name a file as output, or leave --ordered out and sort what comes out by "
                          "custom_id")
    refuse_taken(list(places), read, {})
    return places


def _found(option: str, name: Path | None) -> Place | None:
    return None if name is None else find_place(option, name)
