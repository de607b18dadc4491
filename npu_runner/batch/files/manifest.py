"""`<output>.manifest.json`: what made the answers beside it, so that nothing else is ever mixed in among them.

Knows nothing of rows.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from npu_runner import __version__
from npu_runner.batch.files.durable import clear_file_errors, replacing
from npu_runner.batch.files.fingerprint import digest_lines
from npu_runner.batch.files.input_file import InputIdentity
from npu_runner.batch.files.names import manifest_path
from npu_runner.errors import ConfigError

FORMAT = 2
"""Of the file. 1 had no `npu_runner`; such a file is read, and written as 2 when its output goes on."""
DECODERS = "prompts.decoders"
"""Versions of the libraries that decode images and videos, among the settings."""
_READABLE = (1, FORMAT)
_ABSENT = "(not there)"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The making of one output file."""

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

    @property
    def has_served(self) -> bool:
        """False when the input had no row yet: then no model was loaded, and any may follow."""
        return bool(self.settings)

    @property
    def system_fingerprint(self) -> str:
        """Names model and settings in every answer; no decoders, which may be installed while an output goes on."""
        named = {name: value for name, value in self.settings.items() if name != DECODERS}
        settings = {name: json.dumps(value, sort_keys=True) for name, value in named.items()}
        weights = {f"weights.{name}": line for name, line in self.weights.items()}
        return f"fp_{digest_lines({**self.model_files, **weights, **settings})}"

    def save(self, output: Path) -> None:
        path = manifest_path(output)
        with clear_file_errors(f"manifest {path}"), replacing(path) as file:
            text = json.dumps(_to_json(self), indent=2, sort_keys=True, ensure_ascii=False)
            file.write(text.encode("utf-8") + b"\n")

    @staticmethod
    def load(output: Path) -> Manifest | None:
        """The manifest beside an output; None when there is none."""
        path = manifest_path(output)
        try:
            with clear_file_errors(f"manifest {path}"):
                if not path.exists():
                    return None
                fields = json.loads(path.read_bytes())
            if fields["format"] not in _READABLE:
                raise ValueError(f"it is of npu-runner {fields.get('npu_runner', '(unknown)')}, this is {__version__}")
            return _from_json(fields)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"manifest {path}: cannot be read ({error}); --overwrite starts afresh") from error

    def with_input(self, identity: InputIdentity) -> Manifest:
        return replace(self, input=identity)


def _to_json(manifest: Manifest) -> dict[str, Any]:
    """The names in the file, which stay whatever becomes of those in the code; `_from_json` reads the same."""
    return {
        "format": FORMAT,
        "npu_runner": __version__,
        "created": manifest.created,
        "model_name": manifest.model_name,
        "model_files": manifest.model_files,
        "weights": manifest.weights,
        "settings": manifest.settings,
        "input": {"num_bytes": manifest.input.num_bytes, "blake2b": manifest.input.blake2b},
        **({"error_file": manifest.error_file} if manifest.error_file is not None else {}),
    }


def _from_json(fields: dict[str, Any]) -> Manifest:
    return Manifest(
        created=fields["created"],
        model_name=fields["model_name"],
        model_files=fields["model_files"],
        weights=fields.get("weights", {}),
        settings=fields["settings"],
        input=InputIdentity(num_bytes=fields["input"]["num_bytes"], blake2b=fields["input"]["blake2b"]),
        error_file=fields.get("error_file"),
    )


def differences(earlier: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Every name whose value changed, with both values."""
    names = sorted(earlier.keys() | now.keys())
    # Through JSON, because one side has been there: tuples are lists, keys are strings.
    pairs = [(name, _jsonish(earlier.get(name, _ABSENT)), _jsonish(now.get(name, _ABSENT))) for name in names]
    return [f"{name}: was {before}, is {after}" for name, before, after in pairs if before != after]


def start_time() -> int:
    """Now, or what SOURCE_DATE_EPOCH says, so that two jobs can be compared byte for byte."""
    value = os.environ.get("SOURCE_DATE_EPOCH")
    if value is None:
        return int(time.time())
    if not value.isdigit():
        raise ConfigError(f"SOURCE_DATE_EPOCH={value!r} is not a number of seconds")
    return int(value)


def _jsonish(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)
