"""Operator packages of vendors are found with what is called here; a start warns of them and of untried chips."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from npu_runner.platforms.npu.preflight.vendor_packages import check_vendor_packages, exported_functions
from tests.cann.environment import has_real_cann, run_python

only_emulated = pytest.mark.skipif(has_real_cann(), reason="a real host cannot be broken on purpose")


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
