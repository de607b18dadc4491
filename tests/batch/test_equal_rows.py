"""Equal rows are served once: each of them gets the line that it would have got if it was served itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from npu_runner.batch.files import input_file
from npu_runner.batch.files.input_file import InputFile
from npu_runner.batch.files.row_book import equal_rows
from npu_runner.batch.job.history import JobSummary
from npu_runner.batch.rows.equal import equal_digest
from npu_runner.config import RunnerConfig
from npu_runner.errors import ConfigError, EngineDeadError
from npu_runner.reports.status import JobStatus, status_of
from npu_runner.request.outputs import RequestOutput
from npu_runner.request.prompt_inputs import PromptInputs
from npu_runner.request.sampling_params import SamplingParams
from tests.batch.job_folder import Job
from tests.batch.scripted import ScriptedEngine, completion_row, read_rows, row, write_rows

pytestmark = pytest.mark.usefixtures("fixed_time")


@pytest.fixture
def job(job: Job) -> Job:
    job.copies_equal_rows = True
    return job


def lines(job: Job) -> dict[str | None, dict[str, Any]]:
    return {item["custom_id"]: item for item in read_rows(job.output)}


def served(job: Job) -> list[str]:
    """The names of the rows that the last engine got."""
    engine = job.engines[-1]
    assert isinstance(engine, Listening)
    return engine.names


class Listening(ScriptedEngine):
    """Knows which rows it got. The tokens of a prompt that it has seen count as cached."""

    def __init__(self, config: RunnerConfig, **settings: Any):
        super().__init__(config, **settings)
        self.names: list[str] = []

    def add_request(self, request_id: str, *arguments: Any) -> list[int]:
        self.names.append(request_id)
        return super().add_request(request_id, *arguments)


CALL = '<tool_call>{"name": "f", "arguments": {"id": "call_1"}}</tool_call>'
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
MIXED = [
    row("a1", "what is it", metadata={"expected": "ti si tahw"}),
    row("b1", "another", user="u"),
    row("a2", "what is it", metadata={"expected": "no", "kind": "x"}),
    row("a3", "what is it", metadata={"expected": 'x "metadata": {'}),
    row("sampled1", "warm", temperature=1),
    row("sampled2", "warm", temperature=1),
    row("seeded1", "warm", temperature=1, seed=5),
    row("seeded2", "warm", temperature=1, seed=5),
    row("other seed", "warm", temperature=1, seed=6),
    completion_row("c1", "text", n=2),
    completion_row("c2", "text", n=2),
    row("b2", "another", user="other"),
    row("a4", "what is it", metadata={"expected": "TI SI TAHW."}),
    row("call1", CALL[::-1], tools=[TOOL]),
    row("call2", CALL[::-1], tools=[TOOL]),
    row("bad1", "bad"),
    row("bad2", "bad"),
    row("broken1", "engine error"),
    row("broken2", "engine error"),
]  # fmt: skip
SERVED = ["a1", "b1", "sampled1", "sampled2", "seeded1", "other seed", "c1", "b2", "call1", "broken1", "broken2"]


def test_the_first_is_served_and_each_has_the_line_of_its_own(job: Job, tmp_path: Path) -> None:
    write_rows(job.input, MIXED)
    copied = job.run(Listening)
    assert sorted(served(job)) == sorted(SERVED)
    apart = Job(tmp_path / "apart")
    write_rows(apart.input, MIXED)
    each = apart.run(Listening, copy_equal_rows=False)
    assert len(served(apart)) == len(MIXED) - 2, "all but the two that preprocessing refuses"
    assert sorted(job.output.read_bytes().splitlines()) == sorted(apart.output.read_bytes().splitlines())
    assert copied.tally.num_copied == 6
    assert all("tool_calls" in str(lines(job)[name]) for name in ("call1", "call2"))
    one = copied.tally.to_json() | {"num_copied": 0, "num_cached_tokens": 0}
    assert one == each.tally.to_json() | {"num_cached_tokens": 0}
    assert (one["num_expected"], one["num_as_expected"]) == (4, 2)


def test_a_copy_counts_its_whole_prompt_as_cached(job: Job) -> None:
    write_rows(job.input, [row(name, "cached_tokens") for name in ("a", "b", "c")])
    job.run(Listening, cached_tokens=True)
    cached = {name: line["response"]["body"]["usage"]["prompt_tokens_details"] for name, line in lines(job).items()}
    assert cached == {"a": {"cached_tokens": 0}, "b": {"cached_tokens": 13}, "c": {"cached_tokens": 13}}


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_later_run_reads_the_answer_back(job: Job, overwrite: bool) -> None:
    first = [row("a", "again"), row("warm", "again", temperature=1), row("b", "bad")]
    write_rows(job.input, first)
    job.run(Listening)
    before = job.output.read_bytes()
    later = [row(f"{item['custom_id']}{n}", item["body"]["messages"][0]["content"],
                 temperature=item["body"]["temperature"]) for n in range(2) for item in first]  # fmt: skip
    write_rows(job.input, first + later)
    summary = job.run(Listening, overwrite=overwrite)
    assert set(served(job)) == {"warm0", "warm1"} | ({"a", "warm"} if overwrite else set())
    assert job.output.read_bytes().startswith(before) or overwrite
    found = lines(job)
    assert [found[name]["response"]["body"]["choices"] for name in ("a0", "a1")] == [
        found["a"]["response"]["body"]["choices"]] * 2  # fmt: skip
    assert found["a1"]["id"] != found["a0"]["id"] != found["a"]["id"]
    assert (summary.tally.num_copied, summary.tally.num_failed) == (2, 3 if overwrite else 2)
    status = status_of(str(job.output))
    assert isinstance(status, JobStatus)
    assert status.to_json()["rows"]["copied"] == 2
    assert "(2 copied)" in status.to_lines()[1]


def test_no_model_is_loaded_where_copies_alone_are_missing(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    """A killed run has answered the first of each; the lines are those of one run. A row that has to be served itself
    loads the model for all."""
    items = [row(f"{name}{number}", name) for name in ("again", "once more") for number in range(40)]
    write_rows(job.input, items)
    job.run(Listening)
    whole = job.output.read_bytes().splitlines(keepends=True)
    first = [line for line in whole if json.loads(line)["custom_id"] in ("again0", "once more0")]
    job.output.write_bytes(b"".join(first))
    capsys.readouterr()
    num_engines = len(job.engines)
    with pytest.raises(ConfigError, match="no_repeat_ngram_size"):
        job.run(Listening, no_repeat_ngram_size=5)
    summary = job.run(Listening, progress="lines")
    assert len(job.engines) == num_engines
    assert "no model is loaded: 78 rows equal answered ones" in capsys.readouterr().err
    assert sorted(job.output.read_bytes().splitlines(keepends=True)) == sorted(whole)
    assert (summary.tally.num_copied, summary.exit_status) == (78, 0)
    job.run(Listening, progress="lines")
    assert "nothing to do" in capsys.readouterr().err
    job.output.write_bytes(b"".join(first))
    write_rows(job.input, [*items, row("new", "new")])
    job.run(Listening)
    assert served(job) == ["new"]
    assert len(read_rows(job.output)) == 81


def test_an_answered_row_leads_wherever_it_stands_and_a_failed_one_does_not(job: Job) -> None:
    write_rows(job.input, [row("a", "again"), row("b", "again"), row("x", "engine error")])
    job.run(Listening)
    without = [line for line in job.output.read_bytes().splitlines(keepends=True) if b'"custom_id":"a"' not in line]
    job.output.write_bytes(b"".join(without))
    write_rows(job.input, [row("a", "again"), row("b", "again"), *(row(name, "engine error") for name in "xyz")])

    class Mended(Listening):
        def add_request(self, request_id: str, prompt: PromptInputs, params: SamplingParams) -> list[int]:
            return super().add_request(request_id, PromptInputs(list(map(ord, "mended"))), params)

    summary = job.run(Mended)
    assert served(job) == ["y"]
    assert (summary.tally.num_copied, summary.num_resumed) == (2, 2)
    assert lines(job)["z"]["response"]["body"]["choices"][0]["message"]["content"] == "dednem"


def test_an_answer_under_other_settings_is_not_copied(job: Job) -> None:
    write_rows(job.input, [row("a", "again")])
    job.run(Listening)
    write_rows(job.input, [row(name, "again") for name in "abc"])
    job.run(Listening, seed=1, accept_changed=("seed", "engine"))
    assert served(job) == ["b"], "c is a copy of b, which this run has answered"


def test_a_killed_job_writes_the_copies_that_are_missing(job: Job) -> None:
    texts = [row(f"{text}{n}", text) for n in range(5) for text in ("one", "twelve tokens")]

    def dying(config: RunnerConfig) -> Listening:
        def step(engine: ScriptedEngine) -> None:
            if engine.num_steps > 6:
                raise EngineDeadError("rank 1 died in decode")

        return Listening(config, on_step=step)

    write_rows(job.input, texts)
    with pytest.raises(EngineDeadError):
        job.run(dying)
    cut = job.output.read_bytes().splitlines(keepends=True)
    job.output.write_bytes(b"".join(cut[:2]))
    summary: JobSummary = job.run(Listening)
    assert (summary.num_resumed, summary.tally.num_copied) == (2, 7)
    assert served(job) == ["twelve tokens0"]
    assert sorted(job.names()) == sorted(item["custom_id"] for item in texts)


@pytest.mark.parametrize("names", [("b",), ("a",), ("b", "c")])
def test_a_suspect_runs_alone_and_others_do_not_wait_for_a_row_that_is_given_up(
    job: Job, names: tuple[str, ...]
) -> None:
    write_rows(job.input, [row(name, "suspected") for name in "abcd"])

    def die(engine: ScriptedEngine) -> NoReturn:
        raise EngineDeadError("dead", request_ids=names, blame="out_of_memory" if len(names) == 1 else None)

    with pytest.raises(EngineDeadError):
        job.run(lambda config: Listening(config, on_step=die))
    summary = job.run(Listening)
    if len(names) == 1:  # it is given up: the next one is answered, and so are those that wait for another
        assert (summary.tally.num_failed, summary.tally.num_answered) == (1, 3)
        assert served(job) == (["a"] if names == ("b",) else ["b", "c", "d"])
    else:
        assert summary.tally.num_answered == 4
        assert sorted(served(job)) == ["a", "b", "c"]
    assert sorted(job.names()) == list("abcd")


def test_a_row_that_a_ladder_tried_again_is_copied_in_no_run(job: Job) -> None:
    """A later attempt has a seed of the row's name."""
    class Moody(Listening):
        def _output(self, request_id: str, text: str, params: SamplingParams) -> RequestOutput:
            is_faulty = text == "moody" and not params.temperature
            return super()._output(request_id, "engine error" if is_faulty else text, params)

    steps = job.folder / "steps.json"
    steps.write_text(json.dumps([{"when": ["error:generation_failed"], "change": {"temperature": 0.7}}]))
    rows = [row(f"{text}{n}", text) for n in range(3) for text in ("moody", "plain")]
    for some, copied in ((rows[:4], 1), (rows, 1)):
        write_rows(job.input, some)
        summary = job.run(Moody, ladder=str(steps))
        assert summary.tally.num_copied == copied
    found = lines(job)
    answers = {found[f"moody{n}"]["response"]["body"]["choices"][0]["message"]["content"] for n in range(3)}
    assert len(answers) == 3, "each shows its seed"
    assert all("attempts" in found[f"moody{n}"] for n in range(3))


# -- which rows are equal ----------------------------------------------------------------------------------------------


def line(custom_id: str = '"a"', metadata: str = '{"n": 1}', text: str = "x", spaces: str = "") -> bytes:
    return (f'{{{spaces}"custom_id":{spaces}{custom_id}, "url": "u", "body": {{"x": {{"metadata": "{text}"}}, '
            f'"metadata"{spaces}:{spaces}{metadata}, "messages": "{text}"}}}}').encode()  # fmt: skip


EQUAL: list[Callable[[], bytes]] = [
    lambda: line(custom_id='"b"'),
    lambda: line(custom_id='"a \\" \\\\ \\u005f"'),
    lambda: line(metadata='{"deep": [{"metadata": [1, {"custom_id": "}"}]}], "t": "\\"metadata\\": {"}'),
    lambda: line(metadata="null"),
    lambda: line(metadata="{}") + b"\n",
]
OTHER: list[Callable[[], bytes]] = [
    lambda: line(text="y"),
    lambda: line(text="\\\\"),
    lambda: line(spaces=" "),
    lambda: line(metadata="3"),
    lambda: line(metadata='{"label": "table"}'),
    lambda: line(metadata=""),
    lambda: line().replace(b'"messages"', b'"a\\"metadata": {"n": 1}, "messages"'),
    lambda: line().replace(b'"messages"', b'"a\\"metadata": {"n": 2}, "messages"'),
    lambda: line(metadata='{"n": 1'),
    lambda: line(metadata='{"n": ' + "[" * 40 + "]" * 40 + "}"),
    lambda: line(metadata='{"n": "' + "x" * (65 << 10) + '"}'),
    lambda: line().replace(b'"body"', b'"metadata": {}, "body"'),
    lambda: line().replace(b'"custom_id"', b'"custom\\u005fid"'),
    lambda: line().replace(b'"metadata":{', b'"metadat\\u0061":{'),
    lambda: line().replace(b'"x": {"metadata": "x"}', b'"x": {"metadata": "z"}'),
]


@pytest.mark.parametrize("other", EQUAL)
def test_names_and_metadata_make_no_other_row(other: Callable[[], bytes]) -> None:
    assert equal_digest(line()) == equal_digest(other()) is not None


def test_everything_else_makes_another_row() -> None:
    digests = [equal_digest(other()) for other in OTHER]
    assert equal_digest(line()) not in digests
    known = [digest for digest in digests if digest is not None]
    assert len(set(known)) == len(known)


def test_a_row_in_pieces_equals_a_whole_one_up_to_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row(name, "é" * 50, metadata={"n": n}) for n, name in enumerate("abcd")]
    path = write_rows(tmp_path / "rows.jsonl", [*rows, b"no json", b"no json", row("", "x"), row("", "x")])
    size = len(json.dumps(rows[0]).encode()) + 1
    for piece_bytes in (7, 64, 1 << 20):
        monkeypatch.setattr(input_file, "PIECE_BYTES", piece_bytes)
        for most, expected in ((size, [0, 1, 2, 3]), (size - 1, [])):
            monkeypatch.setattr(input_file, "MAX_ROW_BYTES", most)
            with InputFile(str(path)) as file:
                assert file.scan(with_equal=True).equal_E.tolist() == expected
                assert not len(file.scan().equal_E)


def test_the_json_module_finds_the_same_rows_equal(tmp_path: Path) -> None:
    """The oracle is the json module: rows are equal if they parse to the same without the two fields."""
    random = np.random.default_rng(3)
    texts = ['"metadata": {}', "\\", '"custom_id": "x"', "plain", '\\"metadata\\":', "{[", "]}"]
    rows = []
    for n in range(400):
        body: dict[str, Any] = {"messages": [{"role": "user", "content": str(random.choice(texts))}]}
        if random.random() < 0.5:
            body["tools"] = [{"metadata": {"n": int(random.integers(2))}, "custom_id": str(random.choice(texts))}]
        members: dict[str, Any] = {"metadata": {"n": n, str(random.choice(texts)): [str(random.choice(texts))]}, **body}
        if random.random() < 0.5:
            members = dict(reversed(members.items()))
        outer = {"custom_id": f"{random.choice(texts)}{n}", "url": "/v1/chat/completions", "body": members}
        # In doubt, where another member of this name is nested before the row's own, a row equals no other.
        is_turned = "tools" not in body and random.random() < 0.5
        rows.append(dict(reversed(outer.items())) if is_turned else outer)
    path = write_rows(tmp_path / "rows.jsonl", rows)
    with InputFile(str(path)) as file:
        scan = file.scan(with_equal=True)
    groups: dict[str, list[int]] = {}
    for n, item in enumerate(rows):
        body = {name: value for name, value in item["body"].items() if name != "metadata"}
        orders = [list(item), list(item["body"])]
        groups.setdefault(json.dumps([orders, body]), []).append(n)
    expected = {n: group[0] for group in groups.values() if len(group) > 1 for n in group}
    assert len(expected) > 250
    assert dict(zip(scan.equal_E.tolist(), scan.groups_E.tolist(), strict=True)) == expected


def test_groups_are_found_across_the_parts_of_the_search() -> None:
    digests = np.arange(200_000, dtype=np.int64) // 3
    order = np.random.default_rng(1).permutation(len(digests))
    shuffled = np.char.zfill(digests[order].astype("S16"), 16)
    equal_E, groups_E = equal_rows(shuffled)
    firsts = {value: place for place, value in reversed(list(enumerate(digests[order].tolist())))}
    assert len(equal_E) == len(digests) - int((np.bincount(digests) == 1).sum())
    assert all(firsts[int(digests[order[place]])] == first
               for place, first in zip(equal_E.tolist(), groups_E.tolist(), strict=True))  # fmt: skip


