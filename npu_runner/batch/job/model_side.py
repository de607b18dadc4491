"""The model as a job sees it: what prepares prompts is there at once, what answers them takes its time to load.

Knows nothing of rows or files of answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from npu_runner.config import RunnerConfig


class ModelSide(Protocol):
    """A checkpoint that is about to be served."""

    @property
    def processor(self) -> Any:
        """A ChatProcessor, or what does as one does; picklable."""

    @property
    def generation_defaults(self) -> Mapping[str, Any]:
        """SamplingParams fields that the checkpoint sets."""

    def load(self, wants_grammars: Callable[[], bool]) -> AbstractContextManager[Any]:
        """The engine, once it can serve; prompts of `processor` are what it takes. `wants_grammars`: LLMEngine's."""


class CheckpointSide:
    """A checkpoint folder and LLMEngine. The engine is given the processor, so that there is only one of them."""

    def __init__(self, config: RunnerConfig):
        from strategies import pick_strategy  # torch comes with it: not before everything else is checked

        strategy = pick_strategy(Path(config.model))
        self._config = config
        self.generation_defaults = dict(strategy.read_config().generation_defaults)
        self.processor = strategy.processor(config)

    def load(self, wants_grammars: Callable[[], bool]) -> AbstractContextManager[Any]:
        from npu_runner.engine.llm_engine import LLMEngine

        return LLMEngine(self._config, processor=self.processor, wants_grammars=wants_grammars)
