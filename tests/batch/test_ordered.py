"""--ordered: nothing that is finished is thrown away for the sake of order, and the order is that of the input."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from typing import Any

import pytest

from npu_runner.config import RunnerConfig
from npu_runner.errors import ConfigError, EngineDeadError
from tests.batch.job_folder import Job, numbered, overtaken
from tests.batch.scripted import OvertakingEngine, ScriptedEngine, row, write_rows
from tests.full_set import only_full

pytestmark = pytest.mark.usefixtures("fixed_time")


def dies_at_random(rng: random.Random, finished: list[str], num_rows: int) -> Callable[[RunnerConfig], ScriptedEngine]:
    """Hands over any of eight rows a step, and dies at some moment. `finished`: gets their names, of `num_rows`."""
    dies_at = len(finished) + rng.randrange(15)

    class Dies(ScriptedEngine):
        def step(self) -> list[Any]:
            if len(finished) == dies_at:
                raise EngineDeadError("rank 1 died in decode")
            self.running |= {name: (0, text, params) for name, text, params in self.waiting}
            self.waiting.clear()
            if len(self.running) < min(8, num_rows - len(finished)):
                return []  # the workers are not that far yet
            finished.append(rng.choice(list(self.running)))
            return [self._output(finished[-1], *self.running.pop(finished[-1])[1:])]

    return Dies


class StopsBehindASlowRow(ScriptedEngine):
    """The row 000 never ends. A signal comes when thirty rows behind it are finished."""

    num_finished = 0

    def _output(self, request_id: str, text: str, params: Any) -> Any:
        self.num_finished += 1
        if self.num_finished == 30:
            os.kill(os.getpid(), signal.SIGINT)
        return super()._output(request_id, text, params)


def stops_behind_a_slow_row(config: RunnerConfig) -> ScriptedEngine:
    return StopsBehindASlowRow(config, latency=lambda text: 10**9 if text == "000" else 1)


def test_a_file_comes_in_the_order_of_the_input_and_no_row_waits_for_another(job: Job) -> None:
    texts = [text if n % 10 != 7 else f"bad{text}" for n, text in enumerate(numbered(60))]
    write_rows(job.input, [row(text, text) for text in texts])
    summary = job.run(OvertakingEngine, ordered=True)
    assert job.names() == texts
    assert summary.tally.num_done == 60
    (engine,) = job.engines
    assert isinstance(engine, OvertakingEngine)
    answered = [text for text in texts if not text.startswith("bad")]
    assert engine.finished == overtaken(answered) != answered, "the engine itself keeps no order"


def test_a_signal_keeps_every_finished_row_and_counts_no_other(job: Job) -> None:
    texts = numbered(100)
    write_rows(job.input, [row(text, text) for text in texts])
    summary = job.run(stops_behind_a_slow_row, ordered=True)
    names = job.names()
    assert len(names) == summary.tally.num_answered >= 30
    assert "000" not in names
    assert (summary.exit_status, summary.num_unfinished) == (1, 100 - len(names))
    again = job.run(ordered=True)
    assert (again.num_resumed, again.tally.num_answered) == (len(names), 100 - len(names))
    assert job.names() == texts


@pytest.mark.parametrize("seed", [1, *only_full("two more seeds", 0, 2)])
def test_however_often_it_dies_every_row_is_answered_once(job: Job, seed: int) -> None:
    rng, texts, finished = random.Random(seed), numbered(60), list[str]()
    write_rows(job.input, [row(text, text) for text in texts])
    while len(finished) < 45:
        with pytest.raises(EngineDeadError):
            job.run(dies_at_random(rng, finished, len(texts)), ordered=rng.random() < 0.8)
        assert sorted(job.names()) == sorted(finished), "all that was finished, and none of it twice"
        assert len(set(finished)) == len(finished), "no row is answered again"
    job.run(ordered=True)
    assert job.names() == texts


def test_an_unordered_output_is_put_in_order_without_a_model(job: Job) -> None:
    texts = numbered(40)
    write_rows(job.input, [row(text, text) for text in texts])
    job.run(OvertakingEngine)
    before = job.names()
    assert before != texts
    whole = set(job.output.read_bytes().splitlines())
    job.run(ordered=True)
    assert job.names() == texts
    assert set(job.output.read_bytes().splitlines()) == whole
    assert len(job.engines) == 1


def test_a_stream_is_refused_with_its_remedy(job: Job) -> None:
    write_rows(job.input, [row("a")])
    os.mkfifo(job.output)
    with pytest.raises(ConfigError, match=r"ordered: output .* is a stream.*; name a file as output, or leave"):
        job.run(ordered=True)
    assert job.engines == []
