"""One strategy per model family: how it is built, loaded and shown images. Other packages may register more.

A family is one file here. It is found by the checkpoint's `model_type` and imported when it is needed: `olmo2` is in
olmo2.py. If no file has that name, the part before the last underscore counts: `qwen3_5_moe_text` is in qwen3_5.py. A
strategy of another package is an entry point of the group `npu_runner.strategies`: its name is the `model_type`, its
value a `LoadStrategy` subclass.

A checkpoint's folder is opened once (`open_checkpoint`), without its weights, and the result is passed on whole.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from importlib.metadata import EntryPoint
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import torch

from npu_runner.checkpoint.files import registered, require_json, resolve_checkpoint
from npu_runner.checkpoint.formats.reader import DequantisingReader, open_weights
from npu_runner.checkpoint.lora import Adapter, read_adapter
from npu_runner.checkpoint.model_config import ModelConfig, ScorePooling
from npu_runner.checkpoint.quantization import Quantization, read_quantization, resolve_format
from npu_runner.checkpoint.weights_reader import stores_another_head
from npu_runner.config import RunnerConfig
from npu_runner.errors import ModelError
from npu_runner.prompts.processor import ChatProcessor
from npu_runner.strategies.base import LoadStrategy, StagedImages, VisionEmbeddings

__all__ = ["ENTRY_POINT_GROUP", "LoadStrategy", "OpenedCheckpoint", "StagedImages", "VisionEmbeddings",
           "find_strategy", "open_adapter", "open_checkpoint", "pick_strategy", "strategies_by_model_type"]

logger = logging.getLogger(__name__)
ENTRY_POINT_GROUP = "npu_runner.strategies"


def pick_strategy(path: Path) -> LoadStrategy:
    """The strategy for the checkpoint folder `path`, by the `model_type` of its config.json.

    If no family serves it, the generic one, if transformers has it; else raises ModelError listing the types.
    """
    raw = require_json(path, "config.json")
    model_type = raw.get("model_type")
    strategy = find_strategy(model_type)
    if strategy is not None:
        return strategy(path)
    from npu_runner.strategies import transformers_model

    if transformers_model.knows(model_type):
        return transformers_model.TransformersStrategy(path)
    code = " (the checkpoint's own code, auto_map, is never run)" if raw.get("auto_map") else ""
    supported = ", ".join(sorted(strategies_by_model_type()))
    installed = transformers_model.installed_version()
    found = f"; {installed} is installed" if installed and not transformers_model.is_new_enough(installed) else ""
    raise ModelError(
        f"{path}: model_type {model_type!r} is not supported{code}; supported are {supported}, and most text models "
        f"of {transformers_model.REQUIRED}{found}. A package can add one through the entry-point group "
        f"{ENTRY_POINT_GROUP!r}")


def find_strategy(model_type: Any) -> type[LoadStrategy] | None:
    """The strategy of a model type, of another package first, then our own; None if there is none."""
    for entry in registered(ENTRY_POINT_GROUP):
        if entry.name == model_type:
            return _registered(entry)
    files, name = {module.name for module in iter_modules(__path__)}, str(model_type)
    while name:
        found = _families_in(name).get(model_type) if name in files else None
        if found is not None:
            return found
        name = name.rpartition("_")[0]
    return None


def strategies_by_model_type() -> dict[str, type[LoadStrategy]]:
    """Our own strategies, for which every file is imported, and those that installed packages register, which win."""
    known: dict[str, type[LoadStrategy]] = {}
    for module in iter_modules(__path__):
        known.update(_families_in(module.name))
    return {**known, **{entry.name: _registered(entry) for entry in registered(ENTRY_POINT_GROUP)}}


def _families_in(file: str) -> dict[str, type[LoadStrategy]]:
    """The strategies that one file of this folder defines, by model_type."""
    module = import_module(f"{__name__}.{file}")
    own = (kind for kind in vars(module).values()
           if isinstance(kind, type) and issubclass(kind, LoadStrategy) and kind.__module__ == module.__name__)
    return {model_type: kind for kind in own for model_type in kind.model_types}


def _registered(entry: EntryPoint) -> type[LoadStrategy]:
    strategy = entry.load()
    if not (isinstance(strategy, type) and issubclass(strategy, LoadStrategy)):
        raise ModelError(f"entry point {entry.name!r} ({entry.value}) is not a LoadStrategy subclass")
    return strategy


@dataclass(frozen=True, kw_only=True)
class OpenedCheckpoint:
    """The result of `open_checkpoint`."""

    path: Path
    strategy: LoadStrategy
    config: RunnerConfig
    """As the family serves it."""
    model_config: ModelConfig
    processor: ChatProcessor
    quantization: Quantization | None
    """None: its weights are not quantised."""
    adapter: Adapter | None
    """To be merged into the weights."""
    seconds: float
    """Seconds that opening took."""

    def multiplied_forms(self, weight_forms: Collection[str]) -> Collection[str]:
        """The subset of a platform's `weight_forms` in which this checkpoint stores weights. Reads only headers.

        It is all of them if weights are random or made by the setting `quantization`.
        """
        made = self.config.load_format == "dummy" or self.config.quantization != "auto"
        if self.quantization is None or made or not weight_forms:
            return weight_forms
        return [form for form in weight_forms if form in self._stored_forms]

    @cached_property
    def _stored_forms(self) -> frozenset[str]:
        with open_weights(self.path, self.quantization) as reader:
            return reader.weight_forms if isinstance(reader, DequantisingReader) else frozenset()

    @property
    def generation_defaults(self) -> dict[str, Any]:
        """SamplingParams fields that the checkpoint sets."""
        return dict(self.model_config.generation_defaults)

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer."""
        return self.processor.end_token_ids(self.model_config)


def open_checkpoint(config: RunnerConfig) -> OpenedCheckpoint:
    """Opens the folder that `config.model` stands for.

    Raises ModelError if the folder is no checkpoint or its family is not served, ConfigError if the family does not
    serve a setting.
    """
    began = time.perf_counter()
    path = resolve_checkpoint(config.model, config.revision)
    strategy = pick_strategy(path)
    resolved, quantization = strategy.resolve_config(config), read_quantization(path)
    resolved = resolved.replace(quantization=resolve_format(quantization, resolved.quantization))
    model_config = strategy.model_config_for(resolved)
    adapter = None if config.lora is None else open_adapter(config.lora, quantization)
    if model_config.tie_word_embeddings and _has_own_head(path, resolved, model_config, adapter):
        model_config = replace(model_config, tie_word_embeddings=False)
    return OpenedCheckpoint(
        path=path, strategy=strategy, config=resolved, model_config=model_config, adapter=adapter,
        processor=strategy.processor(resolved), quantization=quantization, seconds=time.perf_counter() - began)


def _has_own_head(path: Path, config: RunnerConfig, model_config: ModelConfig, adapter: Adapter | None) -> bool:
    """Whether the head differs from the embedding, whatever config.json says: it is stored so, or an adapter changes
    it."""
    if adapter is not None and adapter.has("lm_head.weight"):
        return True
    pooling = model_config.pooling
    if config.load_format == "dummy" or (pooling is not None and not isinstance(pooling, ScorePooling)):
        return False
    if not stores_another_head(path, getattr(torch, model_config.dtype)):
        return False
    logger.info("%s: tie_word_embeddings is true, and lm_head.weight is not the embedding; the stored head is used, "
                "as in transformers", path)
    return True


def open_adapter(folder: str, quantization: Quantization | None) -> Adapter:
    """Raises ModelError for a base that is quantised: what the adapter adds would be lost in its rounding."""
    if quantization is not None:
        raise ModelError(f"lora {folder}: the checkpoint's weights are quantised ({quantization.method}); take the "
                         "checkpoint in bfloat16 or float16 that it was made of")
    return read_adapter(Path(folder).expanduser())
