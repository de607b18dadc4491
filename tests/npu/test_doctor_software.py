"""`npu-runner doctor`: versions of CANN, torch_npu and the driver, kernels and packages, each with its remedy."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from npu_runner.platforms import find_platform
from npu_runner.platforms.examination import RUNNER_NEEDS, Findings, examination_of
from npu_runner.platforms.host import Check, Host
from npu_runner.platforms.npu.preflight import software
from npu_runner.platforms.npu.preflight.errors import explain
from npu_runner.platforms.npu.versions import cann_version
from tests.cann.environment import ROOT
from tests.npu.hosts import empty_host, toolkit

KNOWN = {"torch": "2.9.0", "torch_npu": "2.9.0.post6"}


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


def test_the_requirements_hold_what_the_doctor_looks_for() -> None:
    lines = (ROOT / "requirements-npu.txt").read_text().splitlines()
    names = {re.split("[<>=!]", line)[0] for line in lines if line and not line.startswith("#")}
    assert names == {"torch-npu", *software.TORCHAIR_NEEDS, *RUNNER_NEEDS} - {"torch"}


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
