"""Rows that make steps of a real model fail, whatever else runs: they end by name, and the others are answered."""

from __future__ import annotations

import ipaddress
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from npu_runner import LLM
from npu_runner.engine.executors import shared_memory
from tests import zygote
from tests.batch.scripted import read_rows, row, write_rows
from tests.faults.poisoned_strategy import FAULTS, GIL_SECONDS, install, poisoned_copy
from tests.oracle.running import greedy

NUM_ROWS = 14


def poisoned_model(checkpoint: Any, folder: Path) -> Path:
    install(folder / "site")
    return poisoned_copy(checkpoint("qwen3"), folder / "model")


def run_job(model: Path, folder: Path, size: int, output: str) -> subprocess.CompletedProcess[str]:
    paths = [str(folder / "site"), *sys.path]
    command = [sys.executable, "-m", "npu_runner", "batch", "-i", str(folder / "in.jsonl"), "-o", str(folder / output),
               "--model", str(model), "--platform", "cpu", "--tensor-parallel-size", str(size), "--max-num-seqs", "8",
               "--max-model-len", "256", "--kv-cache-bytes", "1M", "--progress", "off"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path),
                   "SOURCE_DATE_EPOCH": "1700000000"}
    return zygote.run(command, env=environment, stderr=subprocess.PIPE, text=True, timeout=300)


def write_input(folder: Path, model: Path, poisons: dict[int, str]) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    # Nobody else generates the poison.
    ban = {str(tokenizer.token_to_id(token)): -100 for token in FAULTS}
    # The number keeps the space before the poison out of the prefix that rows share: the pair is computed in one step.
    texts = [f"which {n} {poisons.get(n, 'b')} colour" for n in range(NUM_ROWS)]
    write_rows(folder / "in.jsonl", [
        row(f"r{n}", text, max_tokens=3 + n % 5, logit_bias=ban) for n, text in enumerate(texts)
    ])


def results(path: Path) -> dict[str, dict[str, Any]]:
    return {item["custom_id"]: item for item in read_rows(path)}


@pytest.mark.full("rows of the same kind stay in test_blame.py, and memory that runs out in runner/test_culprits.py")
def test_a_poisoned_row_fails_alone(checkpoint: Any, tmp_path: Path) -> None:
    assert_fails_alone(1, {3: "Z", 4: "Q", 12: "Z"}, 0, checkpoint, tmp_path)


@pytest.mark.slow
@pytest.mark.full("two ranks start three and four times; one rank stays, and scripted deaths")
@pytest.mark.parametrize(("poisons", "most_deaths"), [({4: "Q"}, 2), ({3: "Z"}, 2), ({2: "X"}, 3)])
def test_poisons_of_two_ranks(poisons: dict[int, str], most_deaths: int, checkpoint: Any, tmp_path: Path) -> None:
    assert_fails_alone(2, poisons, most_deaths, checkpoint, tmp_path)


def assert_fails_alone(size: int, poisons: dict[int, str], most_deaths: int, checkpoint: Any, tmp_path: Path) -> None:
    """Ranks end `most_deaths` times at most: on a busy machine a row may come alone, and is given up at once."""
    model = poisoned_model(checkpoint, tmp_path)
    write_input(tmp_path, model, {})
    assert run_job(model, tmp_path, 1, "undisturbed.jsonl").returncode == 0
    write_input(tmp_path, model, poisons)
    ends = []
    while not ends or (ends[-1].returncode == 1 and len(ends) < 6):
        ends.append(run_job(model, tmp_path, size, "out.jsonl"))
    assert [end.returncode for end in ends] == [1] * (len(ends) - 1) + [3], ends[-1].stderr
    assert min(most_deaths, 1) <= len(ends) - 1 <= most_deaths
    expected, found = results(tmp_path / "undisturbed.jsonl"), results(tmp_path / "out.jsonl")
    assert found.keys() == expected.keys()
    for number in range(NUM_ROWS):
        name = f"r{number}"
        if number in poisons:
            code = "out_of_memory" if poisons[number] == "Q" else "request_failed"
            assert found[name]["error"]["code"] == code
            assert "alone in its step" in found[name]["error"]["message"]
        else:
            assert choices(found[name]) == choices(expected[name])
    assert "suspects" not in json.loads((tmp_path / "out.jsonl.manifest.json").read_text())


def choices(item: dict[str, Any]) -> Any:
    return item["response"]["body"]["choices"]


@pytest.mark.slow
def test_a_rank_that_holds_the_interpreters_lock_is_not_taken_for_a_stopped_one(
    checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = poisoned_model(checkpoint, tmp_path)
    monkeypatch.setattr(shared_memory, "STOPPED_SECONDS", GIL_SECONDS / 4)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    with LLM(model, platform="cpu", tensor_parallel_size=2, max_model_len=256, max_num_seqs=4) as llm:
        (output,) = llm.generate(["a J b"], greedy(3))
    assert len(output.token_ids) == 3


def test_ranks_listen_on_the_loopback_interface_only(checkpoint: Any) -> None:
    with LLM(checkpoint("qwen3"), platform="cpu", tensor_parallel_size=2, max_model_len=256, max_num_seqs=4) as llm:
        executor = llm.engine._executor
        assert isinstance(executor, shared_memory.SharedMemoryExecutor)
        addresses = [address for pid in (os.getpid(), *executor.process_ids()) for address in listening(pid)]
        assert len(addresses) >= 2, "the store and the ranks"
    assert all(is_loopback(address) for address in addresses), addresses


def listening(pid: int) -> list[str]:
    """Local addresses, in the system's hexadecimal, that a process listens on."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(os.readlink(link))
        except OSError:
            continue
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                found.append(fields[1].partition(":")[0])
    return found


def is_loopback(address: str) -> bool:
    """`address`: words of 4 bytes in the host's order."""
    data = b"".join(int(address[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(address), 8))
    found = ipaddress.ip_address(data)
    return (getattr(found, "ipv4_mapped", None) or found).is_loopback
