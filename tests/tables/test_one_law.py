"""Which of several lines of a row counts is one law for job, table, merge, report, status and summary."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npu_runner.batch.files.answer_file import AnswerFile, lines_that_count
from npu_runner.batch.files.input_file import InputFile
from npu_runner.batch.files.joined import Joined
from npu_runner.batch.files.names import status_path
from npu_runner.batch.files.row_book import keys_array
from npu_runner.batch.rows.flaw import WHOLE, Flaw
from npu_runner.reports.status import status_of
from npu_runner.reports.summary import PastJob
from npu_runner.tables.merge_outputs import merge
from npu_runner.tables.options import MergeOptions
from tests.batch.job_folder import Job
from tests.batch.scripted import row, write_rows
from tests.tables.made import answered, completion, failed, table

LAW: list[tuple[list[Flaw], int]] = [
    ([WHOLE, WHOLE], 0),
    ([Flaw.CUT_OFF, WHOLE], 1),
    ([WHOLE, Flaw.CUT_OFF], 0),
    ([Flaw.CUT_OFF, Flaw.UNPARSED], 0),
    ([Flaw.ERRORS, WHOLE, WHOLE], 1),
    ([Flaw.ERRORS, Flaw.CUT_OFF], 1),
    ([Flaw.CUT_OFF, Flaw.ERRORS], 0),
    ([Flaw.ERRORS, Flaw.ERRORS], 0),
    ([Flaw.ERRORS, Flaw.CUT_OFF, Flaw.REPETITION, WHOLE], 3),
]


@pytest.mark.parametrize(("flaws", "place"), LAW)
def test_a_whole_answer_counts_else_an_answer_else_the_first(flaws: list[Flaw], place: int) -> None:
    """Lines of another row stand between them."""
    keys = keys_array(b"".join(key * 16 for _ in flaws for key in (b"a", b"b")))
    both = np.array([flaw for flaw in flaws for _ in "ab"], dtype=np.uint8)
    assert lines_that_count(keys, both).tolist() == [2 * place, 2 * place + 1]


def lines(name: str) -> dict[str, bytes]:
    """All kinds of lines that somebody may have put together."""
    whole = answered(name, completion(f"whole {name}"))
    return {
        "whole": whole,
        "again": answered(name, completion(f"again {name}")),
        "cut off": answered(name, completion(f"cut {name}", finish_reason="length")),
        "failed": failed(name, "bad"),
        "status": whole.replace(b'"status_code":200', b'"status_code":500'),
        "no error": whole.replace(b',"error":null', b"").replace(b"whole", b"no error"),
        "marked": b"\xef\xbb\xbf" + whole.replace(b"whole", b"marked"),
        "no row": b'{"custom_id": "%s"' % name.encode() + b"\n",
        "zeros": b"\0" * 20 + b"\n",
    }


RANKS = {"whole": 0, "again": 0, "no error": 0, "marked": 0, "cut off": 1, "failed": 2, "status": 2}
CASES = [kinds for count in (1, 2) for kinds in itertools.permutations(RANKS, count)]
CASES += [("zeros", *kinds, "no row") for kinds in itertools.permutations(("failed", "cut off", "again", "whole"))]


def shown_text(line: bytes) -> str | None:
    item = json.loads(line.decode("utf-8-sig"))
    is_answer = item.get("error") is None and item["response"]["status_code"] == 200
    return item["response"]["body"]["choices"][0]["message"]["content"] if is_answer else None


@pytest.mark.parametrize("has_error_file", [False, True])
def test_all_six_who_read_answers_agree(tmp_path: Path, has_error_file: bool) -> None:
    """With an error file the lines of each row stand in both by turns, and a torn line ends each."""
    job, errors = Job(tmp_path / "job"), tmp_path / "job" / "errors.jsonl"
    options: dict[str, Any] = {"error_file": errors} if has_error_file else {}
    write_rows(job.input, [row(f"r{number}") for number in range(len(CASES))])
    job.run(**options)
    parts, expected = (b"", b""), dict[str, bytes]()
    for number, kinds in enumerate(CASES):
        made = lines(f"r{number}")
        files = [index % 2 if has_error_file else 0 for index in range(len(kinds))]
        in_order = sorted(range(len(kinds)), key=lambda index: (files[index], index))
        parts = tuple(part + b"".join(made[kind] for kind, file in zip(kinds, files, strict=True) if file == which)
                      for which, part in enumerate(parts))  # fmt: skip
        best = min((kinds[index] for index in in_order if kinds[index] in RANKS), key=lambda kind: RANKS[kind])
        expected[f"r{number}"] = made[best]
    torn = answered("r0", completion("torn"))[:-9]
    job.output.write_bytes(parts[0] + torn)
    if has_error_file:
        errors.write_bytes(parts[1] + torn)
    texts = {name: shown_text(line) for name, line in expected.items()}
    num_failed = list(texts.values()).count(None)

    made_table = table(job.output, tmp_path / "t.jsonl", rows=job.input)
    shown = [json.loads(line) for line in (tmp_path / "t.jsonl").read_bytes().splitlines()]
    assert {line["custom_id"]: line["text"] for line in shown} == texts
    assert (made_table.num_answers, made_table.num_failed) == (len(CASES), num_failed)

    with InputFile(str(job.input)) as file, AnswerFile([job.output, errors]) as answers:
        joined = Joined(file, file.scan(), answers.scan(), 1 << 20)
        pairs = list(joined.pairs(joined.places))
    assert [request["custom_id"] for request, _ in pairs] == list(texts)
    assert [result for _, result in pairs] == [json.loads(line.decode("utf-8-sig")) for line in expected.values()]

    totals = PastJob(str(job.output)).totals(None)
    assert (totals.rows.num_done, totals.rows.num_failed) == (len(CASES), num_failed)
    status_path(job.output).unlink()
    told = status_of(str(job.output)).to_json()["rows"]
    assert (told["done"], told["failed"]) == (len(CASES), num_failed)

    (tmp_path / "none.jsonl").write_bytes(failed("r0", "bad"))
    merge(str(job.output), str(tmp_path / "none.jsonl"),
          MergeOptions(output=str(tmp_path / "merged.jsonl"), dropped=tmp_path / "dropped.jsonl"))  # fmt: skip
    assert sorted((tmp_path / "merged.jsonl").read_bytes().splitlines(True)) == sorted(expected.values())

    summary = job.run(**options)
    assert (summary.num_resumed, summary.rows.num_failed) == (len(CASES), num_failed)
    assert len(job.engines) == 1, "no row is answered again"
    kept = job.output.read_bytes() + (errors.read_bytes() if has_error_file else b"")
    assert sorted(kept.splitlines(True)) == sorted(expected.values())
