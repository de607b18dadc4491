"""Where a job writes: devices and pipes are written to, links are followed or refused, no name stands for two things.

Jobs run with a scripted engine; devices, pipes, links and file systems are real ones.
"""

from __future__ import annotations

import json
import os
import pickle
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from npu_runner.batch.files.output_lock import OutputLock
from npu_runner.batch.job.options import BatchOptions
from npu_runner.batch.job.run import job_places
from npu_runner.cli.options import Option, options_of, with_parts
from npu_runner.config import READ, WRITTEN, RunnerConfig
from npu_runner.errors import ConfigError, JobError
from npu_runner.reports.run_summary import run_json
from npu_runner.tables.options import MergeOptions, RowsOptions, TableOptions
from tests import zygote
from tests.batch.job_folder import LEFT, Job, numbered, overtaken
from tests.batch.mounts import mounted
from tests.batch.scripted import OvertakingEngine, read_rows, row, write_rows
from tests.full_set import only_full
from tests.replicas.jobs import PYTHONPATH

pytestmark = pytest.mark.usefixtures("fixed_time")
BESIDE = ["summary", "report"]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    job = Job(tmp_path)
    write_rows(job.input, [row("a"), row("b")])
    return job


@pytest.fixture
def null(tmp_path: Path) -> Path:
    path = tmp_path / "null"
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    except OSError:
        pytest.skip("this user may not make devices")
    return path


def script(folder: Path, closing: str = "", **given: Any) -> subprocess.CompletedProcess[bytes]:
    """A job of one replica in a process of its own. `given`: stdin, stdout and stderr, and options of the job.

    closing: what bash does to its descriptors; then it starts from nothing.
    """
    streams: dict[str, Any] = {name: given.pop(name, subprocess.PIPE) for name in ("stdout", "stderr")}
    streams["stdin"] = given.pop("stdin", None)
    fields = {"model": str(folder / "model"), "input": str(folder / "in.jsonl"), "output": str(folder / "out.jsonl"),
              "preprocessing_workers": 1, "progress": "off", **given}  # fmt: skip
    command = [sys.executable, "-m", "tests.replicas.scripted_job", json.dumps(fields)]
    start: Any = zygote
    if closing:
        command, start = ["bash", "-c", f'"$0" "$@" {closing}', *command], subprocess
    found: subprocess.CompletedProcess[bytes] = start.run(
        command, cwd=folder, env={**os.environ, "PYTHONPATH": PYTHONPATH}, **streams)
    return found


def is_null(path: Path) -> bool:
    found = path.stat()
    return stat.S_ISCHR(found.st_mode) and found.st_rdev == os.makedev(1, 3)


@pytest.mark.parametrize("option", [*BESIDE, "output"])
def test_a_device_is_written_to_and_stays_one(job: Job, null: Path, option: str) -> None:
    link = job.folder / "link"
    link.symlink_to(null)
    before = null.lstat().st_ino
    for name in (null, link):
        value = str(name) if option == "output" else name
        assert job.run(**{option: value}).exit_status == 0
    assert is_null(null)
    assert null.lstat().st_ino == before
    assert link.is_symlink()
    assert not any(path.name.endswith((".lock", ".new")) for path in job.folder.iterdir())


def test_a_full_device_is_told_and_the_answers_are_there(job: Job) -> None:
    with pytest.raises(JobError, match="summary /dev/full: No space left on device"):
        job.run(summary=Path("/dev/full"))
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)
    assert len(read_rows(job.output)) == 2


def test_a_disk_is_no_place(job: Job) -> None:
    disk = job.folder / "disk"
    try:
        os.mknod(disk, 0o600 | stat.S_IFBLK, os.makedev(7, 200))
    except OSError:
        pytest.skip("this user may not make devices")
    with pytest.raises(ConfigError, match=r"summary .*disk: is a disk"):
        job.run(summary=disk)


def test_a_named_pipe_takes_the_summary(job: Job) -> None:
    pipe, read = job.folder / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    summary = job.run(summary=pipe)
    reader.join()
    assert json.loads(read[0])["this_run"] == run_json(summary), "once, at the end"
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.parametrize("name", ["-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
def test_standard_output_takes_the_summary_and_nothing_else(job: Job, name: str) -> None:
    done = script(job.folder, summary=name)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows"]["answered"] == 2
    assert job.files() == LEFT


@pytest.mark.parametrize("name", ["-", "/dev/stdout"])
def test_a_file_that_standard_output_goes_to_is_added_to(job: Job, name: str) -> None:
    (job.folder / "log").write_text("before\n")
    with open(job.folder / "log", "ab") as log:
        script(job.folder, stdout=log, summary=name)
    first, _, rest = (job.folder / "log").read_text().partition("\n")
    assert first == "before"
    assert json.loads(rest)["this_run"]["exit_status"] == 0


def test_the_page_goes_to_standard_output(job: Job) -> None:
    done = script(job.folder, report="-")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(b"<!")
    assert not (job.folder / "-").exists()


@pytest.mark.parametrize("option", BESIDE)
def test_a_pipe_of_the_shell_is_written_to(job: Job, option: str) -> None:
    fields = {"model": str(job.model), "input": str(job.input), "output": str(job.output), "preprocessing_workers": 1,
              "progress": "off"}  # fmt: skip
    code = ("import json,sys; from tests.replicas import scripted_job; "
            f"sys.exit(scripted_job.main({{**json.loads(sys.argv[1]), {option!r}: sys.argv[2]}}))")  # fmt: skip
    with open(job.folder / "got", "wb") as got, subprocess.Popen("cat", stdin=subprocess.PIPE, stdout=got) as cat:
        assert cat.stdin is not None
        number = cat.stdin.fileno()
        done = zygote.run([sys.executable, "-c", code, json.dumps(fields), f"/dev/fd/{number}"], cwd=job.folder,
                          capture_output=True, pass_fds=[number],
                          env={**os.environ, "PYTHONPATH": PYTHONPATH})  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (job.folder / "got").read_bytes()[:1] in (b"{", b"<")


def test_standard_output_takes_one_thing(job: Job) -> None:
    for options in ({"output": "-", "summary": Path("-")}, {"summary": Path("-"), "report": Path("-")},
                    {"output": "/dev/stdout", "summary": Path("-")}):  # fmt: skip
        with pytest.raises(ConfigError, match=r"standard output: is the (output|report) as well"):
            job.run(**options)
    with pytest.raises(ConfigError, match="is no file; a stream cannot be resumed"):
        job.run(error_file=Path("-"))
    assert job.files() == set()


@pytest.mark.parametrize(("shell", "summary"), [
    (">&-", "-"), *only_full("one that is open, but not for writing", ("3< in.jsonl", "/dev/fd/3"))])
def test_a_closed_descriptor_is_refused(job: Job, shell: str, summary: str) -> None:
    done = script(job.folder, shell, summary=summary)
    assert done.returncode == 2
    assert b"this descriptor is" in done.stderr
    assert job.files() == set()


@pytest.mark.parametrize("option", BESIDE)
def test_a_link_is_followed_and_stays_one(job: Job, option: str) -> None:
    (job.folder / "there").mkdir()
    link = job.folder / "link"
    link.symlink_to("there/real")
    for _ in range(2):
        job.run(**{option: link})
        assert link.is_symlink()
        assert (job.folder / "there" / "real").stat().st_size > 100
    assert [path.name for path in (job.folder / "there").iterdir()] == ["real"]


OWN = ["out.jsonl.status.json", ".out.jsonl.status.json.new",
       "out.jsonl.manifest.json", "out.jsonl.suspects.json", "out.jsonl.rows", "out.jsonl.runs.jsonl", "out.jsonl.lock",
       ".out.jsonl.new", ".out.jsonl.rows.new", ".out.jsonl.manifest.json.new", "e.jsonl.lock", ".e.jsonl.new"]


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("option", [*BESIDE, "error_file"])
def test_no_name_is_one_of_the_jobs_own_files(job: Job, option: str, name: str) -> None:
    if option == "error_file" and "e.jsonl" in name:
        pytest.skip("the error file's own files go by its name")
    options = {"error_file": job.folder / "e.jsonl", option: job.folder / name}
    with pytest.raises(ConfigError, match=rf"{option} .*: is the .* of the (output|error_file), which the job makes"):
        job.run(**options)
    assert job.files() == set()


def test_no_name_is_the_next_version_of_another(job: Job) -> None:
    with pytest.raises(ConfigError, match=r"report .*: is the next version of the summary"):
        job.run(summary=job.folder / "s", report=job.folder / ".s.new")


def test_no_two_names_are_one_file(job: Job) -> None:
    schema, other = job.folder / "schema.json", job.folder / "hard_link"
    schema.write_text('{"type": "object"}')
    os.link(schema, other)
    loop = job.folder / "model" / ".." / "schema.json"
    for options, match in (
        ({"summary": schema, "response_schema": schema}, "summary .*: is the response_schema as well"),
        ({"summary": other, "response_schema": schema}, "summary .*: is the response_schema as well"),
        ({"report": loop, "response_schema": schema}, "report .*: is the response_schema as well"),
        ({"output": str(schema), "response_schema": schema}, "output .*: is the response_schema as well"),
        ({"error_file": schema, "response_schema": schema}, "error_file .*: is the response_schema as well"),
        ({"summary": job.folder / "s", "report": job.folder / "s"}, "summary .*: is the report as well"),
        ({"metrics_file": job.output}, "metrics_file .*: is the output as well"),
        ({"metrics_file": job.input}, "metrics_file .*: is the input as well"),
        ({"metrics_file": Path("-")}, "metrics_file standard output: is a stream, and it is replaced"),
        ({"summary": job.model / "config.json"}, "summary .*: is the model's config.json"),
    ):
        with pytest.raises(ConfigError, match=match):
            job.run(**options)
    assert schema.read_text() == '{"type": "object"}'
    assert job.engines == []


def settings_of(*kinds: type) -> dict[str, Option]:
    return {option.field.name: option for kind in kinds for _, part in with_parts("", kind)
            for option in options_of(part)}  # fmt: skip


JOB = settings_of(BatchOptions, RunnerConfig)
READ_BY_JOB = [name for name, option in JOB.items() if option.field.metadata.get("file") == READ]
WRITTEN_BY_JOB = [name for name, option in JOB.items() if option.field.metadata.get("file") == WRITTEN]


def test_every_option_that_names_a_file_says_whether_it_is_read_or_written() -> None:
    # The folder of `markdown` may hold files that are read: each file of it is looked at when it is written.
    some = {"ladder", "markdown", "model", "reader"}
    for options in (JOB, *map(settings_of, (RowsOptions, TableOptions, MergeOptions))):
        named = {name for name, option in options.items() if option.kind is Path or option.values in ("FILE", "PATH")}
        said = {name for name, option in options.items() if "file" in option.field.metadata}
        assert named - some == said - some
    assert settings_of(RowsOptions)["reader"].field.metadata["file"] == READ
    some_read = {"allowed_media_dir", "chat_template", "input", "ladder", "lora", "model", "response_schema"}
    assert some_read < set(READ_BY_JOB)
    assert {"output", "error_file", "summary", "report", "metrics_file"} == set(WRITTEN_BY_JOB)


@pytest.mark.parametrize("written", WRITTEN_BY_JOB)
@pytest.mark.parametrize("read", READ_BY_JOB)
def test_no_file_that_an_option_reads_is_written_over(job: Job, read: str, written: str) -> None:
    """By its name, by a hard link of it, and, of a folder, a file in it."""
    schema, template, media, adapter = (job.folder / name for name in ("s.json", "t.jinja", "media", "adapter"))
    schema.write_text('{"type": "object"}')
    (passwords := job.folder / "passwords").write_text("{}")
    (ladder := job.folder / "ladder").write_text('[{"when": ["cut_off"], "change": {"max_tokens": 9}}]')
    template.write_text("{{ messages }}")
    media.mkdir(), adapter.mkdir()
    (media / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(60))
    (adapter / "adapter_config.json").write_text("{}")
    (adapter / "adapter_model.safetensors").write_bytes(bytes(8))
    files = {"input": [job.input], "response_schema": [schema], "chat_template": [template],
             "allowed_media_dir": [media / "a.png"], "model": [job.model / "config.json"],
             "lora": [*adapter.iterdir()], "pdf_passwords": [passwords], "ladder": [ladder]}  # fmt: skip
    for path in files[read]:
        link = job.folder / "link"
        os.link(path, link)
        before = path.read_bytes()
        for place in (path, link):
            options = {"input": str(job.input), "output": str(job.output), "allowed_media_dir": media,
                       "response_schema": schema, "pdf_passwords": passwords, "ladder": str(ladder)}
            with pytest.raises(ConfigError, match=rf"{written} .*: is (the {read}|an image or a video \(PNG\))"):
                job_places(BatchOptions.from_keywords(**options | {written: place}), RunnerConfig.from_keywords(
                    model=str(job.model), chat_template=str(template), lora=str(adapter)))  # fmt: skip
        assert path.read_bytes() == before
        link.unlink()


def test_a_template_that_is_given_as_text_names_no_file(job: Job) -> None:
    config = RunnerConfig.from_keywords(model=str(job.model), chat_template="{{ messages }}\0")
    job_places(BatchOptions.from_keywords(input=str(job.input), output=str(job.output)), config)
    copy = pickle.loads(pickle.dumps(RunnerConfig.from_keywords("m", chat_template=__file__).replace(seed=1)))
    assert copy.prompts.chat_template == Path(__file__).read_text()
    assert copy.prompts.chat_template.file == Path(__file__)


def test_what_standard_streams_come_from_and_go_to_is_not_replaced(job: Job) -> None:
    before = job.input.read_bytes()
    with job.input.open("rb") as rows:
        done = script(job.folder, stdin=rows, input="-", summary=str(job.input))
    assert (done.returncode, job.input.read_bytes()) == (2, before)
    assert b"is the input as well" in done.stderr
    with open(job.folder / "log", "wb") as log:
        done = script(job.folder, stderr=log, summary=str(job.folder / "log"))
    assert done.returncode == 2
    assert "is the file that standard error goes to" in (job.folder / "log").read_text()


@pytest.fixture
def victim(job: Job) -> Path:
    path = job.folder / "victim"
    path.write_text("somebody's\n")
    return path


PLANTED = ["out.jsonl.lock", ".out.jsonl.manifest.json.new", ".s.json.new", ".r.html.new", "out.jsonl.manifest.json",
           "out.jsonl.status.json", ".out.jsonl.status.json.new",
           ".out.jsonl.new", "out.jsonl.runs.jsonl"]


@pytest.mark.parametrize("plant", [os.symlink, *only_full("links of the other kind", os.link)],
                         ids=["link", "hard link"])
@pytest.mark.parametrize("name", PLANTED)
def test_a_link_that_somebody_planted_is_not_written_through(job: Job, victim: Path, name: str, plant: Any) -> None:
    (job.folder / name).unlink(missing_ok=True)
    plant(victim, job.folder / name)
    options = {"summary": job.folder / "s.json", "report": job.folder / "r.html", "ordered": True}
    if name.endswith((".lock", "l.manifest.json", "l.runs.jsonl")):
        with pytest.raises(ConfigError, match=rf"{name}: (is a link|cannot be read|no line of it can be read)"):
            job.run(**options)
    else:
        assert job.run(**options).exit_status == 0
        assert sorted(job.names()) == ["a", "b"]
        is_replaced = name.endswith(("l.new", "status.json"))
        assert is_replaced or not os.path.lexists(job.folder / name), "nothing of it is left"
    assert victim.read_text() == "somebody's\n"


def test_a_new_version_that_is_planted_is_not_written_through(job: Job, victim: Path) -> None:
    """An output that is put in order, with a link where its next version is written."""
    write_rows(job.input, [row(text, text) for text in numbered(16)])
    job.run(OvertakingEngine)
    assert job.names() == overtaken(numbered(16))
    (job.folder / ".out.jsonl.new").symlink_to(victim)
    job.run(ordered=True)
    assert job.names() == numbered(16)
    assert not job.output.is_symlink()
    assert victim.read_text() == "somebody's\n"


def test_a_lock_that_is_no_file_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "out.jsonl.lock")
    with pytest.raises(ConfigError, match="is a link, or no file"), OutputLock(tmp_path / "out.jsonl"):
        pass


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A folder of a read-only file system."""
    folder = tmp_path / "read_only"
    folder.mkdir()
    with mounted(folder, "ro"):
        yield folder


@pytest.mark.parametrize("option", [*BESIDE, "output", "error_file"])
def test_a_read_only_place_is_refused_before_the_model_loads(job: Job, read_only: Path, option: str) -> None:
    value = str(read_only / "x") if option == "output" else read_only / "x"
    with pytest.raises(ConfigError, match="Read-only file system; choose a place that exists and can be written"):
        job.run(**{option: value})
    assert job.engines == []
    assert not job.output.exists()


@pytest.mark.parametrize("option", BESIDE)
def test_a_place_without_permission_is_refused(tmp_path: Path, option: str) -> None:
    """As a user who is not root."""
    folder = tmp_path / "theirs"
    folder.mkdir(mode=0o755)
    code = ("import os,sys; from npu_runner.batch.files.place import Place\n"
            "if os.geteuid() == 0: os.setgid(65534); os.setuid(65534)\n"
            f"Place({option!r}, sys.argv[1]).__enter__()")  # fmt: skip
    if os.geteuid() != 0:
        folder.chmod(0o555)
    for parent in (tmp_path, *tmp_path.parents[:2]):
        parent.chmod(parent.stat().st_mode | 0o055)
    done = zygote.run([sys.executable, "-c", code, str(folder / "x")], capture_output=True, text=True)
    assert "ConfigError" in done.stderr
    assert "Permission denied; choose a place that exists and can be written" in done.stderr


def test_a_file_that_is_mounted_by_itself_is_refused(job: Job) -> None:
    """As a container has it: the file is of another file system than its folder."""
    target, source = job.folder / "a summary.json", Path("/dev/shm") / f"{os.getpid()}.json"
    for path in (target, source):
        path.write_text("{}")
    try:
        if subprocess.run(["mount", "--bind", source, target], capture_output=True).returncode:
            pytest.skip("this user may not mount a file")
        with pytest.raises(ConfigError, match="is mounted by itself"):
            job.run(summary=target)
    finally:
        subprocess.run(["umount", target], capture_output=True)
        source.unlink()


def test_an_output_that_takes_no_rows_is_refused_before_the_model_loads(job: Job) -> None:
    job.run()
    write_rows(job.input, [row("a"), row("b"), row("c")])
    try:
        subprocess.run(["chattr", "+i", job.output], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this user, or this file system, makes no file immutable")
    try:
        with pytest.raises(ConfigError, match=r"output .*Operation not permitted"):
            job.run()
    finally:
        subprocess.run(["chattr", "-i", job.output], check=True)
    assert len(job.engines) == 1
