"""Every file and stream that a job was given: found, told apart, and held while it runs.

No name may stand for two, nor for what the job keeps beside its files. Knows nothing of what is written.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from npu_runner.batch.files.folder_place import FolderPlace, find_folder
from npu_runner.batch.files.input_file import STANDARD_STREAM
from npu_runner.batch.files.place import Place, find_place
from npu_runner.batch.files.taken_names import Named, read_by, refuse_taken
from npu_runner.batch.job.options import BatchOptions
from npu_runner.batch.report.choice import MAX_CARDS_OF_ONE_FILE
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
        report=_found_report(options), summary=_found("summary", options.summary),
        metrics_file=_found("metrics_file", options.metrics_file))
    _refuse_streams(places, options)
    _refuse_within(places.report, places, read)
    refuse_taken(list(places), read, {})
    return places


def _found(option: str, name: Path | None) -> Place | None:
    return None if name is None else find_place(option, name)


def _found_report(options: BatchOptions) -> Place | None:
    """A file or a stream; of more rows than one page shows, or where a folder has the name, a folder."""
    if options.report is None:
        return None
    if options.report_rows > MAX_CARDS_OF_ONE_FILE:
        reason = f"with report_rows {options.report_rows} the report is a folder of pages"
        return find_folder("report", options.report, reason=f"{reason} (one file shows {MAX_CARDS_OF_ONE_FILE} rows)")
    if options.report.is_dir():
        return find_folder("report", options.report, reason="it was a folder a moment ago")
    return find_place("report", options.report)


def _refuse_streams(places: Places, options: BatchOptions) -> None:
    """Raises ConfigError where a file is needed: what is sorted at the end, or replaced while the job runs."""
    if options.ordered and places.output.is_stream:
        raise ConfigError(f"ordered: {places.output.title} is a stream, whose rows go out as they finish and cannot be "
                          "sorted afterwards; name a file as output, or leave --ordered out and sort what comes out by "
                          "custom_id")
    replaced = [(places.metrics_file, "it is replaced every other second")]
    if options.report_every is not None:
        replaced.append((places.report, "with report_every it is replaced while the job runs"))
    for place, reason in replaced:
        if place is not None and place.is_stream:
            raise ConfigError(f"{place.title}: is a stream, and {reason}; name a file")


def _refuse_within(folder: Place | None, places: Places, read: Sequence[Named]) -> None:
    """What is in a report's folder is the report's."""
    if not isinstance(folder, FolderPlace):
        return
    inside = [(option, os.path.realpath(name)) for option, name in read if name is not None and name != STANDARD_STREAM]
    inside += [(place.option, str(place.path)) for place in places if place.path is not None]
    for option, name in inside:
        if folder.holds(Path(name)):
            raise ConfigError(f"{folder.title}: is the folder that holds the {option}, {name}; a report needs one of "
                              "its own")
