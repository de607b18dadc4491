"""A job over replicas whose engines follow a script: `python -m tests.replicas.scripted_job OPTIONS` runs one.

The processes, sockets, files and deaths are real; what stands where the model would needs no torch. Holds no tests.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from npu_runner.batch.job import live
from npu_runner.batch.job.options import BatchOptions
from npu_runner.config import RunnerConfig
from npu_runner.errors import EngineDeadError, ModelError, NpuRunnerError
from npu_runner.reports.report import run_batch_and_report
from npu_runner.request.outputs import RequestOutput
from npu_runner.serving.replicas import fleet, process_replica
from tests.batch.scripted import ScriptedEngine, ScriptedModel
from tests.faults.strikes import die, strikes

STEP_SECONDS = 0.005
HOLD = "HOLD_REPLICAS"


@dataclass
class StagedEngine(ScriptedEngine):
    """Words at the beginning of a row are stage directions: kill, fail, slow."""

    def step(self) -> list[RequestOutput]:
        time.sleep(STEP_SECONDS)
        if is_held() or self.plan():
            return []
        texts = [text for _, text, _ in self.running.values()]
        if any(text.startswith("kill") for text in texts) and strikes():
            die()
        if any(text.startswith("fail") for text in texts) and strikes():
            raise EngineDeadError("rank 1 failed", request_ids=tuple(self.running), blame="request_failed")
        return super().step()

    def describe(self) -> dict[str, str]:
        stage = stage_directions()
        if "differs" in stage:
            return {**super().describe(), "max_model_len": str(os.getpid())}
        return super().describe()


def is_held() -> bool:
    """Nothing is answered while the file is there that the environment names."""
    path = os.environ.get(HOLD)
    return path is not None and os.path.exists(path)


def stage_directions() -> list[str]:
    return os.environ.get("STAGE", "").split(",")


def open_model(config: RunnerConfig) -> ScriptedModel:
    if "broken" in stage_directions():
        raise ModelError("model.safetensors: a tensor is missing")
    if "dies" in stage_directions():
        os.kill(os.getpid(), signal.SIGKILL)
    if "loses a rank once" in stage_directions() and _is_first(Path("lost")):
        raise EngineDeadError("rank 1 died (killed by SIGKILL) while being started")
    return ScriptedModel(config, StagedEngine)


def _is_first(path: Path) -> bool:
    """Whether nobody was here before; `path` says so to whoever comes next."""
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def main(options: dict[str, Any]) -> int:
    model, platform = options.pop("model"), options.pop("platform", "cpu")
    for name in ("summary", "report", "error_file", "metrics_file"):
        if name in options:
            options[name] = Path(options[name])
    if "impatient" in stage_directions():
        process_replica.STOPPED_SECONDS = fleet.ROOM_SECONDS = 1.0
    if "watched" in stage_directions():
        live.BEAT_SECONDS = 0.05
    config = RunnerConfig(model=model, platform=platform)
    try:
        summary = run_batch_and_report(config, BatchOptions.from_keywords(**options), open_model=open_model)
    except NpuRunnerError as error:
        print(error, file=sys.stderr)
        return {"ConfigError": 2, "ModelError": 2, "TooManyFailuresError": 4}.get(type(error).__name__, 1)
    return summary.exit_status


if __name__ == "__main__":
    from tests.replicas import scripted_job  # by its name, so that replicas can import what they are sent

    sys.exit(scripted_job.main(json.loads(sys.argv[1])))
