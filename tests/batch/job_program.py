"""A job with a scripted engine as a program of its own, to be signalled, killed and read from. Holds no tests.

    python -m tests.batch.job_program INPUT OUTPUT MODEL [AT]

AT names what happens to it (_EVENTS). It says "five steps" on standard error, so that whoever started it knows.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from npu_runner.batch.files import answer_file, durable
from npu_runner.batch.job.options import BatchOptions
from npu_runner.config import RunnerConfig
from npu_runner.errors import NpuRunnerError
from npu_runner.reports.report import run_batch_and_report
from tests.batch.scripted import OvertakingEngine, ScriptedEngine, ScriptedModel, workers_of

VANISHED = 9


def vanish(*_: Any) -> NoReturn:
    os._exit(VANISHED)


def announcing(pauses: Callable[[int], float] = lambda step: 0.01) -> Callable[[RunnerConfig], ScriptedEngine]:
    def on_step(engine: ScriptedEngine) -> None:
        if engine.num_steps == 5:
            print("five steps", file=sys.stderr, flush=True)
        time.sleep(pauses(engine.num_steps))

    return lambda config: ScriptedEngine(config, on_step=on_step)


def vanishing_after(num_rows: int) -> Callable[[RunnerConfig], ScriptedEngine]:
    return lambda config: OvertakingEngine(config, crash_after=num_rows, crash=vanish)


def loading_for_ever(_: RunnerConfig) -> NoReturn:
    while not workers_of(os.getpid()):
        time.sleep(0.01)
    print("loading", file=sys.stderr, flush=True)
    while True:
        time.sleep(3600)


def interrupt_after_locking() -> None:
    lock = fcntl.flock

    def lock_and_interrupt(*arguments: Any) -> None:
        fcntl.flock = lock  # a second signal would end the job at once
        lock(*arguments)
        os.kill(os.getpid(), signal.SIGINT)

    fcntl.flock = lock_and_interrupt


def vanish_while_ordering(module: Any, name: str) -> None:
    """In the call of that name which the output's new version makes; files before it are let pass."""
    replacing = answer_file.replacing

    def replacing_the_output(path: Path) -> Any:
        setattr(module, name, vanish)
        return replacing(path)

    answer_file.replacing = replacing_the_output


_ENGINES: dict[str, Callable[[RunnerConfig], ScriptedEngine]] = {
    "vanish after 6": vanishing_after(6), "vanish after 33": vanishing_after(33), "load for ever": loading_for_ever,
    "hang after six steps": announcing(lambda step: 0.01 if step < 6 else 3600.0),
}
_EVENTS: dict[str, Callable[[], None]] = {
    "interrupt after locking": interrupt_after_locking,
    "vanish at fsync": lambda: vanish_while_ordering(os, "fsync"),
    "vanish at replace": lambda: vanish_while_ordering(os, "replace"),
    "vanish at sync_folder": lambda: vanish_while_ordering(durable, "sync_folder"),
}


def main(source: str, output: str, model: str, at: str = "") -> int:
    _EVENTS.get(at, lambda: None)()
    options = BatchOptions.from_keywords(input=source, output=output, preprocessing_workers=1, progress="off",
                                         ordered=output != "-", summary=f"{model}/summary.json")
    make = _ENGINES.get(at, announcing())
    print("an import that chats", flush=True)
    try:
        return run_batch_and_report(RunnerConfig(model=model), options,
                                    open_model=lambda config: ScriptedModel(config, make)).exit_status
    except NpuRunnerError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
