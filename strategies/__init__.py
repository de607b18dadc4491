"""How each model family is built, loaded and shown its pictures. Other packages register more.

A strategy of another package is an entry point of the group `npu_runner.strategies`: its name is the `model_type`, its
value a `LoadStrategy` subclass.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

from npu_runner.checkpoint.files import require_json
from npu_runner.errors import ModelError
from npu_runner.strategies import transformers_model
from npu_runner.strategies.base import LoadStrategy, StagedImages, VisionEmbeddings
from npu_runner.strategies.llama import LlamaStrategy
from npu_runner.strategies.mistral import MistralStrategy
from npu_runner.strategies.qwen2 import Qwen2Strategy
from npu_runner.strategies.qwen2_5_vl import Qwen25VLStrategy
from npu_runner.strategies.qwen3 import Qwen3MoEStrategy, Qwen3Strategy
from npu_runner.strategies.qwen3_5 import Qwen35MoEStrategy, Qwen35MoETextStrategy, Qwen35Strategy, Qwen35TextStrategy
from npu_runner.strategies.qwen3_next import Qwen3NextStrategy
from npu_runner.strategies.qwen3_vl import Qwen3VLMoEStrategy, Qwen3VLStrategy

__all__ = ["ENTRY_POINT_GROUP", "LoadStrategy", "StagedImages", "VisionEmbeddings", "pick_strategy",
           "strategies_by_model_type"]

ENTRY_POINT_GROUP = "npu_runner.strategies"
_OWN: tuple[type[LoadStrategy], ...] = (
    LlamaStrategy, MistralStrategy, Qwen2Strategy, Qwen3Strategy, Qwen3MoEStrategy, Qwen3VLStrategy,
    Qwen3VLMoEStrategy, Qwen25VLStrategy, Qwen35Strategy, Qwen35TextStrategy, Qwen35MoEStrategy, Qwen35MoETextStrategy,
    Qwen3NextStrategy,
)


def pick_strategy(path: Path) -> LoadStrategy:
    """The strategy for the checkpoint folder `path`, by the `model_type` of its config.json.

    Where none knows it, the generic one, if transformers does; else raises ModelError listing the types.
    """
    raw = require_json(path, "config.json")
    model_type = raw.get("model_type")
    known = strategies_by_model_type()
    if model_type in known:
        return known[model_type](path)
    if transformers_model.knows(model_type):
        return transformers_model.TransformersStrategy(path)
    code = " (the checkpoint's own code, auto_map, is never run)" if raw.get("auto_map") else ""
    raise ModelError(
        f"{path}: model_type {model_type!r} is not supported{code}; supported are {', '.join(sorted(known))}, and with "
        f"transformers ({transformers_model.INSTALL}) most text models that it knows. A package can add one through "
        f"the entry-point group {ENTRY_POINT_GROUP!r}"
    )


def strategies_by_model_type() -> dict[str, type[LoadStrategy]]:
    """Our own strategies, and those that installed packages register, which win."""
    known = {model_type: strategy for strategy in _OWN for model_type in strategy.model_types}
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        strategy = entry.load()
        if not (isinstance(strategy, type) and issubclass(strategy, LoadStrategy)):
            raise ModelError(f"entry point {entry.name!r} ({entry.value}) is not a LoadStrategy subclass")
        known[entry.name] = strategy
    return known
