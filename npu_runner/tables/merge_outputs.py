"""`npu-runner merge`: two outputs of one input become one file of answers, each row once, whole or not at all.

A whole answer counts more than another one, an answer more than a failure, and else the first output more than the
second: that is the law of AnswerFile for the lines of both. No line of either output is lost in silence. Knows nothing
of what answers say: rows of endpoints that this version does not know are copied as they are.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from npu_runner.batch.files.answer_file import Line, lines_that_count, parse_result
from npu_runner.batch.files.input_identity import changed_rows
from npu_runner.batch.rows.flaw import WHOLE
from npu_runner.batch.rows.openai_response import name_of_answer
from npu_runner.errors import ConfigError
from npu_runner.request.limits import LIMITS
from npu_runner.tables.job_output import JobOutput
from npu_runner.tables.options import MergeOptions
from npu_runner.tables.places import find_outputs

_MAX_NAMED = 20
FAILED, AGAIN = "failed, and the other output has an answer", "is in the other output as well"
REPEATED, BROKEN = "stands there again, or failed and was answered since", "no result row"
NOT_WHOLE = "is not whole, and the other output has a whole answer"


@dataclass(frozen=True, kw_only=True)
class Dropped:
    """Lines of one output that are left out for one reason. `names`: of the first of them."""

    output: str
    reason: str
    count: int
    names: str

    def to_line(self) -> str:
        return f"dropped   {self.count} of {self.output} ({self.reason}): {self.names}"


@dataclass(frozen=True, kw_only=True)
class Merged:
    """What was made, for the words at the end."""

    output: str
    kept: dict[str, int]
    """Rows of each output."""
    num_failed: int
    dropped: list[Dropped]
    models: set[str]
    unknown: list[str]
    """Outputs without a manifest."""
    asked_otherwise: int
    """Rows that ask otherwise in the two inputs."""

    def to_lines(self) -> list[str]:
        kept = ", ".join(f"{count} of {name}" for name, count in self.kept.items())
        lines = [f"merged    {self.output}: {sum(self.kept.values())} rows ({kept}), {self.num_failed} of them failed"]
        if len(self.models) > 1:
            lines.append(f"models    the outputs are of different ones: {', '.join(sorted(self.models))}")
        if self.unknown:
            lines.append(f"inputs    {' and '.join(self.unknown)}: no manifest says that both outputs are of one "
                         "input; what two rows of one name asked was not compared")
        if self.asked_otherwise:
            lines.append(f"inputs    {self.asked_otherwise} rows ask otherwise in the two: they were tried again with "
                         "--retry, or may be, as at most one of the two answers is whole")
        return lines + [each.to_line() for each in self.dropped]


def merge(first: str, second: str, options: MergeOptions) -> Merged:
    """Raises ConfigError where both are one file, or outputs of two inputs, as their manifests have it, and for a line
    that is no result row where `options.dropped` does not say where it goes."""
    with contextlib.ExitStack() as entered:
        files = [entered.enter_context(JobOutput(name, LIMITS.max_row_bytes)) for name in (first, second)]
        places = find_outputs([("merged", options.output), ("dropped", options.dropped)],
                              [pair for each in files for pair in each.read_names])
        if os.path.samefile(first, second):
            raise ConfigError(f"{first} and {second}: are one file; name two outputs of one input")
        for each in files:
            each.scan()
            each.refuse_other_files()
            if options.dropped is None and (lines := each.broken + each.torn):
                more = f" and {len(lines) - 1} more lines" if len(lines) > 1 else ""
                raise ConfigError(f"{each.titles[lines[0].file]}: line {lines[0].number}{more}: no result row; with "
                                  "--dropped FILE such lines go there, and the rows are merged")
        num_otherwise = _refuse_two_inputs(*files)
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
        models={each.manifest.model_name for each in files if each.manifest is not None},
        unknown=[each.name for each in files if each.manifest is None], asked_otherwise=num_otherwise)


def _refuse_two_inputs(first: JobOutput, second: JobOutput) -> int:
    """One input may have grown between the two, and rows may ask otherwise of which at most one output has a whole
    answer: those that --retry tries again. Returns their number.

    Without a manifest at hand, a row in common is asked for.
    """
    if first.manifest is not None and second.manifest is not None:
        inputs = [first.manifest.input, second.manifest.input]
        shorter, longer = sorted((each.rows or b"" for each in inputs), key=len)
        if inputs[0] != inputs[1] and not (shorter and longer.startswith(shorter)):
            otherwise = None if not shorter else changed_rows(shorter, longer)
            if otherwise is not None:
                keys = np.union1d(first.keys_A, second.keys_A)
                keys = keys[np.isin(np.frombuffer(keys.tobytes(), dtype=np.uint64)[::2], otherwise)]
                if not (_are_whole(first, keys) & _are_whole(second, keys)).any():
                    return len(keys)
            raise ConfigError(f"{first.name} and {second.name}: their manifests say that their inputs differ, and "
                              "not only in rows of which at most one answer is whole; a row's answers belong to "
                              "what it asked")
    elif first.num_rows and second.num_rows and not np.isin(first.keys_A, second.keys_A).any():
        raise ConfigError(f"{first.name} and {second.name}: have no row in common, and no manifests that say that they "
                          "are outputs of one input")
    return 0


def _are_whole(file: JobOutput, keys: np.ndarray) -> np.ndarray:
    are_whole: np.ndarray = np.isin(keys, file.keys_A[file.flaws_A == WHOLE])
    return are_whole


def _kept(first: JobOutput, second: JobOutput) -> tuple[np.ndarray, np.ndarray]:
    """Which rows of each count."""
    keys, flaws = (np.concatenate([getattr(each, name) for each in (first, second)]) for name in ("keys_A", "flaws_A"))
    is_kept = np.zeros(len(keys), dtype=bool)
    is_kept[lines_that_count(keys, flaws)] = True
    return is_kept[: first.num_rows], is_kept[first.num_rows :]


def _write(files: list[JobOutput], kept: tuple[np.ndarray, np.ndarray], out: BinaryIO) -> None:
    """In the order of the first output, each failed row of it in its place; what only the second has comes behind."""
    first, second = files
    there = second.find(first.keys_A)
    for place, is_kept in enumerate(kept[0].tolist()):
        out.write(first.data(place) if is_kept else second.data(int(there[place])))
    for place in np.flatnonzero(kept[1] & ~np.isin(second.keys_A, first.keys_A)).tolist():
        out.write(second.data(place))


def _dropped(files: list[JobOutput], kept: tuple[np.ndarray, np.ndarray], out: BinaryIO | None) -> Iterator[Dropped]:
    """Everything that is not merged, which is written to `out` as well."""
    for number, (each, is_kept) in enumerate(zip(files, kept, strict=True)):
        other = files[1 - number]
        is_worse = ~is_kept & np.isin(each.keys_A, other.keys_A[~other.failed_A]) & each.failed_A
        is_flawed = ~is_kept & ~is_worse & _are_whole(other, each.keys_A) & (each.flaws_A != WHOLE)
        for reason, rows in ((FAILED, is_worse), (NOT_WHOLE, is_flawed), (AGAIN, ~is_kept & ~is_worse & ~is_flawed)):
            yield from _left_out(each, reason, int(rows.sum()), map(each.line, np.flatnonzero(rows).tolist()), out)
        yield from _left_out(each, REPEATED, len(each.repeated), each.repeated, out)
        others = each.broken + each.torn
        yield from _left_out(each, BROKEN, len(others), others, out)


def _left_out(file: JobOutput, reason: str, count: int, lines: Iterable[Line],
              out: BinaryIO | None) -> Iterator[Dropped]:
    names: list[str] = []
    for line in itertools.islice(lines, _MAX_NAMED) if out is None else lines:
        data = file.data_at(line)
        if len(names) < _MAX_NAMED:
            found = parse_result(data)
            names.append(f"line {line.number}" if found is None else repr(name_of_answer(found.fields)))
        if out is not None:
            out.write(data.removesuffix(b"\n") + b"\n")
    if count:
        yield Dropped(output=file.name, reason=reason, count=count,
                      names=", ".join(names + ["..."] * (count > len(names))))
