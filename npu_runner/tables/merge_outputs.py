"""`npu-runner merge`: two outputs of one input become one file of answers, each row once, whole or not at all.

An answer counts more than a failure, and the first output more than the second. Knows nothing of what answers say.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from npu_runner.batch.files.output_scan import places_of
from npu_runner.batch.rows.openai_response import name_of_answer
from npu_runner.errors import ConfigError
from npu_runner.request.limits import LIMITS
from npu_runner.tables.answer_cells import num_cells
from npu_runner.tables.answer_files import AnswerFiles
from npu_runner.tables.options import MergeOptions
from npu_runner.tables.places import find_outputs

_MAX_NAMED = 20
FAILED, AGAIN = "failed, and the other output has an answer", "is in the other output as well"


@dataclass(frozen=True, kw_only=True)
class Dropped:
    """Rows of one output that are left out for one reason. `names`: of the first of them."""

    output: str
    reason: str
    count: int
    names: list[str]

    def to_line(self) -> str:
        named = ", ".join(map(repr, self.names)) + (", ..." if self.count > len(self.names) else "")
        return f"dropped   {self.count} of {self.output} ({self.reason}): {named}"


@dataclass(frozen=True, kw_only=True)
class Merged:
    """What was made, for the words at the end."""

    output: str
    kept: dict[str, int]
    """Rows of each output."""
    num_failed: int
    dropped: list[Dropped]
    models: set[str]

    def to_lines(self) -> list[str]:
        kept = ", ".join(f"{count} of {name}" for name, count in self.kept.items())
        lines = [f"merged    {self.output}: {sum(self.kept.values())} rows ({kept}), {self.num_failed} of them failed"]
        if len(self.models) > 1:
            lines.append(f"models    the outputs are of different ones: {', '.join(sorted(self.models))}")
        return lines + [each.to_line() for each in self.dropped]


def merge(first: str, second: str, options: MergeOptions) -> Merged:
    """Raises ConfigError where both are one file, or outputs of two inputs, as their manifests have it."""
    with contextlib.ExitStack() as entered:
        files = [entered.enter_context(AnswerFiles(name, LIMITS.max_row_bytes)) for name in (first, second)]
        named: list[tuple[str, object]] = [("merged", options.output)]
        named += [] if options.dropped is None else [("dropped", options.dropped)]
        places = find_outputs(named, [pair for each in files for pair in each.read_names])  # type: ignore[arg-type]
        if os.path.samefile(first, second):
            raise ConfigError(f"{first} and {second}: are one file; name two outputs of one input")
        for each in files:
            each.scan(num_cells)
        _refuse_two_inputs(*files)
        kept = _kept(*files)
        for place in places:
            entered.enter_context(place)
        streams = [entered.enter_context(place.writing()) for place in places]
        _write(files, kept, streams[0])
        dropped = list(_dropped(files, kept, streams[1] if options.dropped is not None else None))
    failed = sum(int(each.failed_A[is_kept].sum()) for each, is_kept in zip(files, kept, strict=True))
    return Merged(
        output=options.output, num_failed=failed, dropped=dropped,
        kept={each.name: int(is_kept.sum()) for each, is_kept in zip(files, kept, strict=True)},
        models={each.manifest.model_name for each in files if each.manifest is not None})


def _refuse_two_inputs(first: AnswerFiles, second: AnswerFiles) -> None:
    """One input may have grown between the two. Without a manifest at hand, a row in common is asked for."""
    if first.manifest is not None and second.manifest is not None:
        inputs = [first.manifest.input, second.manifest.input]
        shorter, longer = sorted((each.rows or b"" for each in inputs), key=len)
        if inputs[0] != inputs[1] and not (shorter and longer.startswith(shorter)):
            raise ConfigError(f"{first.name} and {second.name}: their manifests say that their inputs differ; a row's "
                              "answers belong to what it asked")
    elif len(first.keys_A) and len(second.keys_A) and not np.isin(first.keys_A, second.keys_A).any():
        raise ConfigError(f"{first.name} and {second.name}: have no row in common, and no manifests that say that they "
                          "are outputs of one input")


def _kept(first: AnswerFiles, second: AnswerFiles) -> tuple[np.ndarray, np.ndarray]:
    """Which rows of each count."""
    there = places_of(first.keys_A, second.keys_A)
    is_twice = there >= 0
    second_answers = is_twice & ~second.failed_A[there] if len(second.keys_A) else is_twice
    from_first = ~(first.failed_A & second_answers)
    from_second = np.ones(len(second.keys_A), dtype=bool)
    from_second[there[is_twice & from_first]] = False
    return from_first, from_second


def _write(files: list[AnswerFiles], kept: tuple[np.ndarray, np.ndarray], out: BinaryIO) -> None:
    """In the order of the first output, each failed row of it in its place; what only the second has comes behind."""
    first, second = files
    there = places_of(first.keys_A, second.keys_A)
    for place, is_kept in enumerate(kept[0].tolist()):
        out.write(first.line(place) if is_kept else second.line(int(there[place])))
    for place in np.flatnonzero(kept[1] & ~np.isin(second.keys_A, first.keys_A)).tolist():
        out.write(second.line(place))


def _dropped(files: list[AnswerFiles], kept: tuple[np.ndarray, np.ndarray], out: BinaryIO | None) -> Iterator[Dropped]:
    for number, (each, is_kept) in enumerate(zip(files, kept, strict=True)):
        other = files[1 - number]
        answered = other.keys_A[~other.failed_A]
        has_failed_alone = each.failed_A & np.isin(each.keys_A, answered)
        for reason, chosen in ((FAILED, ~is_kept & has_failed_alone), (AGAIN, ~is_kept & ~has_failed_alone)):
            places = np.flatnonzero(chosen).tolist()
            for place in places if out is not None else []:
                out.write(each.line(place))  # type: ignore[union-attr]
            if places:
                names = [name_of_answer(each.answer(place)) for place in places[:_MAX_NAMED]]
                yield Dropped(output=each.name, reason=reason, count=len(places), names=names)
