"""Records of Parquet files and of Hugging Face's saved datasets, a few at a time, through pyarrow.

Times, dates and decimals become text in pyarrow, so that no value depends on other packages. Knows nothing of the
meaning of columns.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from npu_runner.batch.files.durable import clear_file_errors
from npu_runner.errors import ConfigError

_RECORDS_AT_ONCE = 64
"""Each may hold an image of megabytes."""
IMAGE = "Image"
_FILE = {"bytes", "path"}
"""The fields of an image in a Hugging Face dataset, and of a video, a sound or a PDF."""


def pyarrow_for(what: str, otherwise: str = "") -> Any:
    """The module. Raises ConfigError where it is not installed. `what` needs it: "Parquet". `otherwise`: a remedy
    without it."""
    try:
        import pyarrow
    except ImportError as error:
        raise ConfigError(f"{what} goes through pyarrow, which is not there ({error}); pip install 'pyarrow>=17'"
                          f"{otherwise and f', or {otherwise}'}") from error
    return pyarrow


def arrow_records(path: str, needed: frozenset[str] | None, *,
                  is_parquet: bool) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, str | None]]]:
    """Yields (where, columns, kinds of columns that hold files) for each record. A kind is Image, Video, Audio or
    another word of the schema's metadata; None: the metadata do not say.

    `needed`: columns to read, beside those that may be images; None: all of them. Raises ConfigError for a file that is
    cut short or cannot be read.
    """
    number = 0
    with _opened(path, is_parquet=is_parquet) as (file, schema):
        _refuse_twins(path, schema.names)
        kinds = _declared_kinds(schema.metadata)
        media = {field.name: kinds.get(field.name) for field in schema
                 if _is_file(field.type) or kinds.get(field.name) == IMAGE}
        may_be_images = {name for name, kind in media.items() if kind in (None, IMAGE)}
        names = [name for name in schema.names if needed is None or name in needed or name in may_be_images]
        for batch in _batches(file, names, is_parquet=is_parquet):
            for piece in (batch.slice(start, _RECORDS_AT_ONCE) for start in range(0, len(batch), _RECORDS_AT_ONCE)):
                columns = [_values(path, name, piece.column(name)) for name in names]
                for values in zip(*columns, strict=True) if columns else [()] * len(piece):
                    number += 1
                    yield f"record {number}", dict(zip(names, values, strict=True)), media


def num_arrow_records(path: str, *, is_parquet: bool) -> int:
    with _opened(path, is_parquet=is_parquet) as (file, _):
        return file.metadata.num_rows if is_parquet else sum(len(batch) for batch in file)


@contextlib.contextmanager
def _opened(path: str, *, is_parquet: bool) -> Iterator[tuple[Any, Any]]:
    """The open file and its schema. Raises ConfigError, which names the file, where pyarrow cannot read it."""
    what = "Parquet" if is_parquet else "a saved dataset"
    pyarrow = pyarrow_for(what)
    with clear_file_errors(f"source {path!r}"), open(path, "rb") as raw:
        try:
            if is_parquet:
                from pyarrow.parquet import ParquetFile

                file = ParquetFile(raw)
                yield file, file.schema_arrow
            else:
                file = pyarrow.ipc.open_stream(raw)
                yield file, file.schema
        except (pyarrow.ArrowException, OSError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
            raise ConfigError(f"source {path!r}: is no whole file of {what} ({reason}); copy it again") from error


def _batches(file: Any, names: list[str], *, is_parquet: bool) -> Iterator[Any]:
    if is_parquet:
        yield from file.iter_batches(batch_size=_RECORDS_AT_ONCE, columns=names, use_threads=False)
    else:
        yield from file


def _refuse_twins(path: str, names: list[str]) -> None:
    twice = next((name for place, name in enumerate(names) if name in names[:place]), None)
    if twice is not None:
        raise ConfigError(f"source {path!r}: two columns are called {twice[:80]!r}; rename one")


def _is_file(kind: Any) -> bool:
    import pyarrow.types as types

    if types.is_list(kind) or types.is_large_list(kind):
        return _is_file(kind.value_type)
    return types.is_struct(kind) and {kind.field(place).name for place in range(kind.num_fields)} == _FILE


def _declared_kinds(metadata: Mapping[bytes, bytes] | None) -> dict[str, str]:
    """The type of each column in Hugging Face's words; empty where the file says nothing that can be read."""
    try:
        features = json.loads((metadata or {})[b"huggingface"])["info"]["features"]
        return {name: str(kind) for name, feature in features.items() if (kind := _kind_of(feature)) is not None}
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError):
        return {}


def _kind_of(feature: Any) -> Any:
    """A list of images is of the kind Image."""
    if isinstance(feature, list):
        return _kind_of(feature[0]) if feature else None
    inner = feature.get("feature")
    return feature.get("_type") if inner is None else _kind_of(inner)


def _values(path: str, name: str, array: Any) -> list[Any]:
    """Python's values; times and decimals are text."""
    pyarrow = pyarrow_for("Parquet")
    try:
        wanted = _with_text(array.type)
        return (array if wanted == array.type else array.cast(wanted)).to_pylist()
    except (pyarrow.ArrowException, ValueError, UnicodeDecodeError) as error:
        raise ConfigError(f"source {path!r}, column {name!r}: {array.type} cannot be read ({error}); leave the column "
                          "out, or convert it") from error


def _with_text(kind: Any) -> Any:
    """The type with text in place of times and decimals, also inside of lists and structs."""
    import pyarrow
    import pyarrow.types as types

    if types.is_duration(kind):
        return pyarrow.int64()
    if types.is_temporal(kind) or types.is_decimal(kind):
        return pyarrow.string()
    if types.is_list(kind) or types.is_large_list(kind):
        return (pyarrow.list_ if types.is_list(kind) else pyarrow.large_list)(_with_text(kind.value_type))
    if types.is_struct(kind):
        fields = [kind.field(place) for place in range(kind.num_fields)]
        return pyarrow.struct([field.with_type(_with_text(field.type)) for field in fields])
    return kind
