"""A folder with all that a job with a scripted engine needs, and the order in which such an engine finishes rows.

Holds no tests.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from npu_runner.batch.job.history import JobSummary
from npu_runner.batch.job.options import BatchOptions
from npu_runner.config import RunnerConfig
from npu_runner.reports.report import run_batch_and_report
from tests.batch.scripted import ScriptedEngine, ScriptedModel, ScriptedProcessor, read_rows

LEFT = {"out.jsonl", "out.jsonl.manifest.json", "out.jsonl.rows", "out.jsonl.status.json"}
"""What a job that has served rows leaves: its output, and what belongs to it."""


class Job:
    """A folder with an input, an output and as much of a checkpoint as the job itself looks at."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.input, self.output = folder / "in.jsonl", folder / "out.jsonl"
        self.model = folder / "model"
        self.model.mkdir(parents=True)
        (self.model / "config.json").write_text("{}")
        self.engines: list[ScriptedEngine] = []
        self.copies_equal_rows = False
        """Most tests have many rows of one text, and each of them is to be served."""

    def run(
        self,
        engine: Callable[[RunnerConfig], ScriptedEngine] = ScriptedEngine,
        seed: int = 0,
        processor: Any = None,
        **options: Any,
    ) -> JobSummary:
        def make(config: RunnerConfig) -> ScriptedEngine:
            self.engines.append(engine(config))
            return self.engines[-1]

        def open_model(config: RunnerConfig) -> ScriptedModel:
            return ScriptedModel(config, make, processor or ScriptedProcessor())

        defaults = {"input": str(self.input), "output": str(self.output), "preprocessing_workers": 1, "progress": "off",
                    "copy_equal_rows": self.copies_equal_rows}  # fmt: skip
        config = RunnerConfig(model=str(self.model), seed=seed)
        asked = BatchOptions.from_keywords(**{**defaults, **options})
        return run_batch_and_report(config, asked, open_model=open_model)

    def names(self) -> list[str]:
        return [item["custom_id"] for item in read_rows(self.output)]

    def files(self) -> set[str]:
        return {path.name for path in self.folder.iterdir()} - {"model", "in.jsonl"}


def numbered(count: int) -> list[str]:
    return [f"{n:03d}" for n in range(count)]


def overtaken(texts: list[str]) -> list[str]:
    """The order in which OvertakingEngine finishes them: 001 to 005, 000, 006 to 009, 011 to 015, 010, ..."""
    return sorted(texts, key=lambda text: int(text) + 5.5 if text.endswith("0") else int(text))
