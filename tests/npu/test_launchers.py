"""The launchers of Ascend hosts really launch, on the emulated CANN: sourced, set, passed on, and reported."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from scripts.shapes.drawing import TEST_SEEDS, draw_example
from tests.cann.environment import ROOT, environment, has_real_cann

LAUNCHER = ROOT / "scripts/run_ascend.sh"
pytestmark = pytest.mark.skipif(has_real_cann(), reason="builds an installation of its own around the emulated CANN")
# As careless as the toolkit's own: an unset variable, a failing command, a look at the first argument.
SET_ENV = """\
[ -z "$1" ] || echo "somebody else's argument: $1" >&2
false
export ASCEND_HOME_PATH={home}
export ASCEND_OPP_PATH={home}/opp
export LD_LIBRARY_PATH={libraries}:$LD_LIBRARY_PATH
echo "careless $NOT_SET_ANYWHERE" >/dev/null
"""


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """The environment of a shell that has not sourced the toolkit, but says where it is."""
    env = environment(memory_bytes=2 << 30)
    home = tmp_path / "Ascend/ascend-toolkit/latest"
    for name in ("runtime", "compiler", "opp"):
        (home / name).mkdir(parents=True)
    text = SET_ENV.format(home=home, libraries=env.pop("LD_LIBRARY_PATH"))
    (home.parent / "set_env.sh").write_text(text)
    atb = tmp_path / "Ascend/nnal/atb/set_env.sh"
    atb.parent.mkdir(parents=True)
    atb.write_text("export ATB_HOME_PATH=/somewhere\n")
    paths = [str(Path(sys.executable).parent), env["PATH"]]
    return {**env, "ASCEND_HOME_PATH": str(home), "PATH": os.pathsep.join(paths)}


def launch(env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([LAUNCHER, *arguments], env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.npu
def test_the_launcher_generates(installed: dict[str, str], tmp_path: Path) -> None:
    """Without it torch itself would not load here: libhccl.so is on no path before set_env.sh is sourced."""
    assert "LD_LIBRARY_PATH" not in installed
    example = draw_example(next(seed for seed in TEST_SEEDS if len(draw_example(seed).images) == 1))
    example.images[0].save(tmp_path / "image.png")
    done = launch(installed, "generate", "--platform", "npu", "--enforce-eager", "--max-model-len", "512",
                  "--max-num-seqs", "1", "--max-num-batched-tokens", "512", "--image",
                  str(tmp_path / "image.png"), example.question)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1] == example.answer
    assert "somebody else's" not in done.stderr


def variables(env: dict[str, str]) -> dict[str, str]:
    """What a program sees that the launcher started."""
    done = launch(env, "--exec", "env", "-0")
    assert done.returncode == 0, done.stderr
    return dict(entry.partition("=")[::2] for entry in done.stdout.split("\0") if entry)


def test_both_environments_are_sourced_and_gaps_are_filled(installed: dict[str, str]) -> None:
    found = variables(installed)
    assert found["ASCEND_OPP_PATH"].startswith(installed["ASCEND_HOME_PATH"])
    assert found["ATB_HOME_PATH"] == "/somewhere"
    assert found["OMP_WAIT_POLICY"] == "PASSIVE"
    assert found["ASCEND_GLOBAL_LOG_LEVEL"] == "3"
    set_later = {"HCCL_OP_EXPANSION_MODE", "CPU_AFFINITY_CONF", "HCCL_CONNECT_TIMEOUT"}
    assert not set_later & set(found), "these depend on chip and ranks: the platform sets them, for every way to start"


def test_what_the_user_set_survives(installed: dict[str, str]) -> None:
    mine = {"TASK_QUEUE_ENABLE": "0", "PYTORCH_NPU_ALLOC_CONF": "", "OMP_NUM_THREADS": "3",
            "HCCL_CONNECT_TIMEOUT": "60", "HCCL_OP_EXPANSION_MODE": "HOST", "CPU_AFFINITY_CONF": "0",
            "ASCEND_RT_VISIBLE_DEVICES": "1", "ASCEND_GLOBAL_LOG_LEVEL": "1", "OMP_WAIT_POLICY": "ACTIVE"}
    found = variables({**installed, **mine})
    assert {name: found[name] for name in mine} == mine, "an empty value is a choice, too"


def test_an_environment_that_was_sourced_is_left_alone(installed: dict[str, str]) -> None:
    once = variables(installed)
    library = f"{installed['ASCEND_HOME_PATH']}/lib64:{once['LD_LIBRARY_PATH']}"
    twice = variables({**once, "LD_LIBRARY_PATH": library, "ATB_HOME_PATH": "/mine"})
    assert (twice["LD_LIBRARY_PATH"], twice["ATB_HOME_PATH"]) == (library, "/mine")


def test_a_dry_run_starts_nothing_and_shows_everything(installed: dict[str, str]) -> None:
    done = launch({**installed, "OMP_WAIT_POLICY": "ACTIVE"}, "--dry-run", "batch", "-i", "none.jsonl")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("source ")] == [
        f"source {Path(installed['ASCEND_HOME_PATH']).parent}/set_env.sh",
        f"source {Path(installed['ASCEND_HOME_PATH']).parents[1]}/nnal/atb/set_env.sh",
    ]
    assert "OMP_WAIT_POLICY=ACTIVE (yours)" in lines
    assert "ASCEND_GLOBAL_LOG_LEVEL=3" in lines
    assert lines[-1] == "npu-runner batch -i none.jsonl"


def test_arguments_and_exit_status_pass_through(installed: dict[str, str]) -> None:
    done = launch(installed, "--exec", "printf", "<%s>", "a b", "*", "")
    assert done.stdout == "<a b><*><>"
    assert launch(installed, "--exec", "sh", "-c", "exit 7").returncode == 7
    assert launch(installed, "generate").returncode == 2


@pytest.mark.npu
@pytest.mark.full("the whole regression of a host; the launcher stays, and the regression that fails")
def test_the_regression_reports_what_ran(installed: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "regression"
    command = [ROOT / "scripts/regress_ascend.sh", "--out", out, "--rows", "3", "--quick", "--bench",
               "--operators", "rms_norm", "--", "tests/npu/test_launchers.py", "-k", "dry_run"]
    done = subprocess.run(command, env={**installed, "PYTHON": sys.executable}, capture_output=True, text=True,
                          timeout=600)
    report = (out / "report.txt").read_text()
    assert done.returncode == 0, done.stdout + report
    steps = ["operators", "doctor", "images", "eager", "graph", "answers", "tests", "compare", "bench", "replay"]
    assert re.findall(r"^(\w+) +ok \(exit", report, re.MULTILINE) == steps, report
    assert done.stdout.splitlines()[-1] == "0 of 10 steps failed"
    for mode in ("eager", "graph"):
        assert json.loads((out / mode / "summary.json").read_text())["rows"]["as_expected"] == 3
        assert f"{mode}: 3 of 3 rows as expected" in report
    cases = json.loads((out / "operators/operators.json").read_text())["cases"]
    assert cases
    assert all("rms_norm" in case["case"] for case in cases)
    assert "OMP_WAIT_POLICY=PASSIVE" in report
    for side in ("masked", "unmasked"):
        assert re.search(rf"DECODE_ATTENTION={side} +\d+\.\d+ start_s +\d+\.\d+ step_ms", report), report
    for side in ("waiting", "overlapped"):
        found = re.search(rf"REPLAY={side} +\d+\.\d+ start_s +\d+\.\d+ step_ms.*", report)
        assert found is not None, report
        assert "other tokens" not in found[0]
    assert re.search(r"\(b\) decode: \d+ GB/s read \(.+\); eager\n.*device idle\n +1 +\d+\.\d{3} ", report), report
    with tarfile.open(f"{out}.tar.gz") as archive:
        names = set(archive.getnames())
    assert {f"regression/{step}/{name}" for step in steps for name in ("output.txt", "logs")} <= names
    assert {"regression/report.txt", "regression/tests/tests.xml", "regression/graph/answers.jsonl"} <= names
    assert not [name for name in names if "pictures" in name or name.endswith(".tar.gz")]


def test_an_interrupted_regression_reports_what_is_known(tmp_path: Path) -> None:
    """Python is a stand-in that fails for the operators, and then hangs in the doctor."""
    os.mkfifo(tmp_path / "hangs")
    python = tmp_path / "python"
    python.write_text('#!/usr/bin/env bash\ncase $* in *--operators*) echo wrong; exit 4 ;; *doctor*) trap "" TERM; '
                      f'echo "logs in $ASCEND_PROCESS_LOG_PATH"; echo $$ >{tmp_path}/hangs; exec sleep 300 ;; esac\n')
    python.chmod(0o755)
    out = tmp_path / "out"
    with subprocess.Popen([ROOT / "scripts/regress_ascend.sh", "--out", out], stdout=subprocess.PIPE, text=True,
                          env={**os.environ, "PYTHON": str(python)}) as regression:
        child = int((tmp_path / "hangs").read_text())
        regression.send_signal(signal.SIGTERM)
        os.kill(child, signal.SIGKILL)  # as `timeout --kill-after` does a minute later
        text, _ = regression.communicate(timeout=60)
    assert (regression.returncode, text.splitlines()[-1]) == (1, "2 of 2 steps failed: operators interrupted")
    with tarfile.open(f"{out}.tar.gz") as archive:
        (report, doctor) = (archive.extractfile(f"out/{name}") for name in ("report.txt", "doctor/output.txt"))
        assert report is not None
        assert doctor is not None
        assert f"{'operators':24} FAILED (exit status 4" in report.read().decode()
        assert doctor.read().decode().strip() == f"logs in {out}/doctor/logs"
