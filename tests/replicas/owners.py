"""An owner of a fleet for tests. Knows no rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from npu_runner.errors import ReplicaDeadError
from npu_runner.serving.blame import GivenUp
from npu_runner.serving.replica import Loading, Opened
from npu_runner.serving.replicas.fleet import Owner


class Quiet(Owner):
    """Calls the functions that it is given, by the names of its methods; all other calls do nothing."""

    def __init__(self, **functions: Any):
        self._functions = functions

    def make_run(self, indices: Sequence[int]) -> Any:
        return self._functions["make_run"](indices)

    def notify(self, news: Opened | Loading | str) -> None:
        self._functions.get("notify", lambda news: None)(news)

    def check_renderer(self, name: str, renderer: Mapping[str, str]) -> None:
        self._functions.get("check_renderer", lambda *_: None)(name, renderer)

    def isolate(self, indices: Sequence[int]) -> None:
        """Nothing is remembered."""

    def record_death(self, index: int, error: ReplicaDeadError) -> GivenUp | None:
        found: GivenUp | None = self._functions.get("record_death", lambda *_: None)(index, error)
        return found
