"""The files of the named sources: documents, images, videos and files of records, in an order that never changes.

A folder is walked in the order of its names' bytes, so that no file system decides. Knows nothing of their contents.
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from npu_runner.batch.files.durable import clear_file_errors
from npu_runner.errors import ConfigError

DOCUMENT, IMAGE, VIDEO = "document", "image", "video"
CSV, JSONL, PARQUET, ARROW = "csv", "jsonl", "parquet", "arrow"
_ENDINGS = {
    "pdf": DOCUMENT,
    **dict.fromkeys(("png", "jpg", "jpeg", "jfif", "webp", "gif", "bmp", "tif", "tiff", "heic", "heif", "avif", "jp2"),
                    IMAGE),
    **dict.fromkeys(("mp4", "m4v", "mov", "mkv", "webm", "avi", "mpg", "mpeg", "ogv", "flv", "wmv"), VIDEO),
    **dict.fromkeys(("csv", "tsv"), CSV), **dict.fromkeys(("jsonl", "ndjson"), JSONL), "parquet": PARQUET}
MEDIA = (DOCUMENT, IMAGE, VIDEO)
_SAVED = "state.json"
"""Lists the files that `save_to_disk` of Hugging Face's datasets has written. Other programs use the name, too."""
_LINK, _BROKEN_LINK, _NO_FILE = "link to a folder", "broken link", "pipe or device"
_REMEDIES = {
    _LINK: "is a link to a folder, which is not followed; name the folder as a source",
    **dict.fromkeys(("xlsx", "xls", "xlsm", "ods"), "is a spreadsheet; save it as CSV"),
    **dict.fromkeys(("docx", "doc", "pptx", "ppt", "odt", "odp", "rtf"),
                    "is an Office file; soffice --convert-to pdf makes a PDF of it")}
_RESULT = "result of an earlier read"
_OF_READ = re.compile(r"(pages|answers|blocks|block-(rows|answers))\.(jsonl|csv|parquet)(\..*\.jsonl?)?|summary\.json")
_OF_DATASETS = {_SAVED, "dataset_info.json", "dataset_dict.json"}


@dataclass(frozen=True)
class Source:
    """A file. `path`: absolute; a name that is not UTF-8 is as Python has it, with lone surrogates."""

    kind: str
    path: str


@dataclass
class Sources:
    """All files of the named sources. `root`: the folder below which all of them lie; ids are relative to it."""

    names: Sequence[str]
    root: str
    output: Path | None = None
    """Where the rows will be: that file is no source."""
    results: Path | None = None
    """The folder of the results of `read`: none of them is a source, and nothing in it that no pattern names."""
    left_out: Counter[str] = field(default_factory=Counter)
    """The files of the last walk of which no rows are made, by the ending of their names; hidden names apart."""

    def files(self) -> Iterator[Source]:
        """The same files every time, unless the folders change."""
        self.left_out.clear()
        for name in self.names:
            kinds: dict[bool, str] = {}
            found = _expanded(name)
            for path in found:
                for source in self._files_at(path, is_pattern=found != [name]):
                    self._refuse_output(source)
                    self._refuse_both(name, kinds, source)
                    yield source

    def left_out_line(self) -> str:
        """Files that the last walk has left out; empty where there are none."""
        kinds = ", ".join(f"{count} {ending}" for ending, count in sorted((+self.left_out).items())[:10])
        remedies = {_REMEDIES[ending] for kind in self.left_out if (ending := kind.removeprefix(".")) in _REMEDIES}
        more = f" ({'; '.join(f'one {remedy}' for remedy in sorted(remedies))})" if remedies else ""
        return (f"{self.left_out.total()} files that are no document, image, video or table by name: {kinds}{more}"
                if kinds else "")

    @property
    def shown_root(self) -> str:
        return os.fsencode(self.root).decode("utf-8", errors="backslashreplace")

    def shown(self, path: str) -> str:
        """A path below the root, as text: bytes that are not UTF-8 stand as \\xNN."""
        return os.fsencode(os.path.relpath(path, self.root)).decode("utf-8", errors="backslashreplace")

    def _refuse_output(self, source: Source) -> None:
        if self.output is not None and os.path.basename(source.path) == self.output.name and (
            os.path.realpath(source.path) == str(self.output)
        ):
            raise ConfigError(f"rows {str(self.output)!r}: is a source as well; choose another name, or another folder")

    def _refuse_both(self, name: str, kinds: dict[bool, str], source: Source) -> None:
        """Tables beside images may be records, or describe the images: the user knows. `kinds`: a path of each kind so
        far, by whether it is a document, an image or a video."""
        kinds.setdefault(source.kind in MEDIA, source.path)
        if len(kinds) == 2:
            raise ConfigError(f"source {name!r}: holds images, videos or documents ({self.shown(kinds[True])}) and "
                              f"tables ({self.shown(kinds[False])}); name a pattern in quotes such as 'folder/*.png', "
                              "or two sources if rows are to be made of both")

    def _files_at(self, path: str, *, is_pattern: bool) -> Iterator[Source]:
        path = os.path.abspath(path)
        if is_pattern and self._is_result(path, is_pattern=True):
            self.left_out[_RESULT] += 1
            return
        if os.path.isdir(path):
            if not is_pattern:
                yield from self._in_folder(path)
            return
        kind = kind_of_name(path)
        if kind is not None:
            yield Source(kind, path)
        elif is_pattern:
            self._leave_out(path)
        else:
            others = (f"its name ends in none of {', '.join(sorted(_ENDINGS))}, which is how documents, images, videos "
                      "and tables are told apart")
            raise ConfigError(f"source {path!r}: {_REMEDIES.get(_ending(path), others)}")

    def _is_result(self, path: str, *, is_pattern: bool) -> bool:
        """Whether the file is a result of an earlier `read`; one that a pattern matches: of this one."""
        if self.results is None or not _OF_READ.fullmatch(os.path.basename(path)):
            return False
        folder = Path(os.path.realpath(os.path.dirname(path)))
        if is_pattern and self.results != (folder.parent if folder.name.startswith("sample-") else folder):
            return False
        return (folder / "pages.jsonl.documents.jsonl").exists()

    def _leave_out(self, path: str) -> None:
        name, ending = os.path.basename(path), _ending(path)
        if not (name in _OF_DATASETS and _is_of_dataset(path)):
            self.left_out["hidden" if name.startswith(".") else f".{ending}" if ending else "without ending"] += 1

    def _in_folder(self, folder: str) -> Iterator[Source]:
        """The folder's documents, images, videos and tables."""
        for path in _walk(folder, self.results):
            is_hidden = os.path.basename(path).startswith(".")
            kind = None if is_hidden else kind_of_name(path)
            if self._is_result(path, is_pattern=False):
                self.left_out[_RESULT] += 1
            elif not is_hidden and not os.path.isfile(path):
                self.left_out[_LINK if os.path.isdir(path) else _NO_FILE if os.path.exists(path) else _BROKEN_LINK] += 1
            elif kind is None:
                self._leave_out(path)
            else:
                yield Source(kind, path)


def find_sources(names: Sequence[str], results: Path | None = None) -> Sources:
    """`results`: the folder of the results. Raises ConfigError for a name that stands for nothing, or for it."""
    tops = [_top_of(name) for name in names]
    found = Sources(names, os.path.commonpath(tops))
    if results is not None:
        found.results = results.resolve()
        if any(os.path.isdir(name) and os.path.realpath(name) == str(found.results) for name in names):
            raise ConfigError(f"output {str(results)!r}: is a folder of sources as well; name another one, such as "
                              f"{str(results / 'out')!r}")
    return found


def _top_of(name: str) -> str:
    """The folder below which a source has its files."""
    with clear_file_errors(f"source {name!r}", "name one that can be read"):
        if os.path.isdir(name):
            return os.path.abspath(name)
        if os.path.exists(name):
            return os.path.dirname(os.path.abspath(name))
    if not glob.has_magic(name):
        raise ConfigError(f"source {name!r}: there is no such file or folder")
    plain = name
    while glob.has_magic(plain):
        plain = os.path.dirname(plain)
    return os.path.abspath(plain or ".")


def _expanded(name: str) -> list[str]:
    if os.path.lexists(name) or not glob.has_magic(name):
        return [name]
    found = sorted(glob.iglob(_in_any_case(name), recursive=True), key=os.fsencode)
    if not found:
        raise ConfigError(f"source {name!r}: no file fits this pattern")
    return found


def _in_any_case(pattern: str) -> str:
    """The pattern's ending fits in capitals, too, as cameras write it."""
    stem, ending = os.path.splitext(pattern)
    if "[" in ending:
        return pattern
    return stem + "".join(f"[{letter.lower()}{letter.upper()}]" if letter.isalpha() else letter for letter in ending)


def _walk(folder: str, results: Path | None) -> Iterator[str]:
    """Files below a folder, and links to folders and hidden folders themselves, but nothing in `results`. In a saved
    dataset only the .arrow files that it lists count: others beside them are caches."""
    if results is not None and os.path.realpath(folder) == str(results):
        return
    with clear_file_errors(f"source {folder!r}", "name sources that can be read"), os.scandir(folder) as entries:
        found = sorted((os.fsencode(entry.name), entry.is_dir(follow_symlinks=False)) for entry in entries)
    if (os.fsencode(_SAVED), False) in found and any(name.endswith(b".arrow") for name, _ in found):
        yield from _listed(os.path.join(folder, _SAVED))
        found = [(name, is_folder) for name, is_folder in found if not name.endswith(b".arrow")]
    for name, is_folder in found:
        path = os.path.join(folder, os.fsdecode(name))
        if is_folder and not name.startswith(b"."):
            yield from _walk(path, results)
        else:
            yield path


def _listed(state: str) -> Iterator[str]:
    folder = os.path.dirname(state)
    try:
        with clear_file_errors(f"source {state!r}"), open(state, "rb") as file:
            names = [entry["filename"] for entry in json.load(file)["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"source {state!r}: lists no files of a dataset ({error}); save it again") from error
    for name in names:
        if not isinstance(name, str) or os.path.basename(name) != name or name in ("", ".", ".."):
            raise ConfigError(f"source {state!r}: {name!r} is no file beside it; save the dataset again")
        if kind_of_name(name) != ARROW:
            raise ConfigError(f"source {state!r}: lists {name!r}, which is no .arrow file; save the dataset again, or "
                              "name a pattern in quotes such as 'folder/*.png'")
        yield os.path.join(folder, name)


def _is_of_dataset(path: str) -> bool:
    """Whether the file describes a saved dataset, and need not be named as left out."""
    with os.scandir(os.path.dirname(path)) as entries:
        return os.path.basename(path) == "dataset_dict.json" or any(entry.name.endswith(".arrow") for entry in entries)


def kind_of_name(path: str) -> str | None:
    """None: no rows are made of such a file."""
    ending = _ending(path)
    return ARROW if ending == "arrow" else _ENDINGS.get(ending)


def _ending(path: str) -> str:
    return os.path.splitext(path)[1][1:].lower()
