"""Sources become rows in one order, under one id each; pyarrow and pandas say what is in a file."""

from __future__ import annotations

import itertools
import os
import random
import tempfile
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from npu_runner.batch.rows.openai_format import parse_row
from npu_runner.errors import ConfigError
from npu_runner.prompts.media.media import load_media
from npu_runner.tables.sources import find_sources
from tests.tables.made import asked, made, rows, shown

SAVED = Path(__file__).parent / "saved_dataset"
"""Made by `save_to_disk` of Hugging Face's datasets 5.2.0: three records, two of them with the same image."""


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    names = [
        "b.png",
        "a.JPG",
        "sub/c.webp",
        "sub.png",
        "sub/deep/d.gif",
        "film.mp4",
        ".hidden.png",
        ".cache/x.png",
        "notes.txt",
        "README",
    ]
    random.shuffle(names)  # as the file system may list them
    for name in names:
        path = tmp_path / "pictures" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    return tmp_path / "pictures"


def test_a_folder_gives_its_images_and_videos_by_name(pictures: Path, tmp_path: Path) -> None:
    found = rows(tmp_path / "r.jsonl", pictures)
    names = ["a.JPG", "b.png", "film.mp4", "sub/c.webp", "sub/deep/d.gif", "sub.png"]
    assert [row["custom_id"] for row in found] == names
    for row, name in zip(found, names, strict=True):
        (url,) = shown(row)
        assert load_media(url, pictures) == name.encode(), "the job finds it below the common root"
        kind = row["body"]["messages"][0]["content"][0]["type"]
        assert kind == ("video_url" if name == "film.mp4" else "image_url")


def test_what_is_left_out_is_said(pictures: Path, tmp_path: Path) -> None:
    said = made(tmp_path / "r.jsonl", pictures, prompt="?").to_lines()
    named = "1 .txt, 2 hidden, 1 without ending"
    assert f"left out  4 files that are no document, image, video or table by name: {named}" in said
    assert f"--allowed-media-dir {pictures}" in said[-1]


def test_links_that_are_not_followed_and_pipes_are_counted(pictures: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (pictures / "linked").symlink_to(tmp_path / "other")
    (pictures / "a_copy.png").symlink_to(pictures / "b.png")
    for name in ("gone.png", "loop.pdf"):
        (pictures / name).symlink_to(name)
    os.mkfifo(pictures / "pipe.pdf")
    result = made(tmp_path / "r.jsonl", pictures, prompt="?")
    assert result.num_rows == 7
    (line,) = [line for line in result.to_lines() if line.startswith("left out")]
    assert "left out  8 files" in line
    assert "2 broken link, 2 hidden, 1 link to a folder, 1 pipe or device, 1 without ending" in line
    assert "one is a link to a folder, which is not followed; name the folder as a source" in line


def test_a_folder_that_cannot_be_read_is_not_to_be_written() -> None:
    user = os.geteuid()
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        (Path(folder) / "locked").mkdir(mode=0)
        try:
            if user == 0:
                os.seteuid(65534)
            with pytest.raises(ConfigError, match="locked': Permission denied; name sources that can be read"):
                list(find_sources([folder]).files())
        finally:
            os.seteuid(user)


def test_the_same_sources_give_the_same_bytes(pictures: Path, tmp_path: Path) -> None:
    rows(tmp_path / "one.jsonl", pictures)
    copy = tmp_path / "copy"
    for path in sorted(pictures.rglob("*"), reverse=True):
        if path.is_file():
            (copy / path.relative_to(pictures)).parent.mkdir(parents=True, exist_ok=True)
            (copy / path.relative_to(pictures)).write_bytes(path.read_bytes())
    rows(tmp_path / "two.jsonl", copy)
    assert (tmp_path / "one.jsonl").read_bytes() == (tmp_path / "two.jsonl").read_bytes()


def test_ids_stay_when_a_folder_gains_a_file(pictures: Path, tmp_path: Path) -> None:
    before = {row["custom_id"]: row for row in rows(tmp_path / "r.jsonl", pictures)}
    (pictures / "aaa.png").write_bytes(b"")
    after = {row["custom_id"]: row for row in rows(tmp_path / "r.jsonl", pictures)}
    assert after.keys() - before.keys() == {"aaa.png"}
    assert before.items() <= after.items()


@pytest.mark.parametrize(("pattern", "names"), [
    ("*.png", ["b.png", "sub.png"]), ("**/*.gif", ["sub/deep/d.gif"]), ("sub/*", ["c.webp"]),
])  # fmt: skip
def test_patterns_are_expanded_and_their_root_is_the_folder_before(
    pictures: Path, tmp_path: Path, pattern: str, names: list[str]
) -> None:
    assert [row["custom_id"] for row in rows(tmp_path / "r.jsonl", f"{pictures}/{pattern}")] == names


def test_several_sources_have_their_common_root(pictures: Path, tmp_path: Path) -> None:
    found = rows(tmp_path / "r.jsonl", pictures / "sub", pictures / "b.png")
    assert [row["custom_id"] for row in found] == ["sub/c.webp", "sub/deep/d.gif", "b.png"]


def test_a_file_that_is_named_twice_is_an_error_that_names_both(pictures: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"custom_id 'b.png': is that of 'b.png' and of 'b.png'"):
        rows(tmp_path / "r.jsonl", pictures / "b.png", pictures)
    assert not (tmp_path / "r.jsonl").exists()


@pytest.mark.parametrize("name", ["nothing", "nothing*.png", "notes.txt", "."])
def test_a_source_that_is_none_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "notes.txt").write_text("")
    with pytest.raises(ConfigError, match="source"):
        rows(tmp_path / "r.jsonl", tmp_path / "in" / name)


def test_images_beside_tables_are_not_guessed_at(pictures: Path, tmp_path: Path) -> None:
    (pictures / "metadata.csv").write_text("file_name,text\nb.png,hello\n")
    with pytest.raises(ConfigError, match=r"holds images, videos or doc.* and tables"):
        rows(tmp_path / "r.jsonl", pictures)
    with pytest.raises(ConfigError, match=r"'.*/pictures/\*': holds images, videos .* and tables .*or two sources"):
        rows(tmp_path / "r.jsonl", f"{pictures}/*")
    assert not (tmp_path / "r.jsonl").exists()
    (found,) = rows(tmp_path / "r.jsonl", pictures / "metadata.csv", image=("file_name",))
    assert load_media(shown(found)[0], pictures) == b"b.png"


def test_what_rows_are_made_of_is_said(pictures: Path, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a\n1\n2\n")
    (pictures / "film.mp4").rename(pictures / "film.txt")
    for source, kinds in ((pictures, "5 images"), (f"{pictures}/**/*", "5 images"), (f"{pictures}/b.png", "1 image"),
                          (tmp_path / "t.csv", "2 records of t.csv")):  # fmt: skip
        said = made(tmp_path / "r.jsonl", source, prompt="?").to_lines()
        assert said[1].startswith(f"made of   {kinds}")
    said = made(tmp_path / "r.jsonl", pictures, tmp_path / "t.csv", prompt="?").to_lines()
    assert said[1] == "made of   5 images, 2 records of t.csv"


@pytest.mark.parametrize(("pattern", "names"), [
    ("*.jpg", ["a.JPG", "b.jpg", "c.Jpg"]), ("*.JPG", ["a.JPG", "b.jpg", "c.Jpg"]),
    ("*.jp*g", ["a.JPG", "b.jpg", "c.Jpg", "d.jpeg"]), ("[ab].jpg", ["a.JPG", "b.jpg"]),
    ("*.[j]pg", ["b.jpg"]), ("?", []), ("b.jpg", ["b.jpg"]),
])  # fmt: skip
def test_the_ending_of_a_pattern_fits_in_any_case(tmp_path: Path, pattern: str, names: list[str]) -> None:
    (tmp_path / "in").mkdir()
    for name in ("a.JPG", "b.jpg", "c.Jpg", "d.jpeg", "e.png", "f"):
        (tmp_path / "in" / name).write_bytes(b"")
    if names:
        assert [row["custom_id"] for row in rows(tmp_path / "r.jsonl", f"{tmp_path}/in/{pattern}")] == names
    else:
        with pytest.raises(ConfigError, match=r"left out: 1 files .*: 1 without ending"):
            rows(tmp_path / "r.jsonl", f"{tmp_path}/in/{pattern}")


def test_csv_cells_are_text_as_pandas_reads_it(tmp_path: Path) -> None:
    frame = pd.DataFrame(
        {"": ["1", "2"], "zip": ["007", "1e5"], "text": ['say "hi", and\nmore', "=SUM(A1) \N{SNOWMAN}"]}
    )
    frame.to_csv(tmp_path / "t.csv", index=False)
    (tmp_path / "t.csv").write_bytes(b"\xef\xbb\xbf" + (tmp_path / "t.csv").read_bytes())
    found = rows(tmp_path / "r.jsonl", tmp_path / "t.csv", keep=("", "zip", "text"))
    assert [row["body"]["metadata"] for row in found] == pd.read_csv(
        tmp_path / "t.csv", dtype=str, encoding="utf-8-sig", keep_default_na=False
    ).rename(columns={"Unnamed: 0": ""}).to_dict("records")  # fmt: skip
    assert [row["custom_id"] for row in found] == ["t.csv#1", "t.csv#2"]


@pytest.mark.parametrize(("name", "delimiter"), [("t.tsv", None), ("t.csv", ";")])
def test_other_delimiters(tmp_path: Path, name: str, delimiter: str | None) -> None:
    (tmp_path / name).write_text("a\tb\n1\t2\n".replace("\t", delimiter or "\t"))
    (found,) = rows(tmp_path / "r.jsonl", tmp_path / name, keep=("a", "b"), delimiter=delimiter)
    assert found["body"]["metadata"] == {"a": "1", "b": "2"}


def test_parquet_is_read_as_pyarrow_reads_it(tmp_path: Path) -> None:
    table = pa.table({
        "int": pa.array([-(2**63), 2**63 - 1, None]), "uint": pa.array([0, 2**64 - 1, 1], pa.uint64()),
        "float": pa.array([0.1, float("nan"), 1e300]), "flag": pa.array([True, None, False]),
        "text": pa.array(["a", "", None]).dictionary_encode(), "list": pa.array([[1, 2], [], None]),
        "struct": pa.array([{"a": 1, "b": ["x"]}, None, {"a": 2, "b": []}]),
    })  # fmt: skip
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=2)
    names = ("int", "uint", "float", "flag", "text")
    found = [row["body"]["metadata"] for row in rows(tmp_path / "r.jsonl", tmp_path / "t.parquet", keep=names)]
    expected = table.select(list(names)).to_pylist()
    expected[1]["float"] = None  # NaN is an empty cell
    assert found == expected
    nested = rows(tmp_path / "r.jsonl", tmp_path / "t.parquet", keep=("list", "struct"))
    assert [row["body"]["metadata"]["list"] for row in nested] == ["[1,2]", "[]", None]
    assert nested[0]["body"]["metadata"]["struct"] == '{"a":1,"b":["x"]}'


@pytest.mark.parametrize("kind", [
    pa.timestamp("ns"), pa.timestamp("us"), pa.timestamp("s"), pa.timestamp("ms", "UTC"), pa.date32(), pa.date64(),
], ids=str)  # fmt: skip
def test_times_become_text_that_pandas_reads_as_the_same_time(tmp_path: Path, kind: pa.DataType) -> None:
    day = 86_400 * {"ns": 10**9, "us": 10**6, "s": 1, "ms": 1000}.get(getattr(kind, "unit", ""), 1)
    values = (
        [0, 20_000, 20_001]
        if kind == pa.date32()
        else [0, 86_400_000]
        if kind == pa.date64()
        else [0, 20_000 * day + 1]
    )
    array = pa.array(values, pa.int32() if kind == pa.date32() else pa.int64()).cast(kind)
    pq.write_table(
        pa.table({"at": array, "nested": pa.array([[None]] * len(array), pa.list_(kind))}), tmp_path / "t.parquet"
    )
    read_back = pq.read_table(tmp_path / "t.parquet")["at"]
    found = rows(tmp_path / "r.jsonl", tmp_path / "t.parquet", keep=("at", "nested"))
    assert [pd.Timestamp(row["body"]["metadata"]["at"]) for row in found] == [
        pd.Timestamp(v) for v in read_back.to_pandas()
    ]
    assert {row["body"]["metadata"]["nested"] for row in found} == {"[null]"}


def test_a_saved_dataset_is_read_and_its_images_are_written_once(tmp_path: Path) -> None:
    media = tmp_path / "media"
    media.mkdir()
    found = rows(tmp_path / "r.jsonl", SAVED, keep=("label", "tags"), expected="caption", media_dir=media)
    assert [row["body"]["metadata"]["expected"] for row in found] == [
        "a red square",
        "a blue one",
        "a red square, again",
    ]
    urls = [shown(row)[0] for row in found]
    assert urls[0] == urls[2] != urls[1]
    assert len([path for path in media.rglob("*") if path.is_file()]) == 2
    with pa.ipc.open_stream(SAVED / "data-00000-of-00001.arrow") as stream:
        images = [record["image"]["bytes"] for record in stream.read_all().to_pylist()]
    assert [load_media(url, media) for url in urls] == images


def test_only_what_a_dataset_lists_is_part_of_it(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    for path in SAVED.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "cache-0123.arrow").write_bytes((SAVED / "data-00000-of-00001.arrow").read_bytes())
    (tmp_path / "media").mkdir()
    assert len(rows(tmp_path / "r.jsonl", folder, media_dir=tmp_path / "media")) == 3
    (folder / "state.json").write_text('{"_data_files": [{"filename": "../../etc/passwd"}]}')
    with pytest.raises(ConfigError, match="is no file beside it"):
        rows(tmp_path / "r.jsonl", folder, media_dir=tmp_path / "media")
    for words in ("{}", "[1", '{"_data_files": [{"filename": "a.png"}]}'):
        (folder / "state.json").write_text(words)
        with pytest.raises(ConfigError, match=r"state\.json': lists "):
            rows(tmp_path / "r.jsonl", folder, media_dir=tmp_path / "media")


def test_a_file_of_another_program_hides_no_picture(pictures: Path, tmp_path: Path) -> None:
    before = rows(tmp_path / "r.jsonl", pictures)
    for words in ('{"zoom": 3}', '{"_data_files": [{"filename": "c.webp"}]}', '{"_data_files": []}', "["):
        (pictures / "sub" / "state.json").write_text(words)
        assert rows(tmp_path / "r.jsonl", pictures) == before
        assert "2 .json" not in (said := "".join(made(tmp_path / "r.jsonl", pictures, prompt="?").to_lines()))
        assert "1 .json" in said, "it is left out, and counted"
    # One who may put files there cannot choose which pictures count either.
    (pictures / "sub" / "state.json").write_text('{"_data_files": [{"filename": "x.arrow"}]}')
    (pictures / "sub" / "x.arrow").write_bytes((SAVED / "data-00000-of-00001.arrow").read_bytes())
    with pytest.raises(ConfigError, match="holds images, videos or documents"):
        rows(tmp_path / "r.jsonl", pictures)


@pytest.mark.parametrize("num_wanted", [1, 3, 7, 10, 11])
@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_a_sample_is_even_and_keeps_the_ids(tmp_path: Path, num_wanted: int, ending: str) -> None:
    frame = pd.DataFrame({"n": [str(number) for number in range(10)]})
    source = tmp_path / f"t.{ending}"
    if ending == "jsonl":
        frame.to_json(source, orient="records", lines=True)
    elif ending == "csv":
        frame.to_csv(source, index=False)
    else:
        frame.to_parquet(source)
    everything = {row["custom_id"]: row for row in rows(tmp_path / "all.jsonl", source, keep=("n",))}
    found = rows(tmp_path / "r.jsonl", source, keep=("n",), sample=num_wanted)
    assert len(found) == min(num_wanted, 10)
    assert all(everything[row["custom_id"]] == row for row in found)
    places = [int(row["body"]["metadata"]["n"]) for row in found]
    gaps = {after - before for before, after in itertools.pairwise([*places, 10])}
    assert places[0] == 0
    assert gaps <= {10 // len(found), -(-10 // len(found))}, "as near to each other as they can be, over all of them"


def test_every_row_is_one_that_the_job_reads(pictures: Path, tmp_path: Path) -> None:
    for row in rows(tmp_path / "r.jsonl", pictures, max_tokens=5, body={"temperature": 0}, system="Be brief."):
        parse_row(row)
        assert asked(row) == "What is this?"


def test_a_link_to_a_folder_is_not_followed(pictures: Path, tmp_path: Path) -> None:
    os.symlink(pictures, pictures / "loop")
    assert len(rows(tmp_path / "r.jsonl", pictures)) == 6
