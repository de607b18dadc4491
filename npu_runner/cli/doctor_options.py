"""The options of `npu-runner doctor`, apart from its code, which imports far more than a parser should."""

from __future__ import annotations

import argparse

from npu_runner.cli.options import add_some_options, read_size
from npu_runner.config import GRAPH_MODES, RunnerConfig
from npu_runner.errors import ConfigError
from npu_runner.platforms import AUTO, BUILT_IN

_OF_MEMORY = {
    "revision", "runner", "task", "dtype", "quantization", "max_model_len", "max_num_seqs", "max_num_batched_tokens",
    "async_scheduling", "block_size", "kv_cache_dtype", "kv_cache_bytes", "memory_utilization", "enable_prefix_caching",
    "max_state_snapshots", "vision_cache_bytes", "image_min_pixels", "image_max_pixels", "enforce_eager",
    "graph_batch_sizes", "enable_expert_parallel", "speculative_config", "lora"}


def add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--platform", default=AUTO, metavar="NAME",
                        help=f"what to look at: {', '.join(BUILT_IN)}, or an installed package's; auto: the first of "
                        "which anything is seen, in this order")
    parser.add_argument("--graph-mode", choices=[mode for mode in GRAPH_MODES if mode != "auto"], action="append",
                        help="a mode to generate in; may be repeated (default: eager, and the platform's default)")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, metavar="N", help="generate with N ranks")
    parser.add_argument("--skip-generation", action="store_true", help="look at the host only; takes seconds")
    parser.add_argument("--timeout", type=float, default=900.0, metavar="SECONDS", help="for each generation")
    parser.add_argument("--json", action="store_true", help="print the checks as JSON")
    fits = parser.add_argument_group("would a model fit?")
    fits.add_argument("--fits", metavar="MODEL", help="estimate what a checkpoint folder, a hub id or a bare "
                      "config.json takes of a device, and look at nothing else. With --platform auto, an NPU is "
                      "assumed. Exit status 0: it fits, 1: it does not")
    fits.add_argument("--device-memory", type=read_size, metavar="SIZE", help="memory of one device, like 64G")
    add_some_options(parser, RunnerConfig, "settings that --fits counts with", _OF_MEMORY)


def refuse_without_fits(arguments: argparse.Namespace) -> None:
    """Raises ConfigError for an option that only --fits takes."""
    for name in ("device_memory", *sorted(_OF_MEMORY)):
        if getattr(arguments, name, None) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} is for --fits alone; name a model with --fits, or leave it "
                              "out")
