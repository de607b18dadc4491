"""Identifies the input of an output: a later run tells a grown one from a changed one, and finds the changed row.

The manifest has the identity of the whole. `<output>.rows` beside it has a record of 16 bytes for each row: 8 of a
digest of its name, 8 of a digest of its bytes. Knows nothing of what rows ask for, or of answers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from npu_runner.batch.files.durable import clear_file_errors, replacing
from npu_runner.batch.files.names import rows_path
from npu_runner.batch.rows.input_row import row_key
from npu_runner.errors import ConfigError

FORMAT = 1
NAME_BYTES = 8
"""Bytes of a row's key in its record; as many bytes of its checksum follow."""
_NAME, _BYTES = 0, 1


@dataclass(frozen=True)
class InputIdentity:
    """The size and digest of an input, and digests of its rows."""

    num_bytes: int
    blake2b: str
    rows: bytes | None = field(default=None, compare=False, repr=False)
    """A record for each row, in order; None: not known, the output was begun by a version that kept none."""

    def to_json(self) -> dict[str, Any]:
        return {"num_bytes": self.num_bytes, "blake2b": self.blake2b}


def identity_from_json(fields: Mapping[str, Any]) -> InputIdentity:
    return InputIdentity(num_bytes=fields["num_bytes"], blake2b=fields["blake2b"])


def save_rows(output: Path, identity: InputIdentity, *, in_manifest: InputIdentity | None) -> None:
    """Write the records, before the manifest. `in_manifest`: the identity in the manifest until it is replaced; None:
    there is none. If the run is killed in between, it tells the next one that the records belong to this output."""
    assert identity.rows is not None, "the records of the input are known once it is read"
    header = {
        "format": FORMAT,
        "input": identity.to_json(),
        "in_manifest": None if in_manifest is None else in_manifest.to_json(),
        "blake2b": _digest(identity.rows),
    }
    path = rows_path(output)
    with clear_file_errors(f"rows {path}"), replacing(path) as file:
        file.write(json.dumps(header).encode() + b"\n")
        file.write(identity.rows)


def with_rows(output: Path, in_manifest: InputIdentity) -> InputIdentity:
    """The manifest's identity of the input, with the records of its rows, where there are any.

    After a run that was killed between the two files, the records are those of the later input: no row was answered
    since.
    """
    path = rows_path(output)
    try:
        with clear_file_errors(f"rows {path}"):
            if not path.exists():
                return in_manifest
            line, _, records = path.read_bytes().partition(b"\n")
        fields = json.loads(line)
        if fields["format"] != FORMAT:
            raise ValueError("it is of another version of this program")
        if _digest(records) != fields["blake2b"]:
            raise ValueError("its records are not those that were written")
        identity = identity_from_json(fields["input"])
        before = None if fields["in_manifest"] is None else identity_from_json(fields["in_manifest"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"rows {path}: cannot be read ({error}); once it is removed the output goes on, and rows of "
                          "its input may be added but not changed") from error
    # Any other file is of another output that had this name.
    return replace(in_manifest, rows=records) if in_manifest in (identity, before) else in_manifest


class RowChange(NamedTuple):
    """The first row of the earlier input that is not where and what it was."""

    place: int
    """In the earlier input, from 0."""
    place_now: int | None
    """In this one; None: it is not there any more."""
    name: bytes
    """The first NAME_BYTES of its key."""


def first_change(earlier: bytes, now: bytes, may_change: np.ndarray, lines: np.ndarray, *, may_be_named: bool
                 ) -> RowChange | None:
    """Compare the records of two inputs. None: the later one begins with the rows of the earlier one.

    `may_change`: rows of the later one whose bytes may be others, under the same name; `lines`: where its rows stand.
    `may_be_named`: a row that had no usable name, and was named by its line, may have got one.
    """
    before, after = _table(earlier), _table(now)
    num_common = min(len(before), len(after))
    has_name = before[:num_common, _NAME] == after[:num_common, _NAME]
    is_same = has_name & (before[:num_common, _BYTES] == after[:num_common, _BYTES])
    is_new_name = ~np.isin(after[:num_common, _NAME], before[:, _NAME])
    for place in np.flatnonzero(~is_same & ~(has_name & may_change[:num_common])):
        was_nameless = before[place, _NAME].tobytes() == row_key(None, int(lines[place]))[:NAME_BYTES]
        is_named_now = was_nameless and bool(is_new_name[place])
        if not (is_named_now and may_change[place] and may_be_named):
            return _change(before, after, int(place), is_there=is_named_now)
    return None if len(before) <= len(after) else _change(before, after, num_common, is_there=False)


def changed_rows(earlier: bytes, now: bytes) -> np.ndarray | None:
    """The names (the first NAME_BYTES of keys, as uint64) of the rows whose bytes differ between the records of two
    inputs. None: the later one does not begin with the rows of the earlier one, by name."""
    before, after = _table(earlier), _table(now)[: len(earlier) // (2 * NAME_BYTES)]
    if len(before) != len(after) or (before[:, _NAME] != after[:, _NAME]).any():
        return None
    names: np.ndarray = before[before[:, _BYTES] != after[:, _BYTES], _NAME]
    return names


def _change(before: np.ndarray, after: np.ndarray, place: int, *, is_there: bool) -> RowChange:
    name = before[place, _NAME]
    found = [place] if is_there else np.flatnonzero(after[:, _NAME] == name).tolist()
    return RowChange(place, found[0] if found else None, name.tobytes())


def _table(records: bytes) -> np.ndarray:
    return np.frombuffer(records, dtype=np.uint64).reshape(-1, 2)


def _digest(records: bytes) -> str:
    return hashlib.blake2b(records, digest_size=16).hexdigest()
