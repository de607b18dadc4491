"""Forks a fresh `npu-runner` for every line of arguments it reads: torch is imported once, not thirty times.

A forked job is a process of its own in all that matters here: it can be killed, and it holds locks and children.
Protocol: a JSON list of arguments in, the pid out; an empty line in, its exit status out once it has ended (negative:
the signal). Until it is asked for its status, a job that has ended keeps its pid, so that no other process is killed.
"""

from __future__ import annotations

import json
import os
import sys

import npu_runner.batch.job.run
import npu_runner.engine.llm_engine  # noqa: F401 - imported for the children
from npu_runner.cli import main as cli


def main() -> None:
    while line := sys.stdin.readline():
        pid = os.fork()
        if pid == 0:
            os.dup2(2, 1)  # our stdout carries the protocol
            os._exit(cli.main(json.loads(line)))
        print(pid, flush=True)
        sys.stdin.readline()
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
