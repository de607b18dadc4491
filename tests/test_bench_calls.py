"""bench.calls at sizes that a CPU does in seconds. Times mean nothing here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from tokenizers import Tokenizer

from bench.calls import CASES, make_model, report, text
from bench.common import ROOT


def test_a_text_has_as_many_tokens_as_it_says(tmp_path: Path) -> None:
    for case in (CASES["texts"]._replace(model="tiny"), CASES["questions"]._replace(model="tiny-vl")):
        tokenizer = Tokenizer.from_file(str(make_model(case, tmp_path / case.model) / "tokenizer.json"))
        for number in (1, 32, 200):
            assert len(tokenizer.encode(text(Random(number), number)).ids) == number


def test_rows_share_what_they_say_and_no_repeat_has_prompts_of_another() -> None:
    first, second = (CASES["system-prompt"].make(Random(repeat), 4) for repeat in range(2))
    prompts = [row["prompt_token_ids"] for row in first]
    assert {len(prompt) for prompt in prompts} == {2030}
    assert len({tuple(prompt[:2000]) for prompt in prompts}) == 1
    assert len({tuple(prompt[2000:]) for prompt in prompts}) == 4
    assert second[0]["prompt_token_ids"][:16] != prompts[0][:16]
    images = [row[0]["content"][0]["image_url"]["url"] for row in CASES["questions"].make(Random(0), 24)]
    assert [images.count(url) for url in dict.fromkeys(images)] == [8, 8, 8]


def test_a_side_that_failed_is_named() -> None:
    lines = list(report("texts", {"npu_runner": {"seconds": [2.0]}, "against": {"seconds": [4.0]}, "vllm": None}))
    assert lines[2].endswith("npu_runner takes 0.500 of it")
    assert lines[3].split() == ["vllm", "failed"]


@pytest.mark.slow
@pytest.mark.full("a process for each case; nothing that serves depends on it")
def test_every_case_at_tiny_sizes() -> None:
    command = [sys.executable, "-m", "bench.calls", "--platform", "cpu", "--tiny", "--repeats", "1", "--peer"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    results = json.loads(done.stdout.splitlines()[-1])["results"]
    assert results.keys() == CASES.keys()
    assert all(found["npu_runner"]["seconds"][0] > 0 for found in results.values())
