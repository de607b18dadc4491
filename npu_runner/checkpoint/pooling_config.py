"""Says whether a checkpoint generates text or gives vectors, and how these are pooled: modules.json, or a setting.

Knows the files of sentence-transformers, which config.json cannot stand for: an embedding model's is its base model's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from npu_runner.checkpoint.files import read_json, read_text, require_json
from npu_runner.checkpoint.model_config import PoolingConfig
from npu_runner.errors import ModelError

FILE_NAME = "modules.json"
_LAST_TOKEN = "lasttoken"
_MODE_PREFIX = "pooling_mode_"
_INSTEAD = "; with runner generate it is served as a model that generates text"


def read_pooling(folder: Path, runner: str) -> PoolingConfig | None:
    """How vectors are made of the checkpoint in `folder`; None: it generates text.

    `runner`: auto, generate or pooling. Raises ModelError for a modules.json that asks for what is not served.
    """
    if runner == "generate":
        return None
    modules = _modules(folder)
    if modules is None:
        return PoolingConfig(is_normalised=True) if runner == "pooling" else None
    kinds = [kind for kind, _ in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise ModelError(f"{folder / FILE_NAME}: its modules are {', '.join(kinds) or 'none'}; served are Transformer, "
                         f"Pooling and, if it is there, Normalize{_INSTEAD}")
    _check_transformer(folder / modules[0][1])
    _check_mode(folder / modules[1][1])
    library = read_json(folder, "config_sentence_transformers.json") or {}
    return PoolingConfig(is_normalised="Normalize" in kinds, dimensions=_dimensions(folder),
                         default_prompt=library.get("default_prompt_name"))


def _modules(folder: Path) -> list[tuple[str, str]] | None:
    """(kind, folder) of each module; None without the file."""
    text = read_text(folder, FILE_NAME)
    if text is None:
        return None
    try:
        modules = _as_list(json.loads(text))
        # "sentence_transformers.models.Pooling", or where later releases keep it.
        return [(str(module["type"]).rpartition(".")[2], str(module.get("path") or "")) for module in modules]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{folder / FILE_NAME}: is no list of modules ({type(error).__name__}: {error}); copy the "
                         "file again from its source") from error


def _as_list(modules: Any) -> list[Any]:
    if not isinstance(modules, list):
        raise ValueError(f"it is a JSON {type(modules).__name__}")
    return modules


def _check_transformer(folder: Path) -> None:
    settings = read_json(folder, "sentence_bert_config.json") or {}
    if settings.get("do_lower_case"):
        raise ModelError(f"{folder / 'sentence_bert_config.json'}: do_lower_case is not served{_INSTEAD}")


def _check_mode(folder: Path) -> None:
    """One mode as a word, or a switch for each."""
    config = require_json(folder, "config.json")
    modes = [name.removeprefix(_MODE_PREFIX) for name, value in config.items()
             if name.startswith(_MODE_PREFIX) and value is True]
    if "pooling_mode" in config:
        given = config["pooling_mode"]
        modes = [str(mode) for mode in (given if isinstance(given, list) else [given])]
    if modes != [_LAST_TOKEN]:
        raise ModelError(f"{folder / 'config.json'}: pooling by {', '.join(modes) or 'nothing'} is not served; the "
                         f"last token's state ({_LAST_TOKEN}) is{_INSTEAD}")


def _dimensions(folder: Path) -> tuple[int, ...] | None:
    """The lengths that vectors may be cut to, where config.json names them."""
    named = require_json(folder, "config.json").get("matryoshka_dimensions")
    return tuple(int(size) for size in named) if isinstance(named, list) and named else None
