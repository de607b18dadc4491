"""The table of sizes in docs/running-on-ascend.md: what `npu-runner doctor --fits` says of published models.

    python scripts/sizing_table.py [--platform npu] [MODEL ...]

The shapes are those of the published config.json files; images may be as large as their preprocessors allow. No weights
are read and no device is used.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from npu_runner.cli.checkpoint_folder import checkpoint_folder
from npu_runner.config import RunnerConfig
from npu_runner.platforms import find_platform
from npu_runner.request.limits import GIB
from npu_runner.runner.estimate import Estimate, estimate_memory, fewest_ranks
from npu_runner.strategies import pick_strategy

DEVICES = (64, 32)  # GiB
LENGTH = 32768
"""max_model_len: one sequence as long must fit."""
_TEXT: dict[str, Any] = {
    "vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "attention_bias": False, "dtype": "bfloat16",
}
_MOE = {"num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
_SMALL_TOWER = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "deepstack_visual_indexes": [5, 11, 17]}
_LARGE_TOWER = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "deepstack_visual_indexes": [8, 16, 24]}
# Hidden size, MLP width, layers, heads, tied embeddings; what else.
_SHAPES: dict[str, tuple[tuple[int, int, int, int, bool], dict[str, Any]]] = {
    "Qwen3-0.6B": ((1024, 3072, 28, 16, True), {}),
    "Qwen3-1.7B": ((2048, 6144, 28, 16, True), {}),
    "Qwen3-4B": ((2560, 9728, 36, 32, True), {}),
    "Qwen3-8B": ((4096, 12288, 36, 32, False), {}),
    "Qwen3-14B": ((5120, 17408, 40, 40, False), {}),
    "Qwen3-32B": ((5120, 25600, 64, 64, False), {}),
    "Qwen3-30B-A3B": ((2048, 6144, 48, 32, False), _MOE),
    "Qwen3-VL-2B": ((2048, 6144, 28, 16, True), _SMALL_TOWER),
    "Qwen3-VL-4B": ((2560, 9728, 36, 32, True), _SMALL_TOWER),
    "Qwen3-VL-8B": ((4096, 12288, 36, 32, False), _LARGE_TOWER),
    "Qwen3-VL-32B": ((5120, 25600, 64, 64, False), _LARGE_TOWER),
}
MODELS = tuple(_SHAPES)


def config_of(model: str) -> dict[str, Any]:
    """The published config.json, as far as anything of it takes memory."""
    (hidden_size, width, num_layers, num_heads, is_tied), more = _SHAPES[model]
    text = {**_TEXT, "hidden_size": hidden_size, "intermediate_size": width, "num_hidden_layers": num_layers,
            "num_attention_heads": num_heads, "tie_word_embeddings": is_tied}
    if "depth" not in more:
        return {**text, "model_type": "qwen3_moe" if more else "qwen3", "rope_theta": 1e6,
                "max_position_embeddings": 40960, **more}
    rope = {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [24, 20, 20]}
    vision = {"model_type": "qwen3_vl", "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
              "in_channels": 3, "hidden_act": "gelu_pytorch_tanh", "num_heads": 16, "out_hidden_size": hidden_size,
              "num_position_embeddings": 2304, **more}
    return {"model_type": "qwen3_vl", "dtype": "bfloat16", "tie_word_embeddings": is_tied, "vision_config": vision,
            "image_token_id": 151655, "video_token_id": 151656,
            "text_config": {**text, "model_type": "qwen3_vl_text", "rope_theta": 5e6, "rope_scaling": rope,
                            "max_position_embeddings": 262144}}


def row(model: str, platform_name: str) -> str:
    """One line of the table: for each size of a device the fewest ranks, what they take, and what the cache holds."""
    platform = find_platform(platform_name)
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "config.json"
        file.write_text(json.dumps(config_of(model)))
        with checkpoint_folder(str(file), None) as folder:
            strategy = pick_strategy(folder)
            config = RunnerConfig(model=str(folder), platform=platform_name, max_model_len=LENGTH)
            cells: list[str] = []
            for gib in DEVICES:
                found = estimate_memory(strategy, config, platform, gib * GIB)
                if not found.fits:
                    ranks = fewest_ranks(strategy, config, platform, gib * GIB)
                    assert ranks is not None, f"{model} fits no number of ranks"
                    found = estimate_memory(strategy, config.replace(tensor_parallel_size=ranks), platform, gib * GIB)
                cells += _cells(found)
    return "| " + " | ".join([model, *cells]) + " |"


def _cells(found: Estimate) -> list[str]:
    profile = found.profile
    return [str(found.num_ranks), f"{profile.weights_bytes / GIB:.1f}", f"{profile.activation_peak_bytes / GIB:.1f}",
            f"{found.num_tokens:,}", str(found.num_sequences)]


def table(models: tuple[str, ...], platform_name: str) -> Iterator[str]:
    heads = [f"{gib} GiB: {what}" if index == 0 else what for gib in DEVICES
             for index, what in enumerate(("ranks", "weights", "activations", "tokens", "sequences"))]
    yield "| " + " | ".join(["model", *heads]) + " |"
    yield "|---" * (1 + len(heads)) + "|"
    for model in models:
        yield row(model, platform_name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", default=MODELS, help=", ".join(MODELS))
    parser.add_argument("--platform", default="npu")
    arguments = parser.parse_args()
    for line in table(tuple(arguments.models), arguments.platform):
        print(line, flush=True)


if __name__ == "__main__":
    main()
