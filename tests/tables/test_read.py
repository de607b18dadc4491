"""`read` runs rows, batch and table over one folder, and goes on there. The embedded model answers."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from npu_runner.batch.files.output_lock import OutputLock, job_at_work
from npu_runner.cli import main as cli
from npu_runner.reports import report
from scripts.demo_documents import inspection_pages, write_document
from tests.batch.scripted import read_rows
from tests.full_set import only_full
from tests.tables.pages import pdf

SMALL = ["--platform", "cpu", "--max-model-len", "512", "--kv-cache-bytes", "64M", "--max-tokens", "16",
         "--preprocessing-workers", "1"]  # fmt: skip
A7 = (210.0, 298.0)
Read = Callable[..., tuple[int, str]]


def documents(folder: Path) -> Path:
    found = folder / "docs"
    pdf(found / "reports" / "a.pdf", A7, A7, A7)
    (found / "broken.pdf").write_bytes(b"%PDF-1.7\nnothing")
    Image.new("RGB", (60, 40), "red").save(found / "c.png")
    return found


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """The folder after one command, and its exit status."""
    folder = tmp_path_factory.mktemp("read")
    arguments = ["read", str(documents(folder)), "-o", str(folder / "out"), "--prompt", "What is it?", *SMALL]
    return folder, cli.main(arguments)


@pytest.fixture
def folder(finished: tuple[Path, int], tmp_path: Path) -> Path:
    shutil.copytree(finished[0], tmp_path / "read")
    return tmp_path / "read"


@pytest.fixture
def read(folder: Path, capsys: pytest.CaptureFixture[str]) -> Read:
    def call(*more: str, prompt: str = "What is it?") -> tuple[int, str]:
        status = cli.main(["read", str(folder / "docs"), "-o", str(folder / "out"), "--prompt", prompt, *SMALL, *more])
        return status, capsys.readouterr().err

    return call


def markdown(folder: Path) -> dict[str, bytes]:
    root = folder / "out" / "markdown"
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*.md")}


def summary(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "out" / "summary.json").read_text()))


def test_one_command_makes_all_files(finished: tuple[Path, int]) -> None:
    folder, status = finished
    assert status == 3, "the broken document failed"
    answers = {row["custom_id"]: row for row in read_rows(folder / "out" / "answers.jsonl")}
    pages = [row["custom_id"] for row in read_rows(folder / "out" / "pages.jsonl")]
    assert answers.keys() == set(pages) == {"broken.pdf#page=1", "c.png",
                                            *(f"reports/a.pdf#page={number}" for number in (1, 2, 3))}  # fmt: skip
    files = markdown(folder)
    assert files.keys() == {"broken.pdf.md", "c.png.md", "reports/a.pdf.md"}
    assert b"<!-- page 1 has no answer: pdf_broken -->" in files["broken.pdf.md"]
    text = answers["reports/a.pdf#page=2"]["response"]["body"]["choices"][0]["message"]["content"]
    assert f"<!-- page 2 -->\n\n{text}\n" in files["reports/a.pdf.md"].decode()
    found = summary(folder)
    assert found["documents"] == {"total": 3, "whole": 2, "with_gaps": 1}
    assert found["pages"]["total"] == 5
    assert found["pages"]["no answer"] == 1
    (job,) = found["jobs"]
    assert found["tokens_per_page"] == round(job["tokens"]["completion"] / 4, 1)
    assert found["pages_per_second"] == round(4 / job["seconds"]["serve"], 3)
    assert {"blocks.jsonl", "pages.jsonl.documents.jsonl"} < {path.name for path in (folder / "out").iterdir()}


def test_the_same_command_does_nothing_again(read: Read, folder: Path) -> None:
    read()  # in its new place, which the file of documents names
    before = {path: path.read_bytes() for path in (folder / "out").glob("*.jsonl")}, markdown(folder)
    status, said = read()
    assert status == 3, "the failed page is there"
    assert "nothing to do: all 5 rows are finished" in said
    assert "broken    1 document did not open (1 pdf_broken), as 'broken.pdf'" in said
    assert ({path: path.read_bytes() for path in (folder / "out").glob("*.jsonl")}, markdown(folder)) == before


def test_rows_of_a_killed_first_command_are_made_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It died between the rows and the file that describes them. With answers, such rows are not made again."""
    (folder / "new").mkdir()
    (folder / "new" / "pages.jsonl").write_bytes(b"")
    arguments = ["read", str(folder / "docs" / "c.png"), "-o", str(folder / "new"), "--prompt", "What is it?", *SMALL]
    assert cli.main(arguments) == 0
    assert len(read_rows(folder / "new" / "pages.jsonl")) == 1
    (folder / "new" / "pages.jsonl.documents.jsonl").unlink()
    shutil.copytree(folder / "new", folder / "killed", ignore=shutil.ignore_patterns("answers*", "*.md", "summary*"))
    assert cli.main([*arguments[:3], str(folder / "killed"), *arguments[4:]]) == 0, "the rows are whole"
    assert (folder / "killed" / "pages.jsonl.documents.jsonl").exists()
    capsys.readouterr()
    assert cli.main(arguments) == 2
    assert "there is no pages.jsonl.documents.jsonl beside them" in capsys.readouterr().err


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ["pages.jsonl", "answers.jsonl", "block-answers.jsonl"])
def test_a_folder_that_another_command_writes_is_left_as_it_is(name: str, read: Read, folder: Path) -> None:
    """Another `read` has the lock of the rows, a `batch` that of its answers."""
    with OutputLock(folder / "out" / name):
        before = contents(folder / "out")
        status, said = read("--overwrite", "--pages", "1")
        assert (status, "another job (pid " in said) == (2, True)
        assert contents(folder / "out") == before


def test_the_rows_are_locked_while_pages_are_answered(
        read: Read, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locked, run = [], report.run_batch_and_report

    def spied(*given: Any, **more: Any) -> Any:
        locked.append(job_at_work(folder / "out" / "pages.jsonl"))
        before = contents(folder / "out")
        rows = str(folder / "out" / "pages.jsonl")
        assert cli.main(["rows", str(folder / "docs" / "c.png"), "-o", rows, "--prompt", "Mine"]) == 2
        assert contents(folder / "out") == before
        return run(*given, **more)

    monkeypatch.setattr(report, "run_batch_and_report", spied)
    said = read("--overwrite")[1]
    assert f"npu-runner read (pid {os.getpid()}) is at work on them" in said
    assert locked == [str(os.getpid())]
    assert not (folder / "out" / "pages.jsonl.lock").exists()


def test_rows_of_the_user_are_replaced_only_by_overwrite(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = folder / "new" / "pages.jsonl"
    mine.parent.mkdir()
    mine.write_text("mine\n")
    arguments = ["read", str(folder / "docs" / "c.png"), "-o", str(mine.parent), "--prompt", "What is it?", *SMALL]
    assert cli.main(arguments) == 2
    assert "are there already, and this command makes others; --overwrite replaces them" in capsys.readouterr().err
    assert contents(mine.parent) == {mine: b"mine\n"}
    assert cli.main([*arguments, "--overwrite"]) == 0
    assert len(read_rows(mine)) == 1


def test_a_trial_with_answers_keeps_its_rows(read: Read, folder: Path) -> None:
    trial = folder / "out" / "sample-9"
    assert read("--sample", "9")[0] == 3
    before = contents(trial)
    status, said = read("--sample", "9", "--dpi", "36")
    assert (status, "have answers, and this command makes others; --overwrite replaces" in said) == (2, True)
    assert contents(trial) == before
    pdf(folder / "docs" / "z.pdf", A7)
    status, said = read("--sample", "9")
    assert (status, "resuming: 5 of 6 rows are finished" in said) == (3, True)
    assert "z.pdf" in (trial / "pages.jsonl.documents.jsonl").read_text()
    assert read("--sample", "9", "--dpi", "36", "--overwrite")[0] == 3
    assert all(row["body"]["messages"][-1]["content"][0]["image_url"]["dpi"] == 36
               for row in read_rows(trial / "pages.jsonl") if "a.pdf" in row["custom_id"])


def test_replaced_answers_are_no_further_pages(read: Read, folder: Path) -> None:
    """Every answer is cut off at 2 tokens, and tried again."""
    assert read("--overwrite", "--max-tokens", "2")[0] == 3
    status, said = read("--retry", "cut_off", "--max-tokens", "2")
    assert (status, "retry: 4 answers are replaced" in said) == (3, True)
    found = summary(folder)
    (job,) = found["jobs"]
    assert job["tokens"]["completion"] == 2 * 4 * 2
    assert found["tokens_per_page"] == 2
    assert found["pages_per_second"] == round(8 / job["seconds"]["serve"], 3)
    assert "2 tokens per page" in said.splitlines()[-1]


@pytest.mark.parametrize(("num_recorded", "tokens"), [(2, 5), (0, None)])
def test_answers_after_the_last_status_of_a_killed_run_are_pages(read: Read, folder: Path, num_recorded: int,
                                                                 tokens: int | None) -> None:
    """Its seconds are known, and the tokens of the answers before."""
    for path in (folder / "out").glob("answers.jsonl.*.json"):
        state = json.loads(path.read_text())
        for run in state.get("runs", []):
            run["tally"] |= {"num_answered": num_recorded, "num_completion_tokens": 5 * num_recorded}
        path.write_text(json.dumps(state))
    status, said = read()
    found = summary(folder)
    (job,) = found["jobs"]
    assert (status, job["rows"]["unrecorded"], found["tokens_per_page"]) == (3, 4 - num_recorded, tokens)
    assert found["pages_per_second"] == round(4 / job["seconds"]["serve"], 3)
    assert ("tokens per page" in said.splitlines()[-1]) is (tokens is not None)


def test_a_document_that_changed_is_refused_with_the_remedy(read: Read, folder: Path) -> None:
    before = markdown(folder)
    pdf(folder / "docs" / "reports" / "a.pdf", A7)
    status, said = read()
    assert status == 2
    assert "document 'reports/a.pdf': has changed since its rows were made" in said
    assert "read: --overwrite, or another folder" in said
    assert markdown(folder) == before


def test_an_image_that_changed_is_refused_alike(read: Read, folder: Path) -> None:
    before = markdown(folder)
    Image.new("RGB", (60, 40), "blue").save(folder / "docs" / "c.png")
    status, said = read()
    assert status == 2
    assert "document 'c.png': has changed since its rows were made" in said
    assert markdown(folder) == before
    (folder / "docs" / "c.png").unlink()
    status, said = read()
    assert status == 3
    assert "gone      1 document, as 'c.png'" in said
    assert markdown(folder) == before


def test_an_image_that_was_none_is_mended_and_answered(read: Read, folder: Path) -> None:
    (folder / "docs" / "z.png").write_bytes(b"")
    assert read()[0] == 3
    assert b"image_empty" in markdown(folder)["z.png.md"]
    Image.new("RGB", (60, 40), "blue").save(folder / "docs" / "z.png")
    assert read("--retry", "errors")[0] == 3, "the broken document"
    assert b"has no answer" not in markdown(folder)["z.png.md"]


@pytest.mark.parametrize("reader", [[], ["--reader", "shapes-reader"]], ids=["prompt", "reader"])
@pytest.mark.parametrize("before", ["empty", "one page"])
def test_a_tiff_that_has_more_pages_now_is_refused_alike(before: str, reader: list[str], tmp_path: Path,
                                                         capsys: pytest.CaptureFixture[str]) -> None:
    """It was copied while its rows were made, or replaced. It has a row of an image there."""
    pdf(tmp_path / "docs" / "a.pdf", A7)
    pages = [Image.new("L", (30, 40), shade) for shade in (10, 100, 200)]
    tiff = tmp_path / "docs" / "scan.tif"
    if before == "empty":
        tiff.write_bytes(b"")
    else:
        pages[0].save(tiff)
    Image.new("L", (30, 40)).save(tmp_path / "docs" / "z.png")
    command = ["rows", str(tmp_path / "docs"), "-o", str(tmp_path / "rows.jsonl"), *(reader or ["--prompt", "Read."])]
    assert cli.main(command) == 0
    rows = (tmp_path / "rows.jsonl").read_bytes()
    if before == "one page":  # the same file may be there again
        assert cli.main([*command, "--append"]) == 0
    capsys.readouterr()
    pages[0].save(tiff, save_all=True, append_images=pages[1:])
    for _ in range(2):
        assert cli.main([*command, "--append"]) == 2
        assert "document 'scan.tif': has changed since its rows were made" in capsys.readouterr().err
        assert (tmp_path / "rows.jsonl").read_bytes() == rows


def test_another_prompt_is_refused(read: Read) -> None:
    status, said = read(prompt="Another?")
    assert status == 2
    assert "were made with another reader, prompt or option" in said


def test_a_model_without_a_reader_needs_a_prompt(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["read", str(folder / "docs"), "-o", str(folder / "new"), *SMALL]) == 2
    assert "no shipped reader matches its files; name one with --reader" in capsys.readouterr().err
    assert not (folder / "new" / "pages.jsonl").exists()


def test_new_documents_are_added_and_gone_ones_kept(read: Read, folder: Path) -> None:
    before, answers = markdown(folder), (folder / "out" / "answers.jsonl").read_bytes()
    pdf(folder / "docs" / "a_first.pdf", A7, A7)
    os.unlink(folder / "docs" / "reports" / "a.pdf")
    status, said = read("--progress", "lines")
    assert status == 3, "an earlier page has failed"
    assert "made of   2 pages of 1 document" in said
    assert "gone      1 document, as 'reports/a.pdf'" in said
    assert "/7 pages" in said
    assert (folder / "out" / "answers.jsonl").read_bytes().startswith(answers)
    assert markdown(folder).items() > before.items()
    assert summary(folder)["documents"] == {"total": 4, "whole": 3, "with_gaps": 1}


def test_results_may_lie_below_the_documents_but_not_among_them(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = folder / "docs"
    shutil.rmtree(folder / "out")
    (folder / "linked").symlink_to(found)
    monkeypatch.chdir(found)
    arguments = ["--prompt", "What is it?", *SMALL]
    for sources in (["."], ["**/*"], ["."]):
        assert cli.main(["read", *sources, "-o", "../linked/out", *arguments]) == 3
        assert len(read_rows(found / "out" / "pages.jsonl")) == 5
    assert "nothing to do: all 5 rows are finished" in capsys.readouterr().err
    before = sorted(found.iterdir())
    assert cli.main(["read", ".", "-o", "../docs", "--sample", "2", *arguments]) == 2
    assert "output '../docs': is a folder of sources as well; name another one, such as '../docs/out'" in (
        capsys.readouterr().err)  # fmt: skip
    assert sorted(found.iterdir()) == before, "no folder is made, and no file"


def test_results_of_an_earlier_command_are_no_sources(read: Read, folder: Path) -> None:
    (folder / "out").rename(folder / "docs" / "out")
    pdf(folder / "docs" / "out" / "of_the_user.pdf", A7)
    status, said = read()
    assert status == 3
    assert "result of an earlier read" in said
    names = {row["custom_id"] for row in read_rows(folder / "out" / "pages.jsonl")}
    assert (len(names), "out/of_the_user.pdf#page=1" in names) == (6, True)


def test_documents_beside_the_results_are_read_where_a_pattern_matches_them(
        folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder / "docs" / "reports"
    pdf(out / "pages.csv.pdf", A7)
    for pattern, count in (("reports/*.pdf", 4), ("**/*.pdf", 5), ("**/*", 6)):
        command = ["read", str(folder / "docs" / pattern), "-o", str(out), "--prompt", "What is it?", *SMALL]
        status = cli.main([*command, "--overwrite"])
        assert (status, len(read_rows(out / "pages.jsonl"))) == (0 if count == 4 else 3, count)
        capsys.readouterr()
        assert cli.main(command) == status
        assert f"nothing to do: all {count} rows are finished" in capsys.readouterr().err


def test_fonts_that_were_installed_since_may_be_accepted(read: Read, folder: Path) -> None:
    manifest = folder / "out" / "answers.jsonl.manifest.json"
    text = manifest.read_text()
    digest = json.loads(text)["settings"]["prompts.decoders"]["pdf_fonts"]
    manifest.write_text(text.replace(digest, "0" * len(digest)))
    status, said = read("--retry", "errors")
    assert status == 2
    assert "go on knowingly with --accept-changed prompts.decoders" in said
    assert read("--retry", "errors", "--accept-changed", "prompts.decoders")[0] == 3, "one document is broken"


def test_a_sample_has_a_folder_of_its_own(read: Read, folder: Path) -> None:
    before = (folder / "out" / "pages.jsonl").read_bytes()
    status, said = read("--sample", "2", prompt="Another?")
    assert status in (0, 3)
    assert len(read_rows(folder / "out" / "sample-2" / "answers.jsonl")) == 2
    assert "sample-2" in said.splitlines()[-1]
    assert (folder / "out" / "pages.jsonl").read_bytes() == before


def test_a_reader_of_two_stages_reads_blocks(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The embedded model finds no layout, so that each page is asked about as a whole. A layout whose blocks are
    answered is not tried again: another one would have other blocks."""
    pdf(folder / "docs" / "reports" / "locked.pdf", A7, password="secret")
    arguments = ["read", str(folder / "docs" / "reports"), "-o", str(folder / "two"), "--reader", "mineru2.5-layout"]
    assert cli.main([*arguments, *SMALL]) == 3
    said = capsys.readouterr().err
    assert "made of   0 blocks of 0 pages, 4 pages without a block to read" in said
    assert len(read_rows(folder / "two" / "block-answers.jsonl")) == 4
    file = folder / "two" / "markdown" / "a.pdf.md"
    assert file.read_text().count("<!-- page ") >= 3
    found = json.loads((folder / "two" / "summary.json").read_text())
    assert found["pages"]["total"] == 4
    assert len(found["jobs"]) == 2
    before = (folder / "two" / "answers.jsonl").read_bytes()
    (folder / "passwords.json").write_text('{"*": "secret"}')
    again = ["--retry", "errors", "--pdf-passwords", str(folder / "passwords.json")]
    assert cli.main([*arguments, *SMALL, *again]) == 3
    assert "retry     of blocks alone" in capsys.readouterr().err
    assert (folder / "two" / "answers.jsonl").read_bytes() == before
    assert all(row["error"] is None for row in read_rows(folder / "two" / "block-answers.jsonl"))
    assert "may not be the last one" in (folder / "two" / "markdown" / "locked.pdf.md").read_text()


def test_what_a_message_says_of_overwrite_works(read: Read, folder: Path) -> None:
    before = (folder / "out" / "answers.jsonl").read_bytes()
    pdf(folder / "docs" / "new.pdf", A7)
    status, said = read("--image-max-pixels", "50176")
    assert status == 2
    assert "--overwrite to start afresh" in said
    assert (folder / "out" / "answers.jsonl").read_bytes() == before
    status, said = read(prompt="Another question?")
    assert status == 2
    assert "(read: --overwrite, or another folder)" in said
    (folder / "out" / "block-answers.jsonl").write_text("of other layouts\n")
    status, said = read("--image-max-pixels", "50176", "--overwrite", prompt="Another question?")
    assert (status, "resuming" in said, "5 answered" in said) == (3, False, True)
    assert not (folder / "out" / "block-answers.jsonl").exists()
    rows = read_rows(folder / "out" / "pages.jsonl")
    assert {row["body"]["messages"][-1]["content"][-1]["text"] for row in rows} == {"Another question?"}
    assert len(read_rows(folder / "out" / "answers.jsonl")) == len(rows) == 6


@pytest.mark.full("kills the command and starts it again, which loads the model each time")
def test_a_killed_command_goes_on_and_reads_each_page_once(tmp_path: Path) -> None:
    found = documents(tmp_path)
    pdf(found / "more.pdf", *[A7] * 40)
    command = [sys.executable, "-m", "npu_runner", "read", str(found), "--prompt", "What is it?", *SMALL]
    rng, killed, whole = random.Random(5), tmp_path / "killed", tmp_path / "whole"
    for _ in range(6):
        running = subprocess.Popen([*command, "-o", str(killed)], stderr=subprocess.DEVNULL)
        time.sleep(rng.uniform(1, 8))
        running.send_signal(signal.SIGKILL)
        running.wait()
    for folder in (killed, whole):
        done = subprocess.run([*command, "-o", str(folder)], capture_output=True, check=False)
        assert done.returncode == 3, done.stderr.decode()
    names = [row["custom_id"] for row in read_rows(killed / "answers.jsonl")]
    assert sorted(names) == sorted(row["custom_id"] for row in read_rows(killed / "pages.jsonl"))
    assert len(names) == len(set(names)) == 45
    for path in (whole / "markdown").rglob("*.md"):
        assert (killed / "markdown" / path.relative_to(whole / "markdown")).read_bytes() == path.read_bytes()
    for name in ("pages.jsonl", "pages.jsonl.documents.jsonl", "blocks.jsonl"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.parametrize("given", [None, *only_full("a file before the reader's ladder, or none", "file", "none")])
def test_read_uses_the_ladder_of_its_reader_unless_another_is_named(given: str | None, tmp_path: Path) -> None:
    """The embedded model writes no front matter, so the reader's parser refuses each attempt."""
    def step(temperature: float) -> dict[str, Any]:
        return {"when": ["unparsed"], "change": {"temperature": temperature}}

    (tmp_path / "docs").mkdir()
    Image.new("RGB", (60, 40), "red").save(tmp_path / "docs" / "c.png")
    reader = {"name": "mine", "about": "ours", "prompt": "?", "parser": "front_matter",
              "ladder": [step(0.2), step(0.4)]}  # fmt: skip
    mine = tmp_path / "mine.json"
    mine.write_text(json.dumps(reader))
    (tmp_path / "steps.json").write_text(json.dumps([step(0.9)]))
    more = {None: [], "file": ["--ladder", str(tmp_path / "steps.json")], "none": ["--ladder", "none"]}[given]
    command = ["read", str(tmp_path / "docs"), "-o", str(tmp_path / "out"), "--reader", str(mine), *more, *SMALL]
    assert cli.main(command) == 0
    (line,) = read_rows(tmp_path / "out" / "answers.jsonl")
    steps = {None: [1, 2], "file": [1], "none": []}[given]
    assert [each["step"] for each in line.get("attempts", [])] == steps
    assert line.get("best_of") == (len(steps) + 1 if steps else None)
    settings = json.loads((tmp_path / "out" / "answers.jsonl.manifest.json").read_text())["settings"]
    expected = {None: reader["ladder"], "file": [step(0.9)], "none": None}[given]
    assert settings.get("answers.ladder") == (expected and {"parser": "front_matter", "steps": expected})


@pytest.mark.parametrize(("option", "value", "said"), [
    ("--ladder", '[{"when": ["cut_off"], "change": {}}]', "step 1: changes nothing"),
    ("--ladder", '[{"when": ["rotated"], "change": {"top_p": 0.5}}]', "rotated and as_said read the answers of a read"),
    ("--ladder", None, "is no shipped reader and no file"), ("--report", None, "is in no existing folder"),
    ("--logprobs-mode", "raw_logits", "rows have fields of log probabilities alone"),
    ("--max-failures", "many", "neither a number of rows"), ("--retry", "all", "retry: "),
    ("--pdf-passwords", "[]", "pdf_passwords"),
])
def test_an_option_that_is_wrong_for_any_model_is_refused_before_a_page_is_opened(
        option: str, value: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither pages nor a model are opened: there are no rows, and the checkpoint has no weights."""
    from npu_runner.assets import SHAPES_VL

    model = tmp_path / "model"
    shutil.copytree(SHAPES_VL, model, ignore=shutil.ignore_patterns("*.safetensors"))
    Image.new("RGB", (60, 40), "red").save(tmp_path / "c.png")
    given = tmp_path / "no folder" / "given.json"
    if value is not None and value.startswith("["):
        given = tmp_path / "given.json"
        given.write_text(value)
        value = None
    status = cli.main(["read", str(tmp_path / "c.png"), "-o", str(tmp_path / "out"), "--prompt", "What is it?",
                       "--model", str(model), *SMALL, option, value or str(given)])
    assert (status, said in capsys.readouterr().err) == (2, True)
    assert not [path for path in (tmp_path / "out").glob("**/*") if path.is_file()]


def test_the_demos_documents_are_read_as_they_were_drawn(tmp_path: Path) -> None:
    """By the embedded reader, which its checkpoint names."""
    drawn = {f"station-{number}.pdf": inspection_pages(number) for number in (1, 2, 3)}
    (tmp_path / "documents").mkdir()
    for name, pages in drawn.items():
        write_document(tmp_path / "documents" / name, pages)
    arguments = ["read", str(tmp_path / "documents"), "-o", str(tmp_path / "out"), "--model", "shapes-reader"]
    assert cli.main([*arguments, "--platform", "cpu", "--kv-cache-bytes", "64M"]) == 0
    for name, pages in drawn.items():
        first, second = (page.markdown for page in pages)
        found = (tmp_path / "out" / "markdown" / f"{name}.md").read_text()
        assert found == f"<!-- page 1 -->\n\n{first}\n\n<!-- page 2 -->\n\n{second}\n"
