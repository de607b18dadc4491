"""vLLM's `quantization`, where it names a format: it must be the one that the checkpoint's files name."""

from __future__ import annotations

from typing import Any

from npu_runner.checkpoint.files import resolve_checkpoint
from npu_runner.checkpoint.quantization import MODELSLIM, read_quantization
from npu_runner.config import RunnerConfig
from npu_runner.errors import ConfigError

FORMATS = {"awq": "awq", "gptq": "gptq", "compressed-tensors": "compressed-tensors", "ascend": MODELSLIM}
"""vLLM's names of formats, ours to each."""


def check_format(config: RunnerConfig, asked: Any) -> None:
    """Raises ConfigError where `asked` is a format and the checkpoint's weights are of another one, or of none."""
    if not isinstance(asked, str) or asked not in FORMATS:
        return
    found = read_quantization(resolve_checkpoint(config.model, config.revision, with_weights=False))
    if found is None or found.method != FORMATS[asked]:
        are = "not quantised" if found is None else f"quantised as {found.method}"
        raise ConfigError(f"quantization={asked!r} is not served: the checkpoint's weights are {are}; leave it out")
