"""The command with the embedded model over Ray: whatever is killed, its rows are those of one undisturbed replica."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest

from tests.replicas.jobs import RANK, ended, kill_at_random, processes, singly, start_real, wait_until_gone
from tests.replicas.ray_nodes import Node, need_ray, nodes, wait_for_resource
from tests.replicas.real_jobs import killed_until_done

pytestmark = pytest.mark.usefixtures("fixed_time", "one_thread_each")
_THREADS = {"OMP_NUM_THREADS": "1"}


class Hosts:
    """A head, and a second node that may die: it comes again before the next run."""

    def __init__(self, made: list[Node]):
        self._made = made
        made.append(Node(num_cpus=2, environment=_THREADS))
        self.address = made[0].address
        wait_for_resource(self.address, "CPU", 2)
        made.append(Node(self.address, environment=_THREADS))
        wait_for_resource(self.address, "CPU", 3)

    def actors(self) -> list[int]:
        return [pid for node in self._made for pid in node.actors()]

    def ranks(self) -> list[int]:
        return [pid for node in self._made for pid in processes(RANK, node.pid)]

    def second(self) -> list[list[int]]:
        members = self._made[1].members()
        return [members] if members else []

    def mend(self) -> None:
        if not self._made[1].is_running:
            self._made.pop().kill()
            self._made.append(Node(self.address, environment=_THREADS))


@pytest.mark.full("forty kills of actors, hosts, ranks and drivers; chosen moments are in test_ray")
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_killed_at_forty_moments_over_ray_every_row_is_there_once(folder: Path) -> None:
    need_ray()
    rng = random.Random(13)
    num_kills = {"driver": 0, "replica": 0, "rank": 0, "host": 0}
    with nodes() as made:
        hosts = Hosts(made)
        killed_until_done(folder, rng, num_kills, lambda output, num_ranks: run_and_kill(
            folder, output, rng, num_ranks, num_kills, hosts))
    assert all(num_kills.values()), num_kills


def run_and_kill(folder: Path, output: Path, rng: random.Random, num_ranks: int, num_kills: dict[str, int],
                 hosts: Hosts) -> int:
    """One run of the command with up to three deaths in it; returns its exit status."""
    hosts.mend()
    count = 2 if num_ranks == 2 else 3
    job = start_real(folder, output.name, "--ray", hosts.address, "--data-parallel-size", str(count),
                     "--tensor-parallel-size", str(num_ranks), "--max-replica-restarts", "5")  # fmt: skip
    seen: set[int] = set()

    def victims() -> dict[str, list[list[int]]]:
        seen.update(hosts.actors(), hosts.ranks())
        return {"driver": [[job.pid]], "replica": singly(hosts.actors()), "rank": singly(hosts.ranks()),
                "host": hosts.second()}  # fmt: skip

    kill_at_random(job, output, rng, victims, num_kills)
    status, said = ended(job)
    wait_until_gone(sorted(seen))
    assert status in (3, -signal.SIGKILL), said
    return status
