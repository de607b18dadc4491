"""Cases that crash, hang, lose the device's context, are wrong or slow or right, for tests of `run_cases`."""

from __future__ import annotations

import atexit
import math
import os
import signal
import time
from collections.abc import Callable

import torch
from torch import Tensor

from npu_runner.platforms.cases import Case, Side


def crash() -> Tensor:
    os.kill(os.getpid(), signal.SIGSEGV)
    raise AssertionError("the signal ends the process")


def hang() -> Tensor:
    time.sleep(600)
    raise AssertionError("the alarm ends the process")


def lose() -> Tensor:
    atexit.register(crash)  # as a vendor's library may, once its context is lost
    raise RuntimeError("a task failed\naclrtSynchronizeStream failed, error code is 507015, not 561002\nerror 507015")


def end_badly() -> Tensor:
    atexit.register(crash)
    return torch.full((2, 3), 0.5)


def sleep() -> Tensor:
    time.sleep(0.05)
    return torch.ones(2, 3)


def fixed(call: Callable[[], Tensor]) -> Callable[[Side], Callable[[], Tensor]]:
    return lambda side: call


def twice_on_the_device(side: Side) -> Tensor:
    return torch.ones(2, 3) * (1.0 if side.dtype == torch.float64 else 2.0)


def served(asked: list[str]) -> list[Case]:
    return [Case(name="right", prepare=fixed(lambda: torch.ones(2, 3))),
            Case(name="crashes", prepare=fixed(crash), job="a", kernel="first"),
            Case(name="crashes", prepare=fixed(lambda: torch.ones(2, 3)), job="a", kernel="second"),
            Case(name="hangs", prepare=fixed(hang), gives_up="graphs", seconds=0.3),
            Case(name="loses the context", prepare=fixed(lose), gives_up="int8"),
            Case(name="wrong", prepare=lambda side: lambda: twice_on_the_device(side), gives_up="int8_static"),
            Case(name="integers", prepare=lambda side: lambda: twice_on_the_device(side).int(), gives_up="int8_static"),
            Case(name="no number", prepare=lambda side: lambda: twice_on_the_device(side) * math.nan
                 if side.dtype != torch.float64 else twice_on_the_device(side), gives_up="int8_static"),
            Case(name="sleeps", prepare=fixed(sleep)),
            Case(name=f"asked: {asked[0]}", prepare=fixed(end_badly))]


def endless(asked: None) -> list[Case]:
    right, integers = (next(case for case in served(["x"]) if case.name == name) for name in ("right", "integers"))
    return [right, Case(name="hangs", prepare=fixed(hang)), integers]
