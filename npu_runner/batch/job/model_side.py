"""The model as a job sees it: what prepares prompts is there at once, what answers them takes its time to load.

Knows nothing of rows or files of answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
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
    """A checkpoint folder and LLMEngine, which is given what was opened here."""

    def __init__(self, config: RunnerConfig):
        from npu_runner.strategies.opened import (
            open_checkpoint,  # torch comes with it: not before everything else is checked
        )

        self._checkpoint = open_checkpoint(config)
        self.processor, self.generation_defaults = self._checkpoint.processor, self._checkpoint.generation_defaults

    def load(self, wants_grammars: Callable[[], bool]) -> AbstractContextManager[Any]:
        from npu_runner.engine.llm_engine import LLMEngine

        return LLMEngine(self._checkpoint, wants_grammars=wants_grammars)
