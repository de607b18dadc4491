"""Which versions go together: one list, everything written about it says the same, and the others are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.requirements import Requirement

from npu_runner.cli.doctor_layers import cases as layer_cases
from npu_runner.platforms import find_platform
from npu_runner.platforms.examination import Findings, examination_of
from npu_runner.platforms.host import Host
from npu_runner.platforms.npu.preflight import software
from npu_runner.platforms.npu.versions import (
    OLD_WHEELS,
    PAIRINGS,
    WHEELS_FOR_85,
    old_cann,
    old_wheel,
    recipe_for_85,
    release,
    wheel_for,
)
from tests.cann.environment import ROOT, has_real_cann, run_python
from tests.npu.hosts import empty_host, toolkit
from tests.npu.operator_table.facts import fact

HEADER = "| CANN | torch_npu, each for the torch of its first three numbers |"


def table_of(path: Path) -> list[str] | None:
    """The rows of the version table in a document, None where it has none."""
    lines = path.read_text().splitlines()
    if HEADER not in lines:
        return None
    rows = lines[lines.index(HEADER) + 2:]
    return rows[:next(number for number, line in enumerate(rows) if not line.startswith("|"))]


def test_the_documents_have_the_table_that_the_doctor_has() -> None:
    canns = dict.fromkeys(pair.cann for pair in PAIRINGS)
    expected = [f"| {cann} | {', '.join(pair.torch_npu for pair in PAIRINGS if pair.cann == cann)} |" for cann in canns]
    found = {path.name: table_of(path) for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))}
    assert found["ascend.md"] == expected
    assert all(table in (None, expected) for table in found.values()), found


def test_pip_may_install_every_wheel_of_the_table_and_no_old_one() -> None:
    lines = (ROOT / "requirements-npu.txt").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("torch-npu")]
    allowed = Requirement(line).specifier
    assert all(pair.torch_npu in allowed for pair in PAIRINGS)
    assert not [wheel for wheel in OLD_WHEELS if wheel in allowed]


def test_what_the_doctor_tells_to_install_is_in_the_table() -> None:
    wheels = {pair.torch_npu for pair in PAIRINGS}
    by_age = sorted(PAIRINGS, key=lambda pair: post(pair.torch_npu))
    newest = {(pair.torch, pair.cann): pair.torch_npu for pair in by_age}
    for pair in PAIRINGS:
        advice = software.check_pair({"torch": pair.torch, "torch_npu": None}, pair.cann).remedy
        assert advice == f"pip install --no-deps torch_npu=={newest[pair.torch, pair.cann]}"
        assert software.check_pair({"torch": pair.torch, "torch_npu": pair.torch_npu}, pair.cann).status == "ok"
        assert wheel_for(pair.torch, None) in wheels
        assert old_wheel(pair.torch_npu) is None
        assert old_cann(pair.cann) is None
    for wheel in OLD_WHEELS:
        remedy = software.check_pair({"torch": ".".join(map(str, release(wheel)[:3])), "torch_npu": wheel}).remedy
        assert remedy.partition("==")[2].partition(",")[0] in wheels


def post(wheel: str) -> int:
    return int(wheel.partition(".post")[2] or 0)


def test_no_torch_npu_is_advised_where_cann_is_missing() -> None:
    """It would spoil torch for every platform, as docs/running-on-ascend.md says."""
    check = software.check_pair({"torch": "2.13.0", "torch_npu": None})
    assert check.status == "failed"
    assert "pip install" not in check.remedy
    assert "CANN first" in check.remedy


@pytest.mark.npu
@pytest.mark.skipif(has_real_cann(), reason="a real host has the CANN it has")
def test_the_platform_refuses_an_old_cann_by_name(tmp_path: Path) -> None:
    variables = toolkit(tmp_path / "cann", "8.3.RC2")
    done = run_python(["-m", "npu_runner", "generate", "--platform", "npu", "Hello?"], forked=True, timeout=120,
                      **variables)
    assert done.returncode == 2, done.stderr
    assert "CANN 8.3.RC2: older than 8.5" in done.stderr
    assert "install CANN 9.2.0" in done.stderr
    assert "Traceback" not in done.stderr
    # Nor does "auto" quietly take the processor of a host with devices.
    done = run_python(["-m", "npu_runner", "generate", "Hello?"], forked=True, timeout=120, **variables)
    assert (done.returncode, "CANN 8.3.RC2" in done.stderr) == (2, True), done.stderr


def test_cann_85_is_taken_for_wheels_of_one_release_and_no_alpha_is() -> None:
    assert set(WHEELS_FOR_85) == {pair.torch_npu for pair in PAIRINGS if pair.cann == "9.2.0"}
    for wheel in WHEELS_FOR_85:
        for cann in ("8.5.0", "8.5.1", "8.5.0-beta.1"):
            assert old_cann(cann, wheel) is None
    assert old_cann("8.5.0", "2.13.0+cpu") is None
    for wheel in {pair.torch_npu for pair in PAIRINGS} - set(WHEELS_FOR_85):
        found = old_cann("8.5.0", wheel, release_text(wheel))
        assert found is not None
        assert wheel in found.reason
        assert found.remedy == recipe_for_85(release_text(wheel))
    for cann in ("8.5.0.alpha001", "8.5.0-alpha.2"):
        found = old_cann(cann, "2.13.0")
        assert found is not None
        assert "alpha" in found.reason
    for cann in ("8.3.RC2", "8.2.RC1", "7.0.0", "8.9.0"):
        assert old_cann(cann, "2.13.0") is not None, cann


def release_text(wheel: str) -> str:
    return ".".join(map(str, release(wheel)[:3]))


def test_the_recipe_for_cann_85_keeps_torch_where_a_wheel_is_made_for_it() -> None:
    assert "install --no-deps torch_npu==2.9.0.post9 (CANN stays" in recipe_for_85("2.9.0+cpu")
    assert "install --no-deps torch_npu==2.7.1.post11 (CANN stays" in recipe_for_85("2.7.1")
    assert "install --no-deps torch==2.9.0 torch_npu==2.9.0.post9 (CANN stays" in recipe_for_85("2.8.0"), "no wheel"
    for wheel in OLD_WHEELS:  # what an image with CANN 8.5 holds
        check = software.check_pair({"torch": release_text(wheel), "torch_npu": wheel}, "8.5.1")
        assert (check.status, check.remedy) == ("failed", recipe_for_85(release_text(wheel)))


def test_cann_85_is_a_warning_with_its_recipe_under_a_wheel_that_is_taken(tmp_path: Path) -> None:
    variables = toolkit(tmp_path / "cann", "8.5.1")
    packages: dict[str, str | None] = {"torch": "2.9.0", "torch_npu": "2.9.0.post9"}
    check = software.check_cann_version(empty_host(tmp_path, environment=variables), packages)
    assert check.status == "warning"
    assert "not verified on any 8.5" in check.found
    assert "bfloat16 with head dim 128" in check.found
    host = empty_host(tmp_path, environment=variables)
    for wheel, is_told in ((None, True), ("2.9.0", True), ("2.9.0.post9", False)):
        remedy = software.check_cann_version(host, {"torch": "2.9.0", "torch_npu": wheel}).remedy
        assert ("pip install --no-deps torch_npu==2.9.0.post9" in remedy) == is_told
    examination = examination_of(find_platform("npu"), Findings(Host(environment=variables), packages))
    assert {dtype: len(names) for dtype, names in layer_cases(examination).items()} == {"bfloat16": 4, "float16": 0}
    assert "head dim 32" in examination.why_no_embedded()
    newer = examination_of(find_platform("npu"), Findings(Host(environment={}), packages))
    assert {dtype: len(names) for dtype, names in layer_cases(newer).items()} == {"bfloat16": 6, "float16": 6}
    assert newer.why_no_embedded() == ""


def test_captured_graphs_on_cann_85_want_a_driver_that_updates_them(tmp_path: Path) -> None:
    info = tmp_path / "Ascend/driver/version.info"
    info.parent.mkdir(parents=True)
    host = empty_host(tmp_path, environment=toolkit(tmp_path / "cann", "8.5.0"))
    for version, status, eagerly in (("24.1.1", "failed", "warning"), ("25.0.RC1", "warning", "ok")):
        info.write_text(f"Version={version}\n")
        check = software.check_driver(host)
        assert (check.status, software.check_driver(host, is_eager=True).status) == (status, eagerly)
        assert status == "warning" or ("25.0.RC1" in check.found and "--enforce-eager" in check.remedy)


OLD_WHEEL = """
import sys
import torch, torch_npu
from npu_runner.errors import ConfigError
from npu_runner.platforms import pick_platform

library = torch.library.Library("old_wheel", "DEF")
library.define("npu_scatter_pa_kv_cache" + sys.argv[2])
torch.ops.npu.npu_scatter_pa_kv_cache = torch.ops.old_wheel.npu_scatter_pa_kv_cache
torch_npu.__version__ = sys.argv[1]
try:
    pick_platform("npu")
except ConfigError as refusal:
    print(refusal)
"""


@pytest.mark.npu
@pytest.mark.parametrize("wheel", OLD_WHEELS[:1])
def test_the_platform_refuses_a_wheel_with_the_operator_of_an_old_one(wheel: str) -> None:
    """The wheel's own schema of the operator, as the table has it, in the place of the one that is installed."""
    schema = fact(wheel, "torch.ops.npu.npu_scatter_pa_kv_cache")
    assert schema is not None
    done = run_python(["-c", OLD_WHEEL, wheel, schema], forked=True)
    assert done.returncode == 0, done.stderr
    assert f"torch_npu {wheel}: its npu_scatter_pa_kv_cache has no cache_mode" in done.stdout
    assert "take a torch_npu for CANN 9" in done.stdout


@pytest.mark.npu
@pytest.mark.skipif(has_real_cann(), reason="a real host has the environment it has")
@pytest.mark.parametrize(("variable", "value"), [("TASK_QUEUE_ENABLE", "2"), ("ASCEND_LAUNCH_BLOCKING", "1")])
def test_the_platform_refuses_graphs_that_torch_npu_would_not_capture(variable: str, value: str) -> None:
    done = run_python(["-m", "npu_runner", "generate", "--platform", "npu", "Hello?"], forked=True, timeout=120,
                      **{variable: value})
    assert done.returncode == 2, done.stderr
    assert f"{variable}={value}" in done.stderr
    assert "enforce_eager" in done.stderr


@pytest.mark.parametrize(
    ("torch", "torch_npu", "status"),
    [
        ("2.9.0", "2.9.0.post2", "ok"),
        ("2.7.1+cpu", "2.7.1.post8", "ok"),
        ("2.13.0", "2.13.0", "ok"),
        ("2.10.0", "2.10.0.post1", "warning"),
        ("2.9.1", "2.9.1", "ok"),
        ("2.10.0", "2.9.0.post2", "failed"),
        ("2.9.0", "2.9.0", "failed"),
        ("2.8.0", "2.8.0.post2", "failed"),
        ("2.6.0", "2.6.0.post5", "failed"),
        ("2.9.0", None, "failed"),
        (None, "2.9.0.post2", "failed"),
    ],
)
def test_pairs_of_torch_and_torch_npu(torch: str | None, torch_npu: str | None, status: str) -> None:
    check = software.check_pair({"torch": torch, "torch_npu": torch_npu})
    assert check.status == status
    assert bool(check.remedy) == (status != "ok")


def test_an_old_wheel_is_refused_with_its_reason_and_a_wheel_that_exists() -> None:
    check = software.check_pair({"torch": "2.9.0", "torch_npu": "2.9.0"}, cann="9.1.0")
    assert "no cache_mode" in check.found
    assert "torch_npu==2.9.0.post8" in check.remedy
    assert "2.9.0.post9" in software.check_pair({"torch": "2.9.0", "torch_npu": "2.9.0"}).remedy, "the newest otherwise"
