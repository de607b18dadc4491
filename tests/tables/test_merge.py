"""Two outputs of one input become one: each row once, the better one, and what is dropped is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from npu_runner.errors import ConfigError
from npu_runner.tables.merge_outputs import merge
from npu_runner.tables.options import MergeOptions
from tests.batch.job_folder import Job
from tests.batch.scripted import ScriptedEngine, read_rows, row, write_rows
from tests.full_set import examples, only_full
from tests.tables.made import answered, begun, completion, failed

EASY = settings(max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def merged(folder: Path, first: bytes, second: bytes, **options: Any) -> Any:
    (folder / "a.jsonl").write_bytes(first)
    (folder / "b.jsonl").write_bytes(second)
    return merge(
        str(folder / "a.jsonl"), str(folder / "b.jsonl"), MergeOptions(output=str(folder / "c.jsonl"), **options)
    )


def line(name: str, who: str, is_answered: bool) -> bytes:
    return answered(name, completion(f"{name} of {who}")) if is_answered else failed(name, f"bad_{who}")


def test_an_answer_counts_more_than_a_failure_and_the_first_more_than_the_second(tmp_path: Path) -> None:
    first = line("a", "A", True) + line("b", "A", False) + line("c", "A", False) + line("d", "A", True)
    second = (
        line("d", "B", False)
        + line("c", "B", False)
        + line("b", "B", True)
        + line("a", "B", True)
        + line("e", "B", True)
    )
    found = merged(tmp_path, first, second, dropped=tmp_path / "d.jsonl")
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    assert (tmp_path / "c.jsonl").read_bytes() == b"".join(
        [line("a", "A", True), line("b", "B", True), line("c", "A", False), line("d", "A", True), line("e", "B", True)]
    )
    assert found.to_lines() == [
        f"merged    {tmp_path / 'c.jsonl'}: 5 rows (3 of {a}, 2 of {b}), 1 of them failed",
        f"inputs    {a} and {b}: no manifest says that both outputs are of one input; what two rows of one name asked "
        "was not compared",
        f"dropped   1 of {a} (failed, and the other output has an answer): 'b'",
        f"dropped   1 of {b} (failed, and the other output has an answer): 'd'",
        f"dropped   2 of {b} (is in the other output as well): 'c', 'a'",
    ]
    assert sorted((tmp_path / "d.jsonl").read_bytes().splitlines(keepends=True)) == sorted(
        [line("b", "A", False), line("d", "B", False), line("c", "B", False), line("a", "B", True)]
    )


ROWS = st.dictionaries(st.sampled_from("abcdefg"), st.booleans(), min_size=1)


@EASY
@given(ROWS, ROWS)
def test_every_row_is_kept_or_dropped_once(tmp_path: Path, first: dict[str, bool], second: dict[str, bool]) -> None:
    if not first.keys() & second.keys():
        second = {**second, next(iter(first)): True}
    found = merged(
        tmp_path,
        b"".join(line(name, "A", ok) for name, ok in first.items()),
        b"".join(line(name, "B", ok) for name, ok in second.items()),
        dropped=tmp_path / "d.jsonl",
    )
    kept = {item["custom_id"]: item["error"] is None for item in read_rows(tmp_path / "c.jsonl")}
    assert kept == {name: first.get(name, False) or second.get(name, False) for name in first.keys() | second.keys()}
    assert len(read_rows(tmp_path / "c.jsonl")) == len(kept)
    inputs = [*(tmp_path / "a.jsonl").read_bytes().splitlines(), *(tmp_path / "b.jsonl").read_bytes().splitlines()]
    outputs = [*(tmp_path / "c.jsonl").read_bytes().splitlines(), *(tmp_path / "d.jsonl").read_bytes().splitlines()]
    assert sorted(outputs) == sorted(inputs)
    assert sum(each.count for each in found.dropped) == len(read_rows(tmp_path / "d.jsonl"))


def test_outputs_of_jobs_with_their_error_files(tmp_path: Path) -> None:
    jobs: list[Callable[..., Any]] = []
    for name in "ab":
        (tmp_path / name).mkdir()
        job = Job(tmp_path / name)
        texts = ["bad" if number == 1 else f"{number} {name}" if number == 2 else str(number) for number in range(4)]
        write_rows(job.input, [row(str(number), text) for number, text in enumerate(texts)])
        job.run(error_file=job.folder / "errors.jsonl")
        jobs.append(job)  # type: ignore[arg-type]
    first, second = (str(tmp_path / name / "out.jsonl") for name in "ab")
    with pytest.raises(ConfigError, match="their manifests say that their inputs differ"):
        merge(first, second, MergeOptions(output=str(tmp_path / "c.jsonl")))
    write_rows(
        tmp_path / "b" / "in.jsonl",
        [row(str(number), "bad" if number == 1 else "2 a" if number == 2 else str(number)) for number in range(5)],
    )
    (tmp_path / "b" / "out.jsonl").unlink()
    for path in (tmp_path / "b").glob("out.jsonl.*"):
        path.unlink()
    jobs[1].run(error_file=tmp_path / "b" / "errors.jsonl", overwrite=True)  # type: ignore[attr-defined]
    found = merge(first, second, MergeOptions(output=str(tmp_path / "c.jsonl")))
    assert sum(found.kept.values()) == 5, "an input that has grown is the same input"
    assert found.num_failed == 1
    for output in (first, str(tmp_path / "a" / "errors.jsonl"), first + ".manifest.json"):
        before = Path(output).read_bytes()
        with pytest.raises(ConfigError, match=r"merged .*: is the"):
            merge(first, second, MergeOptions(output=output))
        assert Path(output).read_bytes() == before


def test_an_output_is_not_merged_with_itself(tmp_path: Path) -> None:
    """Under two names either; the counts were those of one of the two."""
    (tmp_path / "a.jsonl").write_bytes(line("a", "A", True))
    (tmp_path / "link.jsonl").symlink_to("a.jsonl")
    for second in ("a.jsonl", "link.jsonl"):
        with pytest.raises(ConfigError, match="are one file; name two outputs"):
            merge(str(tmp_path / "a.jsonl"), str(tmp_path / second), MergeOptions(output=str(tmp_path / "c.jsonl")))
    assert not (tmp_path / "c.jsonl").exists()


def test_outputs_without_a_row_in_common_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="have no row in common"):
        merged(tmp_path, line("a", "A", True), line("b", "B", True))
    assert not (tmp_path / "c.jsonl").exists()


def test_two_models_are_named(tmp_path: Path) -> None:
    for name in "ab":
        manifest = {
            "format": 3,
            "created": 1,
            "model_name": f"model-{name}",
            "model_files": {},
            "settings": {},
            "input": {"num_bytes": 5, "blake2b": "same"},
        }
        (tmp_path / f"{name}.jsonl.manifest.json").write_text(json.dumps(manifest))
    found = merged(tmp_path, line("a", "A", True), line("a", "B", True))
    assert "models    the outputs are of different ones: model-a, model-b" in found.to_lines()


def test_lines_that_are_not_understood_are_copied_and_others_are_dropped_by_number(tmp_path: Path) -> None:
    """Of a later version, of another program, torn in the middle, torn at the end, and twice in one output."""
    other = b'{"custom_id": "b", "response": {"status_code": 200, "body": {"audio": "x"}}, "error": null}\n'
    bare = b'{"custom_id": "c", "text": "x"}\n'
    torn, end = line("e", "A", True)[:-40] + b"\n", line("f", "A", True)[:-40]
    first = line("a", "A", True) + other + torn + bare + b"\n" + line("a", "A", False) + end
    second = line("a", "B", True) + line("b", "B", True) + line("c", "B", True)
    with pytest.raises(ConfigError, match=r"a\.jsonl: line 3 and 1 more lines: no result row; with --dropped FILE"):
        merged(tmp_path, first, second)
    assert not (tmp_path / "c.jsonl").exists()
    found = merged(tmp_path, first, second, dropped=tmp_path / "d.jsonl")
    assert (tmp_path / "c.jsonl").read_bytes() == line("a", "A", True) + other + line("c", "B", True)
    assert sorted((tmp_path / "d.jsonl").read_bytes().splitlines(keepends=True)) == sorted(
        [torn, end + b"\n", bare, line("a", "A", False), line("a", "B", True), line("b", "B", True)]
    )
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    assert found.to_lines()[2:] == [
        f"dropped   1 of {a} (failed, and the other output has an answer): 'c'",
        f"dropped   1 of {a} (stands there again, or failed and was answered since): 'a'",
        f"dropped   2 of {a} (no result row): line 3, line 7",
        f"dropped   2 of {b} (is in the other output as well): 'a', 'b'",
    ]


@pytest.mark.parametrize("known", ["none", "one", "both"])
def test_outputs_whose_input_is_not_known_are_merged_and_that_is_said(tmp_path: Path, known: str) -> None:
    write_rows(tmp_path / "in.jsonl", [row("a")])
    for name in {"none": "", "one": "a", "both": "ab"}[known]:
        begun(tmp_path / f"{name}.jsonl", tmp_path / "in.jsonl")
    said = merged(tmp_path, line("a", "A", True), line("a", "B", True)).to_lines()
    names = [str(tmp_path / f"{name}.jsonl") for name in {"none": "ab", "one": "b", "both": ""}[known]]
    assert [words for words in said if words.startswith("inputs")] == (
        [f"inputs    {' and '.join(names)}: no manifest says that both outputs are of one input; what two rows of one "
         "name asked was not compared"] if names else [])  # fmt: skip


# What the rows ask in the second input, by name; "three" and "threes" are cut off, "broken" fails.
ASKED_OTHERWISE: dict[str, tuple[dict[str, str], str | None]] = {
    "a cut-off answer": ({"b": "two"}, "b"),
    "a failure": ({"c": "fine"}, "c"),
    "both are cut off": ({"b": "threes"}, None),
    "one row has no answer yet": ({"d": "four"}, "d"),
    "two whole answers": ({"a": "eno"}, "refused"),
    "a cut-off answer, and two whole ones": ({"b": "two", "a": "eno"}, "refused"),
    "the answer that was whole is cut off": ({"a": "sixsix"}, None),
}


class Cutting(ScriptedEngine):
    """More than four characters are cut off, and "broken" is given up."""

    def _output(self, request_id: str, text: str, params: Any) -> Any:
        text = "engine error" if text == "broken" else text
        found = super()._output(request_id, text, params)
        is_cut = len(text) > 4 and text != "engine error"
        return replace(found, completions=[replace(found.completions[0], finish_reason="length")]) if is_cut else found


@pytest.mark.parametrize("order", ["the old one first", *only_full("the new one first; the old one first stays",
                                                                   "the new one first")])
@pytest.mark.parametrize("case", ASKED_OTHERWISE)
def test_outputs_of_two_inputs_merge_where_at_most_one_of_two_answers_is_whole(
    case: str, order: str, tmp_path: Path, tmp_path_factory: Any
) -> None:
    job = Job(tmp_path)
    changed, better = ASKED_OTHERWISE[case]
    texts = {"a": "one", "b": "three", "c": "broken"}
    write_rows(job.input, [row(name, text) for name, text in texts.items()])
    job.run(Cutting)
    new = Job(tmp_path_factory.mktemp("new"))
    write_rows(new.input, [row(name, text) for name, text in {**texts, **changed}.items()])
    new.run(Cutting)
    outputs = [job, new] if order == "the old one first" else [new, job]
    options = MergeOptions(output=str(job.folder / "all.jsonl"), dropped=job.folder / "dropped.jsonl")
    if better == "refused":
        with pytest.raises(ConfigError, match="not only in rows of which at most one answer is whole"):
            merge(*[str(each.output) for each in outputs], options)
        return
    lines = merge(*[str(each.output) for each in outputs], options).to_lines()
    found = {item["custom_id"]: item for item in read_rows(job.folder / "all.jsonl")}
    assert found.keys() == texts.keys() | changed.keys()
    by_name = [{item["custom_id"]: item for item in read_rows(each.output)} for each in (job, new)]
    for name, item in found.items():
        if name == better:
            assert item == by_name[1][name]
        elif name in changed and case == "the answer that was whole is cut off":
            assert item == by_name[0][name]
    differing = [name for name in changed if name in texts]
    assert any("1 rows ask otherwise in the two" in line for line in lines) == bool(differing)
    dropped = read_rows(job.folder / "dropped.jsonl")
    assert sorted([item["custom_id"] for item in dropped]) == sorted(texts), "each line is kept or dropped"
