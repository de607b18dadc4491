"""Runs every check_* function of a module and prints a line of JSON: the name of each with "ok" or its traceback.

A second line names the operators that were launched or captured since the counters were last reset.

    python -m tests.cann.programs.run_checks tests.cann.programs.fused_operators

Many checks share one process because importing torch_npu takes seconds.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback

from .emulation import calls


def main(module_name: str) -> None:
    module = importlib.import_module(module_name)
    results = {}
    for name, check in list(vars(module).items()):
        if not name.startswith("check_"):
            continue
        print(f"running {name}", file=sys.stderr, flush=True)  # the last one is to blame if the process dies
        try:
            check()
            results[name] = "ok"
        except Exception:  # noqa: BLE001 (the border where a check becomes a reported result)
            results[name] = traceback.format_exc()
    print("RESULTS " + json.dumps(results), flush=True)
    print("OPERATORS " + json.dumps(sorted(calls("launches").keys() | calls("captured").keys())), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
