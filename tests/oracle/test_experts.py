"""Mixtures of experts against transformers: routers, dense layers between, layouts of weights, experts nobody chose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from npu_runner import LLM
from npu_runner.checkpoint.model_config import MoEConfig
from npu_runner.checkpoint.weights_reader import CheckpointReader
from npu_runner.errors import ModelError, WeightsError
from npu_runner.layers.expert_weights import ExpertWeights
from npu_runner.layers.parallel import LayerContext, TensorParallel
from npu_runner.layers.weights_loader import load_weights
from npu_runner.platforms import pick_platform
from tests.oracle.running import SMALL, assert_equals_reference
from tests.oracle.test_families import TEXTS
from tests.oracle.test_qwen3_vl import LAYOUTS, make_prompts


def test_a_sharded_checkpoint_equals_transformers(checkpoint: Any, platform_name: str) -> None:
    path: Path = checkpoint("qwen3_moe", max_shard_size="100KB")
    assert len(list(path.glob("*.safetensors"))) > 2
    with LLM(path, platform=platform_name, **SMALL) as llm:
        assert_equals_reference(path, llm, [llm.engine.processor.from_text(text) for text in TEXTS])


@pytest.mark.parametrize(("num_tokens", "is_turned"), [(1024, False), (37, False), (1024, True)])
def test_with_images_and_chunks(num_tokens: int, is_turned: bool, checkpoint: Any, platform_name: str,
                                tmp_path: Path) -> None:
    path: Path = checkpoint("qwen3_vl_moe")
    if is_turned:  # as the published checkpoints have them; transformers writes them the other way round
        path = turned(path, tmp_path, "gate_up_proj", "down_proj")
    with LLM(path, platform=platform_name, max_num_batched_tokens=num_tokens, **SMALL) as llm:
        prompts, images = make_prompts(llm, LAYOUTS)
        assert_equals_reference(path, llm, prompts, images)


@pytest.mark.full("inductor compiles for a minute; the same experts without a compiler stay")
def test_the_experts_of_a_compiled_step_equal_those_of_an_eager_one() -> None:
    ops = pick_platform("cpu").make_ops()
    generator = torch.Generator().manual_seed(0)
    x_TD, logits_TE = torch.randn(5, 16, generator=generator), torch.randn(5, 4, generator=generator)
    gate_up, down = torch.randn(4, 24, 16, generator=generator), torch.randn(4, 16, 12, generator=generator)

    def run(x_TD: torch.Tensor, logits_TE: torch.Tensor) -> torch.Tensor:
        return ops.experts(x_TD, *ops.route(logits_TE, 2, True), gate_up, down)

    compiled = torch.compile(run, fullgraph=True, dynamic=False)
    for logits in (logits_TE, -logits_TE):  # other experts, the same graph
        torch.testing.assert_close(compiled(x_TD, logits), run(x_TD, logits))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("in_out", [False, True])
def test_every_layout_of_a_checkpoint_gives_the_same_weights(in_out: bool, rank: int, tmp_path: Path) -> None:
    num_experts, hidden, width = 3, 8, 6
    generator = torch.Generator().manual_seed(0)
    gate, up, down_t = (torch.randn(num_experts, width, hidden, generator=generator) for _ in range(3))
    gate_up, down = torch.cat((gate, up), dim=1), down_t.transpose(1, 2).contiguous()
    stored = {
        "per_expert": {f"experts.{e}.{name}.weight": weight[e].contiguous() for e in range(num_experts)
                       for name, weight in (("gate_proj", gate), ("up_proj", up), ("down_proj", down))},
        "fused": {"experts.gate_up_proj": gate_up, "experts.down_proj": down},
        "fused_transposed": {"experts.gate_up_proj": gate_up.transpose(1, 2).contiguous(),
                             "experts.down_proj": down_t},
    }
    share = slice(rank * width // 2, (rank + 1) * width // 2)
    right = torch.cat((gate[:, share], up[:, share]), dim=1), down[:, :, share]
    platform = pick_platform("cpu")

    class Ops(type(platform.make_ops())):  # type: ignore[misc]
        experts_in_out = in_out

    for layout, tensors in stored.items():
        folder = tmp_path / layout
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
        moe = MoEConfig(num_experts=num_experts, top_k=1, intermediate_size=width, renormalise=True)
        context = LayerContext(Ops(), None, TensorParallel(rank, 2), torch.float32, torch.device("cpu"))  # type: ignore[arg-type]
        model = torch.nn.Module()
        model.experts = ExpertWeights(hidden, moe, context)
        with CheckpointReader(folder) as reader:
            load_weights(model, reader)
        for parameter, expected in zip((model.experts.gate_up, model.experts.down), right, strict=True):
            torch.testing.assert_close(parameter.data, expected.transpose(1, 2) if in_out else expected)


def turned(source: Path, tmp_path: Path, *endings: str) -> Path:
    """A copy of a checkpoint, the tensors that end so with their last two dims the other way round."""
    folder = tmp_path / "turned"
    folder.mkdir()
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(source / "model.safetensors")
    for name in tensors:
        if name.endswith(endings):
            tensors[name] = tensors[name].transpose(1, 2).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_experts_the_other_way_round_are_an_error_by_name(checkpoint: Any, tmp_path: Path) -> None:
    folder = turned(checkpoint("qwen3_vl_moe"), tmp_path, "layers.1.mlp.experts.down_proj")
    with pytest.raises(WeightsError, match=r"misshapen: .*layers\.1\.mlp\.experts\.down_proj is \[8, 40, 64\], "
                                           r"config.json makes it \[8, 64, 40\] \(its last two dims the other way"):
        LLM(folder, platform="cpu", **SMALL)


@pytest.mark.parametrize(("changes", "words"), [
    ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 of num_experts 8 is not possible"),
    ({"moe_intermediate_size": None}, "field 'moe_intermediate_size' is missing for model_type 'qwen3_moe'"),
])
def test_a_config_of_impossible_experts_is_explained(changes: dict[str, Any], words: str, checkpoint: Any,
                                                     tmp_path: Path) -> None:
    from tests.core.test_config import spoiled

    source = spoiled(lambda base: checkpoint("qwen3_moe"), tmp_path, **changes)
    with pytest.raises(ModelError, match=words):
        LLM(source, platform="cpu", **SMALL)
