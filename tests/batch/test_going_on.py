"""Going on with other rows or settings: what may differ, what may not, and a kill at every step of the beginning.

A job without a model: real files, lock, manifest and comparison, and rows that are answered at once. So a beginning can
be cut everywhere: of each state in which it leaves the folder there is a copy, and all of them are gone on with.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from npu_runner.assets import SHAPES_VL
from npu_runner.batch.files.answer_writer import Delivery
from npu_runner.batch.files.destination import Destination
from npu_runner.batch.files.input_file import InputFile
from npu_runner.batch.files.manifest import LIMITS_OF_ROWS, Manifest, start_time
from npu_runner.batch.files.names import manifest_path, replaced_path, rows_path
from npu_runner.batch.files.place import Place
from npu_runner.batch.job import manifest_check
from npu_runner.batch.job.manifest_check import manifest_of, refuse_another_input
from npu_runner.batch.job.options import BatchOptions
from npu_runner.batch.job.row_server import answer_defaults
from npu_runner.batch.rows.counts import Counts
from npu_runner.batch.rows.flaw import Flaw
from npu_runner.config import RunnerConfig
from npu_runner.errors import ConfigError
from npu_runner.prompts.processor import ChatProcessor, ProcessorSettings
from npu_runner.serving.replica import FinishedRow, ReplicaFacts
from tests.batch.scripted import read_rows
from tests.full_set import only_full, some_of

pytestmark = pytest.mark.usefixtures("fixed_time")
LIMIT, LENGTH = "prompts.max_images_per_prompt", "max_model_len"
Row = tuple[str | None, str]
"""Name and text. A text fails if it is longer than the limit; so does a row without a name."""
ROWS: list[Row] = [("a", "one"), ("b", "too long"), ("c", "two"), (None, "broken"), ("d", "three"),
                   ("e", "far too long")]
CORRECTED: list[Row] = [ROWS[0], ("b", "short"), ROWS[2], ("x", "mended"), *ROWS[4:], ("f", "more")]


@dataclass(frozen=True, kw_only=True)
class Command:
    """What a user asks for."""

    rows: list[Row]
    limit: int = 6
    length: int = 4
    """A longer text is answered, and cut off."""
    seed: str = "0"
    retry: str = ""
    accept: tuple[str, ...] = ()
    overwrite: bool = False
    has_error_file: bool = False

    def lines(self) -> list[str]:
        return [text if name is None else json.dumps({"custom_id": name, "text": text}) for name, text in self.rows]

    def result(self, number: int) -> dict[str, Any]:
        """Of a row. It says all that went into it."""
        name, text = self.rows[number]
        error = {"line": number + 1, "limit": self.limit} if name is None or len(text) > self.limit else None
        choice = {"finish_reason": "length" if len(text) > self.length else "stop"}
        response = {"status_code": 400 if error else 200, "body": {} if error else {"choices": [choice]}}
        return {"custom_id": name, "error": error, "response": response, "answer": {"text": text, "seed": self.seed}}

    @property
    def flaws(self) -> Flaw:
        return Flaw.parse(self.retry.split(",") if self.retry else ())


def begin(folder: Path, command: Command, destination: Destination, file: InputFile) -> tuple[list[int], Delivery]:
    """As `npu_runner.batch.job.run` does it. Returns the numbers of the rows that are wanted."""
    destination.scan()
    rows = file.scan(destination.earlier.input if destination.earlier else None)
    destination.decide(destination.retry(command.flaws, rows))
    refuse_another_input(destination, file, rows, retry=command.flaws)
    settings = {"seed": command.seed, LIMIT: command.limit, LENGTH: str(command.length)}
    facts = ReplicaFacts(version="1", settings=settings, ledger="", max_rows=1)
    new = Manifest(created=start_time(), model_name="m", model_files={"w": "1 bytes"}, settings={}, input=rows.identity)
    manifest = manifest_of(destination, new, facts, accept=command.accept, is_retry=bool(command.retry))
    wanted = ~destination.finished(rows)
    return [int(line) - 1 for line in rows.lines[wanted]], destination.open_writers(manifest, Counts())


def run(folder: Path, command: Command, *, num_rows: int | None = None) -> None:
    """The whole job, or as far as so many rows."""
    with begun(folder, command, is_whole=num_rows is None) as (wanted, delivery):
        for number in wanted[:num_rows]:
            result = command.result(number)
            counts = Counts.from_failure("bad") if result["error"] else Counts(num_answered=1)
            delivery.put(FinishedRow(number, counts, json.dumps(result).encode() + b"\n"))


@contextmanager
def begun(folder: Path, command: Command, *, is_whole: bool = False) -> Iterator[tuple[list[int], Delivery]]:
    """`is_whole`: the job comes to its end."""
    (folder / "in.jsonl").write_text("\n".join(command.lines()) + "\n")
    errors = Place("error_file", str(folder / "errors.jsonl")) if command.has_error_file else None
    destination = Destination(Place("output", str(folder / "out.jsonl")), overwrite=command.overwrite, errors=errors)
    with destination, InputFile(str(folder / "in.jsonl"), folder) as file:
        wanted, delivery = begin(folder, command, destination, file)
        with delivery:
            yield wanted, delivery
        if is_whole:
            destination.state.update(retry=Flaw(0))


def results(folder: Path) -> list[dict[str, Any]]:
    return [item for name in ("out.jsonl", "errors.jsonl") if (folder / name).exists()
            for item in read_rows(folder / name)]


def assert_finished(folder: Path, command: Command) -> None:
    """Each row is there once, as it is asked now. Another seed stands beside where the manifest says that it may."""
    found = {item["custom_id"] or item["error"]["line"]: item for item in results(folder)}
    assert len(found) == len(results(folder)) == len(command.rows)
    manifest = json.loads(manifest_path(folder / "out.jsonl").read_text())
    assert manifest["settings"] == {"seed": command.seed, LIMIT: command.limit, LENGTH: str(command.length)}
    assert "retry" not in manifest
    seeds = {manifest["settings"]["seed"],
             *(change["was"] for change in manifest.get("changes", []) if change["name"] == "seed")}
    for number, (name, _) in enumerate(command.rows):
        item = found[name or number + 1]
        assert item["answer"]["seed"] in seeds
        assert item == replace(command, seed=item["answer"]["seed"]).result(number)
        assert item["answer"]["seed"] == command.seed or not ("errors" in command.retry and item["error"])


def answers(folder: Path) -> list[dict[str, Any]]:
    return [item for item in results(folder) if item["error"] is None]


# -- what may differ ---------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An output in which three rows are answered and three have failed."""
    run(tmp_path, Command(rows=ROWS))
    assert {item["custom_id"] for item in results(tmp_path) if item["error"]} == {"b", None, "e"}
    return tmp_path


AGAIN = Command(rows=CORRECTED, limit=20, retry="errors")


def test_failed_rows_are_tried_again_corrected_and_with_a_higher_limit(folder: Path) -> None:
    before, earlier = answers(folder), Manifest.load(folder / "out.jsonl")
    run(folder, AGAIN)
    assert_finished(folder, AGAIN)
    assert all(item["error"] is None for item in results(folder))
    assert results(folder)[:3] == before
    assert not replaced_path(folder / "out.jsonl").exists(), "nothing was paid for a failure"
    manifest = Manifest.load(folder / "out.jsonl")
    assert manifest is not None
    assert earlier is not None
    assert manifest.settings[LIMIT] == 20
    assert manifest.changes == ({"name": LIMIT, "was": 6, "is": 20, "time": 1700000000,
                                 "system_fingerprint_before": earlier.system_fingerprint},)
    assert manifest.system_fingerprint != earlier.system_fingerprint
    run(folder, replace(AGAIN, retry=""))
    assert Manifest.load(folder / "out.jsonl") == manifest


def test_a_lower_limit_leaves_answers_as_they_are(folder: Path) -> None:
    before = answers(folder)
    run(folder, Command(rows=ROWS, limit=2, retry="errors"))
    assert answers(folder) == before
    assert len(results(folder)) == len(ROWS)


def test_a_limit_and_a_row_may_differ_only_when_failed_rows_are_tried_again(folder: Path) -> None:
    refused(folder, Command(rows=ROWS, limit=20), rf"other settings.*Changed: {LIMIT}: was 6, is 20.*--accept-changed "
            rf"{LIMIT}\. With --retry {LIMIT} may differ")
    refused(folder, Command(rows=CORRECTED), r"row 2 \(custom_id 'b'\), line 2, was changed; it has no answer, so with "
            "--retry-errors it may be")
    refused(folder, Command(rows=put(ROWS, 3, ("x", "mended"))), r"row 4 \(custom_id 'x'\), line 4, was changed; it "
            "has no answer, so with --retry-errors it may be")


def refused(folder: Path, command: Command, match: str) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "in.jsonl"}
    with pytest.raises(ConfigError, match=match):
        run(folder, command)
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "in.jsonl"} == before


def test_a_row_that_was_not_reached_may_be_corrected(tmp_path: Path) -> None:
    run(tmp_path, Command(rows=ROWS), num_rows=4)
    command = Command(rows=[*ROWS[:4], ("d", "other"), ROWS[5]], retry="errors")
    run(tmp_path, command)
    assert_finished(tmp_path, command)


def put(rows: list[Row], number: int, *others: Row) -> list[Row]:
    return [*rows[:number], *others, *rows[number + 1 :]]


NOT_ALLOWED: dict[str, tuple[list[Row], str]] = {
    "answered": (put(ROWS, 2, ("c", "TWO")), r"row 3 \(custom_id 'c'\), line 3, was changed and has an answer; ask it "
                 "under a new custom_id at the end"),
    "answered, and its name": (put(ROWS, 2, ("C", "two")), r"row 3 \(custom_id 'c'\) is not there any more"),
    "failed, and its name": (put(ROWS, 1, ("B", "short")), r"row 2 \(custom_id 'b'\) is not there any more"),
    "failed, and its name is lost": (put(ROWS, 1, (None, "short")), r"row 2 \(custom_id 'b'\) is not there any more"),
    "removed, answered": (put(ROWS, 2), r"row 3 \(custom_id 'c'\) is not there any more, and no row may be removed"),
    "removed, failed": (put(ROWS, 1), r"row 2 \(custom_id 'b'\) is not there any more"),
    "removed, without a name": (put(ROWS, 3), "row 4 is not there any more"),
    "the last removed": (ROWS[:-1], r"row 6 \(custom_id 'e'\) is not there any more"),
    "reordered": ([ROWS[2], ROWS[1], ROWS[0], *ROWS[3:]], r"row 1 \(custom_id 'a'\) is row 3 now \(line 3\); rows keep "
                  "their order, new ones go to the end"),
    "failed ones reordered": ([ROWS[0], ROWS[5], ROWS[2], ROWS[3], ROWS[4], ROWS[1]],
                              r"row 2 \(custom_id 'b'\) is row 6 now"),
    "one in front": ([("new", "new"), *ROWS], r"row 1 \(custom_id 'a'\) is row 2 now"),
    "one between": (put(ROWS, 4, ("new", "new"), ROWS[4]), r"row 5 \(custom_id 'd'\) is row 6 now"),
    "answered, and its name is lost": (put(ROWS, 2, (None, "two")), r"row 3 \(custom_id 'c'\) is not there any more"),
    "an answered row where one was broken": (put(put(ROWS, 4), 3, ("d", "three"), ("y", "new")), "row 4 is not there"),
}


def test_the_message_that_people_quote_stands_in_one_piece_in_the_source() -> None:
    assert "was changed and has an answer; ask it under a new custom_id" in Path(manifest_check.__file__).read_text()


@pytest.mark.parametrize("name", NOT_ALLOWED)
@pytest.mark.parametrize("retry", ["", "errors", "cut_off"])
def test_any_other_change_of_the_input_is_refused_with_its_row(folder: Path, name: str, retry: str) -> None:
    rows, match = NOT_ALLOWED[name]
    refused(folder, Command(rows=rows, retry=retry),
            f"in.jsonl: it is not the input that .*out.jsonl was begun with: {match}.*choose another output, or --over")


def test_the_last_row_may_get_its_line_end_later(folder: Path) -> None:
    path = folder / "in.jsonl"
    path.write_bytes(path.read_bytes().removesuffix(b"\n"))
    for command in (AGAIN, replace(AGAIN, rows=[*CORRECTED, ("g", "last")])):
        run(folder, command)
        assert_finished(folder, command)


@pytest.mark.parametrize("version", [1, 2])
def test_rows_of_an_output_without_digests_may_be_added_and_not_changed(folder: Path, version: int) -> None:
    """As an earlier version leaves it: limits may differ all the same."""
    rows_path(folder / "out.jsonl").unlink()
    path = manifest_path(folder / "out.jsonl")
    fields = {**json.loads(path.read_text()), "format": version}
    path.write_text(json.dumps(fields))
    refused(folder, AGAIN, "rows may be added at its end, not changed: the version that began the output kept no dig")
    command = replace(AGAIN, rows=[*ROWS, ("f", "more")])
    run(folder, command)
    assert_finished(folder, command)
    corrected = replace(AGAIN, rows=put(command.rows, 3, ("x", "mended")))
    run(folder, corrected)
    assert_finished(folder, corrected)


@pytest.mark.parametrize("damage", [b"", b"{}\n", b'{"format": 9}\n', b"[" * 100_000, b"more", b"flip",
                                    b"later"])
def test_a_damaged_file_of_digests_is_named_and_the_output_goes_on_without_it(folder: Path, damage: bytes) -> None:
    path = rows_path(folder / "out.jsonl")
    whole = path.read_bytes()
    path.write_bytes({b"more": whole + damage, b"flip": whole[:-1] + bytes([whole[-1] ^ 1]),
                      b"later": whole.replace(b'"format": 1', b'"format": 2')}.get(damage, damage))
    refused(folder, AGAIN, r"rows .*out\.jsonl\.rows: cannot be read \(.*\); once it is removed the output goes on")
    path.unlink()
    run(folder, Command(rows=[*ROWS, ("f", "more")]))
    run(folder, AGAIN)
    assert_finished(folder, AGAIN)


def test_digests_that_an_earlier_output_of_the_name_left_are_not_taken_for_its_own(folder: Path, tmp_path_factory: Any
                                                                                  ) -> None:
    """Somebody moves an output and its manifest here. The rows in the way look like those that are asked now."""
    other = tmp_path_factory.mktemp("other")
    run(other, Command(rows=[(name, text.upper()) for name, text in ROWS]))
    for name in ("out.jsonl", "out.jsonl.manifest.json"):
        shutil.move(other / name, folder / name)
    refused(folder, Command(rows=ROWS), "the version that began the output kept no digests")


def test_answers_that_were_cut_off_are_tried_again_with_a_longer_limit_and_the_change_is_recorded(folder: Path) -> None:
    before = answers(folder)
    shorter = Command(rows=ROWS, length=3, retry="cut_off")
    refused(folder, shorter, r'Changed: max_model_len: was "4", is "3"\..*--accept-changed max_model_len$')
    refused(folder, replace(shorter, length=8, retry=""), "With --retry max_model_len may differ: it changes no whole")
    command = Command(rows=put(ROWS, 4, ("d", "longer")), length=8, retry="cut_off")
    run(folder, command)
    assert_finished(folder, command)
    assert [item["custom_id"] for item in results(folder)][-1] == "d", "new lines are appended"
    assert answers(folder)[:2] == [item for item in before if item["custom_id"] != "d"]
    manifest = Manifest.load(folder / "out.jsonl")
    assert manifest is not None
    assert [(change["name"], change["was"], change["is"]) for change in manifest.changes] == [(LENGTH, "4", "8")]
    assert read_rows(replaced_path(folder / "out.jsonl")) == [item for item in before if item["custom_id"] == "d"]


def test_a_failed_row_may_not_change_where_only_answers_are_tried_again(folder: Path) -> None:
    for row, name in ((1, "b"), (3, "x")):
        rows = put(put(ROWS, row, (name, "short")), 4, ("d", "thr"))
        refused(folder, Command(rows=rows, retry="cut_off"), rf"row {row + 1} \(custom_id '{name}'\), line {row + 1}, "
                "was changed; it has no answer, so with --retry-errors it may be")


# -- settings that are accepted ----------------------------------------------------------------------------------------


def test_files_that_no_loader_opens_do_not_hold_an_earlier_output_back(folder: Path) -> None:
    """An earlier version hashed every safetensors file of the folder."""
    path = manifest_path(folder / "out.jsonl")
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "weights": {"consolidated.safetensors": "9 bytes, sha256 0"}}))
    run(folder, AGAIN)
    assert_finished(folder, AGAIN)
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "weights": {"model.bin": "9 bytes, sha256 0"}}))
    with pytest.raises(ConfigError, match=r"begun with another model.*model\.bin"):
        run(folder, AGAIN)


def test_a_setting_is_another_one_only_where_it_is_accepted_by_name(folder: Path) -> None:
    command = Command(rows=[*ROWS, ("f", "more")], seed="1")
    refused(folder, command, r'begun with other settings; answers of both would be mixed\. Changed: seed: was "0", is '
            r'"1"\. Restore them, .* --overwrite to start afresh, or go on knowingly with --accept-changed seed$')
    refused(folder, replace(command, accept=(LIMIT,)), "--accept-changed seed")
    refused(folder, replace(command, accept=("seed", "sed")), "accept_changed: 'sed' is no setting.*did you mean seed")
    refused(folder, replace(command, accept=("seed", "w")), "a file of the model never is")
    for _ in range(2):
        run(folder, replace(command, accept=("seed",)))
        assert_finished(folder, command)
        manifest = Manifest.load(folder / "out.jsonl")
        assert manifest is not None
        assert [(change["name"], change["was"], change["is"]) for change in manifest.changes] == [("seed", "0", "1")]
    refused(folder, Command(rows=ROWS[:1]), "row 2 .* is not there")
    refused(folder, replace(command, seed="0"), 'seed: was "1", is "0"')


def test_a_setting_that_is_new_or_gone_is_accepted_once_and_for_all(folder: Path) -> None:
    """As after an upgrade: no version of before named it, or none of now does."""
    path = manifest_path(folder / "out.jsonl")
    fields = json.loads(path.read_text())
    fields["settings"]["old"] = fields["settings"].pop("seed")
    path.write_text(json.dumps(fields))
    command = Command(rows=[*ROWS, ("f", "more")])
    refused(folder, command, r'Changed: old: was "0", is "\(not there\)"; seed: was "\(not there\)", is "0".*'
            "--accept-changed old --accept-changed seed")
    for _ in range(2):
        run(folder, replace(command, accept=("old", "seed")))
        assert json.loads(path.read_text())["settings"] == {"seed": "0", LIMIT: 6, LENGTH: "4"}


def test_kernels_that_0_6_0_recorded_stay_with_an_output_and_its_fingerprint(folder: Path) -> None:
    command = Command(rows=[*ROWS, ("f", "more")])
    path, kernels = manifest_path(folder / "out.jsonl"), {"cache_write": "npu_scatter_pa_kv_cache"}
    fields = json.loads(path.read_text())
    begun = {**fields["settings"], **kernels}
    path.write_text(json.dumps({**fields, "settings": begun}))
    before = Manifest.load(folder / "out.jsonl")
    run(folder, command)
    after = Manifest.load(folder / "out.jsonl")
    assert before is not None
    assert after is not None
    assert (after.settings, after.changes) == (begun, ())
    assert after.system_fingerprint == before.system_fingerprint
    for recorded in ({"cache_write": "_npu_reshape_and_cache"}, {"tower": "npu_scatter_pa_kv_cache"}):
        path.write_text(json.dumps({**fields, "settings": {**fields["settings"], **recorded}}))
        refused(folder, command, f"Changed: {next(iter(recorded))}: was")


def test_every_limit_in_the_table_is_a_setting_of_manifests() -> None:
    identity = ChatProcessor(str(SHAPES_VL), ProcessorSettings(limit_mm_per_prompt={"image": 1})).identity()
    options = BatchOptions(input="i", output="o", repetition_detection={"max_pattern_size": 9, "min_count": 3})
    named = {*(f"prompts.{name}" for name in identity), *(f"answers.{name}" for name in answer_defaults(options))}
    assert {*named, *(field.name for field in dataclasses.fields(RunnerConfig))} >= LIMITS_OF_ROWS.keys()


# -- a kill at every step ----------------------------------------------------------------------------------------------

Image = dict[str, bytes]


def images_of(folder: Path, command: Command) -> list[Image]:
    """The folder as a kill could leave it while the job begins: before each call from Python into C, all that differ.
    What a kill cannot take back is in the kernel by then."""
    found: list[Image] = []

    def look(frame: Any, event: str, argument: Any) -> None:
        image = {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.endswith(".lock")}
        if event == "c_call" and image not in found:
            found.append(image)

    sys.setprofile(look)
    try:
        with begun(folder, command):
            sys.setprofile(None)
    finally:
        sys.setprofile(None)
    return found


COMMANDS = {
    "rows and limit": (AGAIN, 8),
    "rows, limit and a first error file": (replace(AGAIN, has_error_file=True), 8),
    "a first error file": (Command(rows=ROWS, has_error_file=True), 7),
    "cut-off rows": (Command(rows=[*put(ROWS, 4, ("d", "thr")), ("f", "more")], length=8, retry="cut_off"), 8),
    "cut-off rows, and a first error file": (
        Command(rows=put(ROWS, 4, ("d", "thr")), length=8, retry="cut_off", has_error_file=True), 8),
    "cut-off and failed rows": (
        replace(AGAIN, rows=put(CORRECTED, 4, ("d", "mended")), length=8, retry="errors,cut_off"), 8),
    "an accepted seed": (Command(rows=[*ROWS, ("f", "more")], seed="1", accept=("seed",)), 4),
    "all at once": (replace(AGAIN, seed="1", accept=("seed",)), 8),
    "overwrite": (Command(rows=CORRECTED, seed="1", limit=20, overwrite=True), 5),
}
IN_EACH_RUN = ("all at once", "cut-off rows")


@pytest.mark.parametrize("name", [*IN_EACH_RUN, *only_full(
    "each change by itself; all of them at once stay, and below what is left of an output begun afresh",
    *(name for name in COMMANDS if name not in IN_EACH_RUN))])
def test_a_job_killed_at_any_step_of_its_beginning_goes_on(folder: Path, name: str, tmp_path_factory: Any) -> None:
    command, least = COMMANDS[name]
    before = answers(folder)
    images = images_of(folder, command)
    assert len(images) >= least
    corrected_again = [replace(command, rows=put(command.rows, 1, ("b", "brief")))] if "err" in command.retry else []
    for image in images:
        lines = [json.loads(line) for line in image.get("out.jsonl", b"").splitlines()]
        assert len(lines) == len({item["custom_id"] for item in lines}), "no row has two lines at any moment"
    for image, following in itertools.product(some_of(images, 6), [command, *corrected_again]):
        again = restored(image, tmp_path_factory.mktemp("again"))
        run(again, following)
        assert_finished(again, following)
        there = [*results(again), *(read_rows(replaced) if (replaced := replaced_path(again / "out.jsonl")).exists()
                                    else [])]
        assert command.overwrite or [item for item in before if item not in there] == []


@pytest.mark.parametrize("name", [*IN_EACH_RUN, *only_full(
    "each change by itself; all of them at once stay, and below what is left of an output begun afresh",
    *(name for name in COMMANDS if name not in IN_EACH_RUN))])
def test_a_job_killed_there_and_gone_on_with_otherwise_mixes_nothing(
    folder: Path, name: str, tmp_path_factory: Any
) -> None:
    """With the rows, the limit or the seed of before, without --retry-errors: refused, or each row once and of now."""
    command, _ = COMMANDS[name]
    others: list[Command] = []
    for rows, limit, length, seed in itertools.product(
            (ROWS, command.rows), (6, command.limit), {4, command.length}, ("0", command.seed)):
        other = Command(rows=rows, limit=limit, length=length, seed=seed, has_error_file=command.has_error_file)
        others += [other] if other not in others else []
    num_finished = 0
    for image, other in itertools.product(some_of(images_of(folder, command), 6), others):
        place = restored(image, tmp_path_factory.mktemp("other"))
        try:
            run(place, other)
        except ConfigError:
            continue  # nothing follows what is there; the command itself goes on there, above
        num_finished += 1
        assert_finished(place, other)
    assert num_finished > 3


def test_once_an_output_is_gone_that_is_overwritten_nothing_of_its_settings_holds(
    folder: Path, tmp_path_factory: Any
) -> None:
    command, _ = COMMANDS["overwrite"]
    manifest = manifest_path(folder / "out.jsonl").name
    gone = [image for image in images_of(folder, command) if not {"out.jsonl", manifest} & image.keys()]
    assert gone
    for image in gone:
        again = restored(image, tmp_path_factory.mktemp("again"))
        run(again, replace(command, overwrite=False))
        assert_finished(again, command)


def restored(image: Image, folder: Path) -> Path:
    for name, data in image.items():
        (folder / name).write_bytes(data)
    return folder
