"""The command: every setting has an option, mistakes answer at once and in plain words, statuses are as documented."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from npu_runner.batch.job.options import BatchOptions
from npu_runner.cli import main as cli
from npu_runner.cli.options import named_settings, options_of, with_parts
from npu_runner.config import RunnerConfig, flat_fields, flat_values
from npu_runner.errors import ConfigError
from npu_runner.request.limits import GIB, MIB
from tests.batch.scripted import row, write_rows


def help_text(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    with pytest.raises(SystemExit) as caught:
        cli.main([*command, "--help-all"])
    assert caught.value.code == 0
    return " ".join(capsys.readouterr().out.split())


def test_every_setting_is_an_option_and_explained(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "500")  # wrapping would cut names and sentences
    batch, generate = help_text(capsys, "batch"), help_text(capsys, "generate")
    for settings, texts in ((RunnerConfig, (batch, generate)), (BatchOptions, (batch,))):
        options = [option for _, kind in with_parts("", settings) for option in options_of(kind)]
        in_python_only = {"hidden_state_layers"} if settings is RunnerConfig else set()
        assert {option.field.name for option in options} == set(flat_fields(settings)) - in_python_only
        for option in options:
            assert all(option.flag in text for text in texts), option.flag
            # Without a word under the field, its option says nothing.
            assert len(option.text) > 15, f"{settings.__name__}.{option.field.name} has no docstring"
    assert "0 every row has an answer" in batch


def parsed(*arguments: str, settings: type = RunnerConfig) -> dict[str, Any]:
    namespace = cli._parser().parse_args(["batch", "-i", "in", "-o", "out", *arguments])
    return named_settings(namespace, settings)


def test_what_is_not_given_is_left_to_the_settings() -> None:
    assert set(parsed()) == {"model"}
    assert set(parsed(settings=BatchOptions)) == {"input", "output"}


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        ("--kv-cache-bytes 123", "kv_cache_bytes", 123),
        ("--kv-cache-bytes 2G", "kv_cache_bytes", 2 * GIB),
        ("--vision-cache-bytes 64MiB", "vision_cache_bytes", 64 * MIB),
        ("--no-enable-prefix-caching", "enable_prefix_caching", False),
        ("--enforce-eager", "enforce_eager", True),
        ("--graph-batch-sizes 1,2,8", "graph_batch_sizes", (1, 2, 8)),
        ("--memory-utilization 0.5", "memory_utilization", 0.5),
        ("--platform cpu", "platform", "cpu"),
        ("--image-max-pixels 1000", "image_max_pixels", 1000),
        ("--max-source-pixels 1000", "max_source_pixels", 1000),
    ],
)
def test_options_become_values_of_the_right_type(arguments: str, name: str, value: Any) -> None:
    assert parsed(*arguments.split())[name] == value
    assert flat_values(RunnerConfig.from_keywords(**parsed(*arguments.split())))[name] == value


def test_names_of_settings_are_given_one_by_one() -> None:
    given_names = parsed("--accept-changed", "seed", "--accept-changed", "dtype", settings=BatchOptions)
    assert BatchOptions.from_keywords(**given_names).accept_changed == ("seed", "dtype")


@pytest.mark.parametrize(
    "arguments",
    [
        ["batch"],
        ["batch", "-i", "in", "-o", "out", "--colour", "red"],
        ["batch", "-i", "in", "-o", "out", "--over"],
        ["batch", "-i", "in", "-o", "out", "--max-num-seqs", "many"],
        ["batch", "-i", "in", "-o", "out", "--kv-cache-bytes", "lots"],
        ["batch", "-i", "in", "-o", "out", "--graph-batch-sizes", "1;2"],
    ],
    ids=" ".join,
)
def test_usage_errors_exit_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert "usage: npu-runner" in capsys.readouterr().err


@pytest.mark.parametrize(("option", "meant"), [
    ("--gpu-memory-utilization=0.5", "--memory-utilization"), ("--max-token", "--max-model-len"),
    ("--repot", "--report"), ("--colour", None),
])  # fmt: skip
def test_an_unknown_option_is_named_with_those_that_look_like_it(option: str, meant: str | None,
                                                                 capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["batch", "-i", "in", "-o", "out", option])
    assert caught.value.code == 2
    usage, said = capsys.readouterr().err.splitlines()
    assert usage == "usage: npu-runner batch [options]; npu-runner batch --help lists them"
    assert said.startswith(f"npu-runner batch: error: {option.partition('=')[0]} is no option of it")
    assert said.endswith("of it") if meant is None else meant in said.partition("did you mean")[2]


def test_a_removed_option_is_refused_with_what_to_do_instead(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["batch", "-i", "in", "-o", "out", "--report-every", "10"])
    assert caught.value.code == 2
    assert "--report-every: it was removed; npu-runner report works beside a running job" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"report_every: .* npu-runner report works beside a running job"):
        BatchOptions.from_keywords(input="a", output="b", report_every=1.0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--platform", "abacus"], "platform: 'abacus' is not one of"),
        (["--max-num-seqs", "0"], "max_num_seqs: 0 is not a positive integer"),
        (["--progress", "dots"], "progress: 'dots' is not one of"),
        (["--preprocessing-workers", "0"], "preprocessing_workers: 0"),
        (["--preprocessing-timeout", "nan"], "preprocessing_timeout"),
        (["--model", "/nowhere/at/all"], "there is no such folder"),
        (["--model", "."], "no config.json"),
        (["--allowed-media-dir", "/nowhere"], "'/nowhere' is not a folder"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_settings_exit_with_2_and_say_why(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "in", [row("a")])
    assert cli.main(["batch", "-i", "in", "-o", "out", *arguments]) == 2
    errors = capsys.readouterr().err
    assert words in errors
    assert "Traceback" not in errors
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def test_help_and_mistakes_import_nothing_heavy() -> None:
    script = """
import sys
from npu_runner.cli import main as cli
for arguments in (["batch", "--help"], ["batch", "--colour"]):
    try:
        cli.main(arguments)
    except SystemExit:
        pass
heavy = {"torch", "transformers", "pydantic", "numpy", "PIL", "jinja2", "tokenizers"} & set(sys.modules)
sys.exit(f"imported {heavy}" if heavy else 0)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_module_is_the_command() -> None:
    entry_point = "from npu_runner.cli.main import main; main()"
    commands = [[sys.executable, "-m", "npu_runner"], [sys.executable, "-c", entry_point]]
    helps = [subprocess.run([*command, "--help"], capture_output=True, check=True).stdout for command in commands]
    assert helps[0] == helps[1]
    assert b"batch" in helps[0]
