"""Help in two levels: what a first user needs, and all. The oracle is argparse, which takes what help shows."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from npu_runner.cli import main as cli
from npu_runner.cli.parser import EXAMPLES, FIRST, Parser
from scripts.options_page import PAGE

OUTER = cli._parser()
COMMANDS: dict[str, Parser] = {name: parser for name, parser in OUTER._subparsers._group_actions[0].choices.items()
                               if name != "help"}  # fmt: skip
FLAG = re.compile(r"^  (?:-\w(?: [A-Z.|]+)?, )?(--[a-z-]+)(?:, (--no-[a-z-]+))?", re.MULTILINE)


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    try:
        status = cli.main(arguments)
    except SystemExit as end:
        status = end.code
    assert status == 0
    return capsys.readouterr().out


def flags(text: str) -> set[str]:
    return {flag for found in FLAG.findall(text) for flag in found if flag}


def parsers_flags(parser: Parser) -> set[str]:
    return {flag for action in parser._actions for flag in action.option_strings
            if flag.startswith("--") and action.help != "==SUPPRESS=="}  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_the_long_help_has_every_option_of_the_parser_and_so_has_the_page(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = flags(printed(capsys, name, "--help-all"))
    assert whole == parsers_flags(COMMANDS[name])
    page = PAGE.read_text()
    assert not {flag for flag in whole - {"--help", "--help-all"} if f"`{flag}`" not in page}


@pytest.mark.parametrize("name", FIRST)
def test_the_short_help_has_a_dozen_options_three_examples_and_a_way_to_the_rest(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    short = printed(capsys, name, "--help")
    assert {action.dest for action in COMMANDS[name]._actions} >= set(FIRST[name]), "options that there are"
    assert len(FIRST[name]) <= 12
    assert flags(short) <= parsers_flags(COMMANDS[name])
    assert len(flags(short)) <= 12
    assert len(re.findall(rf"^  npu-runner {name}\b", short, re.MULTILINE)) == len(EXAMPLES[name]) == 3
    assert f"options: npu-runner {name} --help-all" in short
    assert len(short.splitlines()) < 110


def test_each_command_without_a_short_help_is_short() -> None:
    for name in COMMANDS.keys() - FIRST.keys():
        assert len(COMMANDS[name]._actions) <= 16, name


@pytest.mark.parametrize("line", [line for lines in EXAMPLES.values() for line, _ in lines])
def test_an_example_is_taken(line: str) -> None:
    assert OUTER.parse_args(shlex.split(line)).run


@pytest.mark.parametrize("arguments", [[], ["help"], ["--help"]], ids=str)
def test_the_command_alone_shows_the_commands(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, *arguments)
    assert all(re.search(rf"^    {name} ", text, re.MULTILINE) for name in COMMANDS)


def test_help_of_a_command_is_that_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "help", "batch") == printed(capsys, "batch", "--help")


@pytest.mark.parametrize(("words", "said"), [
    (["bacth"], "'bacth' is no command; did you mean batch?"),
    (["tabel", "a.jsonl"], "'tabel' is no command; did you mean table?"),
    (["serve", "Qwen3-VL"], "'serve' is no command; there is no server"),
    (["run-batch", "-i", "a", "-o", "b"], "'run-batch' is no command; npu-runner batch -i ROWS -o ANSWERS"),
    (["abacus"], "'abacus' is no command; the commands are rows, batch, check"),
    (["batch", "--input-file", "a", "--output-file", "b"], "--input-file is no option of it; did you mean --input?"),
    (["batch", "-i", "a", "--output-file=b"], "--output-file is no option of it; did you mean --output?"),
    (["table", "a", "--otput", "b"], "--otput is no option of it; did you mean --output?"),
])  # fmt: skip
def test_a_mistake_is_named_with_what_is_there_instead(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_a_value_that_looks_like_an_option_is_none() -> None:
    assert OUTER.parse_args(["rows", "p", "--prompt=--what is it?", "-o", "r"]).prompt == "--what is it?"
    assert OUTER.parse_args(["generate", "--", "--colour"]).question == "--colour"


@pytest.mark.parametrize("command", ["batch", "check", "table", "summary", "report"])
def test_the_file_of_rows_has_one_name(command: str) -> None:
    needed = {"batch": ["-o", "o"], "check": [], "table": ["a", "-o", "t.csv"], "summary": ["a"],
              "report": ["a", "-o", "p.html"]}[command]  # fmt: skip
    for spelling in ("-i", "--input"):
        assert OUTER.parse_args([command, *needed, spelling, "rows.jsonl"]).input == "rows.jsonl"


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "npu_runner", *words], cwd=folder, capture_output=True, text=True)


def test_the_old_name_works_and_says_the_new_one(tmp_path: Path) -> None:
    answer = {"custom_id": "a", "response": None, "error": {"code": "x", "message": "y"}}
    row = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {}}
    (tmp_path / "a.jsonl").write_text(json.dumps(answer) + "\n")
    (tmp_path / "r.jsonl").write_text(json.dumps(row) + "\n")
    new = run(tmp_path, "table", "a.jsonl", "-i", "r.jsonl", "-o", "new.csv")
    old = run(tmp_path, "table", "a.jsonl", "--rows", "r.jsonl", "-o", "old.csv")
    assert (new.returncode, old.returncode) == (0, 0), new.stderr + old.stderr
    assert (tmp_path / "old.csv").read_bytes() == (tmp_path / "new.csv").read_bytes()
    note, rest = old.stderr.split("\n", 1)
    assert note == "npu-runner: table --rows is the old spelling, which the next release refuses; write -i r.jsonl"
    assert rest == new.stderr.replace("new.csv", "old.csv")


def test_check_asks_for_its_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "--model", "nowhere"]) == 2
    assert "-i/--input: name the file of rows" in capsys.readouterr().err
    assert cli.main(["check", "nowhere.jsonl", "--sample", "-1"]) == 2
    assert "check ROWS is the old spelling, which the next release refuses; write -i nowhere.jsonl" in (
        capsys.readouterr().err)
