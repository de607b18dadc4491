"""Whatever a source holds: a clear error or the right row, and nothing is written but what was asked for."""

from __future__ import annotations

import base64
import json
import math
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from npu_runner.batch.rows.openai_format import parse_row, read_json
from npu_runner.batch.rows.shape import name_of, row_key
from npu_runner.errors import ConfigError
from npu_runner.prompts.media.media import load_media
from npu_runner.request.limits import LIMITS
from npu_runner.tables import records as record_reader
from tests.batch.scripted import write_rows
from tests.full_set import examples
from tests.tables.made import asked, made, rows, shown

EASY = settings(max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
NAMES = [
    b"a\nb.png",
    b"a..b.png",
    b"caf\xe9.png",
    b"\xff\xfe.png",
    "\N{SNOWMAN}.png".encode(),
    b"data:x.png",
    b"FILE:y.png",
    b"a%20b.png",
    b"x://y.png",
    b" .png",
    b"q?#.png",
    b"n" * 251 + b".png",
    b"tab\t\"'\\.png",
]


def contents(folder: Path) -> set[bytes]:
    return {
        os.fsencode(os.path.relpath(os.path.join(top, name), folder))
        for top, _, names in os.walk(folder)
        for name in names
    }


def rows_or_error(folder: Path, source: Path, **options: Any) -> list[dict[str, Any]] | str:
    try:
        return rows(folder / "r.jsonl", source, **options)
    except ConfigError as error:
        return str(error)


def test_files_of_any_name_are_found_by_the_job(tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path / "in")
    os.mkdir(folder)
    for name in NAMES:
        path = os.path.join(folder, *name.replace(b"x://y", b"x:/y").split(b"/"))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        Path(os.fsdecode(path)).write_bytes(name)
    found = rows(tmp_path / "r.jsonl", tmp_path / "in", keep=("name", "folder"))
    assert len(found) == len(NAMES)
    loaded = [load_media(shown(row)[0], tmp_path / "in") for row in found]
    assert sorted(loaded) == sorted(NAMES)
    assert len({row["custom_id"] for row in found}) == len(NAMES)
    by_name = dict(zip(loaded, found, strict=True))
    assert by_name[b"caf\xe9.png"]["custom_id"] == "caf\\xe9.png"
    assert shown(by_name[b"caf\xe9.png"])[0].startswith("file:///")
    assert shown(by_name[b"a\nb.png"]) == ["a\nb.png"]
    for line in (tmp_path / "r.jsonl").read_bytes().splitlines():
        assert name_of(line) == json.loads(line)["custom_id"]
        parse_row(read_json(line))


def test_two_names_that_look_alike_are_an_error(tmp_path: Path) -> None:
    for name in (b"caf\xe9.png", b"caf\\xe9.png"):
        Path(os.fsdecode(os.path.join(os.fsencode(tmp_path), name))).write_bytes(b"")
    with pytest.raises(ConfigError, match=r"is that of .* and of"):
        rows(tmp_path / "r.jsonl", tmp_path)


def test_a_path_too_long_for_an_id_keeps_its_beginning_and_a_digest(tmp_path: Path) -> None:
    deep = tmp_path.joinpath(*["d" * 240] * 5)
    deep.mkdir(parents=True)
    for name in ("a.png", "b.png"):
        (deep / name).write_bytes(b"")
    first, second = rows(tmp_path / "r.jsonl", tmp_path)
    assert first["custom_id"] != second["custom_id"]
    assert {len(row["custom_id"]) for row in (first, second)} == {LIMITS.max_custom_id_chars}
    assert first["custom_id"].startswith("d" * 240)
    parse_row(first)


@pytest.mark.parametrize("address", ["../../etc/passwd", "/etc/passwd", "file:///etc/passwd", "http://x/y.png", "a\nb"])
def test_an_address_in_a_cell_goes_to_the_job_as_it_is(tmp_path: Path, address: str) -> None:
    source = write_rows(tmp_path / "t.jsonl", [{"image": address}])
    assert shown(rows(tmp_path / "r.jsonl", source, image=("image",))[0]) == [address]
    assert contents(tmp_path) == {b"t.jsonl", b"r.jsonl"}


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@EASY
@given(
    st.lists(
        st.dictionaries(st.sampled_from(["a", "custom_id", "record", "x y", ""]), VALUES, max_size=4),
        min_size=1,
        max_size=4,
    )
)
@example([{"a": math.nan}, {"a": math.inf}, {"a": [math.nan]}, {"a": 2**64 - 1}])
@example([{"a": "\ud800"}])
def test_any_record_of_json_is_a_row_or_an_error(tmp_path: Path, records: list[dict[str, Any]]) -> None:
    source = write_rows(tmp_path / "t.jsonl", records)
    found = rows_or_error(tmp_path, source, keep=tuple(sorted(set().union(*records))))
    if isinstance(found, str):
        assert "t.jsonl" in found
        return
    for record, row in zip(records, found, strict=True):
        parse_row(row)
        for name, value in record.items():
            kept = row["body"].get("metadata", {})[name]
            if isinstance(value, (list, dict)):
                assert isinstance(kept, str)
                assert json.dumps(json.loads(kept)) == json.dumps(value)
            elif isinstance(value, float) and not math.isfinite(value):
                assert kept == (None if math.isnan(value) else str(value))
            else:
                assert (kept, type(kept)) == (value, type(value))


@EASY
@given(
    st.binary(max_size=60) | st.text(max_size=60).map(str.encode), st.sampled_from(["csv", "jsonl", "parquet", "arrow"])
)
@example(b"a,b\n1\n", "csv")
@example(b'a\n"1', "csv")
@example(b"a\n\x00", "csv")
def test_any_bytes_are_rows_or_an_error_that_names_the_file(tmp_path: Path, data: bytes, ending: str) -> None:
    (tmp_path / f"t.{ending}").write_bytes(data)
    found = rows_or_error(tmp_path, tmp_path / f"t.{ending}")
    assert f"t.{ending}" in found if isinstance(found, str) else all(parse_row(row) for row in found)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.95, 0.999])
def test_a_parquet_that_is_cut_short_is_an_error_and_leaves_nothing(tmp_path: Path, share: float) -> None:
    pq.write_table(
        pa.table({"text": [str(number) * 50 for number in range(2000)]}), tmp_path / "t.parquet", row_group_size=100
    )
    data = (tmp_path / "t.parquet").read_bytes()
    (tmp_path / "t.parquet").write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ConfigError, match="is no whole file of Parquet"):
        rows(tmp_path / "r.jsonl", tmp_path / "t.parquet", keep=("text",))
    assert contents(tmp_path) == {b"t.parquet"}


def test_a_saved_dataset_that_is_cut_short_is_an_error(tmp_path: Path) -> None:
    table = pa.table({"text": ["a" * 100] * 1000})
    with pa.OSFile(str(tmp_path / "t.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    data = (tmp_path / "t.arrow").read_bytes()
    (tmp_path / "t.arrow").write_bytes(data[:5000])
    with pytest.raises(ConfigError, match="is no whole file of a saved dataset"):
        rows(tmp_path / "r.jsonl", tmp_path / "t.arrow")


def test_a_line_of_a_csv_that_is_longer_than_a_row_may_be_is_an_error(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(record_reader, "_MAX_BYTES", 1 << 20)
    (tmp_path / "t.csv").write_bytes(b"a,b\n" + b"x" * (2 << 20))
    with pytest.raises(ConfigError, match="line 2: is longer than 1 MiB"):
        rows(tmp_path / "r.jsonl", tmp_path / "t.csv")
    (tmp_path / "t.csv").write_bytes(b'a,b\n"' + b"x" * 700_000 + b"\n" + b"y" * 700_000)
    with pytest.raises(ConfigError, match="line 2: no CSV"):
        rows(tmp_path / "r.jsonl", tmp_path / "t.csv")


@pytest.mark.full("a CSV of one line of 100 MB is written and read")
def test_a_csv_of_one_line_of_100_mb_is_a_row(tmp_path: Path) -> None:
    size = 100_000_000
    (tmp_path / "t.csv").write_bytes(b"n,text\n1," + b"x" * size)
    (tmp_path / "t").write_text("{{ text }}")
    made(tmp_path / "r.jsonl", tmp_path / "t.csv", template=tmp_path / "t")
    line = (tmp_path / "r.jsonl").read_bytes()
    assert line.count(b"x") == size
    assert name_of(line) == "t.csv#1"


@pytest.mark.parametrize(("text", "words"), [
    ("a,b\n1,2,3\n", "line 2: has 3 cells, the first line has 2"), ("a,a\n1,2\n", "two columns are called 'a'"),
    ("a,b\n", "no record"), ("", "no record"), ("a\n\"x\"y\n", "line 2: no CSV"), ("a\n\"x\ny\n", "line 2: no CSV"),
])  # fmt: skip
def test_what_is_no_csv_is_an_error_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(ConfigError, match=words):
        rows(tmp_path / "r.jsonl", tmp_path / "t.csv")


def test_a_csv_that_is_not_utf8_is_an_error_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b"a\nok\ncaf\xe9\n")
    with pytest.raises(ConfigError, match="line 3: byte 3 is not UTF-8"):
        rows(tmp_path / "r.jsonl", tmp_path / "t.csv", keep=("a",))


def test_bytes_are_no_metadata(tmp_path: Path) -> None:
    pq.write_table(pa.table({"data": [b"x"], "nested": [[b"x"]]}), tmp_path / "t.parquet")
    (tmp_path / "t").write_text("{{ data }}")
    for options, words in (
        ({"keep": ("data",)}, "holds bytes"),
        ({"keep": ("nested",)}, "cannot be metadata"),
        ({"template": tmp_path / "t"}, "bytes are printed"),
    ):
        with pytest.raises(ConfigError, match=words):
            rows(tmp_path / "r.jsonl", tmp_path / "t.parquet", **options)  # type: ignore[arg-type]


def test_embedded_images_are_written_below_the_media_folder_and_nowhere_else(tmp_path: Path) -> None:
    outside, media = tmp_path / "outside", tmp_path / "media"
    outside.mkdir(), media.mkdir()
    images = [b"\x89PNG" + bytes([number]) * 40 for number in range(5)]
    urls = ["data:image/png;base64," + base64.b64encode(data).decode() for data in images]
    source = write_rows(tmp_path / "t.jsonl", [{"image": url} for url in [*urls, *urls]])
    found = rows(tmp_path / "r.jsonl", source, image=("image",), media_dir=media)
    assert [load_media(shown(row)[0], media) for row in found] == [*images, *images]
    assert len(contents(media)) == len(images)
    before = {name: (media / os.fsdecode(name)).stat().st_mtime_ns for name in contents(media)}
    again = rows(tmp_path / "again.jsonl", source, image=("image",), media_dir=media)
    assert again == found
    assert before == {name: (media / os.fsdecode(name)).stat().st_mtime_ns for name in contents(media)}, "written once"
    name = shown(found[0])[0]
    (media / name).write_bytes(b"torn")  # a power cut
    rows(tmp_path / "r.jsonl", source, image=("image",), media_dir=media)
    assert (media / name).read_bytes() == images[0]
    for path in (media / name.split("/")[0]).iterdir():
        path.unlink()
    (media / name.split("/")[0]).rmdir()
    os.symlink(outside, media / name.split("/")[0])
    with pytest.raises(ConfigError, match="media_dir"):
        rows(tmp_path / "r.jsonl", source, image=("image",), media_dir=media)
    assert not contents(outside)


def test_images_are_on_disk_before_the_rows_that_name_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that an earlier command has written, and was killed before it synced it."""
    media, synced = tmp_path / "media", []
    media.mkdir()
    urls = ["data:;base64," + base64.b64encode(b"\x89PNG" + bytes([number]) * 40).decode() for number in range(3)]
    source = write_rows(tmp_path / "t.jsonl", [{"image": url} for url in urls])
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    one = write_rows(tmp_path / "one.jsonl", [{"image": urls[0]}])
    rows(tmp_path / "r.jsonl", one, image=("image",), media_dir=media)
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    found = rows(tmp_path / "r.jsonl", source, image=("image",), media_dir=media)
    before = synced[: synced.index(str(tmp_path / ".r.jsonl.new"))]
    files = [media / shown(row)[0] for row in found]
    for path in files:
        # Its bytes, then its name, then that of the folder.
        assert before.index(str(path)) < before.index(str(path.parent)) < before.index(str(media)), path


def test_a_broken_data_url_and_bytes_without_a_folder_are_errors(tmp_path: Path) -> None:
    (tmp_path / "media").mkdir()
    source = write_rows(tmp_path / "t.jsonl", [{"image": "data:image/png;base64,%%%"}])
    with pytest.raises(ConfigError, match="column 'image': the data: URL is not valid base64"):
        rows(tmp_path / "r.jsonl", source, image=("image",), media_dir=tmp_path / "media")
    pq.write_table(pa.table({"image": [b"\x89PNG"]}), tmp_path / "t.parquet")
    with pytest.raises(ConfigError, match="name a folder for such images with --media-dir"):
        rows(tmp_path / "r.jsonl", tmp_path / "t.parquet", image=("image",))


@pytest.mark.parametrize(
    "name",
    [
        "answers.jsonl",
        "errors.jsonl",
        "answers.jsonl.manifest.json",
        "answers.jsonl.lock",
        "answers.jsonl.runs.jsonl",
        "answers.jsonl.status.json",
        "t.jsonl",
        "p.txt",
        ".answers.jsonl.new",
        "in/a.jsonl",
        "s.json",
        "media/a.png",
    ],
)
def test_rows_are_never_written_over_a_source_or_a_jobs_files(tmp_path: Path, name: str) -> None:
    (tmp_path / "answers.jsonl.manifest.json").write_text('{"error_file": "errors.jsonl"}')
    (tmp_path / "in").mkdir()
    for file in ("answers.jsonl", "errors.jsonl", "t.jsonl", "in/a.jsonl"):
        write_rows(tmp_path / file, [{"a": "b"}])
    (tmp_path / "p.txt").write_text("?")
    (tmp_path / "s.json").write_text("{}")
    (tmp_path / "media").mkdir()
    (tmp_path / "media" / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    os.symlink(tmp_path / name, tmp_path / "link")
    before = {
        path: (tmp_path / os.fsdecode(path)).read_bytes()
        for path in contents(tmp_path)
        if path != b"link" and (tmp_path / os.fsdecode(path)).exists()
    }
    for output in (name, "link"):
        with pytest.raises(ConfigError, match=r"^rows .*(is the|is a source|is an image)"):
            rows(
                tmp_path / output,
                tmp_path / "t.jsonl",
                tmp_path / "in",
                prompt_file=tmp_path / "p.txt",
                schema=tmp_path / "s.json",
                media_dir=tmp_path,
            )
    assert before == {path: (tmp_path / os.fsdecode(path)).read_bytes() for path in before}
    assert row_key("a", 0) != row_key("b", 0)


def test_a_prompt_keeps_every_character(tmp_path: Path) -> None:
    text = '\N{SNOWMAN} \x00 \x1f \u2028 " \\ </script>'
    source = write_rows(tmp_path / "t.jsonl", [{"text": text}])
    (tmp_path / "t").write_text("{{ text }}")
    assert asked(rows(tmp_path / "r.jsonl", source, template=tmp_path / "t")[0]) == text
