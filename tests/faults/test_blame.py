"""Whose fault it is: one table of what becomes of a request whose step, rank, replica or worker ends, every way in.

Alone, the request is answered after one such end, which may have been of a moment, and given up by name after the
second. The other requests are always answered as ever, and nothing is suspected once all rows are finished.
"""

from __future__ import annotations

import contextlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from npu_runner import LLM, SamplingParams
from npu_runner.batch.files.names import manifest_path
from npu_runner.cli.main import main
from npu_runner.errors import EngineDeadError
from npu_runner.ray_data import ERROR_COLUMN, LLMPredictor
from tests.batch.scripted import completion_row, read_rows, row, write_rows
from tests.faults.mortal_processor import POISON as WORKER_POISON
from tests.faults.poisoned_strategy import FAULTS, install, poisoned_copy
from tests.faults.strikes import Strikes
from tests.replicas.jobs import ended, leftovers, start_scripted

STEP, STEP_OF_RANKS = "a step fails", "a step of several ranks fails"
RANK, REPLICA, WORKER = "a rank is killed", "the replica is killed", "the worker is killed"
JOB, JOB_2, LLM_1, LLM_2, RAY, RAY_2 = (
    "job", "job of 2 replicas", "LLM", "LLM of 2 replicas", "Ray Data", "Ray Data of 2 replicas")
ANSWERED, FAILED, CRASHED, RAISED = None, "request_failed", "preprocessing_crashed", "EngineDeadError"
CULPRITS = {STEP: "which Z colour", RANK: "which K colour", REPLICA: "which X colour",
            WORKER: f"which {WORKER_POISON} " + "which " * 700}  # so long that LLM sends it to a worker, too
OTHERS = [f"which b colour {number}" for number in range(5)]
OPTIONS = ("--platform", "cpu", "--max-model-len", "1024", "--max-num-seqs", "8", "--kv-cache-bytes", "1M",
           "--preprocessing-workers", "1", "--progress", "off")
SETTINGS: dict[str, Any] = {"platform": "cpu", "max_model_len": 1024, "max_num_seqs": 8, "kv_cache_bytes": 1 << 20,
                            "enable_prefix_caching": False}  # a culprit's tokens are computed again


@dataclass(frozen=True)
class Cell:
    """What becomes of the culprit, alone. `code`: once its fault strikes at every occasion; `attempts`: how often it
    strikes until then; `suspects`: whether the job ends, and leaves the culprit's name to the next run."""

    fault: str
    way: str
    code: str
    attempts: int
    suspects: bool = False

    @property
    def is_answered_after_one(self) -> bool:
        """An engine in the caller's process cannot be started again, and one that raised has said all there is."""
        return self.code != RAISED and self.attempts > 1

    def __str__(self) -> str:
        return f"{self.fault}, {self.way}"


TABLE = [
    Cell(STEP, JOB, FAILED, 2),
    Cell(STEP, LLM_1, FAILED, 2),
    Cell(STEP, RAY, FAILED, 2),
    Cell(RANK, LLM_1, RAISED, 1),
    Cell(STEP_OF_RANKS, JOB_2, FAILED, 1),
    Cell(REPLICA, JOB_2, FAILED, 2),
    Cell(WORKER, LLM_1, CRASHED, 2),
]
LONG_CASES = [
    Cell(RANK, RAY, FAILED, 2),
    Cell(WORKER, RAY, CRASHED, 2),
    Cell(RANK, JOB, FAILED, 2, suspects=True),
    Cell(WORKER, JOB, CRASHED, 2),
    Cell(STEP, LLM_2, FAILED, 2),
    Cell(RANK, LLM_2, FAILED, 2),
    Cell(REPLICA, LLM_2, FAILED, 2),
    Cell(REPLICA, RAY_2, FAILED, 2),
    Cell(WORKER, LLM_2, CRASHED, 2),
]


@dataclass(frozen=True)
class Answer:
    code: str | None
    text: str = ""


class WayIn(ABC):
    """Asks, again and again where it has to, until every text has an answer."""

    texts_of_faults = CULPRITS

    def __init__(self, model: Path, folder: Path):
        self.model, self.folder = model, folder
        self.suspects: set[str] = set()
        """What the job left to its next run, as long as it ended."""

    @abstractmethod
    def ask(self, texts: Sequence[str]) -> list[Answer]: ...

    def close(self) -> None:
        """End what it has, if it has anything."""
        return

    @staticmethod
    def expected(text: str, answers: dict[str, str]) -> str:
        return answers[text]


def suspects_of(output: Path) -> set[str]:
    return set(json.loads(manifest_path(output).read_text()).get("suspects", ()))


class JobOfOne(WayIn):
    num_jobs = 0

    def ask(self, texts: Sequence[str]) -> list[Answer]:
        self.num_jobs += 1
        output = self.folder / f"out-{self.num_jobs}.jsonl"
        source = write_rows(self.folder / "in.jsonl", [
            completion_row(name_of(number), text, max_tokens=4, logit_bias=ban(self.model))
            for number, text in enumerate(texts)])
        command = ["batch", "-i", str(source), "-o", str(output), "--model", str(self.model), *OPTIONS]
        while (status := main(command)) == 1:  # it ended early: the same command again
            self.suspects = suspects_of(output)
        assert status in (0, 3), "every row is finished"
        assert not suspects_of(output), "nothing is suspected any more"
        return answers_in(output, len(texts))


class JobOfTwo(WayIn):
    """Scripted engines in real processes; they answer a text with itself, reversed."""

    texts_of_faults = {STEP_OF_RANKS: "fail me", REPLICA: "kill me"}  # noqa: RUF012

    def ask(self, texts: Sequence[str]) -> list[Answer]:
        write_rows(self.folder / "in.jsonl", [row(name_of(number), text) for number, text in enumerate(texts)])
        status, said = ended(start_scripted(self.folder, max_replica_restarts=4, overwrite=True))
        assert status in (0, 3), said
        assert leftovers(self.folder) == {"strikes"}, "nothing is suspected any more"
        return answers_in(self.folder / "out.jsonl", len(texts))

    @staticmethod
    def expected(text: str, answers: dict[str, str]) -> str:
        return text[::-1]


class Generate(WayIn):
    settings: dict[str, Any] = {"preprocessing_workers": 1}  # noqa: RUF012
    _llm: LLM | None = None

    def ask(self, texts: Sequence[str]) -> list[Answer]:
        if self._llm is None:
            self._llm = LLM(self.model, **SETTINGS, **self.settings)
        params = SamplingParams(temperature=0, max_tokens=4, logit_bias=ban(self.model))
        try:
            outputs = self._llm.generate(texts, params, return_errors=True)
        except EngineDeadError as error:
            self.close()
            return [Answer(RAISED if error.request_ids else None)] * len(texts)  # it names those in the step
        return [Answer(output.error_code, output.text) for output in outputs]

    def close(self) -> None:
        if self._llm is not None:
            self._llm.close()
        self._llm = None


class GenerateOverTwo(Generate):
    settings = {"preprocessing_workers": 1, "data_parallel_size": 2, "max_replica_restarts": 9}  # noqa: RUF012


class Predict(WayIn):
    settings: dict[str, Any] = Generate.settings
    _predictor: LLMPredictor | None = None

    def ask(self, texts: Sequence[str]) -> list[Answer]:
        if self._predictor is None:
            params = {"temperature": 0, "max_tokens": 4, "logit_bias": ban(self.model)}
            self._predictor = LLMPredictor(str(self.model), sampling_params=params, **SETTINGS, **self.settings)
        out = self._predictor({"prompt": list(texts)})
        return [Answer(error.partition(":")[0] or None, text)
                for error, text in zip(out[ERROR_COLUMN], out["generated_text"], strict=True)]

    def close(self) -> None:
        if self._predictor is not None:
            self._predictor._llm.close()


class PredictOverTwo(Predict):
    settings = GenerateOverTwo.settings


WAYS = {JOB: JobOfOne, JOB_2: JobOfTwo, LLM_1: Generate, LLM_2: GenerateOverTwo, RAY: Predict, RAY_2: PredictOverTwo}


def ban(model: Path) -> dict[str, float]:
    """Nobody else generates what makes a step fail."""
    vocabulary = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    return {str(vocabulary[token]): -100.0 for token in FAULTS}


def name_of(number: int) -> str:
    return f"r{number}"


def answers_in(output: Path, num_rows: int) -> list[Answer]:
    found: dict[str, Answer] = {}
    for item in read_rows(output):
        assert item["custom_id"] not in found, "a row is there twice"
        if item["error"] is not None:
            answer = Answer(item["error"]["code"])
        else:
            (choice,) = item["response"]["body"]["choices"]
            answer = Answer(None, choice["text"] if "text" in choice else choice["message"]["content"])
        found[item["custom_id"]] = answer
    return [found[name_of(number)] for number in range(num_rows)]


@pytest.fixture(scope="module")
def model(checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("poisoned")
    install(folder / "site")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder / "site"))
        yield poisoned_copy(checkpoint("qwen3"), folder / "model")


@pytest.fixture(scope="module")
def answers(checkpoint: Any) -> dict[str, str]:
    """What the same weights answer where nothing is poisoned, by text."""
    path = checkpoint("qwen3")
    texts = [*OTHERS, *CULPRITS.values()]
    with LLM(path, **SETTINGS) as llm:
        params = SamplingParams(temperature=0, max_tokens=4, logit_bias=ban(path))
        return {text: output.text for text, output in zip(texts, llm.generate(texts, params), strict=True)}


@contextlib.contextmanager
def asked_through(cell: Cell, model: Path, folder: Path) -> Iterator[tuple[WayIn, str]]:
    """A way in, and the culprit's text."""
    way = WAYS[cell.way](model, folder)
    try:
        yield way, way.texts_of_faults[cell.fault]
    finally:
        way.close()


def assert_table(cell: Cell, model: Path, answers: dict[str, str], folder: Path, patch: pytest.MonkeyPatch) -> None:
    strikes = Strikes(folder / "strikes", patch)
    with asked_through(cell, model, folder) as (way, culprit):
        as_ever = Answer(None, way.expected(culprit, answers))
        if cell.is_answered_after_one:
            strikes.allow(1)
            assert way.ask([culprit]) == [as_ever], "once says nothing"
            assert strikes.count == 1
        strikes.allow(None)
        (found,) = way.ask([culprit])
        assert (found.code, strikes.count) == (cell.code, cell.attempts)
        assert (len(way.suspects) == 1) == cell.suspects
        found, *others = way.ask([culprit, *OTHERS])
        assert found.code == cell.code
        if cell.code == RAISED:
            assert {other.code for other in others} == {RAISED}
        else:
            assert others == [Answer(None, way.expected(text, answers)) for text in OTHERS], "a row is lost"
        assert (name_of(0) in way.suspects) == cell.suspects


@pytest.mark.parametrize("cell", TABLE, ids=str)
def test_who_ends_a_step_a_rank_a_replica_or_a_worker(cell: Cell, model: Path, answers: dict[str, str], tmp_path: Path,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    assert_table(cell, model, answers, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.full("replicas, ranks or jobs start up to nine times a case; scripted ones stay, and those of one LLM")
@pytest.mark.parametrize("cell", LONG_CASES, ids=str)
def test_who_ends_what_takes_long_to_start(cell: Cell, model: Path, answers: dict[str, str], tmp_path: Path,
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    assert_table(cell, model, answers, tmp_path, monkeypatch)
