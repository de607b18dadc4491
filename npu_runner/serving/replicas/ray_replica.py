"""A replica in a Ray actor, on whatever host of the cluster has room, as the driver sees it. Knows nothing of rows.

The other end is ray_actor.py. Nothing here starts an actor again: the fleet does, with a new one of these.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections.abc import Callable
from typing import Any

import ray

import npu_runner
from npu_runner.errors import ConfigError, NpuRunnerError, ReplicaDeadError
from npu_runner.processes.stopwatch import Stopwatch
from npu_runner.serving.replica import Replica
from npu_runner.serving.replicas.ray_actor import RayReplicaHost, size_of
from npu_runner.serving.replicas.ray_cluster import Demand
from npu_runner.serving.replicas.remote_replica import RemoteReplica

# An actor that nobody has room for waits for ever, and Ray says nothing; one that has room is there sooner.
WAITING_SECONDS = 30.0
_END_SECONDS = 10.0


class RayReplica(RemoteReplica):
    """Has the replica that `make` (picklable) makes run in an actor that takes `demand`."""

    def __init__(self, name: str, make: Callable[[], Replica], demand: Demand, *, num_rows_ahead: int):
        super().__init__(name, make, num_rows_ahead=0)  # rows for an actor that nobody has room for would lie there
        self._num_rows_ahead = num_rows_ahead
        self._demand = demand
        self._actor: Any = None
        self._is_there = False

    def start(self, wake: Callable[[], None]) -> None:
        remote: Any = ray.remote  # its types know no groups
        actor_class = remote(concurrency_groups={"commands": 1, "events": 1})(RayReplicaHost)
        self._started = Stopwatch()
        packed = pickle.dumps(self._make)  # what only the same version may read
        self._actor = actor_class.options(max_restarts=0, **self._demand.options).remote(
            self.name, npu_runner.__version__, packed)
        self._reader = threading.Thread(target=self._read, args=(wake,), name=f"{self.name}: reader", daemon=True)
        self._reader.start()

    def _tell(self, command: tuple[str, Any]) -> None:
        self._actor.tell.remote(command)

    def close(self) -> None:
        if self._actor is None:
            return
        self._inbox.close()
        if self._failure is None and self._is_there:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.get(self._actor.end.remote(), timeout=_END_SECONDS)
        ray.kill(self._actor, no_restart=True)
        self._reader.join()
        self._actor = None

    def _read(self, wake: Callable[[], None]) -> None:
        try:
            while True:
                messages = ray.get(self._actor.hear.remote())
                if not self._is_there:
                    self._is_there, self.waits_for, self.num_rows_ahead = True, None, self._num_rows_ahead
                for message in messages:
                    self._inbox.put(message, size_of(message))
                if messages:
                    wake()
        except ray.exceptions.RayError as error:
            self._inbox.put(_last_word(error), 0)
            wake()

    def _look_after(self) -> None:
        if not self._is_there and self._started.exceeds(WAITING_SECONDS):
            self.waits_for = self._demand.wanted

    def _where(self) -> str:
        return f"actor {self._actor._actor_id.hex()}"


def _last_word(error: ray.exceptions.RayError) -> NpuRunnerError:
    """Ray says a lot; what happened stands in one line of it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = next((line for line in reversed(lines) if "Error" in line or "died" in line or "killed" in line),
                  lines[0] if lines else type(error).__name__)
    if "creation task" in str(error):  # an exception there, as other code or none raises; not a death
        return ConfigError(f"its host cannot run it ({reason}); install the same npu-runner[ray] on every host")
    return ReplicaDeadError(reason)
