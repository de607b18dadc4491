"""What children of these tests do, and a parent of such children. Holds no tests."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

from npu_runner.processes.child import Child

NAME = "tests.processes.child_programs"


def main(arguments: list[str]) -> None:
    """`arguments`: what to do."""
    what, *rest = arguments
    if what == "exit":
        os._exit(int(rest[0]))
    if what == "die":
        os.kill(os.getpid(), signal.Signals[rest[0]])
    if what == "print":
        print("on standard output")
    if what == "affinity":
        print(sorted(os.sched_getaffinity(0)))
    if what == "sleep":
        time.sleep(600)
    if what == "hold":  # the GIL, as a decoder that hangs does: no Python of this process runs any more
        ctypes.PyDLL(None).sleep(600)


def parent(how: str) -> None:
    """Starts a child as `how` says, prints its pid and waits to be killed."""
    started: list[Child] = []

    def start(what: str = "sleep") -> None:
        started.append(Child("npu test", NAME, what))
        while Path(f"/proc/{started[-1].pid}/comm").read_text().strip() != "npu test":
            time.sleep(0.005)  # it has asked the kernel to tell it of its parent's end

    if how == "in a thread that ends":
        thread = threading.Thread(target=start)
        thread.start()
        thread.join()
    elif how == "after a fork":
        start()
        started.pop().kill()
        if (forked := os.fork()):
            os.waitpid(forked, 0)
            return
        start()
    else:
        start("hold" if how == "holding the GIL" else "sleep")
    print(os.getpid(), started[0].pid, flush=True)
    time.sleep(600)


if __name__ == "__main__":
    parent(sys.argv[1])
