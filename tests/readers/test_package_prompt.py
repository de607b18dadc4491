"""A prompt comes from its authors' package, by another interpreter, or the message has the line that makes a file."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import sysconfig
import time
import venv
from pathlib import Path
from typing import Any

import pytest

from npu_runner.errors import ConfigError
from npu_runner.readers import package_prompt
from npu_runner.readers.package_prompt import prompt_of
from npu_runner.readers.reader import PageReader, read_reader
from tests.tables.made import asked, rows
from tests.tables.pages import pdf

TEXT = 'Read "it":\n\u8bfb\n'
MODULE = f"""
import os, sys
print("words of the package")
TEXT = {TEXT!r}
NUMBER = 7
def make():
    return TEXT + "made"
def hang():
    import subprocess, time
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    time.sleep(600)
def long():
    return "x" * (1 << 21)
def fail():
    raise KeyError("no such thing")
def leave():
    os._exit(3)
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter that has the package words-ocr 1.2.3, which ours has not."""
    folder = tmp_path_factory.mktemp("prompt") / "venv"
    venv.create(folder, symlinks=True, with_pip=False)
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))
    (packages / "words").mkdir(parents=True)
    (packages / "words" / "__init__.py").touch()
    (packages / "words" / "prompts.py").write_text(MODULE)
    (packages / "words_ocr-1.2.3.dist-info").mkdir()
    (packages / "words_ocr-1.2.3.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: words-ocr\n"
                                                                     "Version: 1.2.3\n")  # fmt: skip
    return str(folder / "bin" / "python")


def reader(constant: str, module: str = "words.prompts") -> PageReader:
    source = {"package": "words-ocr", "module": module, "constant": constant}
    return PageReader.model_validate_json(json.dumps({"name": "words", "about": "words", "prompt_from": source}))


def test_a_constant_and_a_function_are_read(python: str) -> None:
    found = prompt_of(reader("TEXT"), python)
    assert (found.text, found.package, found.version) == (TEXT, "words-ocr", "1.2.3")
    assert prompt_of(reader("make"), python).text == TEXT + "made"
    assert "words" not in sys.modules, "nothing of the package runs here"


@pytest.mark.parametrize(("constant", "words"), [
    ("nothing", "no attribute 'nothing'"), ("NUMBER", "words.prompts.NUMBER is no text"), ("fail", "no such thing"),
    ("leave", "exit status 3"), ("long", "more than 1048576 bytes"),
])  # fmt: skip
def test_what_goes_wrong_is_said_with_the_line_that_makes_the_file(constant: str, words: str, python: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        prompt_of(reader(constant), python)
    assert "--prompt-python" in str(caught.value)
    assert "--prompt-file words.txt" in str(caught.value)
    assert "pip install words-ocr" in str(caught.value)


def test_the_line_that_makes_the_file_makes_it(python: str, tmp_path: Path) -> None:
    """The last command of the line, by the interpreter that has the package."""
    with pytest.raises(ConfigError) as caught:
        prompt_of(reader("make"), sys.executable)
    line = str(caught.value).splitlines()[-1].rpartition(" && ")[2]
    assert line.startswith("prompt/bin/python -c ")
    subprocess.run(line.replace("prompt/bin/python", python, 1), shell=True, check=True, cwd=tmp_path)
    made = (tmp_path / "words.txt").read_text()
    assert made == f"{TEXT}made"


def test_a_package_that_hangs_is_ended_with_its_children(python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package_prompt, "_MOST_SECONDS", 1.0)
    with pytest.raises(ConfigError, match="took longer than 1 s"):
        prompt_of(reader("hang"), python)
    deadline = time.monotonic() + 10
    while (found := _sleeping(python)) and time.monotonic() < deadline:
        time.sleep(0.02)  # a process that is killed takes a moment to end
    assert not found


def _sleeping(python: str) -> list[Path]:
    return [path for path in Path("/proc").glob("[0-9]*/cmdline") if _text(path).startswith(f"{python}\0-c\0")]


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def test_the_working_folder_and_variables_decide_nothing(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "prompts.py").write_text("TEXT = 'of the working folder'")
    (tmp_path / "words" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert prompt_of(reader("TEXT"), python).text == TEXT


def test_an_interpreter_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="/nowhere/python does not give"):
        prompt_of(reader("TEXT"), "/nowhere/python")


def test_the_origin_of_the_prompt_stands_beside_the_rows(python: str, tmp_path: Path) -> None:
    own = tmp_path / "words.json"
    own.write_text(reader("TEXT").to_json())
    document, head = pdf(tmp_path / "a.pdf"), tmp_path / "r.jsonl.documents.jsonl"
    options: dict[str, Any] = {"reader": str(own), "prompt_python": python}
    (row,) = rows(tmp_path / "r.jsonl", document, prompt=None, **options)
    assert asked(row) == TEXT
    sha256 = hashlib.sha256(TEXT.encode()).hexdigest()
    first = json.loads(head.read_bytes().splitlines()[0])
    assert first["prompt"] == {"package": "words-ocr", "version": "1.2.3", "sha256": sha256}
    assert first["reader"] == "words"
    file = tmp_path / "prompt.txt"
    file.write_text("Of a file.")
    (row,) = rows(tmp_path / "r.jsonl", document, prompt_file=file, reader=str(own))
    assert asked(row) == "Of a file.", "it goes before the package's"
    first = json.loads(head.read_bytes().splitlines()[0])
    assert first["prompt"] == {"package": None, "version": None, "sha256": hashlib.sha256(b"Of a file.").hexdigest()}


def test_a_prompt_of_a_card_alone_is_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"model card of nanonets/Nanonets-OCR2-3B alone; .* --prompt-file"):
        prompt_of(read_reader("nanonets-ocr2"), None)
