"""A model folder that changes under the job: no row is prepared by other files than the rows before it."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from npu_runner.assets import SHAPES_VL
from npu_runner.errors import ConfigError, JobError
from npu_runner.prompts.processor import ChatProcessor
from tests.batch.job_folder import Job
from tests.batch.scripted import ScriptedEngine, read_rows, row, workers_of, write_rows
from tests.full_set import only_full

pytestmark = pytest.mark.usefixtures("fixed_time")
ROWS = [row(f"r{n:04d}", f"red {n}") for n in range(300)]


@pytest.fixture
def job_of_a_model(job: Job) -> Job:
    shutil.copytree(SHAPES_VL, job.model, dirs_exist_ok=True)
    write_rows(job.input, ROWS)
    return job


def another_template(model: Path) -> str:
    path = model / "chat_template.jinja"
    path.write_text(path.read_text().replace("assistant\\n", "assistant\\nYes. "))
    return path.name


def another_tokenizer(model: Path) -> str:
    path = model / "tokenizer.json"
    values = json.loads(path.read_text())
    words = values["model"]["vocab"]
    words["1"], words["2"] = words["2"], words["1"]
    path.write_text(json.dumps(values))
    return path.name


def broken_preprocessor(model: Path) -> str:
    (model / "preprocessor_config.json").write_text("{")
    return "preprocessor_config.json"


@pytest.mark.parametrize("change", [another_tokenizer, *only_full(
    "other files of the model; one stays", another_template, broken_preprocessor)])
def test_a_worker_that_would_prepare_otherwise_ends_the_job_by_name(
    job_of_a_model: Job, change: Callable[[Path], str]
) -> None:
    job, names = job_of_a_model, []

    def change_at(engine: ScriptedEngine) -> None:
        if engine.num_steps == 3:
            names.append(change(job.model))
            for worker in workers_of(os.getpid()):
                os.kill(worker, signal.SIGKILL)

    def run(on_step: Callable[[ScriptedEngine], None] = lambda engine: None) -> int:
        return job.run(lambda config: ScriptedEngine(config, latency=lambda text: 1, on_step=on_step),
                       processor=ChatProcessor(str(job.model))).exit_status  # fmt: skip

    with pytest.raises(JobError, match="changed after the model was opened") as caught:
        run(change_at)
    (name,) = names
    assert f"model {job.model}: {name} changed" in str(caught.value)
    assert 0 < len(read_rows(job.output)) < len(ROWS), "what was done stays"

    with pytest.raises(ConfigError, match=name):
        run()
    shutil.copy(SHAPES_VL / name, job.model / name)
    assert run() == 0
    expected = ChatProcessor(str(SHAPES_VL))
    answers = {item["custom_id"]: item["response"]["body"]["choices"][0]["message"]["content"]
               for item in read_rows(job.output)}  # fmt: skip
    assert answers == {
        item["custom_id"]: "".join(map(chr, expected(item["body"]["messages"]).token_ids))[::-1] for item in ROWS
    }
