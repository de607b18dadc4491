"""The packages of readers make the same of an answer as our parsers, as far as they mean the same."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from npu_runner.readers.answers.block import AnswerError
from npu_runner.readers.answers.otsl import html_table
from npu_runner.readers.answers.parsers import parse_answer
from tests.readers.answers_by_grammar import DIVS, FRONT_MATTER, LAYOUT

PACKAGES = ["chandra-ocr==0.2.0", "mineru-vl-utils==2.0.7", "surya-ocr==0.22.1", "olmocr==0.4.27"]
THEIR_IMPORTS = ["pydantic-settings", "python-dotenv", "loguru", "aiofiles", "httpx", "httpx-retries"]
pytestmark = pytest.mark.full("fetches the packages of four readers")


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packages")
    # Without torch and the like, which they ask for and which parsing does not import.
    for more in (["--no-deps", *PACKAGES], THEIR_IMPORTS):
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), *more]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"the packages of readers cannot be fetched: {done.stderr.strip().splitlines()[-1]}")
    return folder


def asked(packages: Path, **answers: list[str]) -> dict[str, list[Any]]:
    script = Path(__file__).with_name("package_parsers.py")
    environment = os.environ | {"PYTHONPATH": str(packages)}
    done = subprocess.run([sys.executable, str(script)], input=json.dumps(answers), capture_output=True, text=True,
                          check=True, env=environment)  # fmt: skip
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_olmocr_reads_the_same_front_matter(packages: Path) -> None:
    answers = [case.answer for case in FRONT_MATTER if "\r" not in case.answer and "perhaps" not in case.answer]
    for answer, theirs in zip(answers, asked(packages, front_matter=answers)["front_matter"], strict=True):
        try:
            ours = parse_answer("front_matter", answer)
        except AnswerError:
            assert theirs is None, answer
        else:
            assert [ours.markdown, -ours.rotation % 360] == theirs, answer


def test_mineru_makes_the_same_tables_of_otsl(packages: Path) -> None:
    rng = random.Random(5)
    answers = []
    for _ in range(300):
        width, height = rng.randint(1, 6), rng.randint(1, 6)
        grid = [[""] * width for _ in range(height)]
        for y in range(height):
            for x in range(width):
                if grid[y][x]:
                    continue
                right = x + 1
                while right < width and not grid[y][right] and rng.random() < 0.3:
                    right += 1
                below = y + 1
                while below < height and not any(grid[below][x:right]) and rng.random() < 0.3:
                    below += 1
                for row in range(y, below):
                    for column in range(x, right):
                        grid[row][column] = ("<xcel>" if column > x else "<ucel>") if row > y else "<lcel>"
                grid[y][x] = rng.choice(["<ecel>", "<fcel>a < b", "<fcel>x & y", "<fcel>1"])
        answers.append("".join("".join(row) + "<nl>" for row in grid))
    assert [html_table(answer) for answer in answers] == asked(packages, otsl=answers)["otsl"]


def test_mineru_reads_the_same_layout(packages: Path) -> None:
    rng = random.Random(6)
    kinds = ["text", "table", "equation", "title", "list", "unknown", "poem", "TEXT"]
    answers = [case.answer for case in LAYOUT[:-1]]
    for _ in range(200):
        answers.append("\n".join(
            f"<|box_start|>{' '.join(str(rng.randint(0, 1020)) for _ in range(4))}<|box_end|>"
            f"<|ref_start|>{rng.choice(kinds)}<|ref_end|><|rotate_{rng.choice(['up', 'right', 'down', 'left'])}|>"
            f"{rng.choice(['', 'txt_contd_tgt', '<|txt_contd_tgt|>'])}"
            for _ in range(rng.randint(1, 12))))  # fmt: skip
    for answer, theirs in zip(answers, asked(packages, layout=answers)["layout"], strict=True):
        ours = [
            [block.label, list(block.box or ()), -block.rotation % 360, block.is_continued]
            for block in parse_answer("mineru_layout", answer).blocks
        ]
        assert ours == [[label, box, angle or 0, is_merged] for label, box, angle, is_merged in theirs], answer


def words(markdown: str) -> list[str]:
    """The words of the text, without tags, marks and escapes."""
    markdown = re.sub(r"</?[A-Za-z][^>]*>", " ", markdown.replace("&lt;", "<").replace("&amp;", "&"))
    return re.findall(r"[\w$]+", markdown.replace("\\", "").replace("_", ""))


def test_chandra_makes_the_same_words_of_divs(packages: Path) -> None:
    # Not the form, whose checkboxes chandra leaves out, nor the broken ones.
    answers = [case.answer for place, case in enumerate(DIVS) if place in (0, 1, 3, 5)]
    for answer, theirs in zip(answers, asked(packages, divs=answers)["divs"], strict=True):
        assert words(parse_answer("divs", answer).markdown) == words(theirs), answer


def test_surya_finds_the_same_blocks(packages: Path) -> None:
    answers = [case.answer for case in DIVS[:6]]
    for answer, theirs in zip(answers, asked(packages, boxes=answers)["boxes"], strict=True):
        ours = [[block.label, [number * 1000 for number in block.box or ()]]
                for block in parse_answer("divs", answer).blocks]  # fmt: skip
        assert [label for label, _ in ours] == [label for label, _ in theirs]
        assert [box for _, box in ours] == [pytest.approx(box) for _, box in theirs]
