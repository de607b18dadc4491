"""Replicas as Ray actors: whoever dies, each row is there once, as an undisturbed replica would have it.

Raylets, actors and their deaths are real; engines follow a script. Skipped where Ray is not installed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.batch.scripted import write_rows
from tests.replicas.jobs import (
    ended,
    kill,
    leftovers,
    num_rows,
    processes,
    start_scripted,
    wait_for_rows,
    wait_until,
    wait_until_gone,
)
from tests.replicas.test_scripted_deaths import NUM_ROWS, lines, rows, run, undisturbed

__all__ = ["undisturbed"]
pytestmark = pytest.mark.usefixtures("fixed_time")
ROOT = Path(__file__).parents[2]
ACTOR = b"ray::RayServant"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head with two cores, on this host and for it alone."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'npu-runner[ray]'")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("RAY_AUTH_MODE", "disabled")
        from ray.cluster_utils import Cluster

        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
        yield made
        made.shutdown()


def actors() -> list[int]:
    """Process ids of the actors of a cluster that this process has started."""
    return processes(ACTOR, os.getpid())


def start(folder: Path, cluster: Any, **options: Any) -> subprocess.Popen[bytes]:
    return start_scripted(folder, ray=cluster.address, progress="lines", **options)


@pytest.mark.full("starts a Ray cluster, whose processes take half a minute on two cores; replicas in processes stay")
@pytest.mark.slow
@pytest.mark.parametrize("shared_input", [False, True])
def test_rows_travel_as_bytes_or_as_places(
    shared_input: bool, cluster: Any, tmp_path: Path, undisturbed: list[bytes]
) -> None:
    write_rows(tmp_path / "in.jsonl", rows())
    status, said = ended(start(tmp_path, cluster, shared_input=shared_input))
    assert status == 3, said
    assert lines(tmp_path) == undisturbed
    assert "replica 0" in said
    assert "replica 1" in said
    wait_until_gone(actors())
    assert leftovers(tmp_path) == set()


@pytest.mark.full("starts a Ray cluster, whose processes take half a minute on two cores; replicas in processes stay")
@pytest.mark.slow
def test_an_actor_that_is_killed_is_named_and_another_one_takes_its_place(
    cluster: Any, tmp_path: Path, undisturbed: list[bytes]
) -> None:
    write_rows(tmp_path / "in.jsonl", rows())
    job = start(tmp_path, cluster)
    wait_for_rows(job, tmp_path / "out.jsonl", 1)
    victim = actors()[0]
    kill([victim])
    status, said = ended(job)
    assert status == 3, said
    assert "died: " in said
    assert "started again (1 of 3)" in said
    assert lines(tmp_path) == undisturbed


@pytest.mark.full("starts a Ray cluster, whose processes take half a minute on two cores; replicas in processes stay")
@pytest.mark.slow
def test_a_node_that_dies_costs_no_row_though_nobody_has_room_for_another_replica(
    cluster: Any, tmp_path: Path, undisturbed: list[bytes]
) -> None:
    node = cluster.add_node(num_cpus=1)
    write_rows(tmp_path / "in.jsonl", rows())
    job = start(tmp_path, cluster, data_parallel_size=3)
    wait_until(lambda: len(actors()) == 3, job)
    wait_for_rows(job, tmp_path / "out.jsonl", 3)
    cluster.remove_node(node, allow_graceful=False)
    status, said = ended(job)
    assert status == 3, said
    assert "died: " in said
    assert lines(tmp_path) == undisturbed
    wait_until_gone(actors())


@pytest.mark.full("starts a Ray cluster, whose processes take half a minute on two cores; replicas in processes stay")
@pytest.mark.slow
def test_a_driver_that_is_killed_leaves_no_actor_and_goes_on_without_ray(
    cluster: Any, tmp_path: Path, undisturbed: list[bytes]
) -> None:
    write_rows(tmp_path / "in.jsonl", rows())
    job = start(tmp_path, cluster)
    wait_for_rows(job, tmp_path / "out.jsonl", 20)
    left = actors()
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
    cluster: Any, tmp_path: Path, undisturbed: list[bytes]
) -> None:
    write_rows(tmp_path / "in.jsonl", rows())
    job = start(tmp_path, cluster)
    wait_for_rows(job, tmp_path / "out.jsonl", 10)
    left = actors()
    job.send_signal(signal.SIGTERM)  # Ray has a handler of its own for it
    status, said = ended(job)
    assert (status, "SIGTERM: stopping" in said) == (1, True), said
    wait_until_gone(left)
    assert set(lines(tmp_path)) <= set(undisturbed)
    assert leftovers(tmp_path) == set()


@pytest.mark.full("starts a Ray cluster, whose processes take half a minute on two cores; replicas in processes stay")
@pytest.mark.slow
def test_what_the_cluster_lacks_is_named_before_rows_move(cluster: Any, tmp_path: Path) -> None:
    write_rows(tmp_path / "in.jsonl", rows())
    status, said = ended(start(tmp_path, cluster, data_parallel_size=9))
    assert status == 2, said
    assert "data_parallel_size 9: a replica takes a core at least, the cluster has 2" in said
    command = [sys.executable, "-m", "npu_runner", "batch", "-i", str(tmp_path / "in.jsonl"), "-o",
               str(tmp_path / "npu.jsonl"), "--platform", "npu", "--ray", cluster.address]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2, done.stderr
    assert "the cluster has no resource NPU" in done.stderr
    assert not (tmp_path / "npu.jsonl").exists()


@pytest.mark.full("starts a Ray cluster, whose processes take half a minute on two cores; replicas in processes stay")
@pytest.mark.slow
def test_actors_that_would_answer_otherwise_are_refused(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(tmp_path / "in.jsonl", rows())
    monkeypatch.setenv("STAGE", "differs")  # what the processes of a node that is started now see
    node = cluster.add_node(num_cpus=1)
    try:
        status, said = ended(start(tmp_path, cluster, data_parallel_size=3))
    finally:
        cluster.remove_node(node)
    assert status == 2, said
    assert "max_model_len" in said
    assert num_rows(tmp_path / "out.jsonl") == 0
