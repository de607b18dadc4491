"""`npu-runner check` says of an input what the real job over it finds, and what its definition gives."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from npu_runner.assets import SHAPES_VL
from npu_runner.batch.check.run import Sample, check_input
from npu_runner.batch.check.survey import Repeats
from npu_runner.batch.job.options import BatchOptions
from npu_runner.cli import main as cli
from npu_runner.config import RunnerConfig
from npu_runner.request.prompt_inputs import ImageInput, ImageSpan, PromptInputs
from tests.batch.real_rows import EXAMPLES, SMALL, rows_of
from tests.batch.scripted import row, write_rows

MODEL = [option for option in SMALL if option not in ("--progress", "off")]
BAD: list[Any] = [
    b"not json",
    row("bad-length", "long " * 2000),
    row("bad-image", messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "no.png"}}]}]),
    row("bad-bias", logit_bias={"99999": 1}),
    row("bad-field", frequency_penalti=1),
]
GOOD = [row("two", "What is this?", n=2, max_tokens=5), row("open", "What is this?")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Six rows with images, two without, and five that fail."""
    folder = tmp_path_factory.mktemp("check")
    write_rows(folder / "in.jsonl", [*BAD, *rows_of(EXAMPLES, folder), *GOOD])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


def check(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    status = cli.main(["check", "-i", *arguments, "--allowed-media-dir", ".", "--json", *MODEL])
    return status, json.loads(capsys.readouterr().out)


def test_it_finds_what_the_job_finds(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Failures by code and all prompt tokens; the job is the oracle."""
    status, found = check(capsys, "in.jsonl")
    assert cli.main(["batch", "-i", "in.jsonl", "-o", "out.jsonl", "--allowed-media-dir", ".", "--summary", "s.json",
                     *SMALL]) == status == 3
    job = json.loads((folder / "s.json").read_text())["this_run"]
    assert found["rows"]["failures_by_code"] == job["rows"]["failures_by_code"]
    assert found["rows"]["served"] == job["rows"]["answered"] == len(EXAMPLES) + len(GOOD)
    assert found["prompt_tokens"]["total"] == job["tokens"]["prompt"]
    assert found["images"]["total"] == sum(len(example.images) for example in EXAMPLES)
    assert found["answers"]["tokens_at_most"] >= job["tokens"]["completion"]


def test_examples_are_the_first_rows_of_their_code(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(folder / "bad.jsonl", [row(f"bad-{n}", frequency_penalti=1) for n in range(40)])
    _, found = check(capsys, "bad.jsonl")
    assert [example["line"] for example in found["examples"]["unknown_parameter"]] == [1, 2, 3]
    assert found["rows"] == {"total": 40, "served": 0, "failed": 40, "failures_by_code": {"unknown_parameter": 40}}


def test_equal_rows_are_counted_beside_prices_that_count_them(folder: Path,
                                                                  capsys: pytest.CaptureFixture[str]) -> None:
    """The job is the oracle: it copies the answers of greedy rows."""
    rows = [row(f"{name}{number}", name, max_tokens=2, temperature=0) for name in "abc" for number in range(4)]
    write_rows(folder / "equal.jsonl", [*rows, row("alone", "other", max_tokens=2, temperature=0)])
    _, found = check(capsys, "equal.jsonl", "--output-price", "3")
    assert cli.main(["batch", "-i", "equal.jsonl", "-o", "equal.out.jsonl", "--summary", "e.json", *SMALL]) == 0
    job = json.loads((folder / "e.json").read_text())["this_run"]
    assert found["equal_rows"] == job["rows"]["copied"] == 9
    assert found["price_at_most"]["answers"] == 13 * 2 * 3 / 1e6
    assert cli.main(["check", "-i", "equal.jsonl", *MODEL]) == 0
    assert "equal     9 rows equal an earlier one; tokens, prices and times count them" in capsys.readouterr().out


def test_answers_and_prices_are_what_their_definition_gives(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row("short", "a", max_tokens=7), row("two", "a", n=2, max_tokens=5), row("open", "a"),
            row("more than is left", "a", max_tokens=1023)]
    write_rows(folder / "good.jsonl", rows)
    status, found = check(capsys, "good.jsonl", "--input-price", "2", "--output-price", "3")
    (length,) = {found["prompt_tokens"]["least"], found["prompt_tokens"]["most"]}
    room = 1024 - length
    at_most = 7 + 2 * 5 + room + room
    assert status == 0
    assert found["answers"] == {"sequences": 5, "tokens_at_most": at_most, "max_model_len": 1024, "cut_short": 1,
                                "without_max_tokens": 1}
    assert found["price_at_most"] == {"prompts": 4 * length * 2 / 1e6, "answers": at_most * 3 / 1e6}


@pytest.mark.full("estimates a model twice; what does not fit stays in runner/test_estimate.py")
@pytest.mark.parametrize(("size", "status"), [("1G", 1), ("8G", 0)])
def test_a_model_that_does_not_fit_is_an_exit_status(size: str, status: int, folder: Path,
                                                     capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(folder / "one.jsonl", [row("a", "What is this?", max_tokens=5)])
    assert cli.main(["check", "-i", "one.jsonl", "--device-memory", size, "--max-model-len", "1024"]) == status
    assert "fit       an estimate for platform npu" in capsys.readouterr().out


def test_rows_beyond_the_length_that_memory_leaves_would_fail(folder: Path) -> None:
    config = RunnerConfig(model=str(SHAPES_VL), platform="cpu")
    options = BatchOptions(input=str(folder / "in.jsonl"), output="-", allowed_media_dir=folder)
    most = sorted(check_input(config, options).survey.prompt_tokens)
    survey = check_input(config, options, most_model_len=most[-1]).survey
    assert survey.failures["prompt_too_long"] == 1 + most.count(most[-1])  # no token of an answer has room behind it


def test_settings_and_first_masks_decide_as_in_the_job(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The KV cache's size cuts the model's length; bans may leave no token of a rule, at once or at its end."""
    const = {"type": "json_schema", "json_schema": {"name": "c", "schema": {"const": "circle"}}}
    rows = [
        row("plain", "a", max_tokens=3), row("long", "circle " * 700, max_tokens=2),
        row("banned", "a", max_tokens=5, guided_choice=["circle"], allowed_token_ids=[5]),
        row("too short", "a", max_tokens=40, min_tokens=30, guided_choice=["circle", "square"]),
        row("forced", "a", max_tokens=40, min_tokens=30, response_format=const),
        row("one character", "a", max_tokens=40, min_tokens=3, guided_regex="a"),
        row("long enough", "a", max_tokens=40, min_tokens=3, guided_regex="a{9}"),
        row("free of it", "a", max_tokens=5, bad_words=["circle"], guided_choice=["square"]),
    ]
    write_rows(folder / "masks.jsonl", rows)
    cache = ["--platform", "cpu", "--kv-cache-bytes", "1M"]
    status = cli.main(["check", "masks.jsonl", "--json", *cache])
    found = json.loads(capsys.readouterr().out)
    assert cli.main(["batch", "-i", "masks.jsonl", "-o", "masks-out.jsonl", "--progress", "off", *cache]) == status == 3
    job: dict[str, list[str]] = {}
    for line in (folder / "masks-out.jsonl").read_text().splitlines():
        answer = json.loads(line)
        if answer["error"]:
            job.setdefault(answer["error"]["code"], []).append(answer["custom_id"])
    assert found["rows"]["failures_by_code"] == {code: len(names) for code, names in job.items()}
    assert len(job["no_token_left"]) == 4
    assert job["prompt_too_long"] == ["long"]
    assert not found["memory_may_cut_max_model_len"]


def test_what_only_memory_decides_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(folder / "one.jsonl", [row("a", "What is this?", max_tokens=5)])
    for more, is_named in (([], True), (["--kv-cache-bytes", "1G"], False), (["--max-model-len", "512"], False)):
        assert cli.main(["check", "one.jsonl", "--platform", "npu", *more]) == 0
        assert ("only the device's memory decides" in capsys.readouterr().out) == is_named


def test_a_sample_is_answered_and_leaves_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of too few rows no time is said."""
    before = set(folder.iterdir())
    _, few = check(capsys, "in.jsonl", "--sample", "3", "--max-num-seqs", "2")
    _, enough = check(capsys, "in.jsonl", "--sample", "100", "--max-num-seqs", "2")
    assert few["sample"]["rows"] == 3
    assert few["sample"]["too_few_to_say"]
    assert few["sample"]["seconds"] is None
    assert enough["sample"]["rows"] == len(EXAMPLES) + len(GOOD), "no more than would be served"
    assert not enough["sample"]["too_few_to_say"]
    least, most = enough["sample"]["seconds"]
    assert 0 < least <= most
    assert set(folder.iterdir()) == before


def test_an_input_without_rows_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "empty.jsonl").write_bytes(b"\n")
    assert cli.main(["check", "-i", "empty.jsonl", *MODEL]) == 2
    assert "input empty.jsonl: it has no row" in capsys.readouterr().err


def sample(*, num_rows: int, num_all: int, batch: int, spread: float, growth: float, **figures: float) -> Sample:
    stats = SimpleNamespace(decode_seconds=figures["decode"], num_decode_steps=figures["steps"],
                            num_decode_tokens=figures["tokens"], prefill_seconds=figures.get("prefill", 0.0))
    summary: Any = SimpleNamespace(stats=stats, replicas=(), serve_seconds=figures["serve"],
                                   start_seconds=figures["start"])
    return Sample(summary=summary, num_rows=num_rows, num_all=num_all, batch=batch, spread=spread, growth=growth)


def test_the_time_lies_between_full_batches_and_batches_as_the_sample_had_them() -> None:
    found = sample(num_rows=100, num_all=100, batch=10, spread=5.0, growth=1.0, start=2, serve=50, decode=40, steps=100,
                   tokens=500)
    assert found.seconds == pytest.approx(((2 + 50 - 40 * 0.5) * 0.9, (2 + 50) * 1.1)), "all rows: nothing is drawn"
    found = sample(num_rows=100, num_all=400, batch=10, spread=0.5, growth=4.0, start=2, serve=50, decode=40, steps=100,
                   tokens=1000, prefill=10)
    doubt = 2 * 0.5 / 10 * 0.75**0.5 + 0.1
    assert found.seconds == pytest.approx((202 * (1 - doubt), 202 * (1 + doubt))), "full batches: both ends are one"


def test_prompts_that_repeat_earlier_ones_are_not_computed_again_at_least() -> None:
    found = sample(num_rows=100, num_all=400, batch=10, spread=0.0, growth=1.5, start=2, serve=50, decode=40, steps=100,
                   tokens=1000, prefill=10)
    assert found.seconds == pytest.approx(((202 - 10 * 4 + 10 * 1.5) * 0.9, 202 * 1.1))


def test_texts_and_images_that_rows_share_are_counted_once() -> None:
    def image(name: bytes) -> ImageInput:
        return ImageInput(name, np.zeros((28, 28, 3), dtype=np.uint8), (1, 2, 2), 3)

    repeats = Repeats()
    for number, (tokens, name) in enumerate([((1, 9, 9, 9, 2), b"cat"), ((1, 9, 9, 9, 2), b"dog"),
                                             ((1, 9, 9, 9, 4), b"cat"), ((1, 9, 9, 9, 2), b"cat")]):
        repeats.add(number, PromptInputs(list(tokens), [image(name)], [ImageSpan(1, 3, 0)]))
    assert repeats.num_new_tokens() == 3 * 2 + 2 * 3, "three texts of two tokens, two images of three"
    assert repeats.num_new_tokens(np.array([0, 3], dtype=np.uint64)) == 2 + 3
    assert repeats.num_new_tokens(np.array([1, 2], dtype=np.uint64)) == 2 * 2 + 2 * 3
