"""Rows by index: runs say where each lies, with its bytes or without, whatever is left out between them."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np

from npu_runner.batch.files.input_file import InputFile
from npu_runner.batch.files.row_book import RowBook
from tests.batch.scripted import row, write_rows


def test_runs_hold_what_the_input_says_of_these_rows(tmp_path: Path) -> None:
    rng = random.Random(3)
    lines = [row(f"r{n}", "x" * rng.randrange(200)) if n % 7 else b"" for n in range(300)]
    write_rows(tmp_path / "in.jsonl", lines)
    with InputFile(str(tmp_path / "in.jsonl"), tmp_path) as file:
        scan = file.scan()
        wanted = np.array([rng.random() < 0.6 for _ in range(scan.num_rows)])
        book, expected = RowBook(scan, wanted, file.source), list(file.rows(wanted))
        assert book.num_rows == len(expected)
        for indices in (range(book.num_rows), range(5, 20), [9, 3, 40], []):
            rows = [expected[index] for index in indices]
            assert book.run(indices).indices == list(indices)
            assert [tuple(found[:5]) for found in book.run(indices).rows()] == [
                (item.number, item.line, item.start, item.num_bytes, item.checksum) for item in rows
            ]
            assert [found.data for found in book.run_with_data(indices).rows()] == [
                file.source.read(item) for item in rows
            ]
        assert [book.row(index) for index in (0, 17)] == [expected[0], expected[17]]
        names = {file.source.name(item): item.number for item in expected}
        assert book.find([*map(str, names), "nobody", *(f"r{n}" for n in range(7))]) == names | {
            name: index for name, index in names.items() if name in {f"r{n}" for n in range(7)}
        }
        assert book.name(17) == file.source.name(expected[17])
