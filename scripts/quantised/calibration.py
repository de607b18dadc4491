"""Ranges of the inputs of a model's linears over a file of rows, for static scales. Knows no format.

T tokens, I input features.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from npu_runner import LLM, SamplingParams
from npu_runner.checkpoint.weights_reader import CheckpointReader, renamed_tensor
from npu_runner.errors import ModelError
from npu_runner.layers.linear import ColumnParallelLinear, RowParallelLinear

from .formats import Range


def input_ranges(model: Path, rows: Path, *, allowed_media_dir: str | None = None) -> dict[str, Range | None]:
    """The ranges of all linears by their names in the checkpoint; None if no row went through one. The rows' messages,
    with the answers in them, are prompts of the cpu platform in float32.

    Raises ModelError for a file without rows, or a row without messages.
    """
    conversations = list(_conversations(rows))
    if not conversations:
        raise ModelError(f"{rows}: there is no row in it")
    with LLM(model, platform="cpu", dtype="float32", enforce_eager=True) as llm:
        runner: Any = llm.engine._executor._runner  # type: ignore[attr-defined]
        runner.steps.accepts_ends = False  # the last layer, too, is to see all tokens
        with CheckpointReader(model) as reader:
            seen = _watch(runner.model, runner.strategy.renamed(reader.names))
        llm.chat(conversations, SamplingParams(temperature=0.0, max_tokens=1), allowed_media_dir=allowed_media_dir)
    return {name: watcher.range for watcher, names in seen for name in names}


def _conversations(rows: Path) -> Iterator[list[dict[str, Any]]]:
    """The messages of a job's rows, or of objects with `messages` alone."""
    for number, line in enumerate(rows.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            yield row.get("body", row)["messages"]
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelError(f"{rows}, line {number}: it is no row with messages ({error!r})") from error


class _Watcher:
    """Operators of one linear, in the place of its platform's."""

    def __init__(self, ops: Any):
        self._ops = ops
        self.range: Range | None = None

    def linear(self, x_TI: Tensor, *rest: Any) -> Any:
        self._observe(x_TI)
        return self._ops.linear(x_TI, *rest)

    def linear_gelu(self, x_TI: Tensor, *rest: Any) -> Any:
        self._observe(x_TI)
        return self._ops.linear_gelu(x_TI, *rest)

    def _observe(self, x_TI: Tensor) -> None:
        least, most = (value.item() for value in x_TI.aminmax())
        before = self.range or Range(0.0, 0.0)
        self.range = Range(min(before.least, least), max(before.most, most))


def _watch(model: nn.Module, renamed: Mapping[str, str]) -> list[tuple[_Watcher, list[str]]]:
    """Each linear with the names of those in the checkpoint that it is made of."""
    seen = []
    for name, module in model.named_modules():
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
            parent = name.rpartition(".")[0]
            tensors = [renamed_tensor(f"{parent}.{part.name}", renamed) for part in module.weight_parts["weight"]]
            watcher = _Watcher(module.ops)
            module.ops = watcher  # type: ignore[assignment]
            seen.append((watcher, [tensor.removesuffix(".weight") for tensor in tensors]))
    return seen
