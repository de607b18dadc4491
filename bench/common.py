"""What the programs share: arguments, turns, medians, child processes, and the JSON line. Knows no workload."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import pickle
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from npu_runner.batch.job.row_server import ServerPlan
    from npu_runner.batch.rows.preprocessing import RowPreprocessor
    from npu_runner.config import RunnerConfig
    from npu_runner.serving.replica import RawRow

ROOT = Path(__file__).parents[1]
SHAPES_VL = ROOT / "npu_runner" / "assets" / "shapes-vl"
_PACKAGES = ("torch", "torch-npu", "triton", "transformers", "vllm", "vllm-ascend", "flashinfer-python", "llguidance",
             "pillow", "ray")
T = TypeVar("T")


def make_parser(description: str | None, *, repeats: int | None = None, platform: str | None = None,
                compares_trees: bool = False) -> argparse.ArgumentParser:
    """A parser with the options that every program has; with --repeats and --platform if these have a default."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if repeats:
        parser.add_argument("--repeats", type=int, default=repeats, help="default: %(default)s")
    parser.add_argument("--commit", default=commit(), help="to be reported; default: that of the measured tree")
    if platform:
        parser.add_argument("--platform", default=platform, help="default: %(default)s")
    if compares_trees:
        parser.add_argument("--against", type=Path, metavar="TREE", help="measure the npu_runner of this tree, too")
    return parser


def commit(tree: Path | None = None) -> str:
    """The short hash of a tree, by default the one that is measured, with + when files differ from it; "unknown"
    outside a checkout."""
    found = importlib.util.find_spec("npu_runner")
    if tree is None and found is not None and found.origin is not None:
        tree = Path(found.origin).parents[1]
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def versions() -> dict[str, str]:
    """The versions of the packages that are installed."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def device_name(platform_name: str) -> str:
    from npu_runner.platforms import pick_platform

    return str(pick_platform(platform_name).describe().get("device", f"{platform_name}, {num_cores()} cores"))


def num_cores() -> int:
    return len(os.sched_getaffinity(0))


def print_result(program: str, arguments: argparse.Namespace, **figures: Any) -> None:
    """The JSON line: the arguments, the machine, the commits and the versions beside the figures."""
    given = {name: value for name, value in vars(arguments).items() if name != "commit"}
    named = {"device": device_name(given["platform"])} if given.get("platform") else {}
    if given.get("against"):
        named["against_commit"] = commit(given["against"])
    print(json.dumps({"bench": program, "commit": arguments.commit, **named, "cores": num_cores(),
                      "machine": platform.machine(), "versions": versions(), "arguments": given, **figures},
                     default=str), flush=True)


def show(values: Sequence[float], digits: int = 3) -> str:
    """The median with the least and the largest value."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def in_turn(sides: Mapping[str, Callable[[int], T]], repeats: int) -> dict[str, list[T]]:
    """Each side `repeats` times, by turns, so that a slow minute of the machine hits all of them.

    Every other turn starts with the last side. A side gets the number of its repeat.
    """
    found: dict[str, list[T]] = {name: [] for name in sides}
    for repeat in range(repeats):
        for name in list(sides)[:: -1 if repeat % 2 else 1]:
            found[name].append(sides[name](repeat))
    return found


def median_ratio(values: Sequence[float], base: Sequence[float]) -> float:
    """The median of the ratios of pairs of one turn: the machine's speed changes by more than what is looked for."""
    return statistics.median(one / other for one, other in zip(values, base, strict=True))


def start_child(module: str, *arguments: Any, tree: Path | None = None, **options: Any) -> subprocess.Popen[str]:
    """A process that runs a module with the npu_runner of `tree`, by default that of this process; `options` are
    those of Popen."""
    paths = [str(tree.resolve()) if tree else None, os.environ.get("PYTHONPATH"), str(ROOT)]
    environment = {**options.pop("env", os.environ), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    # Its working directory is searched first: it holds no npu_runner, and, unlike /tmp, no file of anybody.
    return subprocess.Popen([sys.executable, "-m", module, *map(str, arguments)], stdout=subprocess.PIPE, text=True,
                            cwd="/", env=environment, **options)


def run_child(module: str, *arguments: Any, tree: Path | None = None) -> Any:
    """The child's last line, from JSON; None if it failed, after its last output on standard error."""
    with start_child(module, *arguments, tree=tree) as child:
        text, _ = child.communicate()
    if child.returncode:
        sys.stderr.write(text[-8000:])  # where vLLM's engine says why it ended
    lines = text.splitlines()
    return json.loads(lines[-1]) if child.returncode == 0 and lines else None


class PeakMemory:
    """Samples the resident memory of a process and its descendants."""

    def __init__(self, pid: int):
        self._pid = pid
        self._peak = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        """Highest sum of bytes seen; pages that processes share count once for each."""
        self._is_over.set()
        self._thread.join()
        return self._peak

    def _watch(self) -> None:
        while not self._is_over.wait(0.1):
            self._peak = max(self._peak, sum(map(_resident_bytes, _descendants(self._pid))))


def _descendants(pid: int) -> list[int]:
    found = [pid]
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return found  # it has just ended
    for child in children:
        found += _descendants(int(child))
    return found


def _resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0  # it has just ended


@contextmanager
def job_workers(
    config: RunnerConfig, requests: Path, media: Path
) -> Iterator[tuple[RowPreprocessor, ServerPlan, Iterator[RawRow]]]:
    """What a job's workers apply to rows, the plan that says how far ahead, and the rows. `media`: the folder of images
    and documents."""
    from npu_runner.batch.files.input_file import InputFile
    from npu_runner.batch.job.options import BatchOptions
    from npu_runner.batch.job.row_server import CheckpointSide, server_plan
    from npu_runner.batch.rows.preprocessing import RowPreprocessor

    with InputFile(str(requests), requests.parent) as file:
        options = BatchOptions(input=str(requests), output=f"{requests}.none", allowed_media_dir=media)
        plan = server_plan(config, options, file.source)
        processor = CheckpointSide(config).processor
        yield RowPreprocessor(source=file.source, processor=processor, media=plan.media), plan, file.rows()


def measure_head_start(config: RunnerConfig, requests: Path, media: Path | None = None) -> tuple[float, int]:
    """Seconds to prepare, one after the other, the rows that a job can have prepared before its model is loaded, and
    their number. `media`: None is the folder of `requests`."""
    with job_workers(config, requests, media or requests.parent) as (prepare, plan, all_rows):
        rows = list(islice(all_rows, plan.limits.max_ready))
        prepare(rows[0])  # imports
        seconds, num_bytes, number = 0.0, 0, 0
        while number < len(rows) and num_bytes < plan.limits.max_ready_bytes:
            started = time.perf_counter()
            prepared = prepare(rows[number])
            seconds += time.perf_counter() - started
            number += 1
            num_bytes += len(pickle.dumps(prepared))
    return seconds, number
