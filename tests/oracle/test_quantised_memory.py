"""What a load of quantised weights takes of the host: the loaded weights, and a part that does not grow with the model.

Counted are the bytes of all tensors that live at once. Pages of the mapped files are the system's to drop.

    python -m tests.oracle.test_quantised_memory FOLDER fp8-block 40    # the same of 40 layers: files of 2 GB
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from npu_runner.checkpoint.formats.reader import open_weights
from npu_runner.checkpoint.quantization import read_quantization
from npu_runner.layers.parallel import LayerContext, TensorParallel
from npu_runner.layers.weights_loader import expected_tensors
from npu_runner.platforms import pick_platform
from npu_runner.platforms.meta import LiveBytes
from npu_runner.runner.memory import weights_bytes
from npu_runner.strategies import pick_strategy
from scripts.quantised.writing import FORMATS
from tests.oracle.quantised_folders import write_folder

BF16 = torch.bfloat16
SIZES = {"model_type": "qwen3", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 4,
         "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 512,
         "vocab_size": 512,
         "dtype": "bfloat16"}
"""Like a 1.7B, with fewer layers: 400 MB in 16 bits."""
LARGEST_LAYER = 2 * 2048 * (3 * 6144 + 2 * 2048 + 2 * 1024)


def write_checkpoint(path: Path, name: str, num_layers: int) -> None:
    """Every linear is the same few random rows, repeated: what it takes is under test, not what it computes."""
    form, sizes = FORMATS[name](128), SIZES | {"num_hidden_layers": num_layers}
    path.mkdir()
    (path / "config.json").write_text(json.dumps(sizes))
    context = context_of("meta", TensorParallel())
    strategy = pick_strategy(path)
    shapes = expected_tensors(strategy.build(strategy.read_config(), 512, context))
    made: dict[tuple[int, ...], dict[str, Tensor]] = {}
    tensors: dict[str, Tensor] = {}
    for tensor, shape in shapes.items():
        if "proj" not in tensor:
            tensors[tensor] = torch.ones(shape, dtype=BF16)
            continue
        if shape not in made:
            made[shape] = form.write(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
        module = tensor.removesuffix(".weight")
        tensors |= {f"{module}.{suffix}": values for suffix, values in made[shape].items()}
    write_folder(path, tensors)
    (path / "config.json").write_text(json.dumps(sizes | {"quantization_config": form.config}))


def context_of(device: str, tp: TensorParallel) -> LayerContext:
    platform = pick_platform("cpu")
    attention = platform.make_attention("auto", num_heads=16 // tp.size, num_kv_heads=8 // tp.size, head_dim=128,
                                        block_size=16, dtype=BF16)
    return LayerContext(platform.make_ops(), attention, tp, BF16, torch.device(device))


@pytest.mark.full("writes and reads files of 200 MB")
@pytest.mark.parametrize("name", ["fp8-block", "w4a16-asym", "awq"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_load_takes_little_more_than_the_weights(name: str, num_ranks: int, tmp_path: Path) -> None:
    assert assert_peak(tmp_path / name, name, num_ranks) > 380e6 / num_ranks


def assert_peak(path: Path, name: str, num_ranks: int, num_layers: int = 4) -> int:
    """Returns the bytes of the loaded weights."""
    write_checkpoint(path, name, num_layers)
    strategy = pick_strategy(path)
    model_config = strategy.read_config()
    with torch.inference_mode(), LiveBytes("cpu") as live:
        model = strategy.build(model_config, 512, context_of("cpu", TensorParallel(rank=num_ranks - 1, size=num_ranks)))
        built = live.now
        live.reset_peak()
        with open_weights(path, read_quantization(path)) as reader:
            strategy.load_weights(model, reader, model_config)
        peak = live.peak
    weights = weights_bytes(model)
    assert peak <= 1.1 * weights + LARGEST_LAYER / num_ranks
    beside = peak - built
    stored = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    print(f"{name}, {num_ranks} ranks: files of {stored / 1e6:.0f} MB, weights {weights / 1e6:.0f} MB, at once beside "
          f"them {beside / 1e6:.0f} MB")
    assert beside < 80e6, "of pieces of 16 MiB in float32 there are some at once"
    return weights


if __name__ == "__main__":
    folder, quantised_form, layers = sys.argv[1:]
    assert_peak(Path(folder), quantised_form, 1, int(layers))
