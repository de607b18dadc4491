"""The input file: every row once, in order, whatever the lines look like; duplicates and changes are noticed."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_runner.batch.files import input_file, row_book
from npu_runner.batch.files.input_file import InputFile
from npu_runner.batch.files.input_identity import InputIdentity
from npu_runner.batch.rows import shape
from npu_runner.batch.rows.input_row import row_key
from npu_runner.errors import ConfigError
from tests.batch.scripted import row, write_rows

PACKED = (b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ\x00", b"PK\x03\x04")
LINES = st.lists(st.binary(max_size=12).map(lambda data: data.replace(b"\n", b"")), max_size=6).filter(
    lambda lines: not b"\n".join(lines).startswith(PACKED))  # such a file is compressed: test_packed_input.py


def rows_of(path: Path) -> list[tuple[int, bytes]]:
    with InputFile(str(path), path.parent) as file:
        return [(item.line, file.source.read(item)) for item in file.rows()]


@given(lines=LINES, ends=st.booleans())
def test_rows_are_the_lines_that_are_not_blank(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], ends: bool
):
    path = tmp_path_factory.mktemp("input") / "in.jsonl"
    path.write_bytes(b"\n".join(lines) + (b"\n" if ends else b""))
    without_mark = [lines[0].removeprefix(b"\xef\xbb\xbf"), *lines[1:]] if lines else []
    expected = [(number, line) for number, line in enumerate(without_mark, 1) if line.strip()]
    assert [(number, line.removesuffix(b"\n")) for number, line in rows_of(path)] == expected
    with InputFile(str(path), path.parent) as file:
        scan = file.scan()
    assert list(scan.lines) == [number for number, _ in expected]
    assert [key for key in scan.keys] == [np.bytes_(row_key(None, number)) for number, _ in expected]


def test_only_wanted_rows_come_and_are_numbered_anew(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "in.jsonl", [row(name) for name in "abcd"])
    with InputFile(str(path), tmp_path) as file:
        wanted = list(file.rows(np.array([False, True, False, True])))
        assert [(item.number, item.line, file.source.name(item)) for item in wanted] == [(0, 2, "b"), (1, 4, "d")]
        assert [json.loads(file.source.read(item))["custom_id"] for item in wanted] == ["b", "d"]


def test_a_long_line_is_read_in_pieces_and_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (input_file, row_book, shape):
        monkeypatch.setattr(module, "PIECE_BYTES", 300)
    path = write_rows(tmp_path / "in.jsonl", [row("a"), row("b", "x" * 2000), row("c")])
    with InputFile(str(path), tmp_path) as file:
        assert file.scan().num_rows == 3
        rows = list(file.rows())
        assert [(item.line, file.source.name(item)) for item in rows] == [(1, "a"), (2, "b"), (3, "c")]
        assert [len(piece) for piece in file.source.pieces(rows[1])][:-1] == [300] * (rows[1].num_bytes // 300)


def test_repeated_custom_ids_are_named_with_their_lines(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "in.jsonl", [row("a"), b"", row("b"), b"not json", row("a"), b"not json", row("b")])
    with InputFile(str(path), tmp_path) as file, pytest.raises(ConfigError) as caught:
        file.scan()
    assert "2 rows repeat a custom_id" in str(caught.value)
    assert "'a' (lines 1 and 5)" in str(caught.value)
    assert "'b' (lines 3 and 7)" in str(caught.value)


@given(first=LINES, second=LINES, first_ends=st.booleans())
def test_a_grown_input_continues_the_earlier_one_and_a_changed_one_does_not(
    tmp_path_factory: pytest.TempPathFactory, first: list[bytes], second: list[bytes], first_ends: bool
) -> None:
    folder = tmp_path_factory.mktemp("input")
    path = folder / "in.jsonl"
    # Rows that are not JSON are named by line, so no two of them are duplicates.
    start = b"\n".join(b"x" + line for line in first) + (b"\n" if first_ends else b"")
    path.write_bytes(start)
    with InputFile(str(path), folder) as file:
        earlier = file.scan().identity
        assert file.scan(earlier).continues_earlier
    path.write_bytes(start + (b"" if first_ends else b"\n") + b"\n".join(b"y" + line for line in second))
    with InputFile(str(path), folder) as file:
        assert file.scan(earlier).continues_earlier
    if start:
        path.write_bytes(b"z" + start[1:])
        with InputFile(str(path), folder) as file:
            assert not file.scan(earlier).continues_earlier
        path.write_bytes(start[:-1])
        with InputFile(str(path), folder) as file:
            assert not file.scan(earlier).continues_earlier


def test_a_longer_last_line_is_a_changed_input(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"one\ntwo")
    with InputFile(str(path), tmp_path) as file:
        earlier = file.scan().identity
    path.write_bytes(b"one\ntwo and more\n")
    with InputFile(str(path), tmp_path) as file:
        assert not file.scan(earlier).continues_earlier


def test_rows_that_arrive_while_the_job_runs_are_left_alone(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "in.jsonl", [row("a"), row("b")])
    with InputFile(str(path), tmp_path) as file:
        with open(path, "ab") as more:
            more.write(b'{"custom_id": "c"}\n')
        assert file.scan().num_rows == 2
        assert len(list(file.rows())) == 2


def test_standard_input_is_read_twice_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"custom_id": "a"}\n\n{"custom_id": "b"}')))
    with InputFile("-", tmp_path) as file:
        assert file.scan().num_rows == 2
        assert [item.line for item in file.rows()] == [1, 3]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["missing.jsonl", "."])
def test_an_input_that_cannot_be_read_is_a_clear_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="a JSONL file of requests is needed"):
        InputFile(str(tmp_path / name), tmp_path)


def test_an_empty_input_has_no_rows(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(b"")
    with InputFile(str(tmp_path / "in.jsonl"), tmp_path) as file:
        scan = file.scan(InputIdentity(0, "anything"))
    assert scan.num_rows == 0
    assert scan.continues_earlier
