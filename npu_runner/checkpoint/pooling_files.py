"""Reads pooling settings: modules.json and its folders, which sentence-transformers writes, and the config.json of a
classifier. The config.json of an embedding model or a reranker is that of its base model.

Meanings and defaults of a classifier are those of transformers' configuration and of its *ForSequenceClassification.
Knows no network and no tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from npu_runner.checkpoint.files import read_json, read_text, require_json
from npu_runner.checkpoint.model_config import (
    ClassPooling,
    MessageSettings,
    PairSettings,
    PoolingConfig,
    ScorePooling,
    VectorPooling,
)
from npu_runner.errors import ModelError
from npu_runner.request.limits import shown
from npu_runner.request.pooling_params import IDENTITY, SIGMOID, SOFTMAX, Classes

_MODULES_FILE, _TEXT_FILE = "modules.json", "sentence_bert_config.json"
_LIBRARY_FILE = "config_sentence_transformers.json"
PAIR_FILES = (_MODULES_FILE, _TEXT_FILE, _LIBRARY_FILE)
"""Files that determine prompts of pairs, beside the template and the tokenizer."""
_OF_TOKENS = ("truncation", "max_length", "padding", "return_tensors", "restore_suffix")
"""Stand beside a template's variables there, and say how long a prompt may be; the settings say that here."""
_TRANSFORMER, _POOLING, _NORMALIZE, _SCORE = "Transformer", "Pooling", "Normalize", "LogitScore"
_SERVED = ([_TRANSFORMER, _POOLING], [_TRANSFORMER, _POOLING, _NORMALIZE], [_TRANSFORMER, _SCORE])
_LAST_TOKEN = "lasttoken"
_MODE_PREFIX = "pooling_mode_"
_LOGITS = "causal_logits"
_INSTEAD = "; with runner generate it is served as a model that generates text"
_YES, _NO = "yes", "no"
"""The default answers of rerankers (Qwen3-Reranker's model card)."""
SUFFIX = "ForSequenceClassification"
_DEFAULT_NUM_LABELS = 2
_REGRESSION, _ONE_LABEL, _SEVERAL_LABELS = ("regression", "single_label_classification", "multi_label_classification")


def read_pooling(folder: Path, *, runner: str, task: str,
                 token_id: Callable[[str], int | None]) -> PoolingConfig | None:
    """The pooling of the checkpoint in `folder`, or None if it generates text.

    `runner` (auto, generate, pooling) and `task` (auto, or a PoolingConfig's) are the settings. `token_id`: the id of a
    token in the checkpoint's tokenizer. Raises ModelError for a modules.json that asks for what is not served, or for
    another task than `task`; and for a classifier that is asked for anything else.
    """
    if runner == "generate":
        _refuse_classifier(folder, "runner generate")
        return None
    modules = _read_modules(folder)
    if modules is None or [kind for kind, _ in modules] == [_TRANSFORMER]:
        classes = read_classes(folder)
        if classes is not None:
            gives_scores = task == ScorePooling.task and len(classes.classes.labels) == 1
            if task not in ("auto", classes.task) and not gives_scores:
                _refuse_classifier(folder, f"task {task}")
            return classes
    if modules is None:
        if task == ClassPooling.task:
            raise ModelError(f"{folder / 'config.json'}: task {task} needs a classifier's head, and architectures "
                             f"names no *{SUFFIX}; leave task at auto, or take another checkpoint")
        if task == ScorePooling.task:
            return ScorePooling(true_token_id=_needed(_YES, folder, token_id),
                                false_token_id=_needed(_NO, folder, token_id))
        is_asked = runner == "pooling" or task == VectorPooling.task
        return VectorPooling(is_normalised=True) if is_asked else None
    pooling = _from_modules(folder, modules)
    if task not in ("auto", pooling.task):
        raise ModelError(f"{folder / _MODULES_FILE}: its modules are for task {pooling.task}, not {task}; leave task "
                         "at auto, or take the file out")
    return pooling


def _refuse_classifier(folder: Path, setting: str) -> None:
    name = classifier_architecture(folder)
    if name is not None:
        raise ModelError(f"{folder / 'config.json'}: {setting}: architectures names {name}, a classifier, whose head "
                         "gives probabilities of classes and nothing else; leave runner and task at auto, or take the "
                         "checkpoint that it was made of")


def _from_modules(folder: Path, modules: list[tuple[str, str]]) -> PoolingConfig:
    kinds = [kind for kind, _ in modules]
    if kinds not in _SERVED:
        raise ModelError(f"{folder / _MODULES_FILE}: its modules are {', '.join(kinds) or 'none'}; served are "
                         f"Transformer, Pooling and, if it is there, Normalize; or Transformer, LogitScore{_INSTEAD}")
    _check_text(folder / modules[0][1])
    if kinds[1] == _SCORE:
        return _read_score(folder / modules[1][1], _read_pairs(folder, folder / modules[0][1]))
    _check_mode(folder / modules[1][1])
    library = read_json(folder, _LIBRARY_FILE) or {}
    return VectorPooling(is_normalised=_NORMALIZE in kinds, dimensions=_vector_lengths(folder),
                         default_prompt=library.get("default_prompt_name"),
                         messages=_read_messages(folder / modules[0][1]))


def _read_modules(folder: Path) -> list[tuple[str, str]] | None:
    """(kind, folder) of each module; None without the file."""
    text = read_text(folder, _MODULES_FILE)
    if text is None:
        return None
    try:
        modules = _as_list(json.loads(text))
        # "sentence_transformers.models.Pooling", or where later releases keep it.
        return [(str(module["type"]).rpartition(".")[2], str(module.get("path") or "")) for module in modules]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{folder / _MODULES_FILE}: is no list of modules ({type(error).__name__}: {error}); copy the "
                         "file again from its source") from error


def _as_list(modules: Any) -> list[Any]:
    if not isinstance(modules, list):
        raise ValueError(f"it is a JSON {type(modules).__name__}")
    return modules


def _check_text(folder: Path) -> None:
    settings = read_json(folder, _TEXT_FILE) or {}
    if settings.get("do_lower_case"):
        raise ModelError(f"{folder / _TEXT_FILE}: do_lower_case is not served{_INSTEAD}")


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


def _read_pairs(folder: Path, transformer: Path) -> PairSettings:
    """The variables that a CrossEncoder's text module passes to the chat template, and the prompt before every pair."""
    library = read_json(folder, _LIBRARY_FILE) or {}
    name, add_prompt, kwargs = _template_settings(transformer)
    try:
        default = library.get("default_prompt_name")
        instruction = None if default is None else library["prompts"][default]
    except (AttributeError, TypeError, ValueError, KeyError) as error:
        raise ModelError(f"{folder}: {_LIBRARY_FILE} does not say how a query and a document are shown "
                         f"({type(error).__name__}: {error}); copy it again from its source") from error
    return PairSettings(is_saved=True, template_name=name, template_kwargs=kwargs, add_generation_prompt=add_prompt,
                        instruction=instruction or None)


def _read_messages(transformer: Path) -> MessageSettings | None:
    """Since release 6 sentence-transformers shows every text to a chat template where the file knows messages."""
    modalities = (read_json(transformer, _TEXT_FILE) or {}).get("modality_config") or {}
    if not isinstance(modalities, dict) or not isinstance(modalities.get("message", {}), dict):
        raise ModelError(f"{transformer / _TEXT_FILE}: modality_config {shown(modalities)} is not an object of "
                         "objects; copy the file again from its source")
    if "message" not in modalities:
        return None
    name, add_prompt, kwargs = _template_settings(transformer)
    if name is not None:
        raise ModelError(f"{transformer / _TEXT_FILE}: chat_template {name!r} is not served for vectors; the default "
                         "template is")
    return MessageSettings(is_flat=modalities["message"].get("format") == "flat", template_kwargs=kwargs,
                           add_generation_prompt=add_prompt)


def _template_settings(transformer: Path) -> tuple[str | None, bool, dict[str, Any]]:
    """The name of the chat template, whether the next role is written, and the variables, as the text module gives
    them to the template."""
    path = transformer / _TEXT_FILE
    try:
        processing = (read_json(transformer, _TEXT_FILE) or {}).get("processing_kwargs") or {}
        kwargs = dict(processing.get("chat_template") or {})
    except (AttributeError, TypeError, ValueError) as error:
        raise ModelError(f"{path}: processing_kwargs does not say how a chat template is called "
                         f"({type(error).__name__}: {error}); copy it again from its source") from error
    name, add_prompt = kwargs.pop("chat_template", None), kwargs.pop("add_generation_prompt", False)
    if not isinstance(name, (str, type(None))) or "/" in (name or ""):
        raise ModelError(f"{path}: chat_template {name!r} is no name of a chat template")
    return name, bool(add_prompt), {key: value for key, value in kwargs.items() if key not in _OF_TOKENS}


def _read_score(folder: Path, pairs: PairSettings) -> ScorePooling:
    config, path = require_json(folder, "config.json"), folder / "config.json"
    source = config.get("module_input_name", _LOGITS)
    if source != _LOGITS:
        raise ModelError(f"{path}: module_input_name {source!r} is not served; {_LOGITS} is{_INSTEAD}")
    yes, no = config.get("true_token_id"), config.get("false_token_id")
    for name, value in (("true_token_id", yes), ("false_token_id", 0 if no is None else no)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ModelError(f"{path}: {name} {value!r} is no token id; correct it there")
    return ScorePooling(true_token_id=yes, false_token_id=no, pairs=pairs)  # type: ignore[arg-type]


def _needed(token: str, folder: Path, token_id: Callable[[str], int | None]) -> int:
    found = token_id(token)
    if found is None:
        raise ModelError(f"{folder}: task score is the logit of {_YES!r} less that of {_NO!r}, and the tokenizer has "
                         f"no token {token!r}; a modules.json with a LogitScore names other tokens")
    return found


def _vector_lengths(folder: Path) -> tuple[int, ...] | None:
    """The lengths that vectors may be cut to, where config.json names them."""
    named = require_json(folder, "config.json").get("matryoshka_dimensions")
    return tuple(int(size) for size in named) if isinstance(named, list) and named else None


# -- classifiers -------------------------------------------------------------------------------------------------------


def classifier_architecture(folder: Path) -> str | None:
    """The class that transformers saved the checkpoint in `folder` from, where it is a classifier's."""
    named = require_json(folder, "config.json").get("architectures")
    names = named if isinstance(named, list) else []
    return next((name for name in names if isinstance(name, str) and name.endswith(SUFFIX)), None)


def read_classes(folder: Path) -> ClassPooling | None:
    """The classifier in `folder`, or None. Raises ModelError for an unsupported one."""
    name = classifier_architecture(folder)
    if name is None:
        return None
    raw, path = require_json(folder, "config.json"), folder / "config.json"
    model_type = str(raw.get("model_type"))
    if _letters(name.removesuffix(SUFFIX)) != _letters(model_type):
        raise ModelError(f"{path}: architectures names {name}, which is not model_type {model_type!r} with a "
                         f"classifier's head; served is the *{SUFFIX} of a family's own name")
    labels = _read_labels(raw, path)
    text = raw["text_config"] if isinstance(raw.get("text_config"), dict) else raw
    pad = text.get("pad_token_id")
    if pad is not None and (isinstance(pad, bool) or not isinstance(pad, int)):
        raise ModelError(f"{path}: pad_token_id {pad!r} is no token id; correct it there")
    classes = Classes(labels=labels, activation=_activation(raw, path, len(labels)))
    return ClassPooling(classes=classes, pad_token_id=pad)


def _letters(name: str) -> str:
    """Qwen3_5Text and qwen3_5_text are the same."""
    return name.replace("_", "").casefold()


def _read_labels(raw: dict[str, Any], path: Path) -> tuple[str, ...]:
    named = raw.get("id2label")
    if named is None:
        count = raw.get("num_labels", _DEFAULT_NUM_LABELS)
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ModelError(f"{path}: num_labels {count!r} is no number of classes; correct it there")
        return tuple(f"LABEL_{index}" for index in range(count))
    if not isinstance(named, dict) or not named or sorted(named) != sorted(map(str, range(len(named)))):
        raise ModelError(f'{path}: id2label {shown(named)} has no label for each class, as {{"0": "bad", "1": "good"}} '
                         "has; correct it there")
    return tuple(str(named[str(index)]) for index in range(len(named)))


def _activation(raw: dict[str, Any], path: Path, num_labels: int) -> str:
    """As vLLM and transformers' pipeline choose it. One class alone is a yes or no, unless it is a regression."""
    kind = raw.get("problem_type")
    known = (_REGRESSION, _ONE_LABEL, _SEVERAL_LABELS)
    if kind not in (None, *known):
        raise ModelError(f"{path}: problem_type {kind!r} is not one of {', '.join(known)}; correct it there, or take "
                         "it out")
    if kind == _ONE_LABEL and num_labels == 1:
        raise ModelError(f"{path}: problem_type {kind!r} with one label, whose probability would always be 1; leave "
                         f"problem_type out for its sigmoid, or write {_REGRESSION!r} for the number itself")
    if kind == _REGRESSION:
        return IDENTITY
    return SIGMOID if kind == _SEVERAL_LABELS or num_labels == 1 else SOFTMAX
