"""A checkpoint folder, opened once: which family it is of, what its files say, what prepares its prompts. Loads no
weights; everybody who needs one of these is handed the whole."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from npu_runner.checkpoint.files import resolve_checkpoint
from npu_runner.checkpoint.model_config import ModelConfig
from npu_runner.config import RunnerConfig
from npu_runner.prompts.processor import ChatProcessor
from npu_runner.strategies import pick_strategy
from npu_runner.strategies.base import LoadStrategy


@dataclass(frozen=True, kw_only=True)
class OpenedCheckpoint:
    """What `open_checkpoint` found."""

    path: Path
    strategy: LoadStrategy
    config: RunnerConfig
    """As the family serves it."""
    model_config: ModelConfig
    processor: ChatProcessor
    seconds: float
    """That opening it took."""

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

    Raises ModelError for a folder that is no checkpoint or of no family that is served, ConfigError for a setting that
    the family does not serve.
    """
    began = time.perf_counter()
    path = resolve_checkpoint(config.model, config.revision)
    strategy = pick_strategy(path)
    resolved = strategy.resolve_config(config)
    return OpenedCheckpoint(
        path=path, strategy=strategy, config=resolved, model_config=strategy.model_config_for(resolved),
        processor=strategy.processor(resolved), seconds=time.perf_counter() - began,
    )
