"""The manifest and the model's fingerprint: what changed is named, what did not is not."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from npu_runner import __version__
from npu_runner.batch.files.fingerprint import WeightDigests, fingerprint_model
from npu_runner.batch.files.input_identity import InputIdentity
from npu_runner.batch.files.manifest import Manifest, differences, start_time
from npu_runner.batch.files.names import manifest_path, rows_path
from npu_runner.config import RunnerConfig
from npu_runner.errors import ConfigError, JobError
from npu_runner.prompts.media.image_settings import ImageSettings, Resizing
from npu_runner.request.prompt_inputs import ReasoningTokens
from tests.batch.job_folder import Job
from tests.batch.scripted import ScriptedEngine, ScriptedProcessor, read_rows, row, write_rows

MANIFEST = Manifest(
    created=1,
    model_name="m",
    model_files={"config.json": "1 bytes"},
    settings={"dtype": "float32", "sizes": (1, 2)},
    input=InputIdentity(3, "abc", rows=bytes(32)),
)


def test_a_saved_manifest_is_read_back(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    assert Manifest.load(output) is None
    MANIFEST.save(output)
    loaded = Manifest.load(output)
    assert loaded is not None
    assert loaded.input == MANIFEST.input
    assert differences(loaded.settings, MANIFEST.settings) == []
    assert loaded.system_fingerprint == MANIFEST.system_fingerprint
    assert loaded.input.rows == MANIFEST.input.rows
    assert set(tmp_path.iterdir()) == {manifest_path(output), rows_path(output)}


def test_the_file_says_who_wrote_it_in_names_that_stay(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    MANIFEST.save(output)
    written = {
        "format": 4, "npu_runner": __version__, "created": 1, "model_name": "m",
        "model_files": {"config.json": "1 bytes"}, "weights": {},
        "settings": {"dtype": "float32", "sizes": [1, 2]}, "input": {"num_bytes": 3, "blake2b": "abc"}, "runs": [],
    }  # fmt: skip
    assert json.loads(manifest_path(output).read_text()) == written
    replace(MANIFEST, error_file="errors.jsonl").save(output)
    assert json.loads(manifest_path(output).read_text()) == {**written, "error_file": "errors.jsonl"}


@pytest.mark.parametrize("made", [
    ImageSettings(resizing=Resizing.FRAMES), ReasoningTokens(start="<a>", end="</a>", start_id=1, end_id=2),
], ids=lambda made: type(made).__name__)  # fmt: skip
def test_nothing_that_shapes_prompts_is_left_out(made: Any) -> None:
    """A new field needs a name in the manifest; its absence would mix answers of two settings."""
    fields = [value.value if isinstance(value, Enum) else value for value in asdict(made).values()]
    assert sorted(map(repr, made.to_json().values())) == sorted(map(repr, fields))


def test_a_rule_of_resizing_that_is_older_than_its_name_goes_without_it() -> None:
    """So an output that was begun before there was a choice goes on."""
    assert "resizing" not in ImageSettings().to_json()


def test_a_later_format_is_refused_with_both_versions(tmp_path: Path) -> None:
    text = json.dumps({"format": 5, "npu_runner": "9.0", "made": {}})
    manifest_path(tmp_path / "out.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=rf"cannot be read \(it is of npu-runner 9\.0, this is {__version__}\)"):
        Manifest.load(tmp_path / "out.jsonl")


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"{}", b'{"format": 99}', b'{"format": 1, "created": 1}',
                                  b"[" * 100_000])
def test_an_unreadable_manifest_is_a_clear_error(tmp_path: Path, text: bytes) -> None:
    manifest_path(tmp_path / "out.jsonl").write_bytes(text)
    with pytest.raises(ConfigError, match=r"out\.jsonl\.manifest\.json: cannot be read"):
        Manifest.load(tmp_path / "out.jsonl")


@pytest.mark.parametrize(("changes", "match"), [
    ({"settings": [1]}, "settings: Input should be"),
    ({"error_file": 5}, "error_file: Input should be a valid string"),
    ({"changes": [3]}, r"changes\.0: Input should be"),
    ({"changes": [{}]}, r"changes\.0: .*its name is missing"),
    ({"input": {"num_bytes": "3", "blake2b": "abc"}}, r"input\.num_bytes: Input should be a valid int"),
    ({"model_files": {"config.json": None}}, "model_files"),
    ({"settings": {"max_model_len": "long"}}, "setting max_model_len: 'long' is not a number"),
    ({"settings": {"prompts.max_source_pixels": None}}, "setting prompts.max_source_pixels: None is not a number"),
])
def test_an_edited_manifest_is_refused_with_its_field(tmp_path: Path, changes: dict[str, Any], match: str) -> None:
    output = tmp_path / "out.jsonl"
    MANIFEST.save(output)
    fields = {**json.loads(manifest_path(output).read_text()), **changes}
    manifest_path(output).write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match=rf"manifest .*: cannot be read \(.*{match}.*\); --overwrite starts afresh"):
        Manifest.load(output)


def test_what_reads_a_manifest_warns_of_nothing() -> None:
    """With the oldest pydantic, too. 1 s."""
    program = [sys.executable, "-c", "import npu_runner.batch.files.manifest"]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_every_difference_is_named_with_both_values() -> None:
    before, after = {"dtype": "float32", "gone": 1, "same": [1]}, {"dtype": "bfloat16", "new": None, "same": (1,)}
    assert list(map(str, differences(before, after))) == [
        'dtype: was "float32", is "bfloat16"',
        'gone: was 1, is "(not there)"',
        'new: was "(not there)", is null',
    ]


def test_the_fingerprint_of_answers_follows_model_and_settings() -> None:
    other_model = {"config.json": "2 bytes"}
    fingerprints = {
        MANIFEST.system_fingerprint,
        Manifest(**{**vars(MANIFEST), "model_files": other_model}).system_fingerprint,
        Manifest(**{**vars(MANIFEST), "settings": {"dtype": "bfloat16", "sizes": (1, 2)}}).system_fingerprint,
    }
    assert len(fingerprints) == 3


def test_source_date_epoch_sets_the_time_of_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    assert start_time() == 1_700_000_000
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "yesterday")
    with pytest.raises(ConfigError, match="yesterday"):
        start_time()


def write_model(folder: Path, *, seed: int = 0, config: str = "{}", name: str = "w") -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(config)
    (folder / "README.md").write_text(str(seed))
    weights = np.random.default_rng(seed).standard_normal((2048, 4096), dtype=np.float32)
    save_file({name: weights}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("value", ["\N{SUPERSCRIPT TWO}", "\N{ARABIC-INDIC DIGIT ONE}", "9" * 20, "", "-1", "1.5"])
def test_a_source_date_epoch_that_is_no_number_is_refused_before_a_model_is_loaded(
    job: Job, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", value)
    write_rows(job.input, [row("a")])
    with pytest.raises(ConfigError, match=r"SOURCE_DATE_EPOCH=.* is not a number of seconds"):
        job.run(report=job.folder / "r.html")
    assert (job.engines, job.files()) == ([], set())
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "9" * 11)  # the latest that is taken
    assert job.run(report=job.folder / "r.html").exit_status == 0


def test_copies_of_a_model_are_one_model_and_changes_are_seen_file_by_file(tmp_path: Path) -> None:
    one = fingerprint_model(write_model(tmp_path / "one"))
    assert set(one) == {"config.json", "model.safetensors"}
    assert fingerprint_model(write_model(tmp_path / "two")) == one
    tuned = fingerprint_model(write_model(tmp_path / "tuned", seed=1))
    assert [name for name in one if one[name] != tuned[name]] == ["model.safetensors"]
    renamed = fingerprint_model(write_model(tmp_path / "renamed", name="v"))
    assert [name for name in one if one[name] != renamed[name]] == ["model.safetensors"]
    other = fingerprint_model(write_model(tmp_path / "other", config='{"a": 1}'))
    assert [name for name in one if one[name] != other[name]] == ["config.json"]


def test_a_broken_weight_file_still_has_a_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 5)
    assert json.dumps(fingerprint_model(tmp_path))


def zero_between_samples(path: Path) -> None:
    """Zero the file where the quick look does not look."""
    size, window, num_samples = path.stat().st_size, 64 << 10, 64
    starts = [(size - window) * index // (num_samples - 1) for index in range(num_samples)]
    with open(path, "r+b") as file:
        for start, following in itertools.pairwise(starts):
            file.seek(start + window)
            file.write(bytes(max(0, following - start - window)))


def test_weights_that_differ_between_all_samples_are_another_model(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    path = folder / "model.safetensors"
    quick = fingerprint_model(folder)
    with WeightDigests(folder, num_threads=2) as digests:
        before = digests.lines()
    zero_between_samples(path)
    assert path.read_bytes().count(0) > path.stat().st_size / 2
    assert fingerprint_model(folder) == quick, "samples do not see it"
    with WeightDigests(folder, num_threads=2) as digests:
        assert digests.lines() != before
        expected = subprocess.run(["sha256sum", path], capture_output=True, text=True, check=True).stdout.split()[0]
        assert digests.lines() == {path.name: f"{path.stat().st_size} bytes, sha256 {expected}"}


@pytest.fixture
def begun(job: Job) -> Job:
    """A job with a checkpoint of weights, and a row that has to be tried again."""
    job.model.joinpath("config.json").unlink()
    job.model.rmdir()
    write_model(job.model)
    write_rows(job.input, [row("a"), row("b", "engine error")])
    assert job.run().tally.num_answered == 1
    return job


def test_no_row_is_written_beside_those_of_other_weights(begun: Job) -> None:
    before = begun.output.read_bytes()
    zero_between_samples(begun.model / "model.safetensors")
    with pytest.raises(ConfigError, match=r"another model.*model\.safetensors: was .*sha256 .* is .*sha256"):
        begun.run(retry_errors=True)
    assert begun.output.read_bytes() == before


def test_weights_that_change_while_they_load_end_the_job(begun: Job) -> None:
    before = begun.output.read_bytes()

    def loads(config: RunnerConfig) -> ScriptedEngine:
        os.utime(begun.model / "model.safetensors", (1, 1))
        return ScriptedEngine(config)

    with pytest.raises(JobError, match=r"model\.safetensors changed while the model loaded"):
        begun.run(loads, retry_errors=True)
    assert begun.output.read_bytes() == before


@pytest.mark.parametrize("name", ["config.json", "chat_template.jinja"])
def test_small_files_that_change_while_the_model_loads_end_the_job(begun: Job, name: str) -> None:
    before = begun.output.read_bytes()

    def loads(config: RunnerConfig) -> ScriptedEngine:
        with (begun.model / name).open("a") as file:
            file.write(" ")
        return ScriptedEngine(config)

    with pytest.raises(JobError, match=f"{name} changed while the model loaded"):
        begun.run(loads, retry_errors=True)
    assert begun.output.read_bytes() == before


def test_an_output_begun_by_a_version_that_sampled_weights_goes_on_as_it_was(begun: Job) -> None:
    path = manifest_path(begun.output)
    fields = json.loads(path.read_text())
    assert fields.pop("weights")
    path.write_text(json.dumps(fields))
    earlier = Manifest.load(begun.output)
    assert earlier is not None
    write_rows(begun.input, [row("a"), row("b", "engine error"), row("c")])
    begun.run()
    manifest = Manifest.load(begun.output)
    assert manifest is not None
    assert manifest.weights == {}
    answers = {item["custom_id"]: item["response"]["body"] for item in read_rows(begun.output)}
    assert answers["c"]["system_fingerprint"] == manifest.system_fingerprint == earlier.system_fingerprint


@dataclass(frozen=True)
class Decoding(ScriptedProcessor):
    """Of a host with these packages."""

    decoders: dict[str, str] = field(default_factory=dict)

    def identity(self) -> dict[str, Any]:
        return {**super().identity(), **({"decoders": self.decoders} if self.decoders else {})}


def test_videos_decoded_by_two_versions_are_not_mixed_but_a_decoder_may_come_and_go(job: Job) -> None:
    """A row that found none has failed by name: with it the job goes on, as it said, and keeps its version."""
    rows = [row("0", "engine error")]

    def runs_with(**decoders: str) -> Any:
        rows.append(row(str(len(rows))))
        write_rows(job.input, rows)
        job.run(processor=Decoding(decoders=decoders))
        return json.loads(manifest_path(job.output).read_text())["settings"].get("prompts.decoders")

    assert runs_with() is None
    assert runs_with(av="17.1") == {"av": "17.1"}
    assert runs_with(heif="1.0") == {"av": "17.1", "heif": "1.0"}
    assert runs_with(av="17.1") == {"av": "17.1", "heif": "1.0"}
    before = job.output.read_bytes()
    with pytest.raises(ConfigError, match=r'settings.*prompts.decoders: was .*"av": "17.1".* is .*"av": "18.0"'):
        runs_with(av="18.0", heif="1.0")
    assert job.output.read_bytes() == before
    answers = [item["response"]["body"] for item in read_rows(job.output) if item["error"] is None]
    assert len(answers) == 4
    assert len({body["system_fingerprint"] for body in answers}) == 1, "what an output is named for stays to its end"
