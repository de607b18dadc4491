"""Mixtures of experts against transformers: routers, dense layers between, layouts of weights, experts nobody chose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from npu_runner import LLM
from npu_runner.checkpoint.adapted_weights import AdaptedReader
from npu_runner.checkpoint.lora import Adapter, Change
from npu_runner.checkpoint.model_config import MoEConfig
from npu_runner.checkpoint.weights_reader import CheckpointReader
from npu_runner.errors import ModelError, WeightsError
from npu_runner.layers.expert_weights import ExpertWeights
from npu_runner.layers.parallel import LayerContext, TensorParallel
from npu_runner.layers.weights_loader import load_weights
from npu_runner.platforms import pick_platform
from npu_runner.platforms.ops import HeldExperts
from tests.full_set import only_full
from tests.oracle.family_prompts import TEXTS
from tests.oracle.image_prompts import FEW_LAYOUTS, make_prompts
from tests.oracle.running import SMALL, assert_equals_reference


def test_a_sharded_checkpoint_equals_transformers(checkpoint: Any, platform_name: str) -> None:
    path: Path = checkpoint("qwen3_moe", max_shard_size="100KB")
    assert len(list(path.glob("*.safetensors"))) > 2
    with LLM(path, platform=platform_name, **SMALL) as llm:
        assert_equals_reference(path, llm, [llm.engine.processor.from_text(text) for text in TEXTS])


@pytest.mark.parametrize(("num_tokens", "is_turned"), [
    (37, True), *only_full("weights that are not turned, which have no images elsewhere either, and whole prompts",
                           (37, False), (1024, True), (1024, False))])
def test_with_images_and_chunks(num_tokens: int, is_turned: bool, checkpoint: Any, platform_name: str,
                                tmp_path: Path) -> None:
    path: Path = checkpoint("qwen3_vl_moe")
    if is_turned:  # as the published checkpoints have them; transformers writes them the other way round
        path = turned(path, tmp_path, "gate_up_proj", "down_proj")
    with LLM(path, platform=platform_name, max_num_batched_tokens=num_tokens, **SMALL) as llm:
        prompts, images = make_prompts(llm, FEW_LAYOUTS)
        assert_equals_reference(path, llm, prompts, images)


@pytest.mark.full("inductor compiles for a minute; the same experts without a compiler stay")
def test_the_experts_of_a_compiled_step_equal_those_of_an_eager_one() -> None:
    ops = pick_platform("cpu").make_ops()
    generator = torch.Generator().manual_seed(0)
    x_TD, logits_TE = torch.randn(5, 16, generator=generator), torch.randn(5, 4, generator=generator)
    gate_up, down = torch.randn(4, 24, 16, generator=generator), torch.randn(4, 16, 12, generator=generator)

    def run(x_TD: torch.Tensor, logits_TE: torch.Tensor) -> torch.Tensor:
        chosen = ops.route(logits_TE, 2, True)
        of_a_rank = ops.experts(x_TD, *chosen, gate_up[1:3], down[1:3], HeldExperts(1, 4))
        return torch.cat((ops.experts(x_TD, *chosen, gate_up, down), of_a_rank))

    compiled = torch.compile(run, fullgraph=True, dynamic=False)
    for logits in (logits_TE, -logits_TE):  # other experts, the same graph
        torch.testing.assert_close(compiled(x_TD, logits), run(x_TD, logits))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("in_out", [False, True])
def test_every_layout_of_a_checkpoint_gives_the_same_weights(in_out: bool, is_whole: bool, rank: int,
                                                             tmp_path: Path) -> None:
    """A rank has a slice of each expert, or whole ones: the first two of three, or the last."""
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
    if is_whole:
        held = slice(0, 2) if rank == 0 else slice(2, 3)
        right = gate_up[held], down[held]
    platform = pick_platform("cpu")

    class Ops(type(platform.make_ops())):  # type: ignore[misc]
        experts_in_out = in_out

    for layout, tensors in stored.items():
        folder = tmp_path / layout
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
        tp = TensorParallel(rank, 2, has_whole_experts=is_whole)
        moe = MoEConfig(num_experts=num_experts, top_k=1, intermediate_size=width, renormalise=True)
        context = LayerContext(Ops(), None, tp, torch.float32, torch.device("cpu"))  # type: ignore[arg-type]
        model = torch.nn.Module()
        model.experts = ExpertWeights(hidden, moe, context)
        with CheckpointReader(folder) as reader:
            load_weights(model, reader)
        for parameter, expected in zip((model.experts.gate_up, model.experts.down), right, strict=True):
            torch.testing.assert_close(parameter.data, expected.transpose(1, 2) if in_out else expected)


def test_the_tensors_of_other_ranks_experts_are_checked_and_not_read(tmp_path: Path,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = {"gate_proj": (6, 8), "up_proj": (6, 8), "down_proj": (8, 6)}
    tensors = {f"experts.{e}.{name}.weight": torch.zeros(shape) for e in range(3) for name, shape in shapes.items()}
    tensors["experts.2.up_proj.weight"] = torch.zeros(5, 8)
    moe = MoEConfig(num_experts=3, top_k=1, intermediate_size=6, renormalise=True)

    def load(path: Path) -> int:
        context = LayerContext(pick_platform("cpu").make_ops(), None, TensorParallel(0, 2, has_whole_experts=True),  # type: ignore[arg-type]
                               torch.float32, torch.device("cpu"))
        model = torch.nn.Module()
        model.experts = ExpertWeights(8, moe, context)
        save_file(tensors, path / "model.safetensors")
        with CheckpointReader(path) as reader:
            return load_weights(model, reader)

    with pytest.raises(WeightsError, match=r"misshapen: experts\.2\.up_proj\.weight is \[5, 8\]"):
        load(tmp_path)
    del tensors["experts.2.up_proj.weight"]
    with pytest.raises(WeightsError, match=r"missing: experts\.2\.up_proj\.weight"):
        load(tmp_path)
    tensors["experts.2.up_proj.weight"] = torch.zeros(6, 8)
    assert load(tmp_path) == 2 * 3 * 6 * 8 * 4, "two of three experts"


@pytest.mark.parametrize("rank", [0, 1])
def test_an_adapter_of_experts_changes_those_of_the_rank(rank: int, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {"gate_proj": (6, 8), "up_proj": (6, 8), "down_proj": (8, 6)}
    tensors = {f"experts.{e}.{name}.weight": torch.randn(shape, generator=generator)
               for e in range(3) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    changes = {f"experts.{e}.up_proj.weight": Change(left_OR=torch.randn(6, 2, generator=generator), scale=0.5,
                                                     right_RI=torch.randn(2, 8, generator=generator)) for e in (0, 2)}
    model = torch.nn.Module()
    tp = TensorParallel(rank, 2, has_whole_experts=True)
    model.experts = ExpertWeights(8, MoEConfig(num_experts=3, top_k=1, intermediate_size=6, renormalise=True),
                                  LayerContext(pick_platform("cpu").make_ops(), None, tp, torch.float32,  # type: ignore[arg-type]
                                               torch.device("cpu")))
    with CheckpointReader(tmp_path) as reader:
        adapter = Adapter(path=tmp_path, changes=changes, fingerprint="")
        load_weights(model, AdaptedReader(reader, adapter, {}))
    for name, change in changes.items():
        tensors[name] = tensors[name] + change.scale * change.left_OR @ change.right_RI
    for place, expert in enumerate((0, 1) if rank == 0 else (2,)):
        gate, up, down = (tensors[f"experts.{expert}.{name}.weight"] for name in shapes)
        torch.testing.assert_close(model.experts.gate_up[place].data, torch.cat((gate, up)))
        torch.testing.assert_close(model.experts.down[place].data, down)


@pytest.mark.parametrize(("num_experts", "num_ranks", "shares"), [
    (8, 2, [(0, 4), (4, 4)]), (7, 3, [(0, 3), (3, 2), (5, 2)]), (3, 3, [(0, 1), (1, 1), (2, 1)]), (5, 1, [(0, 5)]),
])
def test_whole_experts_are_ranges_and_the_first_ranks_hold_what_is_left(
        num_experts: int, num_ranks: int, shares: list[tuple[int, int]]) -> None:
    ranks = [TensorParallel(rank, num_ranks, has_whole_experts=True) for rank in range(num_ranks)]
    assert [tp.expert_share(num_experts) for tp in ranks] == shares


@pytest.mark.parametrize("num_tokens", [1, 6])
def test_what_ranges_of_experts_compute_adds_up(num_tokens: int) -> None:
    ops = pick_platform("cpu").make_ops()
    generator = torch.Generator().manual_seed(0)
    x_TD, logits_TE = (torch.randn(num_tokens, size, generator=generator) for size in (16, 5))
    gate_up, down = torch.randn(5, 24, 16, generator=generator), torch.randn(5, 16, 12, generator=generator)
    chosen = ops.route(logits_TE, 2, True)
    parts = [ops.experts(x_TD, *chosen, gate_up[first:last], down[first:last], HeldExperts(first, 5))
             for first, last in ((0, 2), (2, 3), (3, 5))]
    torch.testing.assert_close(sum(parts), ops.experts(x_TD, *chosen, gate_up, down))
    if num_tokens == 1:
        assert any((part == 0).all() for part in parts), "two experts are not in three ranges"


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
    from tests.oracle.changed_checkpoints import spoiled

    source = spoiled(lambda base: checkpoint("qwen3_moe"), tmp_path, **changes)
    with pytest.raises(ModelError, match=words):
        LLM(source, platform="cpu", **SMALL)
