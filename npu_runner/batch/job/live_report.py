"""--report-every: the report while the job runs, made in a process of its own, one at a time, of rows that are on disk.

That process has the lowest priority, and is the first to go where memory runs out. What goes wrong with it is said, and
the job goes on. Knows nothing of how rows are served.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

from npu_runner.batch.files.durable import remove_torn_version
from npu_runner.batch.files.place import Place
from npu_runner.batch.files.status_file import Moment, ReportStatus, printable
from npu_runner.batch.job.options import BatchOptions
from npu_runner.batch.job.past_job import PastJob
from npu_runner.errors import NpuRunnerError
from npu_runner.processes.child import Child, describe_exit

_LOOK_SECONDS = 0.5
_PATIENCE_SECONDS = 5.0
_MOST_BYTES_OF_OUTPUT = 4096
_LOWEST_PRIORITY = 19
_OOM_SCORE = Path("/proc/self/oom_score_adj")
_FIRST_TO_GO = 1000


class LiveReport:
    """Entered while rows are served. `place`: of the report; `output`: of the job; `descriptor`: of its input.

    `synced_ends`: bytes of the output's files that are on disk. `tell`: of the last report, once there is news of it.
    """

    def __init__(self, options: BatchOptions, place: Place, output: Path, descriptor: int, *,
                 synced_ends: Callable[[], Sequence[int]], say: Callable[[str], None],
                 tell: Callable[[ReportStatus], None]):
        assert options.report_every is not None, "nobody asks for it"
        self._every_seconds = options.report_every * 60
        self._options, self._place, self._output, self._descriptor = options, place, output, descriptor
        self._synced_ends, self._say, self._tell = synced_ends, say, tell
        self._child: Child | None = None
        self._words: IO[str] | None = None
        self._made: Moment | None = None
        self._due_at = self._look_at = time.monotonic() + self._every_seconds

    def __enter__(self) -> LiveReport:
        return self

    def __exit__(self, *_: object) -> None:
        """The one that is being made is given up; the one before stays."""
        if self._child is not None:
            self._child.ask_to_end()
            self._child.kill(_PATIENCE_SECONDS)
            self._forget()
        if self._place.path is not None:
            with contextlib.suppress(OSError):  # the next report removes it
                remove_torn_version(self._place.path)

    def look(self) -> None:
        """Call it as often as you like: begin one when it is time to, and see whether one is there."""
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = max(self._due_at, now) if self._child is None else now + _LOOK_SECONDS
        if self._child is not None:
            status = self._child.exit_status(0)
            if status is None:
                return
            self._end(status)
        if now >= self._due_at:
            self._begin(now)

    def _begin(self, now: float) -> None:
        self._due_at, self._look_at = now + self._every_seconds, now + _LOOK_SECONDS
        try:
            self._words = tempfile.TemporaryFile("w+", errors="backslashreplace")  # noqa: SIM115 - closed in _forget
            self._child = Child("npu report", __name__, json.dumps(self._task()), output=self._words,
                                descriptors=(self._descriptor,))
        except OSError as error:
            self._failed(error.strerror or str(error))
            self._forget()

    def _task(self) -> dict[str, Any]:
        options = self._options
        folder = options.allowed_media_dir
        return {
            "ends": list(self._synced_ends()),
            "output": str(self._output),
            # Opened anew there: it has a position of its own. What was standard input, or is packed, has no other name.
            "input": f"/proc/self/fd/{self._descriptor}",
            "report": str(self._place.path),
            "allowed_media_dir": None if folder is None else str(folder),
            "report_rows": options.report_rows,
            "max_row_bytes": options.max_row_bytes,
            "preprocessing_timeout": options.workers.preprocessing_timeout,
            "worker_memory_bytes": options.workers.worker_memory_bytes,
            "max_media_bytes": options.workers.max_media_bytes,
        }

    def _end(self, status: int) -> None:
        if status == 0:
            self._made = Moment.now()
            self._tell(ReportStatus(made=self._made, error=None))
        else:
            self._failed(self._last_words() or describe_exit(status))
        self._forget()

    def _failed(self, reason: str) -> None:
        self._say(f"report    none of the rows so far could be made: {reason}; the job goes on")
        self._tell(ReportStatus(made=self._made, error=printable(reason)))

    def _last_words(self) -> str:
        assert self._words is not None, "a child writes to it"
        with contextlib.suppress(OSError):
            end = self._words.seek(0, os.SEEK_END)
            self._words.seek(max(0, end - _MOST_BYTES_OF_OUTPUT))
            lines = self._words.read().splitlines()
            return lines[-1] if lines else ""
        return ""

    def _forget(self) -> None:
        if self._words is not None:
            self._words.close()
        self._child = self._words = None


def main(arguments: list[str]) -> None:
    """TASK: in the process of its own. Exit status 1: it could not be made; the last line says why."""
    signal.signal(signal.SIGTERM, _leave)
    os.nice(_LOWEST_PRIORITY)
    with contextlib.suppress(OSError):
        _OOM_SCORE.write_text(str(_FIRST_TO_GO))
    task: Mapping[str, Any] = json.loads(arguments[0])
    folder = task["allowed_media_dir"]
    options = {name: value for name, value in task.items() if name != "ends"}
    options |= {"report": Path(task["report"]), "allowed_media_dir": None if folder is None else Path(folder)}
    try:
        PastJob(task["output"]).report(BatchOptions.from_keywords(**options), task["ends"])
    except NpuRunnerError as error:
        sys.exit(str(error))


def _leave(*_: object) -> NoReturn:
    """In good order: what is half made is removed."""
    sys.exit(1)
