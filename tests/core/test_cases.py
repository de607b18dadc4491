"""Cases run in child processes that crash, hang and lose their device; a choice is made of what they find."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest
import torch

from npu_runner.errors import ConfigError
from npu_runner.platforms.cases import Finding, choose, distances, run_cases
from npu_runner.platforms.host import Host

SOURCE = "tests.core.bad_cases:served"


def test_a_child_that_ends_is_replaced_and_each_case_has_its_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", ".")
    told: list[Finding] = []
    found = run_cases(Host(), "cpu", SOURCE, ["a question"], 120, told.append)
    assert told == found
    assert [(each.case.partition(" (")[0], each.verdict) for each in found] == [
        ("right", "right"), ("crashes", "crashed"), ("crashes", "right"), ("hangs", "crashed"),
        ("loses the context", "refused"), ("wrong", "wrong"), ("integers", "wrong"), ("no number", "wrong"),
        ("sleeps", "slow"), ("asked: a question", "right")]
    said = {each.case.partition(" (")[0]: each.message for each in found if not each.is_right}
    assert said["crashes"] == "killed by SIGSEGV"
    assert said["hangs"] == "it did not end in time"
    assert said["loses the context"] == "a task failed; 507015", "the code of a later line"
    assert len({each.process for each in found}) == 4, "each case that ends its process or its device's context"
    assert said["wrong"] == "differs from the CPU by 100.0 % of a row's length, 3 % is allowed"
    assert said["integers"].endswith("0 % is allowed")
    assert math.isnan(next(each for each in found if each.case.startswith("no number")).largest_error or 0.0)
    chosen, reasons = choose(found)
    assert chosen == {"a": "second", "graphs": "", "int8": "", "int8_static": ""}
    assert len(reasons) == len(said)


def test_what_does_not_fit_is_listed_and_a_source_that_does_not_load_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", ".")
    start = time.monotonic()
    (right,) = run_cases(Host(), "cpu", SOURCE, ["x"], 120, only=["right"])
    seconds = 1 + 3 * (time.monotonic() - start)  # a child lists its cases in a third of it, and the second one hangs
    found = run_cases(Host(), "cpu", "tests.core.bad_cases:endless", None, seconds)
    assert [(each.case, each.verdict) for each in found] == [
        (right.case, "right"), ("hangs (bfloat16)", "left out"), ("integers (bfloat16)", "left out")]
    assert {each.message for each in found} == {"", f"the {seconds:.0f} s were over"}
    found = run_cases(Host(), "cpu", SOURCE, ["x"], 0.0)
    assert [(each.case, each.verdict) for each in found] == [("all cases", "left out")], "an empty list would be kept"
    (missing,) = run_cases(Host(), "cpu", "tests.core.bad_cases:nothing", None, 60)
    assert (missing.verdict, "no attribute 'nothing'" in missing.message) == ("crashed", True)


RIGHT = Finding(case="c", verdict="right")


@pytest.mark.parametrize(("findings", "expected"), [
    ([RIGHT], {}),
    ([replace(RIGHT, verdict="slow", job="j", kernel="1")], {}),
    ([replace(RIGHT, verdict="wrong", job="j", kernel="1"), replace(RIGHT, job="j", kernel="2")], {"j": "2"}),
    # A kernel is right if all of its job's cases are.
    ([replace(RIGHT, job="j", kernel="1"), replace(RIGHT, job="j", kernel="1", verdict="wrong"),
      replace(RIGHT, job="j", kernel="2")], {"j": "2"}),
    ([replace(RIGHT, job="j", kernel="1"), replace(RIGHT, job="j", kernel="1", verdict="refused", gives_up="f"),
      replace(RIGHT, job="j", kernel="2", verdict="wrong", gives_up="f")], {"f": ""}),
    ([replace(RIGHT, verdict="crashed", gives_up="graphs")], {"graphs": ""}),
    ([replace(RIGHT, verdict="wrong", message="differs")], "c: wrong, differs"),
    ([replace(RIGHT, verdict="left out", message="late")], "c: left out, late"),
    ([replace(RIGHT, verdict="wrong", job="j", kernel="1", gives_up="f"),
      replace(RIGHT, verdict="refused", job="j", kernel="1"), replace(RIGHT, verdict="refused", job="j", kernel="2")],
     "c: wrong, ; c: refused, ; c: refused, "),
])
def test_the_first_kernel_that_is_right_is_chosen(findings: list[Finding], expected: dict[str, str] | str) -> None:
    if isinstance(expected, dict):
        assert choose(findings)[0] == expected
        return
    with pytest.raises(ConfigError) as refusal:
        choose(findings)
    assert str(refusal.value) == expected


def test_distances_are_of_rows_and_of_their_own_length() -> None:
    expected = torch.tensor([[3.0, 4.0], [30.0, 40.0], [0.0, 0.0]])
    found = expected + torch.tensor([[0.0, 0.5], [0.0, 0.5], [0.0, 0.11]])
    assert distances(found, expected).tolist() == pytest.approx([0.1, 0.01, 0.11 / (0.1 * 55 / 3)])
    assert distances(torch.tensor([[1, 2, 3, 4]]), torch.tensor([[1, 2, 3, 5]])).tolist() == [0.25]
    assert math.isnan(float(distances(found * math.nan, expected).max()))
