"""`npu-runner doctor`: a sound host is called sound and generates; each misconfiguration is found, with its remedy."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from npu_runner.assets import EMBEDDED
from npu_runner.cli.doctor import DoctorOptions, examine_host
from npu_runner.cli.doctor_generation import judge
from npu_runner.platforms import find_platform
from npu_runner.platforms.examination import RUNNER_NEEDS, Findings, examination_of
from npu_runner.platforms.host import Check, Host, Outcome, run_function
from npu_runner.platforms.npu.preflight import devices, software
from npu_runner.platforms.npu.preflight.checks import probe_devices
from npu_runner.platforms.npu.preflight.errors import ERROR_CODES, explain
from npu_runner.platforms.npu.preflight.vendor_packages import check_vendor_packages, exported_functions
from npu_runner.platforms.npu.versions import cann_version
from tests import zygote
from tests.cann.environment import ROOT, environment, has_real_cann, run_python
from tests.full_set import only_full
from tests.npu.hosts import empty_host, toolkit

only_emulated = pytest.mark.skipif(has_real_cann(), reason="a real host cannot be broken on purpose")
NPU = examination_of(find_platform("npu"), Findings(Host(), {}))
KNOWN = {"torch": "2.9.0", "torch_npu": "2.9.0.post6"}


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
    for model in EMBEDDED:
        generation = checks[f"{model} (npu, reduce-overhead)"]
        assert (generation["status"], generation["found"]) == ("ok", "4 answers, all right; graphs for 4")


def test_a_host_without_npu_generates_on_the_cpu() -> None:
    status, checks = doctor("--platform", "cpu")
    assert status == 0, checks
    assert [checks[f"{model} (cpu, eager)"]["found"] for model in EMBEDDED] == ["4 answers, all right"] * 2


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


@pytest.mark.parametrize(("chip", "installed", "status", "words"), [
    ("Ascend910B3", ["ascend910b", "config"], "ok", "for ascend910b"),
    ("Ascend910_9391", ["ascend910_93", "ascend910b"], "ok", "for ascend910_93"),
    ("Ascend910_9391", ["ascend910b"], "failed", "no kernels for ascend910_93, there are those for ascend910b"),
    ("Ascend910B3", ["ascend910_93", "ascend910"], "failed", "no kernels for ascend910b"),
    ("Ascend910B3", [], "warning", "there are none in"),
    ("Ascend310P3", ["ascend910b"], "skipped", "no A2 or A3 device"),
])  # fmt: skip
def test_kernels_of_the_other_chip_are_found(chip: str, installed: list[str], status: str, words: str, tmp_path: Path
                                             ) -> None:
    for name in installed:
        (tmp_path / "opp/built-in/op_impl/ai_core/tbe/kernel" / name).mkdir(parents=True)
    check = software.check_kernels(empty_host(tmp_path, environment={"ASCEND_OPP_PATH": str(tmp_path / "opp")}), {chip})
    assert check.status == status
    assert words in check.found


def vendor_package(folder: Path, *functions: str) -> Path:
    """A package as an installer leaves it. Its library defines `functions`, and calls one of CANN that it does not
    define."""
    library = folder / "op_api/lib/libcust_opapi.so"
    library.parent.mkdir(parents=True)
    source = "int aclnnSwiGlu(); int calls_cann() { return aclnnSwiGlu(); }" + "".join(
        f" int {name}() {{ return 0; }} int {name}GetWorkspaceSize() {{ return 0; }}" for name in functions)
    subprocess.run([COMPILER, "-shared", "-fPIC", "-x", "c", "-", "-o", library], input=source, text=True, check=True)
    return library


COMPILER = shutil.which("cc") or ""
compiles = pytest.mark.skipif(not COMPILER, reason="makes a library of a vendor")


@compiles
def test_packages_of_vendors_are_listed_with_what_is_called_here(tmp_path: Path) -> None:
    opp = tmp_path / "opp"
    vendor_package(opp / "vendors/customize", "aclnnOfTheirOwn", "Exp")
    vendor_package(opp / "vendors/second", "aclnnRecurrentGatedDeltaRule", "aclnnMm2")
    vendor_package(opp / "vendors/not_named", "aclnnRmsNorm")
    settings = opp / "vendors/config.ini"
    environment = {"ASCEND_OPP_PATH": str(opp)}
    assert check_vendor_packages(environment).found == "none beside CANN's", "torch_npu reads the names there"
    settings.write_text("load_priority=customize, gone\n")
    check = check_vendor_packages(environment)
    assert (check.status, check.remedy) == ("ok", "")
    assert check.found == f"{opp}/vendors/customize has no function that is called here"
    settings.write_text("[vendors]\nload_priority = second, customize\n")
    vendor_package(tmp_path / "mine", "aclnnFusedInferAttentionScoreV2", "aclnnMoeInitRoutingV3")
    check = check_vendor_packages({**environment, "ASCEND_CUSTOM_OPP_PATH": f"{tmp_path / 'mine'}:{tmp_path / 'none'}"})
    assert check.status == "warning"
    assert check.found.startswith(
        f"{tmp_path}/mine has aclnnFusedInferAttentionScoreV2, aclnnMoeInitRoutingV3; "
        f"{opp}/vendors/second has aclnnRecurrentGatedDeltaRule; {opp}/vendors/customize has no function")
    assert "unset ASCEND_CUSTOM_OPP_PATH" in check.remedy


@compiles
def test_names_of_a_library_are_those_that_the_loader_finds_in_it(tmp_path: Path) -> None:
    library = vendor_package(tmp_path, "aclnnRmsNorm", "aclnnAddV3")
    loaded = ctypes.PyDLL(str(library), mode=os.RTLD_LAZY)  # bound lazily, as its function of CANN is not here
    found = exported_functions(library)
    assert {name for name in found if name.startswith("aclnn")} == {
        "aclnnRmsNorm", "aclnnRmsNormGetWorkspaceSize", "aclnnAddV3", "aclnnAddV3GetWorkspaceSize"}
    assert all(hasattr(loaded, name) for name in found)
    whole, damaged = library.read_bytes(), tmp_path / "damaged.so"  # the loaded file stays as it is
    for part in (b"", b"text", whole[:100], whole[:len(whole) // 2], b"\x7fELF\x01" + whole[5:]):
        damaged.write_bytes(part)
        assert exported_functions(damaged) == set()
    assert exported_functions(tmp_path / "none.so") == set()


START = """
import json, logging, os, pathlib, sys
logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(message)s")
from npu_runner.platforms.npu import verdicts
verdicts.check_host()
keys = [verdicts._host()]
os.utime(sys.argv[1], ns=(1, 1))
keys.append(verdicts._host())
os.environ["ASCEND_OPP_PATH"] = "/none"
keys.append(verdicts._host())
print(json.dumps([before != after for before, after in zip(keys, keys[1:])]))
from npu_runner.platforms.graphs import GraphResourceError
from npu_runner.platforms.npu.graphs import ResourceErrors
try:
    with ResourceErrors():
        raise RuntimeError("the first line\\nresource alloc fail: Alloc sq cq fail")
except GraphResourceError as full:
    print(full)
"""


@compiles
@pytest.mark.npu
@only_emulated
def test_a_start_warns_of_packages_and_an_untried_chip_and_compares_anew_when_a_package_changes(tmp_path: Path) -> None:
    library = vendor_package(tmp_path / "vendors/vllm", "aclnnRecurrentGatedDeltaRule")
    (tmp_path / "vendors/config.ini").write_text("load_priority=vllm\n")
    done = run_python(["-c", START, str(library)], forked=True, soc="Ascend950PR_9589", ASCEND_OPP_PATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    chip, package, changes, full = done.stdout.splitlines()
    assert chip.startswith("WARNING chip: Ascend950PR_9589: not a chip this was written for")
    assert package.startswith(f"WARNING operator packages: {tmp_path}/vendors/vllm has aclnnRecurrentGatedDeltaRule: ")
    assert json.loads(changes) == [True, True], "findings are kept under what may change them"
    assert full == "the first line; update driver and firmware (HDK) to 25.5.1 or newer", "graphs are dropped for it"


@pytest.mark.npu
@only_emulated
def test_a_start_on_a_chip_without_the_attention_is_refused_by_name() -> None:
    done = run_python(["-m", "npu_runner", "generate", "--platform", "npu", "Hello?"], forked=True, timeout=120,
                      soc="Ascend310P3")
    assert done.returncode == 2, done.stderr
    assert "chip: Ascend310P3: the fused attention over a paged cache is for A2 and A3" in done.stderr
    assert "Traceback" not in done.stderr


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


def test_the_requirements_hold_what_the_doctor_looks_for() -> None:
    lines = (ROOT / "requirements-npu.txt").read_text().splitlines()
    names = {re.split("[<>=!]", line)[0] for line in lines if line and not line.startswith("#")}
    assert names == {"torch-npu", *software.TORCHAIR_NEEDS, *RUNNER_NEEDS} - {"torch"}


@pytest.mark.parametrize(
    ("name", "value", "status", "remedy"),
    [
        ("ASCEND_LAUNCH_BLOCKING", None, "ok", ""),
        ("ASCEND_LAUNCH_BLOCKING", "0", "ok", ""),
        ("ASCEND_LAUNCH_BLOCKING", "1", "failed", "unset ASCEND_LAUNCH_BLOCKING"),
        ("TASK_QUEUE_ENABLE", "1", "ok", ""),
        ("TASK_QUEUE_ENABLE", "0", "warning", "export TASK_QUEUE_ENABLE=1"),
        ("TASK_QUEUE_ENABLE", "2", "failed", "export TASK_QUEUE_ENABLE=1, or unset it, or run with --enforce-eager"),
        ("TASK_QUEUE_ENABLE", "yes", "failed", "export TASK_QUEUE_ENABLE=1"),
        ("HCCL_OP_EXPANSION_MODE", "HOST", "ok", ""),
        ("HCCL_OP_EXPANSION_MODE", "AIV", "warning", "unset"),
        ("HCCL_OP_EXPANSION_MODE", "AI_CPU", "warning", "unset"),
        ("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True", "ok", ""),
        ("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:False", "warning", "expandable_segments:True"),
        ("PYTORCH_NPU_ALLOC_CONF", "max_split_size_mb:64", "warning", "expandable_segments:True"),
        ("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True, max_split_size_mb:64", "failed", "export"),
        ("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True,pin_memory_expandable_segments:True", "failed", "eager"),
        ("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True,pin_memory_expandable_segments:False", "ok", ""),
        ("ASCEND_RT_VISIBLE_DEVICES", "0,1", "ok", ""),
        ("ASCEND_RT_VISIBLE_DEVICES", "0, 1", "failed", "no spaces"),
        ("ASCEND_RT_VISIBLE_DEVICES", "npu:0", "failed", "numbers"),
        ("ASCEND_RT_VISIBLE_DEVICES", "1,1", "failed", "numbers"),
        ("ASCEND_RT_VISIBLE_DEVICES", "", "failed", "unset"),
    ],
)  # fmt: skip
def test_variables(name: str, value: str | None, status: str, remedy: str) -> None:
    found = {check.name: check for check in devices.check_variables({} if value is None else {name: value})}
    assert found.pop(name).status == status
    assert {check.status for check in found.values()} == {"ok"}, "the others are not set, which is fine"
    (check,) = [check for check in devices.check_variables({name: value or ""}) if check.name == name]
    assert remedy in check.remedy


GROWS, OURS, TORCHS = "expandable_segments:True", "PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
READS_BOTH, READS_ONE = ("2.14.0", "2.13.0", "2.12.0.post3", "2.10.0.post7", "2.15.0"), ("2.9.0.post9", "2.12.0",
                                                                                         "2.10.0.post4", "2.7.1.post11")


@pytest.mark.parametrize(("variables", "wheels", "status", "said"), [
    ({OURS: GROWS, TORCHS: GROWS}, (None, *READS_BOTH), "failed", "both"),
    ({OURS: GROWS, TORCHS: ""}, READS_BOTH, "failed", "both"),
    ({OURS: GROWS, TORCHS: GROWS}, READS_ONE, "ok", GROWS),
    ({TORCHS: GROWS}, (None, *READS_BOTH), "ok", f"{TORCHS}={GROWS}"),
    ({TORCHS: GROWS}, READS_ONE, "warning", "does not read"),
    ({TORCHS: "max_split_size_mb:64"}, READS_BOTH, "warning", "without expandable_segments"),
    ({TORCHS: f"{GROWS},max_split_size_mb:64"}, READS_BOTH, "failed", "max_split_size_mb"),
    ({TORCHS: f"{GROWS},pin_memory_expandable_segments:True"}, READS_BOTH, "failed", "captures no graph"),
])  # fmt: skip
def test_both_names_of_the_allocators_variable(
    variables: dict[str, str], wheels: tuple[str | None, ...], status: str, said: str
) -> None:
    for wheel in wheels:
        found = {check.name: check for check in devices.check_variables(variables, torch_npu=wheel)}
        assert found[OURS].status == status, wheel
        assert said in found[OURS].found
        assert (status == "ok") == (not found[OURS].remedy)


@pytest.mark.parametrize(("name", "value"), [
    ("TASK_QUEUE_ENABLE", "2"), ("ASCEND_LAUNCH_BLOCKING", "1"),
    ("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True,pin_memory_expandable_segments:True"),
])  # fmt: skip
def test_what_forbids_graphs_is_a_warning_where_none_is_asked_for(name: str, value: str) -> None:
    found = {check.name: check.status for check in devices.check_variables({name: value}, is_eager=True)}
    assert found.pop(name) == "warning"
    assert set(found.values()) == {"ok"}


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port that somebody listens on, with room above it for HCCL's range."""
    with socket.socket() as listener:
        port = next(port for port in range(20000, 30000) if bound(listener, port))
        listener.listen()
        yield port


def bound(listener: socket.socket, port: int) -> bool:
    try:
        listener.bind(("", port))
    except OSError:
        return False
    return True


def test_a_taken_port(taken_port: int) -> None:
    wanted = {"HCCL_IF_BASE_PORT": str(taken_port - 3)}
    one, two = devices.check_ports(wanted, 1), devices.check_ports(wanted, 2)
    assert (one.status, two.status) == ("warning", "failed"), "one rank needs no port"
    assert str(taken_port) in two.found
    assert "export HCCL_IF_BASE_PORT=" in two.remedy
    assert "asks HCCL for free ones" not in two.found, "with a base port it does not ask"
    advised = two.remedy.partition("HCCL_IF_BASE_PORT=")[2].partition(",")[0]
    assert devices.check_ports({"HCCL_IF_BASE_PORT": advised}, 2).status == "ok", "what it advises works"
    assert devices.check_ports({**wanted, "HCCL_HOST_SOCKET_PORT_RANGE": "auto"}, 2).status == "ok"
    assert devices.check_ports({"HCCL_IF_BASE_PORT": "65530"}, 1).status == "failed"


def test_little_shared_memory(tmp_path: Path) -> None:
    assert devices.check_shared_memory(tmp_path, 1, needed_bytes=0).status == "ok"
    little = devices.check_shared_memory(tmp_path, 1, needed_bytes=1 << 60)
    assert little.status == "warning"
    assert "--shm-size" in little.remedy
    assert devices.check_shared_memory(tmp_path, 2, needed_bytes=1 << 60).status == "failed"
    assert devices.check_shared_memory(tmp_path / "none", 1).status == "failed"


@pytest.mark.parametrize("cann", ["9.2.0", "9.2.1", "9.1.0"])
def test_a_pair_that_an_image_ships_is_no_warning(cann: str, tmp_path: Path) -> None:
    packages: dict[str, str | None] = {"torch": "2.10.0", "torch_npu": "2.10.0.post4"}
    check = software.check_cann_version(empty_host(tmp_path, environment=toolkit(tmp_path / "cann", cann)), packages)
    assert (check.status, check.remedy) == ("ok", "")
    assert ("fused from CANN 9.2 on" in check.found) == (cann == "9.1.0"), "the rule of Gated DeltaNet"


@pytest.mark.parametrize(
    ("version", "status"),
    [("9.1.0", "ok"), ("9.1.1", "ok"), ("9.0.0", "warning"), ("9.2.0", "warning"), ("8.5.0", "failed"),
     ("8.5.0.alpha001", "failed"), ("8.3.RC2", "failed")],
)
def test_cann_against_torch_npu(version: str, status: str, tmp_path: Path) -> None:
    host = empty_host(tmp_path, environment=toolkit(tmp_path / "cann", version))
    check = software.check_cann_version(host, KNOWN)
    assert (check.status, bool(check.remedy)) == (status, status != "ok")
    assert version in check.found
    if status == "failed":
        remedies = {"8.5.0": "torch_npu==2.9.0.post9", "8.5.0.alpha001": "8.5.0 or newer", "8.3.RC2": "CANN 9.2.0"}
        assert remedies[version] in check.remedy


def test_the_version_of_cann_is_not_that_of_its_components(tmp_path: Path) -> None:
    info = tmp_path / "compiler/version.info"
    info.parent.mkdir()
    info.write_text("Version=7.6.0.1.220\nversion_dir=8.2.RC1\ntimestamp=20250718_173029\n")
    assert cann_version({"ASCEND_TOOLKIT_HOME": str(tmp_path)}) == "8.2.RC1"
    info.unlink()
    (tmp_path / "version.cfg").write_text("# version: 1.0\nruntime_running_version=[7.6.0.1.220:8.2.RC1]\n")
    assert cann_version({"ASCEND_TOOLKIT_HOME": str(tmp_path)}) == "8.2.RC1"
    assert cann_version({}) is None


def test_set_env_that_went_stale(tmp_path: Path) -> None:
    loads = {"libascendcl.so": None}
    variables = toolkit(tmp_path / "cann", "8.5.0")
    here = empty_host(tmp_path, environment=variables)
    assert software.check_toolkit(here, loads).status == "ok"
    assert software.check_toolkit(here, {"libascendcl.so": "cannot open"}).status == "failed"
    assert software.check_toolkit(empty_host(tmp_path, environment={}), loads).status == "warning"
    for changes, found in (
        ({"ASCEND_HOME_PATH": str(tmp_path / "gone")}, "gone is not there"),
        ({"ASCEND_OPP_PATH": str(tmp_path / "gone")}, "gone is not there"),
        ({"ASCEND_OPP_PATH": None}, "ASCEND_OPP_PATH is not set"),
    ):
        changed = {name: value for name, value in {**variables, **changes}.items() if value is not None}
        check = software.check_toolkit(empty_host(tmp_path, environment=changed), loads)
        assert (check.status, found in check.found, "set_env.sh" in check.remedy) == ("failed", True, True)


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


def test_drivers_of_each_cann(tmp_path: Path) -> None:
    host = empty_host(tmp_path)
    assert "-v " in software.check_driver(host).remedy, "containers forget to mount it"
    info = tmp_path / "Ascend/driver/version.info"
    info.parent.mkdir(parents=True)
    for version, status in (("25.5.1", "ok"), ("26.0.rc1", "ok"), ("23.0.rc3", "warning")):
        info.write_text(f"Version={version}\nascendhal_version=7.35.23\npackage_version={version}\n")
        check = software.check_driver(host)
        assert (check.status, version in check.found) == (status, True)
    info.write_text("Version=25.0.2\n")  # CANN 9.0 takes it by its release notes, 9.1 does not
    for cann, words in (("9.0.1", "has few streams"), ("9.1.0", "older than 25.2"), ("9.2.0", "older than 26.0")):
        check = software.check_driver(empty_host(tmp_path, environment=toolkit(tmp_path / cann, cann)))
        assert (check.status, words in check.found) == ("warning", True), check


def test_a_driver_with_few_streams_is_a_warning_that_names_the_loss(tmp_path: Path) -> None:
    info = tmp_path / "Ascend/driver/version.info"
    info.parent.mkdir(parents=True)
    host = empty_host(tmp_path, environment=toolkit(tmp_path / "cann", "9.1.0"))
    for version, status in (("25.2.0", "warning"), ("25.5.0", "warning"), ("25.5.1", "ok"), ("26.0.rc1", "ok")):
        info.write_text(f"Version={version}\n")
        check = software.check_driver(host)
        assert check.status == status
        assert status == "ok" or ("fewer graphs are captured" in check.found and "25.5.1 or newer" in check.remedy)
        assert software.check_driver(host, is_eager=True).status == "ok", "no graph is asked for"


def test_queues_that_run_out_are_those_of_an_old_driver() -> None:
    found = explain("error code is 207005: resource alloc fail: alloc sq cq fail")
    assert found.startswith("sq cq: a driver below 25.5.1 ")
    assert "update driver and firmware (HDK) to 25.5.1 or newer" in found
    assert "207005, the device has no resources left" in found


def test_libatb(tmp_path: Path) -> None:
    host = empty_host(tmp_path)
    assert software.check_libatb(host, {"libatb.so": None}).status == "ok"
    assert "NNAL" in software.check_libatb(host, {"libatb.so": "cannot open"}).remedy


def test_packages_that_torch_npu_does_not_declare() -> None:
    packages: dict[str, str | None] = dict.fromkeys([*RUNNER_NEEDS, *software.TORCHAIR_NEEDS], "1")
    assert found_packages("npu", packages).status == "ok"
    packages |= {"decorator": None, "attrs": None}
    assert found_packages("npu", packages) == Check(
        "Python packages", "failed", "npu-runner and torchair import decorator, attrs: not installed",
        "pip list --format=freeze >image.txt; pip install -c image.txt decorator attrs; "
        "without internet: install.sh of a wheelhouse (docs/running-on-ascend.md)")
    assert found_packages("cpu", packages).status == "ok"
    del packages["torch"]
    assert "install torch" in found_packages("cpu", packages).remedy


def found_packages(platform: str, packages: dict[str, str | None]) -> Check:
    examination = examination_of(find_platform(platform), Findings(Host(), packages))
    return next(check for check in examination.examine() if check.name == "Python packages")


def test_every_package_that_torchair_wants_is_looked_for() -> None:
    """Beside torch_npu, the emulation's site holds what torchair imports and nothing else."""
    from tests.cann.setup_site import PACKAGES

    assert {name.partition("=")[0] for name in PACKAGES} - {"torch_npu"} <= set(software.TORCHAIR_NEEDS)
