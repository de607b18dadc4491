"""`rows` and `table` hold a name and a place of each row, and never the rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tables.made import answered, completion, request

# The peak of resident bytes is set back between commands, so one process does for all of them.
SCRIPT = """
import json, sys
from npu_runner.cli import main as cli

def status(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))

def grown(*arguments):
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = status("VmRSS")
    assert cli.main(arguments) == 0
    return status("VmHWM") - before

def commands(count):
    yield "rows", ("rows", f"in{count}.jsonl", "--prompt", "?", "--keep", "text", "-o", "r.jsonl")
    for ending in endings:
        files = (f"answers{count}.jsonl", "-i", f"rows{count}.jsonl", "-o", f"t.{ending}")
        yield ending, ("table", *files)

few, many, *endings = sys.argv[1:]
for _, arguments in commands(few):
    grown(*arguments)  # what is imported and kept is not counted
print(json.dumps({name: grown(*arguments) for name, arguments in commands(many)}))
"""
HELD_BYTES = 200
"""Of a row at the peak: names and places of it and of its answer, and copies of them while they are sorted."""
TEXT_BYTES = 2000
"""In each record, so that rows that are held would be seen at once."""


def grown_bytes(folder: Path, few: int, many: int, *endings: str, text_bytes: int = TEXT_BYTES) -> dict[str, int]:
    """How many resident bytes each command takes for the many, at its peak."""
    answer = answered("NAME", completion(json.dumps({"n": 1, "text": "x" * text_bytes})))
    row = request("NAME", metadata={"label": "x" * text_bytes})
    for count in (few, many):
        lines = {"in": b'{"text": "%s"}\n' % (b"x" * text_bytes), "answers": answer, "rows": row}
        for name, line in lines.items():
            with open(folder / f"{name}{count}.jsonl", "wb") as file:
                for number in range(count):
                    place = count - 1 - number if name == "answers" else number
                    file.write(line.replace(b"NAME", b"row-%d" % place))
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(few), str(many), *endings], cwd=folder,
                          stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)  # fmt: skip
    grown: dict[str, int] = json.loads(done.stdout)
    return grown


def test_two_thousand_long_rows_are_never_in_memory_together(tmp_path: Path) -> None:
    grown = grown_bytes(tmp_path, 100, 2_000, "csv", text_bytes=10_000)
    assert max(grown["rows"], grown["csv"]) < 2_000 * 10_000 / 4, grown


@pytest.mark.full("tables of 200,000 rows are made, to see their memory")
def test_two_hundred_thousand_rows_take_two_hundred_bytes_each(tmp_path: Path) -> None:
    """And what a group of Parquet takes: 16 MiB of text, as Python has it, as Arrow has it and compressed."""
    for name, num_bytes in grown_bytes(tmp_path, 20_000, 200_000, "csv", "parquet").items():
        assert num_bytes < 200_000 * HELD_BYTES + (96 << 20), f"{name}: {num_bytes} bytes for 200,000 rows"
