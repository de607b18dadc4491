"""A ladder tries a row again whose answer has a fault: which attempt counts, and what the job says of the others.

An attempt is compared with a row of a job without a ladder that has the attempt's fields and seed.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npu_runner.batch.files.input_file import InputFile
from npu_runner.batch.files.manifest import Manifest
from npu_runner.batch.files.row_book import RowBook
from npu_runner.batch.job.options import BatchOptions
from npu_runner.batch.job.row_server import RowServer, server_plan
from npu_runner.batch.rows.attempt import Change
from npu_runner.batch.rows.ladder import MOST_ATTEMPTS, read_ladder
from npu_runner.batch.rows.openai_response import JobStamp
from npu_runner.cli import main as cli
from npu_runner.config import RunnerConfig
from npu_runner.errors import ConfigError
from npu_runner.readers.reader import shipped_readers
from npu_runner.reports.status import status_of
from npu_runner.request.outputs import CompletionOutput, RequestOutput
from npu_runner.request.prompt_inputs import ImageInput, ImageSpan, PageFacts, PromptInputs
from npu_runner.request.sampling_params import SamplingParams
from npu_runner.serving.replica import Finished, FinishedRow, Returned
from tests.batch.job_folder import Job
from tests.batch.killed_runs import kill, killed_within
from tests.batch.ladder_steps import STEPS, Tried, ladder
from tests.batch.real_rows import EXAMPLES, SMALL, rows_of
from tests.batch.scripted import (
    ScriptedEngine,
    ScriptedModel,
    ScriptedProcessor,
    completion_row,
    read_rows,
    row,
    write_rows,
)
from tests.replicas.jobs import REPLICA, ended, processes, start_scripted, wait_for_rows
from tests.replicas.jobs import kill as kill_processes

pytestmark = pytest.mark.usefixtures("fixed_time")
LONG = "never" + "x" * 80
ROWS = {
    "good": row("good"), "mended": row("mended", "mended", max_tokens=5), "never": row("never", LONG, max_tokens=5),
    "quiet": row("quiet", "quiet"), "moody": row("moody", "moody"), "mute": row("mute", "quiet" + "y" * 90),
    "engine": row("engine", "engine error"), "bad": row("bad", "bad"), "own seed": row("own seed", "quiet", seed=7),
    "completion": completion_row("completion", "quiet", max_tokens=200),
    "no json": row("no json", "words", response_format={"type": "json_object"}),
}  # fmt: skip
BY_REASON = {"cut_off": 4, "empty": 4, "error:generation_failed": 2, "unparsed": 1}


def seed_of(custom_id: str, attempt: int) -> int:
    """As docs/batch.md defines it."""
    digest = hashlib.blake2b(f"0 {custom_id}\0{attempt}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


def plain(name: str, attempt: int = 0, **fields: Any) -> dict[str, Any]:
    """The row of a job without a ladder that is this attempt."""
    body = {**ROWS[name]["body"], **({"seed": seed_of(name, attempt)} if attempt else {}), **fields}
    return {**ROWS[name], "body": body}


def results(path: Path) -> dict[str, dict[str, Any]]:
    """By name, and without the fingerprint, which tells jobs with a ladder from others."""
    found = {line["custom_id"]: line for line in read_rows(path)}
    for line in found.values():
        line["response"]["body"].pop("system_fingerprint", None)
    return found


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A finished job with a ladder, and all that it can write."""
    job = Job(tmp_path_factory.mktemp("ladder") / "job")
    write_rows(job.input, ROWS.values())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOURCE_DATE_EPOCH", "1700000000")
        job.run(Tried, ladder=ladder(job.folder, STEPS), summary=job.folder / "summary.json",
                report=job.folder / "report.html", metrics_file=job.folder / "metrics.txt")
    return job


def test_the_attempt_that_counts_is_a_plain_row_with_its_fields_and_its_seed(done: Job, job: Job) -> None:
    asked = " pleaseplease"
    expected = {
        "good": (plain("good"), [], None), "bad": (plain("bad"), [], None),
        "mended": (plain("mended", 2, temperature=0.5, max_tokens=60, no_repeat_ngram_size=5),
                   [("cut_off", 1), ("cut_off", 2)], None),
        "never": (plain("never"), [("cut_off", 1), ("cut_off", 2)], 3),
        "moody": (plain("moody", 1, temperature=0.9, top_p=0.5), [("error:generation_failed", 4)], None),
        "mute": (plain("mute"), [("empty", 3)], 2),
        "engine": (plain("engine"), [("error:generation_failed", 4)], None),
        "no json": (plain("no json"), [("unparsed", 4)], 2),
        **{name: (plain(name, 1, temperature=0.7), [("empty", 3)], None)
           for name in ("quiet", "own seed", "completion")}}
    for name in ("quiet", "own seed"):
        expected[name][0]["body"]["messages"] = [{"role": "user", "content": "quiet" + asked}]
    expected["completion"][0]["body"]["prompt"] += asked
    write_rows(job.input, [expected[name][0] for name in ROWS])
    job.run(Tried)
    alone, found = results(job.output), results(done.output)
    assert found.keys() == expected.keys() == ROWS.keys()
    for name, line in found.items():
        _, later, best_of = expected[name]
        members = {"attempts": [{"reason": reason, "step": step} for reason, step in later]} if later else {}
        assert line == {**alone[name], **members, **({"best_of": best_of} if best_of else {})}, name
        assert list(line)[:2] == ["id", "custom_id"]


def test_a_row_counts_once_and_its_attempts_beside(done: Job, job: Job) -> None:
    write_rows(job.input, ROWS.values())
    job.run(Tried)
    summary = json.loads((done.folder / "summary.json").read_text())
    lines = results(done.output)
    for rows, tokens in ((summary["rows"], summary["tokens"]),
                         (summary["this_run"]["rows"], summary["this_run"]["tokens"])):
        assert (rows["answered"], rows["failed"], rows["cut_off"], rows["unparsed"]) == (9, 2, 1, 1)
        usage = [line["response"]["body"]["usage"] for line in lines.values() if line["error"] is None]
        assert tokens["completion"] == sum(each["completion_tokens"] for each in usage), "of the answers that count"
        assert tokens["prompt"] == sum(each["prompt_tokens"] for each in usage)
        attempts = rows["attempts"]
        assert attempts["by_reason"] == BY_REASON
        assert (attempts["rows"], attempts["more"], attempts["best_of"]) == (9, sum(BY_REASON.values()), 3)
        # Attempts that ended with an error have no tokens, as failed rows have none.
        assert attempts["cached_tokens"] == 4 + 3 + 1, "one of each: of cut_off, of the first three of empty, unparsed"
        assert attempts["prompt_tokens"] == 2 * len("mended") + 2 * len(LONG) + 3 * len("quiet") + len("words")
    line = next(line for line in status_of(str(done.output)).to_lines() if line.startswith("attempts"))
    assert "11 more of 9 rows (" in line
    assert "4 cut_off" in line
    assert 'npu_runner_attempts_total{reason="cut_off"} 4' in (done.folder / "metrics.txt").read_text()
    page = (done.folder / "report.html").read_text()
    assert "11 attempts more, 3 best_of" in page
    assert "cut_off (step 1), cut_off (step 2); the first one without an error counts" in page


def test_the_table_has_the_number_of_attempts(done: Job, tmp_path: Path) -> None:
    assert cli.main(["table", str(done.output), "-o", str(tmp_path / "t.jsonl")]) == 0
    found = {line["custom_id"]: (line["attempts"], line["best_of"]) for line in read_rows(tmp_path / "t.jsonl")}
    assert found["mended"] == (3, False)
    assert found["never"] == (3, True)
    assert found["engine"] == (2, False)
    assert found["good"] == (None, None)


def test_a_killed_job_comes_to_the_same_end(done: Job, job: Job) -> None:
    """A row whose third attempt ran begins with the first one again."""
    def engine(config: RunnerConfig) -> Tried:
        def die(engine: ScriptedEngine) -> None:
            if any(params.max_tokens == 60 for _, _, params in (*engine.waiting, *engine.running.values())):
                kill()

        return Tried(config, on_step=die)

    write_rows(job.input, ROWS.values())
    steps = ladder(job.folder, STEPS)
    killed_within(job, lambda: job.run(engine, ladder=steps))
    assert not {"mended", "never"} & set(job.names() if job.output.exists() else [])
    job.run(Tried, ladder=steps)
    assert sorted(job.output.read_bytes().splitlines()) == sorted(done.output.read_bytes().splitlines())


class Paused(Tried):
    """A row that runs with a temperature ends while `goes_on` alone."""

    goes_on = True

    def step(self) -> list[RequestOutput]:
        held = {name: found for name, found in self.running.items() if found[2].temperature}
        if not self.goes_on and held:
            return []
        return super().step()


def test_a_row_that_is_recalled_in_its_second_attempt_begins_again(job: Job) -> None:
    """Also in the replica that has had it."""
    write_rows(job.input, [ROWS["quiet"]])
    options = BatchOptions(input=str(job.input), output="-", ladder=ladder(job.folder, STEPS))
    engines: list[Paused] = []

    def make(config: RunnerConfig) -> Paused:
        engines.append(Paused(config))
        return engines[0]

    with InputFile(str(job.input), job.folder) as file:
        scan = file.scan()
        book = RowBook(scan, np.ones(scan.num_rows, dtype=bool), file.source)
        plan = server_plan(RunnerConfig(model="m"), options, file.source, lambda config: ScriptedModel(config, make), 1)
        with RowServer(plan) as server:
            server.start(lambda: None, lambda event: None)
            server.poll(0.0)
            server.serve(JobStamp(created=1, system_fingerprint="fp", model_name="m"))

            def answered() -> FinishedRow:
                server.submit(book.run(range(1)))
                while True:
                    for event in server.poll(0.1):
                        if isinstance(event, Finished):
                            return event.rows[0]

            before = answered()
            assert b'"attempts":[{"reason":"empty","step":3}]' in before.data
            engines[0].goes_on = False
            server.submit(book.run(range(1)))
            while not any(params.temperature for _, _, params in engines[0].running.values()):
                server.poll(0.1)
            server.recall(1, include_started=True)
            assert [event.indices for event in server.poll(0.0) if isinstance(event, Returned)] == [[0]]
            engines[0].goes_on = True
            assert answered() == before


@pytest.mark.full("replicas with a ladder that are killed; the fast set kills a job with one")
def test_rows_of_a_killed_replica_come_to_the_same_end(job: Job) -> None:
    """They begin again in the other one, with the first attempt."""
    write_rows(job.input, [row(f"r{n}", f"{'engine error' if n % 3 else 'good'} {n}") for n in range(300)])
    steps = ladder(job.folder, [{"when": ["error:generation_failed"], "change": {"temperature": n / 4}}
                                for n in range(1, 4)])
    assert ended(start_scripted(job.folder, ladder=steps, data_parallel_size=1))[0] == 3
    alone = sorted(job.output.read_bytes().splitlines())
    assert sum(b'"attempts":[' in line for line in alone) == 200
    again = job.folder / "again.jsonl"
    process = start_scripted(job.folder, ladder=steps, output=str(again))
    wait_for_rows(process, again, 10)
    kill_processes(processes(REPLICA, process.pid)[:1])
    status, said = ended(process)
    assert status == 3, said
    assert "died 1 times" in said
    assert sorted(again.read_bytes().splitlines()) == alone


def test_the_ladder_is_a_setting_of_the_job(done: Job, job: Job) -> None:
    write_rows(job.input, ROWS.values())
    job.run(Tried, ladder=ladder(job.folder, STEPS[:1]))
    manifest = Manifest.load(job.output)
    assert manifest is not None
    assert manifest.settings["answers.ladder"] == {"parser": None, "steps": STEPS[:1]}
    write_rows(job.input, [*ROWS.values(), row("new")])
    for steps in (STEPS, None):
        with pytest.raises(ConfigError, match=r"Changed: answers\.ladder: was .*--accept-changed answers\.ladder"):
            job.run(Tried, ladder=None if steps is None else ladder(job.folder, steps))
    job.run(Tried, ladder=ladder(job.folder, STEPS), accept_changed=("answers.ladder",))
    assert len(job.names()) == len(ROWS) + 1


def test_failed_rows_that_a_step_fits_are_not_refused_again_without_a_model(job: Job) -> None:
    """Without a ladder no model is loaded for them."""
    write_rows(job.input, [row("bad", top_p=5), b"not json", row("good")])
    steps = ladder(job.folder, [{"when": ["error:invalid_sampling_parameter"], "change": {"temperature": 0.1}}])
    job.run(Tried, ladder=steps)
    job.run(Tried, ladder=steps, retry_errors=True)
    assert len(job.engines) == 2
    assert results(job.output)["bad"]["attempts"] == [{"reason": "error:invalid_sampling_parameter", "step": 1}]


def test_a_step_that_has_nothing_to_change_in_a_row_is_skipped(job: Job) -> None:
    """Rows of text beside pages: the steps of images are not there for them, and neither costs nor ends anything."""
    for_images = [{"when": ["cut_off"], "change": {"longest": 99}}, {"when": ["cut_off"], "change": {"max_pixels": 9}}]
    both = {"when": ["cut_off"], "change": {"rotate": 90, "temperature": 0.5}}
    write_rows(job.input, [ROWS["mended"]])
    job.run(Tried, ladder=ladder(job.folder, [*for_images, both, STEPS[1]]), summary=job.folder / "summary.json")
    found = results(job.output)["mended"]
    assert found.pop("attempts") == [{"reason": "cut_off", "step": 3}, {"reason": "cut_off", "step": 4}]
    assert json.loads((job.folder / "summary.json").read_text())["rows"]["attempts"]["more"] == 2
    write_rows(job.input, [plain("mended", 2, temperature=0.5, max_tokens=60, no_repeat_ngram_size=5)])
    job.run(Tried, overwrite=True)
    assert found == results(job.output)["mended"]
    write_rows(job.input, [ROWS["mended"]])
    job.run(Tried, overwrite=True, ladder=ladder(job.folder, for_images))
    assert not {"attempts", "best_of"} & results(job.output)["mended"].keys()


def test_eight_attempts_are_the_most(job: Job) -> None:
    write_rows(job.input, [row("never", LONG, max_tokens=5)])
    steps = [{"when": ["cut_off"], "change": {"temperature": n / 10}} for n in range(1, 12)]
    job.run(Tried, ladder=ladder(job.folder, steps))
    (line,) = read_rows(job.output)
    assert line["best_of"] == MOST_ATTEMPTS == 8
    assert [each["step"] for each in line["attempts"]] == list(range(1, 8))


# -- ladders of readers ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen(ScriptedProcessor):
    """The prompt is the fields of the image's address. A file that is called blank shows a blank page."""

    def __call__(self, messages: list[dict[str, Any]], *arguments: Any, **options: Any) -> PromptInputs:
        parts = messages[-1]["content"]
        fields = next(part["image_url"] for part in parts if "image_url" in part)
        token_ids = [ord(each) for each in json.dumps(fields)]
        facts = PageFacts(is_blank=fields["url"] == "blank.png", width=1, height=1, has_text=None)
        image = ImageInput(b"", np.zeros((1, 1, 3), np.uint8), (1, 1, 1), 1, page=facts)
        return PromptInputs(token_ids, [image], [ImageSpan(0, 1, 0)])


def front_matter(rotation: int) -> str:
    return (f"---\nprimary_language: en\nis_rotation_valid: {rotation == 0}\nrotation_correction: {rotation}\n"
            "is_table: False\nis_diagram: False\n---\n")


def page(name: str, **address: Any) -> dict[str, Any]:
    shown = [{"type": "image_url", "image_url": {"url": f"{name}.png", **address}}, {"type": "text", "text": "?"}]
    return row(name, messages=[{"role": "user", "content": shown}], max_tokens=500)


@dataclass
class Page(ScriptedEngine):
    """A reader in olmOCR's form. The page is upright at 270 degrees, and one called `odd` has no front matter before a
    temperature of 0.3. Asks for a correction of 90 degrees at a time, as it counts them: counter-clockwise."""

    def _output(self, request_id: str, text: str, params: SamplingParams) -> RequestOutput:
        fields = json.loads(text)
        said = front_matter(90 if fields.get("rotate", 0) != 270 else 0) + text
        if request_id == "odd" and params.temperature < 0.3:
            said = "no form"
        if request_id in ("empty", "blank"):
            said = front_matter(0)
        return RequestOutput(request_id, [CompletionOutput(0, said, [1], "stop")], 1)


def test_the_ladder_of_olmocr_rotates_as_the_reader_says_and_tries_refused_answers_again(job: Job) -> None:
    rows = [page("odd", rotate=270), page("turned", rotate=180), page("twice", rotate=90, size=[20, 40]),
            page("empty"), page("upright", rotate=270)]  # fmt: skip
    write_rows(job.input, rows)
    job.run(Page, ladder="olmocr-2", processor=Seen())
    found = {line["custom_id"]: line for line in read_rows(job.output)}
    assert {name: [(each["reason"], each["step"]) for each in line.get("attempts", [])]
            for name, line in found.items()} == {
        "odd": [("unparsed", 1), ("unparsed", 2), ("unparsed", 3)], "turned": [("rotated", 1), ("rotated", 2),
                                                                              ("rotated", 3)],
        "twice": [("rotated", 1), ("rotated", 2)], "empty": [], "upright": []}


def test_a_page_without_text_is_tried_again_unless_it_is_blank(job: Job) -> None:
    """Its front matter is no text: the parser of the reader has read it."""
    write_rows(job.input, [page("empty", rotate=270), page("blank", rotate=270)])
    steps = ladder(job.folder, [{"when": ["empty"], "change": {"temperature": 0.5}}])
    job.run(Page, ladder=steps, ladder_reader="olmocr-2", processor=Seen())
    found = {line["custom_id"]: line for line in read_rows(job.output)}
    assert (found["empty"]["best_of"], found["empty"]["page"]["blank"]) == (2, False)
    assert (found["blank"].get("best_of"), found["blank"]["page"]["blank"]) == (None, True)


def test_the_parser_knows_the_label_of_a_block(job: Job) -> None:
    """The same words are a text, and no table."""
    write_rows(job.input, [row(name, "words", max_tokens=200, metadata={"label": name}) for name in ("table", "text")])
    steps = ladder(job.folder, [{"when": ["unparsed"], "change": {"temperature": 0.5}}])
    job.run(Tried, ladder=steps, ladder_reader="mineru2.5-blocks")
    assert {line["custom_id"]: "attempts" in line for line in read_rows(job.output)} == {"table": True, "text": False}


def test_a_rotation_that_is_said_is_added_to_the_present_one(job: Job) -> None:
    write_rows(job.input, [page("twice", rotate=90, size=[20, 40]), page("once", size=[20, 40])])
    job.run(Page, ladder="olmocr-2", processor=Seen())
    said = {line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"]
            for line in read_rows(job.output)}
    shown = {name: json.loads(text.split("---\n")[2]) for name, text in said.items()}
    assert {name: (fields["rotate"], fields["size"]) for name, fields in shown.items()} == {
        "twice": (270, [20, 40]), "once": (270, [40, 20])}, "the size behind a quarter turn has its sides swapped"


def test_the_ladder_of_every_shipped_reader_can_be_read() -> None:
    readers = {name: reader for name, reader in shipped_readers().items() if reader.ladder}
    assert readers.keys() == {"chandra-ocr-2", "olmocr-2", "surya-2"}
    for name, reader in readers.items():
        found = read_ladder(name, None)
        assert found is not None
        parser = "front_matter" if name == "olmocr-2" else None  # the others ask for no parser's word
        assert (found.parser, len(found.steps)) == (parser, len(reader.ladder))
        assert len(found.steps) < MOST_ATTEMPTS, "each step can come"


def test_a_change_of_images_reaches_each_of_them_and_nothing_else() -> None:
    given = page("a", size=[10, 20], box=[0, 0, 1, 0.5])
    given["body"] |= {"max_completion_tokens": 9, "mm_processor_kwargs": {"max_pixels": 5000}}
    given_fields = {"longest": 99, "rotate": 90, "min_pixels": 100, "max_tokens": 4}
    change = Change(1, {**given_fields, "turn": 90})
    body = change.applied(given, seed=3)["body"]
    assert body["messages"][0]["content"][0]["image_url"] == {
        "url": "a.png", "box": [0, 0, 1, 0.5], "longest": 99, "rotate": 180}
    assert body["mm_processor_kwargs"] == {"max_pixels": 5000, "min_pixels": 100}
    assert (body["seed"], body["max_tokens"], "max_completion_tokens" in body) == (3, 4, False)
    assert given["body"]["max_completion_tokens"] == 9, "the row itself stays"
    assert change.plus({"rotate": 270}).fields == {**given_fields, "rotate": 270}, "a number is set, and nothing added"


# -- a real model ------------------------------------------------------------------------------------------------------


def test_what_an_attempt_does_not_change_comes_from_the_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedded model, whose attempt equals the plain row that stands beside it in the same job."""
    monkeypatch.chdir(tmp_path)
    (base,) = rows_of(EXAMPLES[1:2], tmp_path)
    del base["body"]["metadata"]

    def asks(name: str, **fields: Any) -> dict[str, Any]:
        return {**base, "custom_id": name, "body": {**base["body"], **fields}}

    turned = json.loads(json.dumps(asks("turned"), default=str))
    for message in turned["body"]["messages"]:
        for part in message["content"] if isinstance(message["content"], list) else ():
            if "image_url" in part:
                part["image_url"] |= {"rotate": 180, "longest": 64}
    write_rows(tmp_path / "in.jsonl", [asks("short", max_tokens=1), asks("whole"), turned])
    steps = ladder(tmp_path, [{"when": ["cut_off"], "change": {"max_tokens": 2}},
                              {"when": ["cut_off"], "change": {"max_tokens": 96, "rotate": 180, "longest": 64}}])
    assert cli.main(["batch", "-i", "in.jsonl", "-o", "out.jsonl", "--allowed-media-dir", ".", "--ladder", steps,
                     "--summary", "s.json", "--preprocessing-workers", "1", *SMALL]) == 0  # fmt: skip
    found = results(tmp_path / "out.jsonl")
    bodies = {name: line["response"]["body"] for name, line in found.items()}
    assert [each["step"] for each in found["short"]["attempts"]] == [1, 2]
    assert bodies["short"]["choices"] == bodies["turned"]["choices"]
    assert bodies["short"]["usage"] == bodies["turned"]["usage"]
    assert "attempts" not in found["whole"]
    run = json.loads((tmp_path / "s.json").read_text())["this_run"]
    num_images = len({part["image_url"]["url"] for message in base["body"]["messages"]
                      if isinstance(message["content"], list) for part in message["content"] if "image_url" in part})
    assert run["vision_cache"]["images_encoded"] == 2 * num_images, "as they are, and turned"
    assert run["rows"]["attempts"]["cached_tokens"] > 0, "the second attempt at the first row"
