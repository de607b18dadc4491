"""A wheelhouse is made where an index is and used where no network is, on an image with torch and torch_npu.

pip is the real one, its index a folder of empty wheels. The image is a folder on PYTHONPATH, in which a socket that
connects is an error and leaves a note. Knows nothing of what npu-runner does when installed (tests/test_wheel.py).
"""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from npu_runner import __version__
from tests.cann.environment import has_real_cann

ROOT = Path(__file__).parents[1]
REFUSES = """\
import socket

def refuse(*arguments, **keywords):
    with open({note!r}, "a") as file:
        file.write(repr(arguments) + "\\n")
    raise OSError("no network in this test")

socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse
"""
# What the image has: vLLM, which keeps llguidance below 1.8, and what it needs.
IMAGE = {"torch": "2.10.0+cpu", "torch_npu": "2.10.0.post4", "numpy": "2.2.6", "llguidance": "1.7.6",
         "pillow": "12.0.0", "vllm": "0.23.0", "huggingface_hub": "1.31.0", "jinja2": "3.1.6", "pydantic": "2.12.0",
         "transformers": "5.5.4", "ray": "2.48.0"}  # fmt: skip
# The same before transformers 5: that vLLM keeps llguidance below 1.4, and transformers huggingface_hub below 1.
OLDER = {**IMAGE, "numpy": "1.26.4", "llguidance": "1.3.0", "pillow": "11.1.0", "vllm": "0.13.0",
         "huggingface_hub": "0.36.0", "transformers": "4.57.1", "tokenizers": "0.22.0",
         "safetensors": "0.5.0"}  # fmt: skip
FROM_A_FILE = '{"url": "file:///torch.whl", "archive_info": {}}'
INDEX = {"attrs": "26.1.0", "decorator": "5.2.1", "numpy": "2.4.6", "packaging": "26.3", "protobuf": "6.33.5",
         "psutil": "7.1.0", "pyyaml": "6.0.4", "huggingface_hub": "2.4.0", "jinja2": "3.1.6", "llguidance": "1.9.1",
         "pillow": "13.0.0", "pydantic": "2.14.3", "safetensors": "0.8.0", "tokenizers": "0.23.3", "tqdm": "4.70.1",
         "torch": "2.13.0", "pyarrow": "21.0.0", "pypdfium2": "5.15.2",
         "nh3": "0.3.8", "markdownify": "1.2.3"}  # fmt: skip
# What the tests of the regression run need beside it, as CI has it; the default Python of a wheelhouse is not 3.10.
PINS = "".join((ROOT / f"requirements-{name}.txt").read_text() for name in ("tests", "dev"))
TESTING = {name.replace("-", "_"): version for name, version in re.findall(
    r"^(av|hypothesis|pytest|pytest-timeout|transformers)==([\d.]+)(?!.*<)", PINS, re.MULTILINE)}  # fmt: skip


NEEDS = {"vllm 0.23.0": ["llguidance<1.8,>=1.7", "transformers"], "transformers 5.5.4": ["huggingface_hub<2"],
         "vllm 0.13.0": ["llguidance<1.4,>=1.3", "transformers<5"],
         "transformers 4.57.1": ["huggingface_hub<1,>=0.34", "tokenizers<=0.23,>=0.22"],
         f"transformers {TESTING['transformers']}": ["huggingface_hub<3,>=2"], "greedy 1": ["torch"]}  # fmt: skip


def metadata(name: str, version: str) -> str:
    needs = "".join(f"Requires-Dist: {each}\n" for each in NEEDS.get(f"{name} {version}", []))
    return f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}"


def make_wheel(folder: Path, name: str, version: str) -> None:
    folder.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", metadata(name, version))
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def elsewhere(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine with an index; setuptools is there already, for speed."""
    for name, version in {**INDEX, **TESTING}.items():
        make_wheel(tmp_path / "index", name, version)
    make_wheel(tmp_path / "index", "greedy", "1")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {"PATH": path, "HOME": str(tmp_path), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "index"),
            "PIP_NO_BUILD_ISOLATION": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}  # fmt: skip


def install(folder: Path, packages: dict[str, str]) -> None:
    """As pip lists them; there is nothing to import."""
    for name, version in packages.items():
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(metadata(name, version))
        (info / "RECORD").write_text("")


@pytest.fixture
def image(tmp_path: Path) -> dict[str, str]:
    """The environment of an image without network; torch came from a file, as it does in vendors' images."""
    folder = tmp_path / "image"
    install(folder, IMAGE)
    (folder / f"torch-{IMAGE['torch']}.dist-info/direct_url.json").write_text(FROM_A_FILE)
    (folder / "sitecustomize.py").write_text(REFUSES.format(note=str(tmp_path / "connected")))
    (folder / "ray/scripts").mkdir(parents=True)
    (folder / "ray/scripts/scripts.py").write_text("import sys\n\ndef main():\n    print(sys.executable)\n")
    # Not imported: setuptools takes a process that imports pip for pip's own, and inductor builds nothing in it then.
    (folder / "pip").symlink_to(Path(str(importlib.metadata.distribution("pip").locate_file("pip"))))
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {"PATH": path, "HOME": str(tmp_path), "PYTHONPATH": str(folder)}


def checkout(tmp_path: Path, *, whole: bool) -> Path:
    """A copy, because building leaves folders behind. Not `whole`: an empty package under our pyproject.toml."""
    folder = tmp_path / "checkout"
    for name in ("scripts", "bench", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for pattern in ("requirements-*.txt", "pyproject.toml", "README.md", "LICENSE"):
        for path in ROOT.glob(pattern):
            shutil.copy(path, folder)
    for name in ("npu_runner", "strategies"):
        if whole:
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            (folder / name).mkdir()
            (folder / name / "__init__.py").write_text(f'__version__ = "{__version__}"\n')
    return folder


def run(script: Path, *arguments: str, env: dict[str, str], cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", script, *arguments], env=env, cwd=cwd, capture_output=True, text=True)


def install_from_wheelhouse(source: Path, elsewhere: dict[str, str], image: dict[str, str], tmp_path: Path) -> Path:
    """The environment that the image gets. What made the wheelhouse is gone by then."""
    made = run(source / "scripts/deploy/make_wheelhouse.sh", "wheelhouse", env=elsewhere, cwd=tmp_path)
    assert made.returncode == 0, made.stdout + made.stderr
    assert not list((tmp_path / "wheelhouse").glob("torch*"))
    assert list((tmp_path / "wheelhouse").glob("pyarrow-*.whl")), "a table in Parquet is what the first page shows"
    assert list((tmp_path / "wheelhouse").glob("pypdfium2-*.whl")), "PDFs are read on a host without internet, too"
    for gone in ("index", "checkout"):
        shutil.rmtree(tmp_path / gone)
    return install_in(image, tmp_path)


def install_in(image: dict[str, str], tmp_path: Path) -> Path:
    installed = run(tmp_path / "wheelhouse/install.sh", "environment", env=image, cwd=tmp_path)
    assert installed.returncode == 0, installed.stdout + installed.stderr
    assert not (tmp_path / "connected").exists(), (tmp_path / "connected").read_text()
    return tmp_path / "environment"


def test_a_wheelhouse_installs_what_the_image_lacks_and_leaves_the_pair(
    elsewhere: dict[str, str], image: dict[str, str], tmp_path: Path
) -> None:
    environment = install_from_wheelhouse(checkout(tmp_path, whole=False), elsewhere, image, tmp_path)
    pair = (environment / "pair.txt").read_text().split()
    assert [line.replace("_", "-") for line in pair] == ["torch==2.10.0+cpu", "torch-npu==2.10.0.post4"]
    found = packages(environment)
    assert {f"npu_runner-{__version__}", "safetensors-0.8.0"} <= found  # the Python below may have some of the others
    names = {name.rpartition("-")[0] for name in found}
    assert not names & {"torch", "torch_npu", "numpy", "huggingface_hub", "pillow", "llguidance", "transformers",
                        "pytest"}, "the image's own fit, and tests are not for jobs"
    of_tests = packages(environment / "tests-environment")
    assert {f"transformers-{TESTING['transformers']}", "huggingface_hub-2.4.0"} <= of_tests, "the oracle's own"
    wanted = (environment / "requirements.txt").read_text().replace("-", "_").split()
    assert sorted(wanted) == sorted(f"{name}=={version}" for name, version in TESTING.items()), "as in CI"
    assert not {name for name in of_tests if name.startswith(("torch", "numpy", "npu_runner"))}
    module = [environment / "tests-environment/bin/python", "-c", "import npu_runner; print(npu_runner.__file__)"]
    seen = subprocess.run(module, env=image, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert seen.startswith(str(environment / "lib")), "the tests test what is installed"
    ray = subprocess.run([environment / "bin/ray"], env=image, capture_output=True, text=True)
    assert ray.stdout.strip() == str(environment / "bin/python"), "not the image's own Python, which sees no npu-runner"


def packages(environment: Path) -> set[str]:
    return {path.name.partition(".dist-info")[0] for path in environment.glob("lib/*/site-packages/*.dist-info")}


@pytest.mark.full("builds the whole package; one without content stays")
def test_the_whole_package_comes_out_of_a_wheelhouse(
    elsewhere: dict[str, str], image: dict[str, str], tmp_path: Path
) -> None:
    environment = install_from_wheelhouse(checkout(tmp_path, whole=True), elsewhere, image, tmp_path)
    (weights,) = environment.glob("lib/*/site-packages/npu_runner/assets/shapes-vl/model.safetensors")
    assert weights.read_bytes() == (ROOT / "npu_runner/assets/shapes-vl/model.safetensors").read_bytes()
    assert (environment / "bin/npu-runner").is_file()


@pytest.mark.full("every version of an image as a constraint; an image that keeps what fits stays")
@pytest.mark.parametrize("packages", [IMAGE, OLDER], ids=["transformers 5", "transformers 4"])
def test_pip_leaves_all_that_an_image_has_and_adds_what_it_lacks(
    packages: dict[str, str], elsewhere: dict[str, str], tmp_path: Path
) -> None:
    """With every version of the image as a constraint, as the doctor advises. Of npu-runner itself: pyproject.toml."""
    install(tmp_path / "image", packages)
    (tmp_path / "image/pip").symlink_to(Path(str(importlib.metadata.distribution("pip").locate_file("pip"))))
    image = {**elsewhere, "PYTHONPATH": str(tmp_path / "image")}
    # -S: the image's packages alone, not those of the Python that runs this test.
    pip = [sys.executable, "-S", "-m", "pip"]
    frozen = subprocess.run([*pip, "list", "--format=freeze"], env=image, capture_output=True, text=True, check=True)
    assert f"llguidance=={packages['llguidance']}\n" in frozen.stdout
    (tmp_path / "image.txt").write_text(frozen.stdout)
    project = re.search(r"^dependencies = (\[.*?^\])", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    assert project is not None
    (tmp_path / "project.txt").write_text("\n".join(ast.literal_eval(project[1])))
    needed = ["-r", str(ROOT / "requirements-npu.txt"), "-r", str(tmp_path / "project.txt")]
    done = subprocess.run([*pip, "install", "--dry-run", "-c", str(tmp_path / "image.txt"), *needed],
                          env=image, capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("Would install")]
    added = {word.rpartition("-")[0].replace("-", "_").lower() for word in line.split()[2:]}
    assert added == {"attrs", "decorator", "packaging", "protobuf", "psutil", "pyyaml", "tqdm", "tokenizers",
                     "safetensors"} - set(packages)  # fmt: skip


@pytest.mark.skipif(has_real_cann(), reason="this host has an NPU")
@pytest.mark.full("nine steps of a regression; what they report of an interrupted one stays (npu/test_launchers.py)")
def test_a_host_that_got_the_kit_alone_runs_the_regression_which_says_what_failed(
    elsewhere: dict[str, str], tmp_path: Path
) -> None:
    """Where there is no NPU, steps that need one fail, and the others run. The report lies in the working directory."""
    made = run(checkout(tmp_path, whole=False) / "scripts/deploy/make_wheelhouse.sh", "wheelhouse", env=elsewhere,
               cwd=tmp_path)  # fmt: skip
    assert made.returncode == 0, made.stderr
    shutil.rmtree(tmp_path / "checkout")
    kit = tmp_path / "wheelhouse/regression"
    (kit / "npu_runner").symlink_to(ROOT / "npu_runner")  # as install.sh does, of the empty one
    (kit / "scripts/demo_requests.py").write_text("raise SystemExit(9)\n")
    (tmp_path / "home").mkdir()
    env = {**os.environ, "PYTHON": sys.executable}
    done = run(kit / "scripts/regress_ascend.sh", "--out", "out", "--quick", "--operators", "rms_norm", "--",
               "tests/npu/test_comparisons.py", "-k", "fails", env=env, cwd=tmp_path / "home")  # fmt: skip
    out = tmp_path / "home/out"
    report = (out / "report.txt").read_text()
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == (
        "8 of 9 steps failed: operators doctor images eager graph answers compare replay"), report
    assert f"{'images':24} FAILED (exit status 9" in report
    assert f"{'tests':24} ok" in report
    with tarfile.open(f"{out}.tar.gz") as archive:
        assert {f"out/{step}/logs" for step in ("operators", "graph", "tests", "replay")} <= set(archive.getnames())


def test_an_image_without_the_pair_is_refused(image: dict[str, str], tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "image/torch_npu-2.10.0.post4.dist-info")
    done = run(ROOT / "scripts/deploy/install.sh", "environment", env=image, cwd=tmp_path)
    assert done.returncode == 2
    assert "no pair of torch and torch_npu (found: torch==2.10.0+cpu )" in done.stderr
    assert not (tmp_path / "environment").exists(), "the next try would find it in its way"


def test_an_environment_of_before_is_left_alone(image: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "environment").mkdir()
    done = run(ROOT / "scripts/deploy/install.sh", "environment", env=image, cwd=tmp_path)
    assert (done.returncode, (tmp_path / "environment").is_dir()) == (2, True)
    assert "exists already" in done.stderr


def test_a_requirement_that_brings_torch_is_refused(elsewhere: dict[str, str], tmp_path: Path) -> None:
    script = checkout(tmp_path, whole=False) / "scripts/deploy/make_wheelhouse.sh"
    done = run(script, "wheelhouse", "greedy", env=elsewhere, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "a requirement brought torch, which the image has: torch-2.13.0-py3-none-any.whl" in done.stderr
