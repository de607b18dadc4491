"""Finds a checkpoint's folder (a local or an embedded one, or a hub id's), and reads the small text files in it. Tells
whether those that prompts are made of, and packages, are still the same, and what packages register.

Errors name file and remedy. Only data files are fetched: no Python code of a checkpoint is ever downloaded, let alone
run. Knows no meaning.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from npu_runner.assets import EMBEDDED
from npu_runner.errors import JobError, ModelError

MODELSLIM_FILES = "quant_model_description*.json"
"""Which tensors of a folder of ModelSlim are quantised, and how."""
_SETTINGS = "*.json"
_PATTERNS = [_SETTINGS, "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
PROMPT_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/tool_use.jinja",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)
"""All that a ChatProcessor may read, but for what it needs of pairs."""


def resolve_checkpoint(model: str, revision: str | None = None, *, with_weights: bool = True) -> Path:
    """The folder of `model`; a hub id is downloaded (or found in the hub's cache) at `revision`. `with_weights`
    False: its JSON files are enough.

    A folder that is called like an embedded model goes before it.
    Raises ModelError when there is neither such a folder nor, without network, such a download.
    """
    path = Path(model).expanduser()
    if not path.is_dir():
        path = EMBEDDED.get(model, path)
    if path.is_dir():
        if revision is not None:
            raise ModelError(f"revision {revision!r} was given, but {model!r} is a local folder")
        if not (path / "config.json").is_file():
            raise ModelError(f"{path} has no config.json: it is not a checkpoint folder")
        return path.resolve()
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1:
        raise ModelError(f"model {model!r}: there is no such folder, and it is neither a hub id (owner/name) "
                         f"nor embedded ({', '.join(EMBEDDED)})")
    return _download(model, revision, _PATTERNS if with_weights else [_SETTINGS])


def is_modelslim(folder: Path) -> bool:
    """Whether a folder is of ModelSlim (msModelSlim; vLLM calls it ascend). A file alone says so: config.json is the
    float model's."""
    return any(folder.glob(MODELSLIM_FILES))


def _download(model: str, revision: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    at = f" at revision {revision!r}" if revision else ""
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))
    except HFValidationError as error:
        raise ModelError(f"model {model!r}: neither a folder nor a valid hub id ({error})") from error
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"model {model!r}{at}: not a local folder, not in the hub cache, and the hub cannot be reached; copy the "
            f"checkpoint to this host and pass its folder") from error
    except (HfHubHTTPError, OSError) as error:
        raise ModelError(f"model {model!r}{at}: the hub refused the download: {error}") from error


def model_folder(model_path: str | Path) -> Path:
    """The folder as a Path; a ModelError when it is not there."""
    folder = Path(model_path)
    if not folder.is_dir():
        raise ModelError(f"model folder {str(folder)!r} does not exist; give the folder that holds config.json")
    return folder


def read_text(folder: Path, name: str) -> str | None:
    """The UTF-8 text of a file, None when it is missing; a ModelError when it cannot be read."""
    path = folder / name
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: cannot be read ({error}); copy the file again from its source") from error


def read_json(folder: Path, name: str) -> dict[str, Any] | None:
    """The JSON object in a file, None when the file is missing; a ModelError when it is anything else."""
    text = read_text(folder, name)
    if text is None:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{folder / name}: not valid JSON ({error}); copy the file again from its source") from error
    if not isinstance(value, dict):
        raise ModelError(f"{folder / name}: holds a JSON {type(value).__name__}, an object is needed")
    return value


def require_json(folder: Path, name: str) -> dict[str, Any]:
    """Like `read_json`, but a missing file is a ModelError."""
    value = read_json(folder, name)
    if value is None:
        raise ModelError(f"{folder / name} is missing; copy it from the place where the checkpoint came from")
    return value


def file_digests(folder: Path, names: Iterable[str] = PROMPT_FILES) -> dict[str, str | None]:
    """One for each file; None: missing or unreadable. 11 MB, as a tokenizer has them, take 30 ms."""
    return {name: _digest_of(folder / name) for name in names}


def package_versions(packages: Sequence[str]) -> dict[str, str | None]:
    """Without importing them; None: it is not there."""
    return {package: _installed_version(package) for package in packages}


def registered(group: str) -> tuple[EntryPoint, ...]:
    """The entry points of installed packages in a group. Two packages may register one name: both are there, the first
    on the path first.

    The lists of all packages are read for it, 15 ms for a hundred: once for each search path of a process.
    """
    return tuple(_entry_points(tuple(sys.path)).select(group=group))


@functools.lru_cache(maxsize=8)
def _entry_points(_path: tuple[str, ...]) -> Any:
    """EntryPoints; before Python 3.12 SelectableGroups, which has the same `select`."""
    return importlib.metadata.entry_points()


def refuse_changes(folder: Path, digests: Mapping[str, str | None], versions: Mapping[str, str | None]) -> None:
    """Raises JobError unless files and packages are what they were when these digests and versions were taken."""
    files, packages = file_digests(folder, digests), package_versions(list(versions))
    changed = [name for name in digests if files[name] != digests[name]]
    changed += [f"the package {name}" for name in versions if packages[name] != versions[name]]
    if changed:
        raise JobError(
            f"model {folder}: {', '.join(changed)} changed after the model was opened, and a preprocessing worker that "
            "starts now would make other prompts than those before it; put back what was there and run the same "
            "again, or begin anew with what is there now")


def _digest_of(path: Path) -> str | None:
    try:
        return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
    except OSError:
        return None


def _installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
