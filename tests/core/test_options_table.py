"""docs/options.md is what scripts/options_page.py makes of the code, so that no option or word differs in silence."""

from __future__ import annotations

import re

import pytest

from npu_runner.batch.job.options import BatchOptions
from npu_runner.cli.main import _parser
from npu_runner.config import RunnerConfig, flat_fields, from_keywords
from npu_runner.errors import ConfigError
from scripts.options_page import PAGE, page

EVERY = {name: field for kind in (BatchOptions, RunnerConfig) for name, field in flat_fields(kind).items()
         if "in_python_only" not in field.metadata}
SETTINGS = PAGE.read_text().partition("\n## Every command")[0]
NEEDED = {"input": "in", "output": "out", "model": "m"}


def test_the_page_is_what_the_code_says() -> None:
    assert PAGE.read_text() == page(), "python scripts/options_page.py"


def test_each_option_has_one_row_and_one_owner() -> None:
    flags = re.findall(r"^\| `--([a-z-]+)` \|", SETTINGS, flags=re.MULTILINE)
    assert sorted(flag.replace("-", "_") for flag in flags) == sorted(EVERY)
    assert not flat_fields(BatchOptions).keys() & flat_fields(RunnerConfig).keys()
    assert flat_fields(RunnerConfig).keys() - EVERY.keys() == {"hidden_state_layers"}, "docs/python.md has it"


def test_a_switch_that_is_on_can_be_turned_off_by_the_name_on_the_page() -> None:
    off = re.findall(r"^\| `--([a-z-]+)` \| `--no-([a-z-]+)` \|", SETTINGS, flags=re.MULTILINE)
    assert {name for name, _ in off} >= {"enable-prefix-caching", "async-scheduling", "use-graph-cache"}
    for name, negated in off:
        assert name == negated
        parsed = _parser().parse_args(["batch", "-i", "in", "-o", "out", f"--no-{name}"])
        assert vars(parsed)[name.replace("-", "_")] is False


@pytest.mark.parametrize("name", [name for name, field in EVERY.items() if "choices" in field.metadata])
def test_a_word_that_is_none_of_the_choices_is_refused_with_all_of_them(name: str) -> None:
    (row,) = re.findall(rf"^\| `--{name.replace('_', '-')}` \| ([^|]*) \|", SETTINGS, flags=re.MULTILINE)
    choices = [cell.strip("`") for cell in row.split(", ")]
    for choice in choices:
        from_keywords({**NEEDED, name: choice}, BatchOptions, RunnerConfig)
    with pytest.raises(ConfigError, match=f"^{name}: 'abacus' is not one of {', '.join(choices)}$"):
        from_keywords({**NEEDED, name: "abacus"}, BatchOptions, RunnerConfig)
