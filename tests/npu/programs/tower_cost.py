"""One call of a Qwen3-VL tower on the emulated device: launches of a layer, and how far its numbers are from the CPU's.

    python -m tests.npu.programs.tower_cost RESULTS.json

Head dim 72, as in Qwen3-VL 8B, two heads. The cost of a layer is the difference between towers of two and of four.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from npu_runner.checkpoint.model_config import VisionConfig
from npu_runner.checkpoint.weights_reader import WeightsReader
from npu_runner.layers.parallel import LayerContext, TensorParallel
from npu_runner.layers.weights_loader import expected_tensors, load_weights
from npu_runner.models.vision.qwen3_vl import VisionTower
from npu_runner.platforms import pick_platform
from npu_runner.platforms.transfers import upload_together
from tests.cann.programs.emulation import calls, reset_counters

GRIDS = [(8, 12), (4, 4), (4, 4)]


class Weights(WeightsReader):
    """What load_weights reads: random values by name, the same for every platform."""

    path = Path("random")

    def __init__(self, tower: VisionTower):
        self.values: dict[str, torch.Tensor] = {}
        generator = torch.Generator().manual_seed(1)
        for name, shape in sorted(expected_tensors(tower).items()):
            bias = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            self.values[name] = bias + 0.05 * torch.randn(shape, generator=generator)

    @property
    def names(self) -> set[str]:
        return set(self.values)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.values[name].shape)

    def dtype(self, name: str) -> str:
        return "F32"

    def close(self) -> None:
        """No file is open."""

    def read(self, name: str, dim: int | None = None, start: int = 0, length: int = 0) -> torch.Tensor:
        value = self.values[name]
        return value if dim is None else value.narrow(dim, start, length)


def tower_on(platform_name: str, depth: int, dtype: torch.dtype, activation: str) -> tuple[VisionTower, torch.device]:
    platform = pick_platform(platform_name)
    device = platform.devices.set_device(0)
    attention = platform.make_attention("fused" if platform_name == "npu" else "auto", num_heads=2, num_kv_heads=2,
                                        head_dim=64, block_size=128, dtype=dtype)
    config = VisionConfig(
        depth=depth, hidden_size=144, intermediate_size=288, num_heads=2, patch_size=4, temporal_patch_size=2,
        spatial_merge_size=2, out_hidden_size=64, num_position_embeddings=64, deepstack_layers=(0,), in_channels=3,
        hidden_act=activation, rope_theta=10000.0,
    )
    context = LayerContext(platform.make_ops(), attention, TensorParallel(), dtype, device)
    return VisionTower(config, context), device


def outputs(platform_name: str, depth: int, dtype: torch.dtype, activation: str = "gelu_pytorch_tanh"
            ) -> tuple[torch.Tensor, dict[str, int]]:
    """Main and deepstack embeddings side by side, and what was launched."""
    reference, _ = tower_on("cpu", depth, torch.float32, activation)
    tower, device = tower_on(platform_name, depth, dtype, activation)
    load_weights(tower, Weights(reference))
    num_patches = sum(height * width for height, width in GRIDS)
    patches = torch.randn(num_patches, 4 * 4 * 3, generator=torch.Generator().manual_seed(2)).to(device)
    with torch.inference_mode():
        places = upload_together(tower.places(GRIDS), device)
        tower(patches, GRIDS, places)
        if platform_name == "npu":
            reset_counters()
        main, levels = tower(patches, GRIDS, places)
        found = calls("launches") if platform_name == "npu" else {}
    return torch.cat([main, *levels], dim=-1).float().cpu(), found


def distance(dtype: torch.dtype, activation: str) -> float:
    """The largest difference to the CPU's float32, in parts of the values' spread."""
    wanted, _ = outputs("cpu", 2, torch.float32, activation)
    found, _ = outputs("npu", 2, dtype, activation)
    return float((found - wanted).abs().max() / wanted.std())


def main(results_path: str) -> None:
    few, many = outputs("npu", 2, torch.bfloat16)[1], outputs("npu", 4, torch.bfloat16)[1]
    per_layer = {name: (count - few.get(name, 0)) / 2 for name, count in many.items() if count != few.get(name, 0)}
    results: dict[str, Any] = {
        "per_layer": per_layer,
        "rest": {name: count for name in few if (count := few[name] - 2 * per_layer.get(name, 0))},
        "distances": {f"{str(dtype)[6:]} {activation}": distance(dtype, activation)
                      for dtype in (torch.float32, torch.bfloat16) for activation in ("gelu_pytorch_tanh", "gelu")},
    }
    Path(results_path).write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1])
