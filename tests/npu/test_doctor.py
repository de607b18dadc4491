"""`npu-runner doctor`: a sound host is called sound and generates; each misconfiguration is found, with its remedy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from npu_runner.cli.doctor import DoctorOptions, examine_host
from npu_runner.cli.doctor_generation import judge
from npu_runner.platforms import find_platform
from npu_runner.platforms.examination import Findings, examination_of
from npu_runner.platforms.host import Host, Outcome, run_function
from npu_runner.platforms.npu.preflight import devices, software
from npu_runner.platforms.npu.preflight.checks import probe_devices
from npu_runner.platforms.npu.preflight.errors import ERROR_CODES, explain
from tests import zygote
from tests.cann.environment import ROOT, environment, has_real_cann
from tests.full_set import only_full
from tests.npu.hosts import empty_host, toolkit

only_emulated = pytest.mark.skipif(has_real_cann(), reason="a real host cannot be broken on purpose")
NPU = examination_of(find_platform("npu"), Findings(Host(), {}))


def doctor(*arguments: str, env: dict[str, str] | None = None) -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit status, and checks by name."""
    done = zygote.run([sys.executable, "-m", "npu_runner", "doctor", "--json", *arguments], env=env, cwd=ROOT,
                      capture_output=True, text=True, timeout=600)
    found = json.loads(done.stdout)
    assert found["ok"] == (done.returncode == 0), done.stderr
    return done.returncode, {check["name"]: check for check in found["checks"]}


@pytest.fixture
def emulated() -> dict[str, str]:
    return environment()


@pytest.mark.npu
@pytest.mark.full("captures graphs of both embedded models; its other checks stay, and its answers on the cpu")
def test_a_sound_host_generates_through_graphs(tmp_path: Path, emulated: dict[str, str]) -> None:
    if not has_real_cann():
        emulated |= toolkit(tmp_path / "cann", "9.2.0")
    # Eagerly, too, without this option; the launcher's test has an eager generation already.
    status, checks = doctor("--platform", "npu", "--graph-mode", "reduce-overhead", env=emulated)
    assert status == 0, checks
    assert {check["status"] for check in checks.values()} <= {"ok", "warning"}
    assert all(check["remedy"] for check in checks.values() if check["status"] == "warning")
    assert checks["CANN environment"]["status"] == checks["devices"]["status"] == "ok"
    for model in ("shapes-vl", "shapes-hybrid"):
        generation = checks[f"{model} (npu, reduce-overhead)"]
        assert (generation["status"], generation["found"]) == ("ok", "4 answers, all right; graphs for 4")


def test_a_host_without_npu_generates_on_the_cpu() -> None:
    status, checks = doctor("--platform", "cpu")
    assert status == 0, checks
    for model in ("shapes-vl", "shapes-hybrid"):
        assert checks[f"{model} (cpu, eager)"]["found"] == "4 answers, all right"


@pytest.mark.skipif(has_real_cann(), reason="there is an NPU")
def test_a_host_without_npu_is_told_so(tmp_path: Path) -> None:
    checks = list(examine_host(empty_host(tmp_path), DoctorOptions(generation=False)))
    assert checks[0].found.startswith("cpu: it can be used; no npu on this host (no torch_npu, no CANN, ")
    assert "; no cuda on this host (" in checks[0].found
    of_host = [check.status for check in checks[1:] if check.name != "pages of PDFs"]
    assert of_host == ["ok", "ok", "ok", "skipped"]


@pytest.mark.skipif(has_real_cann(), reason="torch_npu is installed")
def test_without_torch_npu_an_npu_cannot_be_had(tmp_path: Path) -> None:
    checks = {check.name: check for check in examine_host(empty_host(tmp_path), DoctorOptions(platform="npu"))}
    assert checks["torch and torch_npu"].status == "failed"
    assert "torch_npu is not installed" in checks["torch and torch_npu"].found
    assert checks["CANN environment"].status == "failed"
    assert "set_env.sh" in checks["CANN environment"].remedy
    assert {checks[name].status for name in checks if name.startswith(("devices", "generation"))} == {"skipped"}


@pytest.mark.npu
@pytest.mark.from_nothing("what the probe imports")
@only_emulated
@pytest.mark.parametrize("platform", ["npu", *only_full("the same import, which fails alike", "cpu")])
def test_torch_npu_without_cann_breaks_torch_and_not_the_doctor(
    platform: str, tmp_path: Path, emulated: dict[str, str]
) -> None:
    """In such an environment `import torch` fails, so whatever imports it here would die of it."""
    del emulated["LD_LIBRARY_PATH"]
    script = tmp_path / "Ascend/cann/set_env.sh"
    script.parent.mkdir(parents=True)
    script.touch()
    checks = {check.name: check for check in
              examine_host(empty_host(tmp_path, environment=emulated), DoctorOptions(platform=platform))}
    failed = checks["devices" if platform == "npu" else "import torch"]
    assert failed.status == "failed"
    assert "libhccl.so" in failed.found
    assert "set_env.sh" in failed.remedy
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in failed.remedy
    assert next(check for name, check in checks.items() if name.startswith("generation")).status == "skipped"
    if platform == "npu":
        assert checks["CANN environment"].remedy.startswith(f"source {script}")


@pytest.mark.npu
@only_emulated
def test_every_other_command_then_points_to_the_doctor(emulated: dict[str, str]) -> None:
    del emulated["LD_LIBRARY_PATH"]
    command = [sys.executable, "-m", "npu_runner", "generate", "--model", "shapes-vl", "--platform", "cpu", "Hello?"]
    done = subprocess.run(command, env=emulated, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "libhccl.so" in line
    assert "npu-runner doctor" in line


@pytest.mark.npu
@only_emulated
def test_no_device(tmp_path: Path) -> None:
    host = empty_host(tmp_path, environment=environment(num_devices=0))
    checks = {check.name: check for check in examine_host(host, DoctorOptions(platform="npu"))}
    assert checks["devices"].status == "failed"
    assert "docker run --device /dev/davinci0" in checks["devices"].remedy
    assert checks["device memory"].status == checks["generation (npu, eager)"].status == "skipped"


@pytest.mark.npu
@only_emulated
def test_another_chip_with_little_memory(tmp_path: Path) -> None:
    host = empty_host(tmp_path, environment=environment(num_devices=1, memory_bytes=256 << 20, soc="Ascend310P3"))
    options = DoctorOptions(platform="npu", generation=False, tensor_parallel_size=2)
    checks = {check.name: check for check in examine_host(host, options)}
    assert checks["chip"].status == "failed"
    assert "Ascend310P3" in checks["chip"].found
    assert checks["device memory"].status == "failed"
    assert "npu-smi" in checks["device memory"].remedy
    assert "2 ranks" in checks["devices"].found



def test_devices_that_are_named_and_not_there(tmp_path: Path) -> None:
    host = empty_host(tmp_path, environment={"ASCEND_RT_VISIBLE_DEVICES": "1,7"})
    found = devices.check_devices(host, Outcome([{"torch": "2.9.0"}, {"count": 1}], None))
    assert found.status == "failed"
    assert "1 of the 2 devices" in found.found


def crash(reports: str) -> None:
    import os
    import signal

    with open(reports, "a") as file:
        file.write("1\n")
    os.kill(os.getpid(), signal.SIGSEGV)


def hang(reports: str) -> None:
    import time

    time.sleep(60)


def test_a_crash_and_a_hang_of_a_probe_are_findings() -> None:
    crashed = run_function(Host(), crash)
    assert (crashed.reports, crashed.error) == ([1], "killed by SIGSEGV")
    assert run_function(Host(timeout_seconds=0.5), hang).error == "no end after 0.5 s"


def test_wrong_answers_and_missing_graphs_are_findings() -> None:
    right = ["yellow", "blue", "1", "red cross, red cross"]
    wrong = ["!!!!", *right[1:]]
    for answers, graphs, status in ((right, "4", "ok"), (right, "none", "warning"), (wrong, "4", "failed")):
        found = judge(NPU, "generation", "reduce-overhead", Outcome([{"answers": answers, "graphs": graphs}], None))
        assert found.status == status, found
    assert "'!!!!' instead of 'yellow'" in found.found


def test_an_error_code_gets_its_remedy() -> None:
    failure = Outcome([], "RuntimeError: NPU function error", "... error code is 207001 ...")
    assert "--memory-utilization" in judge(NPU, "generation", "eager", failure).remedy
    assert "--timeout" in judge(NPU, "generation", "eager", Outcome([], "no end after 2 s", "", True)).remedy
    assert "table" in judge(NPU, "generation", "eager", Outcome([], "killed by SIGSEGV")).remedy


def test_cuda_that_cannot_be_used_fails_with_its_reason(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("cuda can be used here")
    checks = {check.name: check for check in examine_host(empty_host(tmp_path), DoctorOptions(platform="cuda"))}
    assert checks["cuda"].status == "failed"
    assert checks["cuda"].found in ("this torch is built without CUDA", "no CUDA device is visible")
    assert "CUDA_VISIBLE_DEVICES" in checks["cuda"].remedy
    assert checks["generation (cuda, eager)"].status == "skipped"


@pytest.mark.npu
@only_emulated
def test_a_torch_that_is_built_for_cuda_gets_its_remedy(emulated: dict[str, str]) -> None:
    output = "what():  Duplicated key 'pinned_use_hip' found in device-specific configuration parser hook registration"
    if emulated.pop("LD_PRELOAD", None):  # this torch is one
        output = run_function(Host(environment=emulated), probe_devices).output
    assert "CPU build" in software.import_remedy(Outcome([], "killed by SIGABRT", output))


def test_the_docs_explain_every_error_code() -> None:
    rows = [line for line in (ROOT / "docs" / "running-on-ascend.md").read_text().splitlines() if line.startswith("|")]
    for code, (meaning, _) in ERROR_CODES.items():
        assert any(code in row and meaning in row.replace("`", "") for row in rows), code


@pytest.mark.parametrize(("codes", "first"), [
    (["107030", "507015"], "507015"),
    (["207001", "107030"], "207001"),
    (["507048", "561003", "107030"], "561003"),
    (["207008", "507018", "361001"], "507018"),
    (["107030"], "107030"),
])  # fmt: skip
def test_a_cause_is_explained_before_its_consequences(codes: list[str], first: str) -> None:
    found = explain(" ... ".join(f"rtMemcpy failed: error code is {code}" for code in codes))
    assert found.startswith(f"{first}: {ERROR_CODES[first][0]}; {ERROR_CODES[first][1]}")
    assert all(f"{code}, {ERROR_CODES[code][0]}" in found for code in codes if code != first)


@pytest.mark.parametrize("code", ["561003", "561112"])
def test_a_missing_kernel_says_that_the_image_is_for_the_other_chip(code: str) -> None:
    assert "the image is for the other chip" in explain(f"AclNN_Runtime_Error: ret {code}")


@pytest.mark.npu
@pytest.mark.from_nothing("what the probe imports")
@pytest.mark.full("a start of torch_npu, to hear its words; what the doctor says stays (test_set_env_that_went_stale)")
@only_emulated
def test_torch_npu_refuses_what_the_doctor_calls_incomplete(tmp_path: Path, emulated: dict[str, str]) -> None:
    host = empty_host(tmp_path, environment={**emulated, "ASCEND_HOME_PATH": str(tmp_path)})
    assert software.check_toolkit(host, {"libascendcl.so": None}).status == "failed"
    check = devices.check_devices(host, run_function(host, probe_devices))
    assert "ASCEND_OPP_PATH environment variable is not set" in check.found, "the cause, not what it led to"
    assert "set_env.sh" in check.remedy
