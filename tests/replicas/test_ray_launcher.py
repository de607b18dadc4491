"""scripts/ray_ascend.sh: what it would do, what it refuses, and a cluster that it starts, with an ssh that stays."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.batch.scripted import read_rows, row, write_rows
from tests.replicas.jobs import PYTHONPATH, ROOT
from tests.replicas.ray_nodes import free_port, need_ray, other_package

LAUNCHER = ROOT / "scripts/ray_ascend.sh"
# Every host is this machine; `gone` does not answer, and `old` has another checkout in the place of this one.
SSH = """\
#!/usr/bin/env bash
while [ "$1" = -o ]; do shift 2; done
printf '%s\\n' "$*" >>"$SSH_LOG"
host=$1 command=$2
[ "$host" != gone ] || exit 255
[ "$host" != old ] || command=${command//cd $ROOT/cd $OLD_ROOT}
exec bash -c "$command"
"""


@pytest.fixture
def env(tmp_path: Path) -> Iterator[dict[str, str]]:
    (tmp_path / "bin").mkdir()
    ssh = tmp_path / "bin/ssh"
    ssh.write_text(SSH)
    ssh.chmod(0o755)
    path = os.pathsep.join([str(tmp_path / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # a short name: sockets have a place in it
    yield {**os.environ, "PATH": path, "SSH_LOG": str(tmp_path / "ssh.log"), "ROOT": str(ROOT),
           "RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": folder, "PYTHONPATH": PYTHONPATH}  # fmt: skip
    shutil.rmtree(folder)


def launch(env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([LAUNCHER, *arguments], env=env, capture_output=True, text=True)


def test_a_dry_run_shows_what_every_host_would_run_and_runs_nothing(env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a  # the head\n\nb\n")
    done = launch(env, "start", "--hosts-file", str(tmp_path / "hosts"), "--npus", "8", "--root", "/opt/npu runner",
                  "--before", "source /opt/venv/bin/activate", "--dry-run")  # fmt: skip
    assert done.returncode == 0, done.stderr
    ray = [line for line in done.stdout.splitlines() if "ray start" in line]
    before = "source /opt/venv/bin/activate && cd /opt/npu\\ runner && RAY_AUTH_MODE=disabled scripts/run_ascend.sh"
    assert [line.partition(": ")[0] for line in ray] == ["a", "b"]
    assert all(before in line and """--resources '{"NPU": 8}'""" in line for line in ray)
    assert "--head --node-ip-address" in ray[0]
    assert "--address '<its address>:6379'" in ray[1]
    stopping = launch(env, "stop", "--hosts", "a,b", "--dry-run").stdout.splitlines()
    assert [line.partition(": ")[0] for line in stopping] == ["b", "a"]
    assert not Path(env["SSH_LOG"]).exists()


def test_in_containers_every_command_goes_through_docker_exec(env: dict[str, str]) -> None:
    """The shell of the host and that of the container each take one layer of quotes away: here the host's does."""
    done = launch(env, "start", "--hosts", "a b", "--container", "npu runner", "--root", "/opt/npu runner", "--dry-run")
    assert done.returncode == 0, done.stderr
    commands = [line.partition(": ")[2] for line in done.stdout.splitlines()[:-1]]
    words = [shlex.split(command) for command in commands]
    assert {tuple(found[:5]) for found in words} == {("docker", "exec", "npu runner", "bash", "-c")}
    assert all(len(found) == 6 for found in words), "what the container runs is one word"
    inside = [found[5] for found in words if "ray start" in found[5]]
    assert all(command.startswith("cd /opt/npu\\ runner && ") for command in inside)
    assert [shlex.split(command)[-1] for command in inside] == ['{"NPU": <its /dev/davinci*>}'] * 2


def test_help_is_the_head_of_the_script(env: dict[str, str]) -> None:
    done = launch(env, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Starts a Ray cluster")
    assert "--container NAME" in done.stdout
    assert "set -euo" not in done.stdout


@pytest.mark.parametrize(("arguments", "message"), [
    (["begin"], "start or stop, not 'begin'"),
    (["start"], "no host was named"),
    (["start", "--hosts"], "--hosts: its value is missing"),
    (["start", "--hosts", "a b a"], "named twice: a"),
    (["start", "--hosts", "-oProxyCommand=x"], "is no host"),
    (["start", "--hosts", "a", "--npus", "0"], "--npus: '0' is no positive number"),
    (["start", "--hosts", "a", "--port", "x"], "--port: 'x' is no number"),
    (["start", "--hosts-file", "nowhere"], "nowhere cannot be read"),
    (["start", "--host", "a"], "unknown option '--host'"),
])  # fmt: skip
def test_what_is_wrong_is_named_and_nothing_is_run(arguments: list[str], message: str, env: dict[str, str]) -> None:
    done = launch(env, *arguments)
    assert (done.returncode, message in done.stderr) == (2, True), done.stderr
    assert not Path(env["SSH_LOG"]).exists()


@pytest.mark.full("imports Ray on each of its hosts, seconds each; what it refuses without a host stays")
@pytest.mark.slow
def test_every_host_is_looked_at_before_anything_is_started(env: dict[str, str], tmp_path: Path) -> None:
    need_ray()
    other_package(tmp_path / "old", "old")
    (tmp_path / "old/scripts").symlink_to(ROOT / "scripts")
    env["OLD_ROOT"] = str(tmp_path / "old")
    done = launch(env, "start", "--hosts", "here gone old")
    assert done.returncode == 2
    assert "gone: cannot be reached by ssh" in done.stderr
    assert "old: has npu-runner and Ray old+" in done.stderr
    if not list(Path("/dev").glob("davinci[0-9]*")):
        assert "here: has no /dev/davinci*, so no NPU" in done.stderr
    assert "nothing was started" in done.stderr
    assert "ray start" not in Path(env["SSH_LOG"]).read_text()


@pytest.mark.full("starts two Ray nodes, half a minute on two cores; the dry run stays")
@pytest.mark.slow
def test_a_cluster_is_started_works_and_is_stopped(env: dict[str, str], tmp_path: Path) -> None:
    need_ray()
    # `ray stop` ends all of Ray that it sees: here it sees nothing else.
    alone = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("Ray is stopped in a namespace of its own, which needs the right to make one")
    write_rows(tmp_path / "in.jsonl", [row(f"r{n}", f"text {n}") for n in range(40)])
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    job = {"platform": "npu", "model": str(tmp_path / "model"), "input": str(tmp_path / "in.jsonl"),
           "output": str(tmp_path / "out.jsonl"), "preprocessing_workers": 1, "progress": "lines",
           "data_parallel_size": "auto"}  # fmt: skip
    port = free_port()
    hosts = ["--hosts", "one two", "--npus", "1", "--port", str(port)]
    script = f"""set -e
        {shlex.join([str(LAUNCHER), "start", *hosts])} | tee started
        address=$(sed -n 's/.*--ray \\([^ ]*\\).*/\\1/p' started)
        python -m tests.replicas.scripted_job "$(printf {shlex.quote(json.dumps({**job, "ray": "%s"}))} "$address")"
        {shlex.join([str(LAUNCHER), "stop", *hosts])}
        ! pgrep -x raylet"""
    done = subprocess.run([*alone, "bash", "-c", script], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f":{port} --data-parallel-size auto" in done.stdout
    assert "replica 1" in done.stderr, "one for each host"
    assert len(read_rows(tmp_path / "out.jsonl")) == 40
