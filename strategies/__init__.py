"""How each model family is built, loaded and shown its pictures. Other packages register more.

A strategy of another package is an entry point of the group `npu_runner.strategies`: its name is the `model_type`, its
value a `LoadStrategy` subclass.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

from npu_runner.checkpoint_files import require_json
from npu_runner.errors import ModelError
from strategies.base import LoadStrategy, VisionEmbeddings
from strategies.causal_lm import CausalLMStrategy
from strategies.qwen3_vl import Qwen3VLStrategy

__all__ = ["ENTRY_POINT_GROUP", "LoadStrategy", "VisionEmbeddings", "pick_strategy", "strategies_by_model_type"]

ENTRY_POINT_GROUP = "npu_runner.strategies"
_OWN: tuple[type[LoadStrategy], ...] = (CausalLMStrategy, Qwen3VLStrategy)


def pick_strategy(path: Path) -> LoadStrategy:
    """The strategy for the checkpoint folder `path`, by the `model_type` of its config.json.

    Raises ModelError listing the supported types when there is none.
    """
    model_type = require_json(path, "config.json").get("model_type")
    known = strategies_by_model_type()
    if model_type not in known:
        raise ModelError(
            f"{path}: model_type {model_type!r} is not supported; supported are {', '.join(sorted(known))}. "
            f"A package can add one through the entry-point group {ENTRY_POINT_GROUP!r}"
        )
    return known[model_type](path)


def strategies_by_model_type() -> dict[str, type[LoadStrategy]]:
    """Our own strategies, and those that installed packages register, which win."""
    known = {model_type: strategy for strategy in _OWN for model_type in strategy.model_types}
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        strategy = entry.load()
        if not (isinstance(strategy, type) and issubclass(strategy, LoadStrategy)):
            raise ModelError(f"entry point {entry.name!r} ({entry.value}) is not a LoadStrategy subclass")
        known[entry.name] = strategy
    return known
