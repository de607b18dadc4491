"""Replicas as Ray actors: whoever dies, each row is there once, as an undisturbed replica would have it.

Raylets, actors and their deaths are real; engines follow a script. Skipped where Ray is not installed.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import npu_runner
from tests.batch.scripted import write_rows
from tests.replicas.jobs import (
    ended,
    kill,
    leftovers,
    num_rows,
    start_scripted,
    wait_for_rows,
    wait_until,
    wait_until_gone,
)
from tests.replicas.ray_nodes import Node, need_ray, nodes, other_package, wait_for_resource
from tests.replicas.scripted_job import HOLD
from tests.replicas.scripted_runs import NUM_ROWS, lines, rows, run

pytestmark = pytest.mark.usefixtures("fixed_time")


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nobody answers a row while this file is there."""
    return tmp_path_factory.mktemp("hold") / "hold"


@pytest.fixture(scope="module")
def cluster(held: Path) -> Iterator[Node]:
    """A head with two cores, on this host and for it alone."""
    need_ray()
    with nodes() as made:
        made.append(Node(num_cpus=2, environment={HOLD: str(held)}))
        wait_for_resource(made[0].address, "CPU", 2)
        yield made[0]


@pytest.fixture
def joined(cluster: Node, held: Path) -> Iterator[Any]:
    """Adds nodes to the cluster; the cluster is alone again afterwards."""
    with nodes() as made:
        def join(**options: Any) -> Node:
            environment = {HOLD: str(held), **options.pop("environment", {})}
            made.append(Node(cluster.address, environment=environment, **options))
            return made[-1]

        yield join
    wait_for_resource(cluster.address, "CPU", 2)


def start(folder: Path, cluster: Node, **options: Any) -> subprocess.Popen[bytes]:
    write_rows(folder / "in.jsonl", rows())
    return start_scripted(folder, ray=cluster.address, progress="lines", **options)


def finished(job: subprocess.Popen[bytes], folder: Path, undisturbed: list[bytes]) -> str:
    """What it said. All rows are there once, and nothing else is left."""
    status, said = ended(job)
    assert status == 3, said
    assert lines(folder) == undisturbed
    assert leftovers(folder) == set()
    return said


def refused(job: subprocess.Popen[bytes], folder: Path) -> str:
    """What it said before a row moved."""
    status, said = ended(job)
    assert status == 2, said
    assert num_rows(folder / "out.jsonl") == 0
    return said


@pytest.mark.full("starts a Ray cluster, whose processes take half a minute on two cores; replicas in processes stay")
@pytest.mark.slow
@pytest.mark.parametrize("shared_input", [False, True])
def test_rows_travel_as_bytes_or_as_places(
    shared_input: bool, cluster: Node, tmp_path: Path, undisturbed: list[bytes]
) -> None:
    said = finished(start(tmp_path, cluster, shared_input=shared_input), tmp_path, undisturbed)
    assert "replica 0" in said
    assert "replica 1" in said
    wait_until_gone(cluster.actors())


@pytest.mark.full("starts a Ray cluster, whose processes take half a minute on two cores; replicas in processes stay")
@pytest.mark.slow
def test_an_actor_that_is_killed_is_named_and_another_one_takes_its_place(
    cluster: Node, tmp_path: Path, undisturbed: list[bytes]
) -> None:
    job = start(tmp_path, cluster)
    wait_for_rows(job, tmp_path / "out.jsonl", 1)
    kill(cluster.actors()[:1])
    said = finished(job, tmp_path, undisturbed)
    assert "died: " in said
    assert "started again (1 of 3)" in said


@pytest.mark.full("starts a Ray cluster, whose processes take half a minute on two cores; replicas in processes stay")
@pytest.mark.slow
def test_replicas_come_with_hosts_and_go_with_them(
    cluster: Node, joined: Any, held: Path, tmp_path: Path, undisturbed: list[bytes]
) -> None:
    held.touch()
    job = start(tmp_path, cluster, data_parallel_size=4)
    wait_until(lambda: len(cluster.actors()) == 2, job)
    for _ in range(2):  # a host, then another one in its place
        node = joined()
        wait_until(node.actors, job)
        node.kill()
    last = []
    for _ in range(2):
        last.append(joined())
        wait_until(last[-1].actors, job)
    held.unlink()
    said = finished(job, tmp_path, undisturbed)
    assert "the cluster has CPU 2: 2 of 4 replicas come when there is CPU 1 more for each" in said
    assert "replica 2 is added: there are devices for it" in said
    assert said.count("died: ") == 2
    assert "replica 3 " in said.partition("replica 2 ")[2], "the summary names all of them"
    wait_until_gone([pid for node in (cluster, *last) for pid in node.actors()])


@pytest.mark.full("starts a Ray cluster, whose processes take half a minute on two cores; replicas in processes stay")
@pytest.mark.slow
def test_auto_takes_the_devices_that_there_are_and_those_that_come(
    cluster: Node, joined: Any, held: Path, tmp_path: Path, undisturbed: list[bytes]
) -> None:
    held.touch()
    first = joined(resources='{"NPU": 2}')
    wait_for_resource(cluster.address, "NPU", 2)
    job = start(tmp_path, cluster, data_parallel_size="auto", platform="npu")
    wait_until(lambda: len(first.actors()) == 2, job)
    second = joined(resources='{"NPU": 1}')
    wait_until(second.actors, job)
    held.unlink()
    assert "replica 2 is added" in finished(job, tmp_path, undisturbed)


@pytest.mark.full("starts a Ray cluster, whose processes take half a minute on two cores; replicas in processes stay")
@pytest.mark.slow
def test_a_host_that_dies_costs_no_row_though_nobody_has_room_for_another_replica(
    cluster: Node, joined: Any, tmp_path: Path, undisturbed: list[bytes]
) -> None:
    node = joined()
    wait_for_resource(cluster.address, "CPU", 3)
    job = start(tmp_path, cluster, data_parallel_size=3, output="-", stdout=subprocess.PIPE)
    wait_until(node.actors, job)
    node.kill()
    output, said = job.communicate()
    assert job.returncode == 3, said
    assert b"died: " in said
    assert sorted(output.splitlines()) == undisturbed, "what Ray tells of its nodes is not among the answers"


@pytest.mark.full("starts a Ray cluster, whose processes take half a minute on two cores; replicas in processes stay")
@pytest.mark.slow
def test_a_driver_that_is_killed_leaves_no_actor_and_goes_on_without_ray(
    cluster: Node, tmp_path: Path, undisturbed: list[bytes]
) -> None:
    job = start(tmp_path, cluster)
    wait_for_rows(job, tmp_path / "out.jsonl", 20)
    left = cluster.actors()
    assert len(left) == 2
    job.kill()
    job.communicate()
    wait_until_gone(left)
    assert 20 <= num_rows(tmp_path / "out.jsonl") < NUM_ROWS
    assert run(tmp_path, data_parallel_size=1)[0] == 3
    assert lines(tmp_path) == undisturbed


@pytest.mark.full("starts a Ray cluster, whose processes take half a minute on two cores; replicas in processes stay")
@pytest.mark.slow
def test_a_signal_ends_the_job_in_good_order_and_its_actors_with_it(
    cluster: Node, tmp_path: Path, undisturbed: list[bytes]
) -> None:
    job = start(tmp_path, cluster)
    wait_for_rows(job, tmp_path / "out.jsonl", 10)
    left = cluster.actors()
    job.send_signal(signal.SIGTERM)  # Ray has a handler of its own for it
    status, said = ended(job)
    assert (status, "SIGTERM: stopping" in said) == (1, True), said
    wait_until_gone(left)
    assert set(lines(tmp_path)) <= set(undisturbed)
    assert leftovers(tmp_path) == set()


@pytest.mark.full("starts a Ray cluster, whose processes take half a minute on two cores; replicas in processes stay")
@pytest.mark.slow
def test_what_the_cluster_lacks_is_named_before_rows_move(cluster: Node, joined: Any, tmp_path: Path) -> None:
    said = refused(start(tmp_path, cluster, data_parallel_size="auto"), tmp_path)
    assert "the cpu platform has cores only" in said
    command = [sys.executable, "-m", "npu_runner", "batch", "-i", str(tmp_path / "in.jsonl"), "-o",
               str(tmp_path / "npu.jsonl"), "--platform", "npu", "--ray", cluster.address]  # fmt: skip
    for expected in ("the cluster has no resource NPU", "takes 2 NPU, the cluster has 1"):
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 2, done.stderr
        assert expected in done.stderr
        assert not (tmp_path / "npu.jsonl").exists()
        if "--tensor-parallel-size" not in command:
            joined(resources='{"NPU": 1}')
            wait_for_resource(cluster.address, "NPU", 1)
            command += ["--tensor-parallel-size", "2"]


@pytest.mark.full("starts a Ray cluster, whose processes take half a minute on two cores; replicas in processes stay")
@pytest.mark.slow
@pytest.mark.parametrize(("what", "message"), [
    ("settings", "max_model_len"),
    ("version", f"has npu-runner other+{npu_runner.__version__}, the driver {npu_runner.__version__}"),
    ("package", "install the same npu-runner and the same Ray on every host"),
    ("model", "config.json"),
    ("folder", "there is no folder"),
])  # fmt: skip
def test_a_host_that_would_answer_otherwise_is_refused_by_name(
    what: str, message: str, cluster: Node, joined: Any, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    (tmp_path / "model").mkdir()
    (tmp_path / "another").mkdir()
    (tmp_path / "empty/npu_runner").mkdir(parents=True)
    (tmp_path / "empty/npu_runner/__init__.py").touch()
    (tmp_path / "another" / "config.json").write_text('{"another": 1}')
    options: dict[str, Any] = {
        "settings": {"environment": {"STAGE": "differs"}},
        "version": {"environment": {"PYTHONPATH": other_package(tmp_path / "package", "other")}},
        "package": {"environment": {"PYTHONPATH": str(tmp_path / "empty")}},
        "model": {"prepare": f"mount --bind {tmp_path}/another {model}"},
        "folder": {"prepare": f"mount -t tmpfs none {tmp_path}"},
    }[what]
    if "prepare" in options and subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("hosts that see other files need the right to mount")
    joined(**options)
    wait_for_resource(cluster.address, "CPU", 3)
    said = refused(start(tmp_path, cluster, data_parallel_size=3), tmp_path)
    assert message in said, said
    assert "replica " in said
