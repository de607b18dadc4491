"""The whole path with the embedded model: rows of a file answer as the Python API does, bad ones harm nothing."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletion

from npu_runner import LLM, SamplingParams
from npu_runner.assets import SHAPES_VL
from npu_runner.cli import main as cli
from scripts.shapes.drawing import Example
from tests.batch.real_rows import EXAMPLES, SMALL, rows_of
from tests.batch.scripted import read_rows, row, write_rows
from tests.full_set import only_full


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the command has answered six good rows and refused some bad ones."""
    folder = tmp_path_factory.mktemp("job")
    good = list(rows_of(EXAMPLES, folder))
    image: dict[str, Any] = {"type": "image_url", "image_url": {"url": "0-0.png"}}
    bad = [
        b"not json",
        row("bad-image", messages=[{"role": "user", "content": [{**image, "image_url": {"url": "no.png"}}]}]),
        row("bad-length", "long " * 2000),
        row("bad-bias", logit_bias={"99999": 1}),
    ]
    lines = [item for pair in zip(good, [*bad, *[b""] * len(good)], strict=False) for item in pair]
    write_rows(folder / "in.jsonl", lines)
    arguments = ["batch", "-i", "in.jsonl", "-o", "out.jsonl", "--allowed-media-dir", ".", "--report", "report.html"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert cli.main([*arguments, "--summary", "summary.json", *SMALL]) == 3
        assert cli.main([*arguments, *SMALL]) == 3, "a finished job with failed rows stays one"
    return folder


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(SHAPES_VL, platform="cpu", max_model_len=1024, kv_cache_bytes=64 << 20) as llm:
        yield llm


def answers(folder: Path) -> dict[str, ChatCompletion]:
    rows = [item for item in read_rows(folder / "out.jsonl") if item["error"] is None]
    return {item["custom_id"]: ChatCompletion.model_validate(item["response"]["body"], strict=True) for item in rows}


def test_the_file_answers_as_the_python_api_does(finished: Path, llm: LLM) -> None:
    results = llm.chat([example.conversation() for example in EXAMPLES], SamplingParams(temperature=0, max_tokens=96))
    completions = answers(finished)
    assert sorted(completions) == sorted(f"good-{number}" for number in range(len(EXAMPLES)))
    for number, result in enumerate(results):
        completion = completions[f"good-{number}"]
        assert completion.choices[0].message.content == result.text
        assert completion.choices[0].finish_reason == result.finish_reason
        assert completion.usage is not None
        assert completion.usage.prompt_tokens == result.num_prompt_tokens
        assert completion.usage.completion_tokens == len(result.token_ids)


def test_bad_rows_fail_by_themselves(finished: Path) -> None:
    failed = {item["custom_id"]: item for item in read_rows(finished / "out.jsonl") if item["error"] is not None}
    assert {name: item["error"]["code"] for name, item in failed.items()} == {
        None: "not_json",
        "bad-image": "media_missing",
        "bad-length": "prompt_too_long",
        "bad-bias": "invalid_sampling_parameter",
    }
    assert {item["response"]["status_code"] for item in failed.values()} == {400}


def test_the_summary_counts_what_happened(finished: Path) -> None:
    summary = json.loads((finished / "summary.json").read_text())["this_run"]
    completions = answers(finished)
    usages = [completion.usage for completion in completions.values() if completion.usage is not None]
    assert summary["rows"]["answered"] == len(EXAMPLES) == len(usages)
    assert summary["rows"]["failed"] == summary["rows"]["failed_in_output"] == 4
    assert summary["tokens"]["prompt"] == sum(usage.prompt_tokens for usage in usages)
    assert summary["tokens"]["completion"] == sum(usage.completion_tokens for usage in usages)
    assert summary["vision_cache"]["images_encoded"] == sum(len(example.images) for example in EXAMPLES)
    assert 0 < summary["kv_cache"]["peak_blocks"] <= summary["kv_cache"]["blocks"]
    assert summary["exit_status"] == 3


def test_the_report_shows_every_row(finished: Path) -> None:
    page = (finished / "report.html").read_text()
    assert page.count("<article") == len(EXAMPLES) + 4
    assert page.count('src="data:image/jpeg;base64,') == sum(len(example.images) for example in EXAMPLES)


def test_generate_prints_the_answer_and_nothing_else(
    llm: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    example = next(example for example in EXAMPLES if len(example.images) == 1 and not example.question_first)
    encoded = io.BytesIO()
    example.images[0].save(encoded, "PNG")
    (tmp_path / "image.png").write_bytes(encoded.getvalue())
    conversation = Example(example.images, example.question, example.answer, example.kind).conversation()
    (expected,) = llm.chat(conversation, SamplingParams(temperature=0))
    arguments = [argument for argument in SMALL if argument not in ("--progress", "off")]
    assert cli.main(["generate", "--image", str(tmp_path / "image.png"), example.question, *arguments]) == 0
    assert capsys.readouterr().out == expected.text + "\n"


def test_generate_refuses_what_it_cannot_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "--image", str(tmp_path / "no.png"), "What?"]) == 2
    assert "no.png: No such file or directory" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["generate", "--image", "no.png", "What?"], ["batch", "-i", "no", "-o", "out"]],
                         ids=["generate", "batch"])
def test_without_a_model_somebody_says_who_answers(arguments: list[str], tmp_path: Path, monkeypatch: Any,
                                                   capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    words = "the embedded shapes-vl answers, which knows drawn shapes only; --model names another one\n"
    assert cli.main(arguments) == 2
    assert capsys.readouterr().err.startswith(words)
    for named in ("shapes-vl", "other"):
        assert cli.main([*arguments, "--model", named]) == 2
        assert words not in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["inf", *only_full("less than for ever; that stays", "1e10", "3e6")])
def test_preprocessing_may_have_all_the_time_there_is(seconds: str, tmp_path: Path) -> None:
    write_rows(tmp_path / "in.jsonl", [row("a", "Hello!", max_tokens=2)])
    arguments = ["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"), "--preprocessing-timeout"]
    assert cli.main(["batch", *arguments, seconds, *SMALL]) == 0


def broken_model(folder: Path, what: str) -> Path:
    model = folder / "model"
    shutil.copytree(SHAPES_VL, model)
    if what == "no tokenizer":
        (model / "tokenizer.json").unlink()
    elif what == "config is not JSON":
        (model / "config.json").write_text("{")
    elif what == "unknown model":
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**config, "model_type": "perceptron"}))
    elif what == "no weights":
        (model / "model.safetensors").unlink()
    elif what == "cut weights":
        weights = model / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:100_000])
    return model


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("no tokenizer", "tokenizer.json"),
        ("cut weights", "model.safetensors"),
        *only_full("other files that are not there or not whole, and what a start refuses",
                   ("config is not JSON", "config.json"), ("unknown model", "perceptron"),
                   ("no weights", "safetensors"), ("KV budget too small", "kv_cache_bytes")),
    ],
)
def test_a_job_that_cannot_start_says_why_and_writes_nothing(
    what: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(tmp_path / "in.jsonl", [row("a")])
    model = broken_model(tmp_path, what)
    settings = ["--kv-cache-bytes", "1K"] if what == "KV budget too small" else []
    arguments = ["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"), "--model", str(model)]
    assert cli.main(["batch", *arguments, *SMALL, *settings]) == 2
    errors = capsys.readouterr().err
    assert words in errors
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "model"]


def test_a_length_that_memory_cut_is_taken_over_when_the_job_goes_on(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["batch", "-i", "in.jsonl", "-o", "out.jsonl", "--platform", "cpu", "--progress", "off",
               "--preprocessing-workers", "1", "--max-num-seqs", "4", "--kv-cache-bytes"]  # fmt: skip
    rows = [row("a", "Hello!", max_tokens=4), row("b", "Hello!", max_tokens=4), row("c", "x " * 400, max_tokens=4)]
    write_rows(tmp_path / "in.jsonl", rows[:1])
    assert cli.main([*command, "1M"]) == 0
    length = json.loads((tmp_path / "out.jsonl.manifest.json").read_text())["settings"]["max_model_len"]
    write_rows(tmp_path / "in.jsonl", rows)
    assert cli.main([*command, "300K"]) == 2
    assert f"was begun with max_model_len {length} and goes on with no other" in capsys.readouterr().err
    assert cli.main([*command, "2M", "--max-model-len", "96"]) == 2
    assert f'max_model_len: was "{length}", is "96"' in capsys.readouterr().err
    assert cli.main([*command, "8M"]) == 3, "more memory does not make it longer: the long row is refused as before"
    errors = {item["custom_id"]: item["error"] and item["error"]["code"] for item in read_rows(tmp_path / "out.jsonl")}
    assert errors == {"a": None, "b": None, "c": "prompt_too_long"}
