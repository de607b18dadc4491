"""No escape sequence of a row, a file's name or a library reaches what a command prints."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_runner.assets import SHAPES_VL
from npu_runner.cli import main as cli
from npu_runner.processes.patient_streams import plain
from tests.batch.scripted import row, write_rows

ESCAPE = "\x1b]0;owned\x07\x1b[2J\x9b1m\u202e"
OBEYED = "\x1b\x07\x9b\u202e"
MODEL = ["--platform", "cpu", "--kv-cache-bytes", "32M"]


def rule(**rule: Any) -> dict[str, Any]:
    return row("rule", "a", **rule)


ROWS: list[Any] = [
    row(f"id{ESCAPE}", "a", max_tokens=1), row("field", "a", **{f"field{ESCAPE}": 1}), row("model", "a", model=ESCAPE),
    row("kwargs", "a", chat_template_kwargs={ESCAPE: 1}), rule(guided_grammar=f"start: {ESCAPE}"),
    rule(guided_regex=f"(?<{ESCAPE}"), row("part", messages=[{"role": "user", "content": [{"type": ESCAPE}]}]),
    row("file", messages=[{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": f"{ESCAPE}.png"}}, {"type": "text", "text": "?"}]}]),
    rule(response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": {ESCAPE: 1, "type": ESCAPE}}}),
    {"custom_id": "url", "method": "POST", "url": f"/v1/{ESCAPE}", "body": {}},
]  # fmt: skip


@given(st.text())
def test_plain_text_has_nothing_to_obey_and_says_the_same(text: str) -> None:
    shown = plain(text)
    assert all(character.isprintable() or character in "\t\n\r" or not character.isascii() for character in shown)
    assert not set(OBEYED) & set(shown)
    quoted = '"' + plain(json.dumps(text, ensure_ascii=False)[1:-1]) + '"'
    assert json.loads(quoted) == text


def test_no_command_prints_an_escape_sequence(tmp_path: Path, capfd: pytest.CaptureFixture[str],
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = f"in{ESCAPE}.jsonl"
    write_rows(tmp_path / name, ROWS)
    (tmp_path / f"t{ESCAPE}.csv").write_text(f"id,{ESCAPE}\n1,x\n")
    (tmp_path / "bad.jinja").write_text("{{ raise_exception(record) }}")
    shutil.copytree(SHAPES_VL, tmp_path / f"m{ESCAPE}")
    output = f"out{ESCAPE}.jsonl"
    files = ["--allowed-media-dir", ".", *MODEL]
    for command in (
            ["check", name, *files], ["batch", "-i", name, "-o", output, "--progress", "lines", *files],
            ["summary", output], ["status", output], ["table", output, "-o", f"t{ESCAPE}.x"],
            ["table", output, "-o", "table.csv", "--rows", name], ["merge", output, output, "-o", "m.jsonl"],
            ["report", output, "-o", "page.html"], ["report", output, f"{ESCAPE}.html"],
            ["rows", f"t{ESCAPE}.csv", "--prompt", "x", "-o", "r.jsonl"],
            ["rows", f"t{ESCAPE}.csv", "--template", "bad.jinja", "-o", "r.jsonl"],
            ["rows", f"t{ESCAPE}.csv", "--prompt", "x", "--id", ESCAPE, "-o", "r.jsonl"],
            ["models", f"m{ESCAPE}"], ["models", ESCAPE], ["check", name, "--model", ESCAPE],
            ["check", name, f"--{ESCAPE}"], [ESCAPE]):
        with contextlib.suppress(SystemExit):  # argparse's way to refuse
            cli.main(command)
        said = capfd.readouterr()
        found = [line for line in (said.out + said.err).splitlines() if set(OBEYED) & set(line)]
        assert not found, (command, found)
        assert said.out + said.err, command
