"""`npu-runner merge`: two outputs of one input become one file of answers, each row once, whole or not at all.

An answer counts more than a failure, and the first output more than the second. Of a row that was tried again with
another question, the whole answer counts. No line of either output is lost in silence. Knows nothing of what answers
say: rows of endpoints that this version does not know are copied as they are.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from npu_runner.batch.files.input_identity import changed_rows
from npu_runner.batch.files.output_scan import places_of
from npu_runner.batch.rows.flaw import WHOLE
from npu_runner.batch.rows.flaws import flaws_of
from npu_runner.batch.rows.openai_response import name_of_answer
from npu_runner.batch.rows.shape import parse_json
from npu_runner.errors import ConfigError
from npu_runner.request.limits import LIMITS
from npu_runner.tables.answer_files import AnswerFiles, Line
from npu_runner.tables.options import MergeOptions
from npu_runner.tables.places import find_outputs

_MAX_NAMED = 20
FAILED, AGAIN = "failed, and the other output has an answer", "is in the other output as well"
REPEATED, BROKEN = "stands there again, or failed and was answered since", "no result row"
NOT_WHOLE = "asks otherwise in the two inputs, and only the other output has a whole answer"


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
        files = [entered.enter_context(AnswerFiles(name, LIMITS.max_row_bytes)) for name in (first, second)]
        named: list[tuple[str, object]] = [("merged", options.output)]
        named += [] if options.dropped is None else [("dropped", options.dropped)]
        places = find_outputs(named, [pair for each in files for pair in each.read_names])  # type: ignore[arg-type]
        if os.path.samefile(first, second):
            raise ConfigError(f"{first} and {second}: are one file; name two outputs of one input")
        for each in files:
            each.scan(lambda _: 1)
            if options.dropped is None and (lines := each.broken + each.torn):
                more = f" and {len(lines) - 1} more lines" if len(lines) > 1 else ""
                raise ConfigError(f"{each.title_of(lines[0])}: line {lines[0].number}{more}: no result row; with "
                                  "--dropped FILE such lines go there, and the rows are merged")
        otherwise = _refuse_two_inputs(*files)
        is_better = _is_better_in_second(files[0], files[1], otherwise)
        kept = _kept(files[0], files[1], is_better)
        for place in places:
            entered.enter_context(place)
        streams = [entered.enter_context(place.writing()) for place in places]
        _write(files, kept, streams[0])
        dropped = list(_dropped(files, kept, is_better, streams[1] if options.dropped is not None else None))
    failed = sum(int(each.failed_A[is_kept].sum()) for each, is_kept in zip(files, kept, strict=True))
    return Merged(
        output=options.output, num_failed=failed, dropped=dropped,
        kept={each.name: int(is_kept.sum()) for each, is_kept in zip(files, kept, strict=True)},
        models={each.manifest.model_name for each in files if each.manifest is not None},
        unknown=[each.name for each in files if each.manifest is None], asked_otherwise=len(otherwise))


def _refuse_two_inputs(first: AnswerFiles, second: AnswerFiles) -> np.ndarray:
    """One input may have grown between the two, and rows may ask otherwise of which at most one output has a whole
    answer: those that --retry tries again. Returns their keys.

    Without a manifest at hand, a row in common is asked for.
    """
    if first.manifest is not None and second.manifest is not None:
        inputs = [first.manifest.input, second.manifest.input]
        shorter, longer = sorted((each.rows or b"" for each in inputs), key=len)
        if inputs[0] != inputs[1] and not (shorter and longer.startswith(shorter)):
            otherwise = None if not shorter else changed_rows(shorter, longer)
            keys = None if otherwise is None else _with_one_whole_answer(first, second, otherwise)
            if keys is None:
                raise ConfigError(f"{first.name} and {second.name}: their manifests say that their inputs differ, and "
                                  "not only in rows of which at most one answer is whole; a row's answers belong to "
                                  "what it asked")
            return keys
    elif len(first.keys_A) and len(second.keys_A) and not np.isin(first.keys_A, second.keys_A).any():
        raise ConfigError(f"{first.name} and {second.name}: have no row in common, and no manifests that say that they "
                          "are outputs of one input")
    return first.keys_A[:0]


def _with_one_whole_answer(first: AnswerFiles, second: AnswerFiles, names: np.ndarray) -> np.ndarray | None:
    """The keys of the answered rows with these names (first bytes of keys); None: one has two whole answers."""
    keys = np.union1d(first.keys_A, second.keys_A)
    keys = keys[np.isin(np.frombuffer(keys.tobytes(), dtype=np.uint64)[::2], names)]
    are_whole = [_are_whole(each, keys) for each in (first, second)]
    return None if (are_whole[0] & are_whole[1]).any() else keys


def _are_whole(file: AnswerFiles, keys: np.ndarray) -> np.ndarray:
    places = places_of(keys, file.keys_A).tolist()
    return np.array([place >= 0 and flaws_of(file.answer(place)) == WHOLE for place in places], dtype=bool)


def _is_better_in_second(first: AnswerFiles, second: AnswerFiles, otherwise: np.ndarray) -> np.ndarray:
    """Which answers of the first ask otherwise than those of the second, which are whole."""
    better: np.ndarray = np.isin(first.keys_A, otherwise[_are_whole(second, otherwise)])
    return better


def _kept(first: AnswerFiles, second: AnswerFiles, is_better: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which rows of each count. `is_better`: rows of the first in whose place those of the second count."""
    there = places_of(first.keys_A, second.keys_A)
    is_twice = there >= 0
    second_answers = is_twice & ~second.failed_A[there] if len(second.keys_A) else is_twice
    from_first = ~((first.failed_A & second_answers) | is_better)
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


def _dropped(files: list[AnswerFiles], kept: tuple[np.ndarray, np.ndarray], is_better: np.ndarray,
             out: BinaryIO | None) -> Iterator[Dropped]:
    """Everything that is not merged, which is written to `out` as well."""
    for number, (each, is_kept) in enumerate(zip(files, kept, strict=True)):
        other = files[1 - number]
        answered = other.keys_A[~other.failed_A]
        has_failed_alone = each.failed_A & np.isin(each.keys_A, answered)
        is_left = ~is_kept & ~has_failed_alone
        is_worse = is_left & is_better if number == 0 else np.zeros_like(is_left)
        for reason, rows in ((FAILED, ~is_kept & has_failed_alone), (NOT_WHOLE, is_worse),
                             (AGAIN, is_left & ~is_worse)):
            yield from _left_out(each, reason, int(rows.sum()), map(each.place, np.flatnonzero(rows).tolist()), out)
        yield from _left_out(each, REPEATED, len(each.repeated), each.repeated, out)
        others = each.broken + each.torn
        yield from _left_out(each, BROKEN, len(others), others, out)


def _left_out(file: AnswerFiles, reason: str, count: int, lines: Iterable[Line],
              out: BinaryIO | None) -> Iterator[Dropped]:
    names: list[str] = []
    for line in itertools.islice(lines, _MAX_NAMED) if out is None else lines:
        text = file.bytes_of(line).removesuffix(b"\n")
        if len(names) < _MAX_NAMED:
            is_row = reason != BROKEN
            names.append(repr(name_of_answer(parse_json(text.decode()))) if is_row else f"line {line.number}")
        if out is not None:
            out.write(text + b"\n")
    if count:
        yield Dropped(output=file.name, reason=reason, count=count,
                      names=", ".join(names + ["..."] * (count > len(names))))
