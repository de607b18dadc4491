"""Cases of one random layer each, computed on a device and on the CPU from the same weights (platforms/cases.py).

B sequences, T tokens of all of them, D hidden size, S block size, P patches of all images, X values of a patch.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from npu_runner.checkpoint.model_config import (
    AttentionConfig,
    GatedDeltaNetConfig,
    LayerConfig,
    MLPConfig,
    ModelConfig,
    MoEConfig,
    RopeConfig,
    VisionConfig,
)
from npu_runner.checkpoint.weights_reader import CheckpointReader
from npu_runner.layers.attention import bind_kv_cache
from npu_runner.layers.gated_delta import bind_states, gated_delta_shape
from npu_runner.layers.parallel import LayerContext, TensorParallel
from npu_runner.layers.weights_loader import expected_tensors, load_weights
from npu_runner.models.decoder import Decoder, make_layer
from npu_runner.models.mixers.attention import HeadNormAttention
from npu_runner.models.vision.qwen3_vl import VisionTower
from npu_runner.platforms.cases import Case, Side
from npu_runner.platforms.gated_delta import GatedDeltaShape
from npu_runner.platforms.pools import zeros
from npu_runner.platforms.step_inputs import AttentionMetadata
from npu_runner.platforms.transfers import upload_together

_SEED, _LAUNCHES = 20, 100
_BLOCK_SIZE = 128
# One sequence that fills a block and begins the next, one within a block, one as short as can be.
_PROMPT_LENS = (150, 70, 1)
_LONG_PROMPT = 2000
_GRIDS = ((6, 10), (2, 4))  # patches of two images
# Heads and blocks are those of real models; sizes that only make matmuls longer are smaller, so this takes seconds.
_HIDDEN_SIZE, _MLP_WIDTH, _HEAD_DIM = 512, 1536, 128
_MROPE = "decoder layer, M-RoPE, a prompt of 2,000 tokens"
_HEADS = {"decoder layer, 32/8 heads of 128": (32, 8), "decoder layer, 16/8 heads of 128": (16, 8), _MROPE: (32, 8)}
# A tower has the attention of the model that it sees for: not every kernel takes its own head dim over a cache.
_HEADS_BEHIND_TOWER = (32, 8)
_DELTA = GatedDeltaNetConfig(num_k_heads=4, num_v_heads=8, head_k_dim=128, head_v_dim=128, conv_kernel_size=4)
_MIXERS: dict[str, AttentionConfig | GatedDeltaNetConfig] = {
    **dict.fromkeys(_HEADS, AttentionConfig()),
    "Gated DeltaNet layer, 4/8 heads of 128": _DELTA,
    "experts layer, 8 of 8 experts": AttentionConfig(),
}
# All of them: which ones are chosen where two are nearly as good is each device's rounding, and would tell nothing.
_EXPERTS = {"experts layer, 8 of 8 experts": MoEConfig(num_experts=8, top_k=8, intermediate_size=768, renormalise=True)}


def served(asked: dict[str, list[str]]) -> list[Case]:
    """The doctor's. `asked`: by dtype, names in LAYERS."""
    return [Case(name=name, prepare=partial(_prepare, _decoder_config(name) if name in _MIXERS else _tower_config()),
                 describe=partial(_form, name), dtype=dtype, num_launches=_LAUNCHES)
            for dtype, names in asked.items() for name in names]


def _prepare(config: ModelConfig | VisionConfig, side: Side) -> Callable[[], Tensor]:
    with tempfile.TemporaryDirectory() as folder:
        tensors = expected_tensors(_build(config, side)[0])
        save_file(_sample_weights(tensors), Path(folder, "model.safetensors"))
        model, context = _build(config, side)
        with CheckpointReader(Path(folder)) as reader:
            load_weights(model, reader)
    model.requires_grad_(False).eval()
    if isinstance(config, ModelConfig):
        return partial(_decode, config, model, context)
    return partial(_see, config, model, side)


def _context(side: Side, num_heads: int, num_kv_heads: int, head_dim: int,
             delta: GatedDeltaShape | None = None) -> LayerContext:
    attention = side.attention(num_heads, num_kv_heads, head_dim, _BLOCK_SIZE)
    gated_delta = None if delta is None else side.platform.make_gated_delta(delta, side.dtype)
    return LayerContext(side.ops, attention, TensorParallel(), side.dtype, side.device, gated_delta)


def _form(name: str, side: Side) -> str:
    """The implementation of Gated DeltaNet, which depends on the host; "" without such a layer."""
    delta = gated_delta_shape(_decoder_config(name), TensorParallel()) if name in _MIXERS else None
    return "" if delta is None else f"decodes through {side.platform.make_gated_delta(delta, side.dtype).form}"


def _sample_weights(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Weights with which every part of a layer counts in its output: matmuls keep the scale, softmax is sharp. They are
    bfloat16, which float16 holds as well."""
    generator = torch.Generator().manual_seed(_SEED)
    weights = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator)
        if "norm" in name:
            values = (2.0 if "q_norm" in name or "k_norm" in name else 1.0) + 0.1 * values
        elif name.endswith("A_log"):
            values = values - 2.0  # some heads remember long
        elif len(shape) > 1:
            values = values / math.sqrt(math.prod(shape[1:]))
        weights[name] = values.bfloat16()
    return weights


def _build(config: ModelConfig | VisionConfig, side: Side) -> tuple[nn.Module, LayerContext]:
    """The model and what it is built for."""
    if isinstance(config, ModelConfig):
        delta = gated_delta_shape(config, TensorParallel())
        context = _context(side, config.num_heads, config.num_kv_heads, config.head_dim, delta)
        make = partial(make_layer, attention=HeadNormAttention)
        return Decoder(config, sum(_prompt_lens(config)) + 1, context, make), context
    context = _context(side, *_HEADS_BEHIND_TOWER, _HEAD_DIM)
    return VisionTower(config, context), context


def _decode(config: ModelConfig, model: nn.Module, context: LayerContext) -> Tensor:
    """The outputs for a prompt of each sequence and then one token of each, (T + B, D)."""
    prompt_lens = _prompt_lens(config)
    tables_BW, num_blocks = _block_tables(prompt_lens)
    sizes = (len(config.attention_layers), num_blocks, _BLOCK_SIZE, config.num_kv_heads, config.head_dim)
    if config.attention_layers:
        bind_kv_cache(model, *(zeros(sizes, context.dtype, context.device) for _ in range(2)))
    if context.gated_delta is not None:
        delta = gated_delta_shape(config, TensorParallel())
        assert delta is not None, "there is a backend for it"
        counts = (len(config.state_layers), len(prompt_lens) + 1)
        bind_states(model, zeros((*counts, *delta.conv_state_shape), context.dtype, context.device),
                    zeros((*counts, *delta.state_shape), torch.float32, context.device))
    generator = torch.Generator().manual_seed(_SEED + 1)
    outputs = []
    for done_lens, new_lens in (((0,) * len(prompt_lens), prompt_lens), (prompt_lens, (1,) * len(prompt_lens))):
        x_TD = torch.randn(sum(new_lens), config.hidden_size, generator=generator).bfloat16()
        positions, metadata = _step(context, tables_BW, done_lens, new_lens)
        if config.rope.mrope_section is not None and metadata.is_prefill:  # as of a large image, which turns each axis
            positions = torch.stack((positions, positions // 2, positions // 3))
        outputs.append(model(x_TD.to(context.device, context.dtype), positions, metadata))
    return torch.cat(outputs)


def _prompt_lens(config: ModelConfig) -> tuple[int, ...]:
    return _PROMPT_LENS if config.rope.mrope_section is None else (_LONG_PROMPT,)


def _block_tables(prompt_lens: Sequence[int]) -> tuple[np.ndarray, int]:
    """Blocks of each sequence, out of order and never block 0, and how many blocks there are."""
    counts = [-(-(length + 1) // _BLOCK_SIZE) for length in prompt_lens]
    blocks = np.random.default_rng(_SEED).permutation(np.arange(1, 1 + sum(counts))).astype(np.int32)
    tables_BW = np.zeros((len(counts), max(counts)), dtype=np.int32)
    for row, part in enumerate(np.split(blocks, list(accumulate(counts))[:-1])):
        tables_BW[row, : len(part)] = part
    return tables_BW, 1 + sum(counts)


def _step(context: LayerContext, tables_BW: np.ndarray, done_lens: Sequence[int],
          new_lens: Sequence[int]) -> tuple[Tensor, AttentionMetadata]:
    """Positions (T,) and metadata of a step that adds `new_lens` tokens to contexts of `done_lens`."""
    attention, device = context.attention, context.device
    is_prefill = max(new_lens) > 1
    context_lens = [done + new for done, new in zip(done_lens, new_lens, strict=True)]
    places = [np.arange(done, length) for done, length in zip(done_lens, context_lens, strict=True)]
    slots = np.concatenate([tables_BW[row, place // _BLOCK_SIZE] * _BLOCK_SIZE + place % _BLOCK_SIZE
                            for row, place in enumerate(places)])
    plan = (attention.plan_prefill(list(new_lens), context_lens, tables_BW, device) if is_prefill
            else attention.plan_decode(context_lens, tables_BW, device))
    state_plan = None
    if is_prefill and context.gated_delta is not None:
        state_plan = context.gated_delta.plan_prefill(list(new_lens), context_lens, [], device)
    slots_T, lens_B, tables, positions_T, state_slots_B = (
        torch.from_numpy(array.astype(np.int32)).to(device)
        for array in (slots, np.asarray(context_lens), tables_BW, np.concatenate(places),
                      np.arange(len(new_lens), 0, -1)))
    return positions_T, AttentionMetadata(is_prefill, slots_T, lens_B, tables, plan, state_slots_B, state_plan)


def _see(config: VisionConfig, model: nn.Module, side: Side) -> Tensor:
    """The outputs for two images, (P / merge^2, D)."""
    num_patches = sum(height * width for height, width in _GRIDS)
    generator = torch.Generator().manual_seed(_SEED + 1)
    patches_PX = torch.randn(num_patches, config.in_channels * config.patch_size**2, generator=generator).bfloat16()
    assert isinstance(model, VisionTower), f"{type(model).__name__} is no tower"
    places = upload_together(model.places(_GRIDS), side.device)
    output: Tensor = model(patches_PX.to(side.device, side.dtype), _GRIDS, places)[0]
    return output


def _decoder_config(name: str) -> ModelConfig:
    num_heads, num_kv_heads = _HEADS.get(name, (16, 8))
    return ModelConfig(
        model_type="qwen3", vocab_size=8, hidden_size=_HIDDEN_SIZE, num_heads=num_heads, num_kv_heads=num_kv_heads,
        head_dim=_HEAD_DIM, max_position_embeddings=4096, rms_norm_eps=1e-6, tie_word_embeddings=True,
        rope=RopeConfig(theta=5e6, mrope_section=(24, 20, 20) if name == _MROPE else None), dtype="bfloat16",
        layers=(LayerConfig(mixer=_MIXERS[name], channel=_EXPERTS.get(name, MLPConfig(intermediate_size=_MLP_WIDTH))),))


def _tower_config() -> VisionConfig:
    """The tower of Qwen3-VL-8B, with one layer and a narrower MLP."""
    return VisionConfig(
        depth=1, hidden_size=1152, intermediate_size=1152, num_heads=16, hidden_act="gelu_pytorch_tanh", in_channels=3,
        patch_size=16, temporal_patch_size=2, spatial_merge_size=2, out_hidden_size=_HIDDEN_SIZE,
        num_position_embeddings=2304, deepstack_layers=(), rope_theta=10000.0)
