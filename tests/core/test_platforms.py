"""A platform is an entry point: another package's runs jobs, over replicas too, and what is wrong with it is named."""

from __future__ import annotations

import fnmatch
import importlib
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from npu_runner import LLM, RunnerConfig, SamplingParams, platforms
from npu_runner.cli.doctor import DoctorOptions, examine_host
from npu_runner.errors import ConfigError
from npu_runner.platforms.cpu.platform import CpuPlatform
from npu_runner.platforms.host import Host
from npu_runner.platforms.ops import TorchOps
from npu_runner.serving.replicas.placement import on_devices, place
from npu_runner.strategies.causal_lm import CausalLMStrategy
from tests import zygote

PLUGIN = """
from npu_runner.platforms.cpu.platform import CpuPlatform


class FourthPlatform(CpuPlatform):
    name = "fourth"
    priority = 50
    ray_resource = "FOURTH"

class Accelerator(FourthPlatform):
    visible_devices = "FOURTH_DEVICES"

class Broken(FourthPlatform):
    device_files = "dev/fourth[0-9]*"
    visible_devices = "FOURTH_DEVICES"

    def why_unavailable(self):
        return "its driver is too old"

not_a_platform = 3
"""
PROMPTS = ["circle", "a red square", "which"]


def install(site: Path, *entries: str) -> None:
    """What an installer leaves of a package with entry points."""
    (site / "their_devices.py").write_text(PLUGIN)
    (site / "half_done.py").write_text("import a_vendor_that_is_not_there")
    info = site / "their_devices-1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-devices\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("\n".join(["[npu_runner.platforms]", *entries, ""]))


FOURTH = "fourth = their_devices:FourthPlatform"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Installs a package with these entry points into this process, until the test ends."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(site)

    def make(*entries: str) -> None:
        install(site, *entries)
        platforms._installed.cache_clear()
        sys.modules.pop("their_devices", None)

    yield make
    platforms._installed.cache_clear()


def job(folder: Path, *options: str) -> tuple[str, dict[str, str]]:
    """The command itself, where the package is installed; what it says, and each row's answer."""
    rows = [{"custom_id": prompt, "method": "POST", "url": "/v1/completions",
             "body": {"prompt": prompt, "max_tokens": 6, "temperature": 0}} for prompt in PROMPTS]
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    paths = os.pathsep.join(filter(None, (str(folder / "site"), os.environ.get("PYTHONPATH"))))
    done = zygote.run(
        [sys.executable, "-m", "npu_runner", "batch", "-i", "in.jsonl", "-o", "out.jsonl", "--max-model-len", "64",
         "--kv-cache-bytes", "4M", "--preprocessing-workers", "1", *options],
        cwd=folder, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    return done.stderr, {row["custom_id"]: row["response"]["body"]["choices"][0]["text"] for row in answers}


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    """Our own CPU's answers."""
    with LLM("shapes-vl", platform="cpu", max_model_len=64, kv_cache_bytes=4 << 20) as llm:
        results = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=6))
        return {prompt: result.text for prompt, result in zip(PROMPTS, results, strict=True)}


def test_auto_runs_a_job_on_another_packages_platform(installed: Callable[..., None], tmp_path: Path,
                                                      expected: dict[str, str]) -> None:
    installed(FOURTH)
    said, answers = job(tmp_path)
    assert "platform fourth" in said
    assert answers == expected


@pytest.mark.full("two replicas of a platform of another package; one process of it stays, and placement by itself")
def test_its_replicas_are_placed_as_it_says(installed: Callable[..., None], tmp_path: Path,
                                            expected: dict[str, str]) -> None:
    installed(FOURTH)
    said, answers = job(tmp_path, "--platform", "fourth", "--data-parallel-size", "2")
    assert "platform fourth" in said
    assert "replica 1 " in said
    assert answers == expected


def test_its_name_is_known_once_it_is_installed(installed: Callable[..., None]) -> None:
    with pytest.raises(ConfigError, match=r"platform: 'fourth' is not one of auto, npu, cuda, cpu$"):
        RunnerConfig(model="x", platform="fourth")
    installed(FOURTH)
    assert RunnerConfig(model="x", platform="fourth").platform == "fourth"
    with pytest.raises(ConfigError, match=r"platform: 'fifth' is not one of auto, npu, cuda, cpu, fourth$"):
        RunnerConfig(model="x", platform="fifth")


def test_priorities_order_what_auto_tries(installed: Callable[..., None]) -> None:
    installed(FOURTH)
    assert [each.name for each in platforms.platforms()] == ["fourth", "npu", "cuda", "cpu"]
    assert platforms.pick_platform("auto").name == "fourth"


def test_auto_computes_nowhere_else_where_devices_are_there_and_unusable(
    installed: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole job on the CPU of a host of accelerators looks right, and takes days."""
    installed("fourth = their_devices:Broken")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FOURTH_DEVICES", raising=False)
    Path("dev").mkdir()
    Path("dev/fourth_manager").touch()
    usable = platforms.pick_platform("auto").name
    assert usable != "fourth"
    Path("dev/fourth0").touch()
    words = (r"platform auto: this host has fourth devices \(dev/fourth0\), and they cannot be used: its driver is too "
             r"old\. To compute without them, name a platform \(--platform cpu\)")
    with pytest.raises(ConfigError, match=words):
        platforms.pick_platform("auto")
    with pytest.raises(ConfigError, match=words):
        place("auto", 2, 1)
    assert platforms.pick_platform("cpu").name == "cpu"
    monkeypatch.setenv("FOURTH_DEVICES", "")
    assert platforms.pick_platform("auto").name == usable, "somebody has hidden them"


def test_what_shows_an_ascend_host() -> None:
    pattern = platforms.find_platform("npu").device_files
    shown = [name for name in ("davinci0", "davinci12", "davinci_manager", "hisi_hdc")
             if fnmatch.fnmatch(f"/dev/{name}", str(pattern))]  # fmt: skip
    assert shown == ["davinci0", "davinci12"]


def test_it_says_what_replicas_share(installed: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Cores, as the CPU, or devices that a variable of its own lists."""
    installed(FOURTH)
    assert [placement.platform for placement in place("fourth", 2, 1)] == ["fourth", "fourth"]
    accelerator = sys.modules["their_devices"].Accelerator()
    monkeypatch.setenv("FOURTH_DEVICES", "a,b,c,d")
    shares = [placement.environment for placement in on_devices(accelerator, 4, [0, 1], None, 2)]
    assert shares == [{"FOURTH_DEVICES": "a,b"}, {"FOURTH_DEVICES": "c,d"}]


def test_its_resource_is_what_a_ray_cluster_is_asked_for(installed: Callable[..., None],
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked for is arithmetic: it needs no Ray."""
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    monkeypatch.delitem(sys.modules, "npu_runner.serving.replicas.ray_cluster", raising=False)
    cluster = importlib.import_module("npu_runner.serving.replicas.ray_cluster")
    installed(FOURTH)
    found = cluster.demand({"CPU": 8.0, "FOURTH": 4.0}, "auto", 2, 1)
    assert (found.platform, found.options) == ("fourth", {"resources": {"FOURTH": 2}})
    assert cluster.demand({"CPU": 8.0}, "auto", 2, 1).platform == "cpu"
    del sys.modules["npu_runner.serving.replicas.ray_cluster"]  # it holds what is no Ray


def test_the_doctor_examines_it(installed: Callable[..., None], tmp_path: Path) -> None:
    installed(FOURTH)
    host = Host(environment={**os.environ, "PYTHONPATH": str(tmp_path / "site")})
    checks = {check.name: check for check in examine_host(host, DoctorOptions(platform="fourth", generation=False))}
    checks.pop("pages of PDFs")  # it looks at this host, whatever its platform is
    assert {name: check.status for name, check in checks.items()} == {
        "platform": "ok", "Python packages": "ok", "import torch": "ok", "fourth": "ok",
        "generation (fourth, eager)": "skipped"}  # fmt: skip


@pytest.mark.parametrize(("entry", "words"), [
    ("fourth = their_devices:not_a_platform", "their_devices:not_a_platform is not a Platform subclass"),
    ("fifth = their_devices:FourthPlatform", "their_devices:FourthPlatform calls itself 'fourth'; both names must be"),
    ("half = half_done:Platform", r"half_done:Platform\) does not load \(ModuleNotFoundError: No module named 'a_ven"),
    ("gone = their_devices:Gone", r"their_devices:Gone\) does not load \(AttributeError"),
])  # fmt: skip
def test_what_is_wrong_with_it_is_named_and_no_other_platform_minds(
    entry: str, words: str, installed: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    installed(entry)
    with pytest.raises(ConfigError, match=words):
        platforms.find_platform(entry.partition(" ")[0])
    assert platforms.pick_platform("cpu").name == "cpu"
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert [each.name for each in platforms.platforms()] == ["npu", "cuda", "cpu"]
    assert re.search(words, caplog.text)


def test_a_name_of_ours_stays_ours(installed: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    installed("cpu = their_devices:FourthPlatform")
    with caplog.at_level(logging.WARNING):
        assert [each.name for each in platforms.platforms()] == ["npu", "cuda", "cpu"]
    assert "their_devices:FourthPlatform" in caplog.text


@pytest.mark.parametrize(("base", "name", "message"), [
    (CpuPlatform, "state_ring_length", "a field of StateFacts, see state_facts"),
    (TorchOps, "int8_linear", "QuantisedOps.linear"),
    (CausalLMStrategy, "takes_videos", "accepts_videos"),
])
def test_a_member_of_an_earlier_release_is_refused(base: type, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"\.Mine: {name} is a name of npu_runner 0\.5; now it is {message}"):
        type("Mine", (base,), {name: None})
