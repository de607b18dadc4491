"""`<output>.manifest.json`, the state of a job: all that a later run needs to go on, beside the rows themselves.

It has what made the answers, so that nothing else is ever mixed in among them, the rows under suspicion, and the runs.
It is replaced as a whole and synced: when a run begins to write, at a suspect, and when the run ends. Knows nothing of
rows.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, NoReturn

from pydantic import AfterValidator, BeforeValidator, ConfigDict, TypeAdapter, ValidationError

from npu_runner import __version__
from npu_runner.batch.files.durable import FileErrors, clear_file_errors, late_file_errors, replacing
from npu_runner.batch.files.fingerprint import digest_lines
from npu_runner.batch.files.input_identity import InputIdentity, save_rows, with_rows
from npu_runner.batch.files.names import manifest_path, runs_path, suspects_path
from npu_runner.batch.files.runs import Runs, has_served
from npu_runner.batch.rows.flaw import WHOLE, Flaw
from npu_runner.errors import ConfigError
from npu_runner.request.limits import shown

FORMAT = 4
"""The format of the file. 1 had no `npu_runner`, 1 and 2 no `changes`, 1 to 3 had runs and suspects in files of their
own. They are read, and written as 4 when their output goes on."""
_FORMAT_OF_ONE_FILE = 4
DECODERS = "prompts.decoders"
"""Versions of the libraries that decode images and videos, among the settings, and RENDERER."""
RENDERER = ("pdfium", "pdf_fonts")
"""The decoders' names for PDFium and the fonts, once a page of a PDF was answered (PageFacts.renderer)."""
_LENGTH = "max_model_len"
RULE_OF_JOB = "answers.structured_outputs"
"""The schema for rows without a rule of their own, among the settings."""
LIMITS_OF_ROWS = {
    "prompts.max_images_per_prompt": "a prompt with more fails as too_many_images; any other is the same prompt",
    "prompts.limit_mm_per_prompt": "a prompt with more of one kind fails as too_many_images; any other is the same",
    "prompts.max_source_pixels": "a larger image fails as image_too_large, before it is decoded; any other is the same",
    "answers.repetition_detection": "it ends an answer as a repetition; one that does not repeat itself is the same",
    _LENGTH: "a longer prompt fails as prompt_too_long, an answer is cut off there; a higher one leaves whole answers",
}
"""Settings that can only make a row fail, or its answer end, each with the reason: no value changes a whole answer. So
they may differ with --retry; max_model_len may only be higher. Limits that no manifest names may differ in any run."""
_NUMBERS = {_LENGTH, "prompts.max_source_pixels"}
"""Settings that a later run, or a report, takes from here."""
_READABLE = (1, 2, 3, FORMAT)
_MAX_EPOCH_DIGITS = 11
"""Up to the year 5138; a calendar ends with the year 9999."""
_ABSENT = "(not there)"


class SettingChange(NamedTuple):
    """A setting with two values, JSON-ready; one that is not there has a word that says so."""

    name: str
    was: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.name}: was {_as_json(self.was)}, is {_as_json(self.now)}"

    @property
    def leaves_whole_answers(self) -> bool:
        """Whether it changes no whole answer: it is a limit of rows, and one that ends answers is higher."""
        if self.name != _LENGTH:
            return self.name in LIMITS_OF_ROWS
        values = (str(self.was), str(self.now))
        return all(map(str.isdecimal, values)) and int(values[0]) < int(values[1])


@dataclass(frozen=True, kw_only=True)
class Suspicion:
    """`num_deaths`: how often the job ended with this row alone in the step; `code`, `message`: why it is given up."""

    num_deaths: int = 0
    code: str | None = None
    message: str = ""


def _with_name(change: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(change.get("name"), str):
        raise ValueError("its name is missing")
    return change


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The state of one output. A file that was edited is read by these types."""

    # pydantic before 2.10 warns of every field named model_..., for each import.
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, protected_namespaces=())

    created: int
    """Unix time at which the job was first started; every answer carries it."""
    model_name: str
    model_files: dict[str, str]
    settings: dict[str, Any]
    """Everything beside the model that shapes answers, JSON-ready."""
    input: InputIdentity
    weights: dict[str, str] = field(default_factory=dict)
    """The weights' hashes over every byte; `model_files` has them over samples. Empty in outputs that were begun by a
    version that looked at samples only: these stay so to their end, and so does their `system_fingerprint`."""
    error_file: str | None = None
    """Where failed rows are, as seen from the output's folder; None: in the output."""
    changes: tuple[Annotated[dict[str, Any], AfterValidator(_with_name)], ...] = ()
    """Settings that were changed knowingly while the output went on, in order."""
    retry: Annotated[Flaw, BeforeValidator(Flaw.parse)] = WHOLE
    """Rows that had one of these flaws are tried again. They have left the output, so those of them that have no line
    yet are the rows that it lacks. It lasts until the job has ended with a line for every row."""
    suspects: Mapping[str, Suspicion] = field(default_factory=dict)
    """Rows that the next run has to run alone, or to give up, by custom_id."""
    runs: Annotated[Runs, BeforeValidator(lambda last: Runs())] = field(default_factory=Runs)
    """`Runs.from_json` reads them from two fields."""

    @property
    def has_served(self) -> bool:
        """False when the input had no row yet: then no model was loaded, and any may follow."""
        return bool(self.settings)

    @property
    def system_fingerprint(self) -> str:
        """Names model and settings in every answer that is written with them; no decoders, which may be installed
        while an output goes on."""
        named = {name: value for name, value in self.settings.items() if name != DECODERS}
        settings = {name: json.dumps(value, sort_keys=True) for name, value in named.items()}
        weights = {f"weights.{name}": line for name, line in self.weights.items()}
        return f"fp_{digest_lines({**self.model_files, **weights, **settings})}"

    def changed(self, settings: dict[str, Any], changes: list[SettingChange]) -> Manifest:
        """With `settings` from here on, and a record of these changes. Answers of before have the fingerprint there."""
        now, fingerprint = start_time(), self.system_fingerprint
        records = [{"name": change.name, "was": change.was, "is": change.now, "time": now,
                    "system_fingerprint_before": fingerprint} for change in changes]
        return replace(self, settings=settings, changes=(*self.changes, *records))

    def save(self, output: Path, *, earlier: Manifest | None = None, file_errors: FileErrors = clear_file_errors
             ) -> None:
        """Write the state to disk. `earlier`: the state that is there, None: there is none.

        The records of rows are on disk before: what a manifest says of the input is always known row by row.
        """
        if earlier is None or earlier.input != self.input or earlier.input.rows != self.input.rows:
            save_rows(output, self.input, in_manifest=None if earlier is None else earlier.input)
        path = manifest_path(output)
        with file_errors(f"manifest {path}"), replacing(path) as file:
            text = json.dumps(_to_json(self), indent=2, sort_keys=True, ensure_ascii=False)
            file.write(text.encode("utf-8") + b"\n")

    @staticmethod
    def load(output: Path) -> Manifest | None:
        """The manifest beside an output, with the records of the input's rows; None when there is none."""
        path = manifest_path(output)
        try:
            with clear_file_errors(f"manifest {path}"):
                if not path.exists():
                    return None
                fields = json.loads(data := path.read_bytes())
            if fields["format"] not in _READABLE:
                raise ValueError(f"it is of npu-runner {fields.get('npu_runner', '(unknown)')}, this is {__version__}")
            found = _FILE.validate_json(data)
            for name in _NUMBERS & found.settings.keys():
                if not str(found.settings[name]).isdecimal():
                    raise ValueError(f"setting {name}: {found.settings[name]!r} is not a number")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            reason = _listed(error) if isinstance(error, ValidationError) else str(error)
            raise ConfigError(f"manifest {path}: cannot be read ({reason}); --overwrite starts afresh") from error
        if fields["format"] < _FORMAT_OF_ONE_FILE:
            found = replace(found, suspects=read_older_suspects(output),
                            runs=read_older_runs(output, has_manifest=True))
        else:
            found = replace(found, runs=Runs.from_json(fields.get("runs", ()), fields.get("older_runs")))
        return found.with_input(with_rows(output, found.input))

    def with_input(self, identity: InputIdentity) -> Manifest:
        return replace(self, input=identity)


def _listed(error: ValidationError) -> str:
    return "; ".join(f"{'.'.join(map(str, found['loc']))}: {found['msg']}" for found in error.errors())


def _to_json(manifest: Manifest) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "npu_runner": __version__,
        "created": manifest.created,
        "model_name": manifest.model_name,
        "model_files": manifest.model_files,
        "weights": manifest.weights,
        "settings": manifest.settings,
        "input": manifest.input.to_json(),
        **({"error_file": manifest.error_file} if manifest.error_file is not None else {}),
        **({"changes": manifest.changes} if manifest.changes else {}),
        **({"retry": manifest.retry.names} if manifest.retry else {}),
        **({"suspects": {name: asdict(row) for name, row in manifest.suspects.items()}} if manifest.suspects else {}),
        "runs": manifest.runs.last,
        **({"older_runs": manifest.runs.older} if manifest.runs.older else {}),
    }


_FILE = TypeAdapter(Manifest)


class StateFile:
    """The state beside `output`. Without an output file it lasts as long as the job."""

    def __init__(self, output: Path | None):
        self._output = output
        self.manifest: Manifest | None = None
        self.runs = Runs()
        """The runs that the state has."""
        self.is_begun = False
        """This run has begun to write."""
        self._is_loaded = False

    def load(self) -> None:
        """Read what earlier runs have left, once. Raises ConfigError where that is no state."""
        if self._output is not None and not self._is_loaded:
            self.manifest, self.runs = read_state(self._output)
            self._is_loaded = True

    def clear(self) -> None:
        """The file is removed with the output that it belongs to."""
        self.manifest, self.runs = None, Runs()

    def save(self, manifest: Manifest, file_errors: FileErrors = clear_file_errors) -> None:
        """Have this state on disk from here on. Older files, which it takes the place of, go after it."""
        if self._output is not None:
            manifest.save(self._output, earlier=self.manifest, file_errors=file_errors)
            if not self.is_begun:
                remove_older_files(self._output)
        self.manifest, self.runs, self.is_begun = manifest, manifest.runs, True

    def update(self, **changes: Any) -> None:
        """Replace these fields of the state, once the run has begun to write. Raises JobError."""
        if self.manifest is not None and self.is_begun:
            changed = replace(self.manifest, **changes)
            if changed != self.manifest:
                self.save(changed, late_file_errors)


def read_state(output: Path) -> tuple[Manifest | None, Runs]:
    """The state, and the runs that it has. Those of an older version may be there before there is a manifest."""
    manifest = Manifest.load(output)
    return manifest, read_older_runs(output, has_manifest=False) if manifest is None else manifest.runs


def differences(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> list[SettingChange]:
    """The settings whose values differ."""
    names = sorted(earlier.keys() | now.keys())
    changes = [SettingChange(name, earlier.get(name, _ABSENT), now.get(name, _ABSENT)) for name in names]
    # Through JSON, because one side has been there: tuples are lists, keys are strings.
    return [change for change in changes if _as_json(change.was) != _as_json(change.now)]


def start_time() -> int:
    """Now, or what SOURCE_DATE_EPOCH says, so that two jobs can be compared byte for byte. Raises ConfigError."""
    value = os.environ.get("SOURCE_DATE_EPOCH")
    if value is None:
        return int(time.time())
    if not (value.isascii() and value.isdecimal() and len(value) <= _MAX_EPOCH_DIGITS):
        raise ConfigError(f"SOURCE_DATE_EPOCH={shown(value)} is not a number of seconds of at most {_MAX_EPOCH_DIGITS} "
                          "digits, like 1700000000; correct the variable or unset it")
    return int(value)


def _as_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


# -- formats 1 to 3: they are read until a run begins to write; the manifest then has what they say -------------------


def read_older_runs(output: Path, *, has_manifest: bool) -> Runs:
    """The last whole line of each run. Without a manifest no run of this output has served a row: runs that have were
    of another output of that name.

    Raises ConfigError for a file of whole lines none of which is a run's: no job has left it so.
    """
    path = runs_path(output)
    with clear_file_errors(f"record of runs {path}"):
        # What follows the last line end is torn.
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    found: list[Any] = []
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            found.append(json.loads(line, parse_constant=_refuse))
    # A run that ended has no later line.
    runs = Runs.from_json(found)
    if lines and not runs.last:
        raise ConfigError(f"record of runs {path}: no line of it can be read, so no job has left it so; move it away, "
                          "and earlier runs are not counted")
    return Runs(tuple(run for run in runs.last if has_manifest or not has_served(run)), runs.older)


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def read_older_suspects(output: Path) -> dict[str, Suspicion]:
    """The rows under suspicion, by custom_id."""
    path = suspects_path(output)
    try:
        with clear_file_errors(f"suspects {path}"):
            if not path.exists():
                return {}
            fields = json.loads(path.read_bytes())
        if fields["format"] != 1:
            raise ValueError("it is of another version of this program")
        return {str(name): Suspicion(**row) for name, row in fields["rows"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"suspects {path}: cannot be read ({error}); without it all rows run together") from error


def remove_older_files(output: Path) -> None:
    """Once the manifest that has what they say is on disk."""
    for path in (runs_path(output), suspects_path(output)):
        with clear_file_errors(str(path)):
            path.unlink(missing_ok=True)
