"""What a host lacks is named before a model is loaded there, and so is what is wrong with --ray. Without Ray."""

from __future__ import annotations

import dataclasses
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from npu_runner.batch.files.input_identity import InputIdentity
from npu_runner.batch.files.manifest import Manifest
from npu_runner.batch.files.row_book import CarriedRows, SharedFile
from npu_runner.batch.job.manifest_check import manifest_of
from npu_runner.batch.job.options import BatchOptions
from npu_runner.batch.job.replica_plan import RemotePlan
from npu_runner.batch.job.row_server import ServerPlan
from npu_runner.cli.main import _parser
from npu_runner.config import RunnerConfig
from npu_runner.errors import ConfigError
from npu_runner.prompts.media.media import MediaRules
from npu_runner.serving.replica import ReplicaFacts
from npu_runner.serving.workers.pool import PoolLimits
from tests.batch.scripted import row, write_rows


def plan(folder: Path, **changes: Any) -> RemotePlan:
    (folder / "model").mkdir(exist_ok=True)
    server = ServerPlan(
        config=RunnerConfig(model=str(folder / "model")), source=CarriedRows("in.jsonl"), media=MediaRules(),
        limits=PoolLimits(num_workers=1, task_timeout_seconds=1.0), max_row_bytes=1 << 20,
    )  # fmt: skip
    return RemotePlan(server=dataclasses.replace(server, **changes), name="replica 3")


def test_what_a_host_does_not_see_is_named(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(b"{}\n")
    missing = str(tmp_path / "missing")
    wrong = [
        (plan(tmp_path, config=RunnerConfig(model=missing)), f"no folder {missing}"),
        (plan(tmp_path, media=MediaRules(allowed_dir=missing)), "allowed_media_dir"),
        (plan(tmp_path, source=SharedFile(missing, 3)), "cannot be read .No such file"),
        (plan(tmp_path, source=SharedFile(str(tmp_path / "in.jsonl"), 4)), "3 bytes there and 4"),
    ]
    for made, message in wrong:
        with pytest.raises(ConfigError, match=message) as caught:
            made()
        assert f"replica 3 on host {socket.gethostname()}: " in str(caught.value)
    plan(tmp_path, source=SharedFile(str(tmp_path / "in.jsonl"), 3))().close()


def test_replicas_that_loaded_another_model_are_refused() -> None:
    facts = ReplicaFacts(version="1", settings={}, ledger="", max_rows=1, weights={"config.json": "a", "w": "b"})
    for files, weights in (({"config.json": "other"}, {"w": "b"}), ({"config.json": "a"}, {"w": "other"})):
        new = Manifest(created=1, model_name="m", model_files=files, weights=weights, settings={},
                       input=InputIdentity(num_bytes=1, blake2b=""))
        with pytest.raises(ConfigError, match="another model than this host sees"):
            manifest_of(None, new, facts)  # type: ignore[arg-type]


def test_the_option_alone_means_the_cluster_of_this_host() -> None:
    arguments = ["batch", "-i", "a", "-o", "b"]
    assert _parser().parse_args([*arguments, "--ray"]).ray == "auto"
    assert _parser().parse_args([*arguments, "--ray", "10.0.0.1:6379", "--ordered"]).ray == "10.0.0.1:6379"
    with pytest.raises(ConfigError, match="shared_input"):
        BatchOptions(input="a", output="b", shared_input=True)


@pytest.mark.parametrize(("blocked", "address", "message"), [
    (True, "auto", "Ray is not installed here"),
    (False, "127.0.0.1:1", "no process answers there"),
    (False, "ray://127.0.0.1:1", "not an address"),
])  # fmt: skip
def test_a_cluster_that_cannot_be_joined_is_named(blocked: bool, address: str, message: str, tmp_path: Path) -> None:
    if not blocked:
        pytest.importorskip("ray", reason="Ray is not installed: pip install 'ray[data]>=2.40'")
    write_rows(tmp_path / "in.jsonl", [row("1")])
    arguments = ["batch", "-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"), "--ray", address]
    block = "sys.modules['ray'] = None" if blocked else "pass"
    code = f"import sys\n{block}\nfrom npu_runner.cli.main import main\nsys.exit(main({arguments!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, message in done.stderr) == (2, True), done.stderr
    assert not (tmp_path / "out.jsonl").exists()
