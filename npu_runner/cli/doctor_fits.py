"""`npu-runner doctor --fits`: would a model fit devices of a given size? Prints the estimate, and what would help.

Reads the checkpoint's small files, loads no weights and touches no device.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npu_runner.checkpoint.quantization import arithmetic, read_quantization, resolve_format
from npu_runner.cli.checkpoint_folder import checkpoint_folder
from npu_runner.cli.options import named_settings
from npu_runner.config import RunnerConfig, from_keywords
from npu_runner.errors import ConfigError
from npu_runner.platforms import AUTO, find_platform, platforms

if TYPE_CHECKING:
    from npu_runner.platforms.platform import Platform
    from npu_runner.runner.estimate import Estimate
    from npu_runner.strategies import LoadStrategy


def run(arguments: argparse.Namespace) -> int:
    """Print the estimate. Returns 0 if the model fits, 1 if not."""
    if arguments.device_memory is None:
        raise ConfigError("--fits: how much memory a device has is not given; add --device-memory 64G")
    settings = named_settings(arguments, RunnerConfig) | {"model": arguments.fits}
    settings["platform"] = platform_with_devices(arguments.platform, "--fits").name
    settings["graph_mode"] = (arguments.graph_mode or [AUTO])[0]
    (config,) = from_keywords(settings, RunnerConfig)
    platform = find_platform(config.platform)
    with checkpoint_folder(arguments.fits, config.revision) as folder:
        return _report(folder, config, platform, arguments.device_memory, as_json=arguments.json)


def platform_with_devices(name: str, option: str) -> Platform:
    """The platform `name`; auto: of those with devices the one that a start tries first. This host may have none.

    Raises ConfigError, which names `option`, for a platform whose devices have no memory of their own.
    """
    if name == AUTO:
        return next(platform for platform in platforms() if platform.visible_devices is not None)
    platform = find_platform(name)
    if platform.visible_devices is None:
        raise ConfigError(f"{option}: platform {platform.name} has no device with memory of its own; name another one")
    return platform


def estimate(folder: Path, config: RunnerConfig, platform: Platform, device_bytes: int) -> tuple[Estimate, list[str]]:
    """The memory that the model needs on each device, and options that would help where it does not fit."""
    # Imported here: these import torch.
    from npu_runner.runner.estimate import estimate_memory, fewest_ranks, longest_length
    from npu_runner.strategies import pick_strategy

    strategy = pick_strategy(folder)
    config = strategy.resolve_config(config)
    config = config.replace(quantization=resolve_format(read_quantization(folder), config.quantization))
    found = estimate_memory(strategy, config, platform, device_bytes)
    remedies = []
    if not found.fits:
        ranks = fewest_ranks(strategy, config, platform, device_bytes)
        remedies += [f"--tensor-parallel-size {ranks}"] if ranks else []
        length = longest_length(found)
        remedies += [f"--max-model-len {length}"] if length else []
        remedies += ["--quantization int8"] if _fits_as_int8(strategy, config, platform, device_bytes) else []
    return found, remedies


def _fits_as_int8(strategy: LoadStrategy, config: RunnerConfig, platform: Platform, device_bytes: int) -> bool:
    from npu_runner.runner.estimate import estimate_memory

    if config.quantization == "int8" or "int8" not in platform.weight_forms:
        return False
    try:
        return estimate_memory(strategy, config.replace(quantization="int8"), platform, device_bytes).fits
    except ConfigError:  # the dtype has no such matmul
        return False


def _report(folder: Path, config: RunnerConfig, platform: Platform, device_bytes: int, *, as_json: bool) -> int:
    found, remedies = estimate(folder, config, platform, device_bytes)
    quantization = read_quantization(folder)
    method = arithmetic(quantization, resolve_format(quantization, config.quantization), found.settings.weight_forms)
    if as_json:
        values = as_values(found) | ({} if method is None else {"quantization": method})
        print(json.dumps({"fits": found.fits, **values, "problem": found.problem, "remedies": remedies}))
    else:
        print("\n".join(as_lines(found, platform.name, remedies, method)))
    return 0 if found.fits else 1


def as_values(found: Estimate) -> dict[str, Any]:
    """Bytes of each rank, and what the KV cache holds."""
    profile = found.profile
    return {
        "tensor_parallel_size": found.num_ranks, "weights_bytes": profile.weights_bytes,
        "states_bytes": found.states.num_bytes if found.states else 0,
        "activations_bytes": profile.activation_peak_bytes, "staging_bytes": profile.staging_bytes,
        "driver_and_communicators_bytes": profile.outside_bytes, "graphs_bytes": found.graphs_bytes,
        "vision_cache_bytes": found.reserved_bytes, "kv_cache_bytes": found.kv_cache_bytes,
        "device_bytes": profile.total_bytes, "max_model_len": found.max_model_len,
        "kv_cache_tokens": found.num_tokens, "sequences_of_max_model_len": found.num_sequences}


def as_lines(found: Estimate, platform: str, remedies: list[str], quantization: str | None = None) -> list[str]:
    """`quantization`: how quantised weights are computed with."""
    from npu_runner.runner.states import size

    values, settings = as_values(found), found.settings
    ranks = f", each of {found.num_ranks} ranks" if found.num_ranks > 1 else ""
    lines = [f"an estimate for platform {platform}, {settings.dtype}{ranks}: nothing was loaded, no device was used"]
    rows = [
        ("weights", "weights_bytes", "exact"), ("states of sequences", "states_bytes", "exact"),
        ("activations, worst step", "activations_bytes", "at most"),
        ("images of the next step", "staging_bytes", "at most"),
        ("driver, communicators", "driver_and_communicators_bytes", "allowance"),
        ("vision cache", "vision_cache_bytes", "at most"), ("KV cache", "kv_cache_bytes", "exact"),
        ("decode graphs", "graphs_bytes", "allowance, of what is left"), ("device memory", "device_bytes", "as given")]
    lines += [f"  {name:<26}{size(values[key]):>12}  {kind}" for name, key, kind in rows
              if values[key] or key.startswith(("weights", "kv"))]
    if quantization is not None:
        lines.append(f"  weights are {quantization}")
    lines.append(f"  up to {settings.max_num_seqs} sequences and {settings.max_num_batched_tokens} tokens a step; "
                 f"memory_utilization {found.memory_utilization:g}")
    if not found.fits:
        lines.append(f"does not fit: {found.problem}")
        instead = " or ".join(remedies) or "nothing that was tried: take larger devices or a smaller model"
        return [*lines, f"would fit: {instead}"]
    lines.append(f"fits: the KV cache holds {found.num_tokens:,} tokens, {found.num_sequences} sequences of "
                 f"{found.max_model_len:,}")
    if found.max_model_len < settings.max_model_len:
        lines.append(f"max_model_len is cut to {found.max_model_len} from {settings.max_model_len}, as a start does")
    return lines
