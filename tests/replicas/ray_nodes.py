"""Ray clusters of several nodes on this machine, each started as `ray start` does it, and ended. Holds no tests."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.replicas.jobs import PYTHONPATH, kill, processes, wait_until_gone

ACTOR = b"ray::RayReplicaHost"
_ANY = b""
# A folder of their own, so that no other program takes them for the cluster of this host.
_ENVIRONMENT = {"RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": f"/tmp/ray-of-{os.getpid()}"}
_RAY = [sys.executable, "-m", "ray.scripts.scripts"]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


class Node:
    """One `ray start`. Without `address` it is the head of a new cluster.

    `prepare`: shell commands that run before, in a mount namespace of the node's own: a host that sees other files.
    """

    def __init__(self, address: str | None = None, *, num_cpus: int = 1, resources: str = "{}",
                 environment: Mapping[str, str] | None = None, prepare: str = ""):
        self.is_head = address is None
        port = free_port()
        self.address = address or f"127.0.0.1:{port}"
        head = ["--head", "--port", str(port), "--include-dashboard", "false"]
        where = ["--address", self.address] if address else head
        command = [*_RAY, "start", *where, "--num-cpus", str(num_cpus), "--resources", resources, "--block",
                   "--object-store-memory", str(100 << 20), "--disable-usage-stats"]
        if prepare:
            command = ["unshare", "--mount", "sh", "-ec", f"{prepare}; exec {shlex.join(command)}"]
        self._process = subprocess.Popen(
            command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env={**os.environ, **_ENVIRONMENT, "PYTHONPATH": PYTHONPATH, **(environment or {})}, cwd="/",
        )  # fmt: skip

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def members(self) -> list[int]:
        """Every process of the node; none of one that was killed."""
        return [*processes(_ANY, self.pid), self.pid] if self.is_running else []

    def kill(self) -> None:
        """All of it at once, as a host that loses its power."""
        members = self.members()
        kill(members)
        self._process.wait()
        wait_until_gone(members)

    def actors(self) -> list[int]:
        return processes(ACTOR, self._process.pid)


@contextlib.contextmanager
def nodes() -> Iterator[list[Node]]:
    """Put nodes into the list: they are killed at the end, the last ones first."""
    made: list[Node] = []
    try:
        yield made
    finally:
        for node in reversed(made):
            node.kill()
            if node.is_head:
                shutil.rmtree(_ENVIRONMENT["RAY_TMPDIR"], ignore_errors=True)


def wait_for_resource(address: str, name: str, amount: float) -> None:
    """Until the cluster has exactly so much of it. Asked in a process of its own: one process joins one cluster."""
    code = ("import ray, sys, time\n"
            "ray.init(address=sys.argv[1], log_to_driver=False, logging_level=50)\n"
            "while ray.cluster_resources().get(sys.argv[2], 0) != float(sys.argv[3]): time.sleep(0.1)\n")
    while subprocess.run([sys.executable, "-c", code, address, name, str(amount)], capture_output=True,
                         env={**os.environ, **_ENVIRONMENT}).returncode:  # fmt: skip
        time.sleep(0.5)  # the head does not answer yet


def other_package(folder: Path, version: str) -> str:
    """A PYTHONPATH with this package in another version."""
    root = Path(__file__).parents[2]
    package = folder / "npu_runner"
    package.mkdir(parents=True)
    for path in (root / "npu_runner").iterdir():
        if path.name != "__init__.py":
            (package / path.name).symlink_to(path)
    text = (root / "npu_runner" / "__init__.py").read_text()
    (package / "__init__.py").write_text(text.replace('__version__ = "', f'__version__ = "{version}+'))
    (folder / "tests").symlink_to(root / "tests")
    return str(folder)


def need_ray() -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'ray[data]>=2.40'")
