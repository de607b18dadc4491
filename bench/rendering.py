"""Pages per second that a job's preprocessing workers render and resize, by cores, kinds of pages and resolution.

Each core has a worker, and one of the cores also serves the process that receives the pages. No model runs.

    python -m bench.rendering --cores 1 2 4 8 16
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path

from bench import common
from bench.documents import KINDS, write_documents, write_reader
from bench.shapes import make_vision_model
from npu_runner import RunnerConfig
from npu_runner.serving.workers.pool import WorkerPool
from npu_runner.tables.make_rows import make_rows
from npu_runner.tables.options import RowsOptions

_MODEL, _LONGEST = "qwen3.5-0.8b", 4096
_WARM_UP = 2
"""Pages that each worker renders before time counts."""


def main() -> None:
    parser = common.make_parser(__doc__)
    parser.add_argument("--cores", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--dpi", type=int, nargs="+", default=[144, 192])
    parser.add_argument("--pages", type=int, default=32, help="that each core renders; default: %(default)s")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(Path(arguments.measure[0]), int(arguments.measure[1]), arguments)))
        return
    cores = [count for count in arguments.cores if count <= common.num_cores()]
    with tempfile.TemporaryDirectory() as name:
        make_vision_model(Path(name), _MODEL, _LONGEST)
        for kind in KINDS:
            write_documents(Path(name, kind), max(cores) * (_WARM_UP + arguments.pages), [kind])
        rates = {count: common.run_child("bench.rendering", *sys.argv[1:], "--measure", name, count) for count in cores}
    print(f"{'pages/s by cores':<20}" + "".join(f"{count:>8}" for count in cores))
    for case in rates[cores[0]]:
        print(f"{case:<20}" + "".join(f"{rates[count][case]:>8.1f}" for count in cores))
    common.print_result("rendering", arguments, rates=rates)


def measure(folder: Path, cores: int, arguments: argparse.Namespace) -> dict[str, float]:
    """The rows and the workers are those of `read`."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])  # workers inherit it
    config = RunnerConfig.from_keywords(str(folder / _MODEL), platform="cpu")
    rows, reader, rates = folder / "rows.jsonl", folder / "reader.json", {}
    for kind in KINDS:
        for dpi in arguments.dpi:
            write_reader(reader, {"dpi": dpi, "longest": _LONGEST})
            make_rows([str(folder / kind)], RowsOptions(output=str(rows), reader=str(reader)))
            with common.job_workers(config, rows, folder / kind) as (prepare, plan, all_rows):
                pool = WorkerPool(prepare, replace(plan.limits, num_workers=cores), plan.inherited)
                for row in islice(all_rows, cores * (_WARM_UP + arguments.pages)):
                    pool.submit(row, row.num_bytes)
                for number in range(cores * (_WARM_UP + arguments.pages)):
                    if number == cores * _WARM_UP:
                        started = time.perf_counter()
                    done = pool.get(120.0)
                    assert done is not None
                    assert done.result.error is None, done.result
                rates[f"{kind}, {dpi} DPI"] = cores * arguments.pages / (time.perf_counter() - started)
                pool.close()
    return rates


if __name__ == "__main__":
    main()
