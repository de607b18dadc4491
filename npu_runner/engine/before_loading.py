"""What an engine answers with, as far as that is known before its weights are loaded. Knows nothing of requests."""

from __future__ import annotations

from npu_runner.platforms import pick_platform
from npu_runner.runner.settings import resolve_settings
from npu_runner.strategies import OpenedCheckpoint


def settings_before_loading(checkpoint: OpenedCheckpoint) -> dict[str, str]:
    """The part of `LLMEngine.describe` that follows from settings and files.

    Raises ConfigError for settings that model or platform cannot do, where this process is to run the model.
    """
    config, pooling = checkpoint.config, checkpoint.model_config.pooling
    known = {"tensor_parallel_size": str(config.parallel.tensor_parallel_size), "seed": str(config.seed)}
    if config.max_model_len is not None:
        known["max_model_len"] = str(config.max_model_len)
    if pooling is not None:
        known["pooling"] = pooling.describe()
    if config.parallel.tensor_parallel_size == 1:  # else this process loads no platform: ranks do
        platform = pick_platform(config.platform)
        known |= {"platform": platform.name, **resolve_settings(config, checkpoint.model_config, platform).describe()}
    return known
