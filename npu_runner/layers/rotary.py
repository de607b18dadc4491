"""Rotary position embeddings: frequencies of every scaling kind, and cos/sin tables, also for M-RoPE.

Kinds and formulas: RoPE arXiv 2104.09864; linear interpolation arXiv 2306.15595; YaRN arXiv 2309.00071; LongRoPE
arXiv 2402.13753; llama3 as in the Llama 3.1 reference code; parameter names and defaults as in transformers' configs.
Knows nothing of attention.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from npu_runner.checkpoint.model_config import ModelConfig, RopeConfig
from npu_runner.errors import ConfigError, ModelError

# T tokens, P positions in the table, H head dims that turn, F = H / 2 frequencies


class RotaryTable(nn.Module):
    """cos and sin of every position below `num_positions`, looked up once per step for all layers."""

    def __init__(self, config: ModelConfig, num_positions: int, *, dtype: torch.dtype, device: torch.device):
        super().__init__()
        inverse_F, attention_factor = inverse_frequencies(config, num_positions)
        angles_PF = torch.arange(num_positions, dtype=torch.float32)[:, None] * inverse_F
        angles_PH = torch.cat((angles_PF, angles_PF), dim=-1)
        self.register_buffer("cos_PH", (angles_PH.cos() * attention_factor).to(device, dtype), persistent=False)
        self.register_buffer("sin_PH", (angles_PH.sin() * attention_factor).to(device, dtype), persistent=False)
        if config.rope.mrope_section is not None:
            make_axes = interleaved_axes if config.rope.mrope_is_interleaved else sectioned_axes
            axis_F = make_axes(config.rope.mrope_section, len(inverse_F))
            axis_H = torch.cat((axis_F, axis_F)).to(device)
            self.register_buffer("is_height_H", axis_H == 1, persistent=False)
            self.register_buffer("is_width_H", axis_H == 2, persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, (T, H) each, for positions (T,) or, with M-RoPE, (3, T): time, height, width."""
        cos, sin = F.embedding(positions, self.cos_PH), F.embedding(positions, self.sin_PH)
        return (cos, sin) if positions.dim() == 1 else (self._interleave(cos), self._interleave(sin))

    def _interleave(self, x_3TH: Tensor) -> Tensor:
        return torch.where(self.is_height_H, x_3TH[1], torch.where(self.is_width_H, x_3TH[2], x_3TH[0]))


def interleaved_axes(section: tuple[int, int, int], num_frequencies: int) -> Tensor:
    """(F,) 0, 1 or 2: whether time, height or width turns each frequency. Qwen3-VL interleaves them T H W T H W ..."""
    _check_section(section, num_frequencies)
    axis_F = torch.zeros(num_frequencies, dtype=torch.int64)
    for axis in (1, 2):
        axis_F[axis : section[axis] * 3 : 3] = axis
    return axis_F


def sectioned_axes(section: tuple[int, int, int], num_frequencies: int) -> Tensor:
    """(F,) likewise; Qwen2-VL puts one axis after the other."""
    _check_section(section, num_frequencies)
    return torch.arange(3).repeat_interleave(torch.tensor(section))


def _check_section(section: tuple[int, int, int], num_frequencies: int) -> None:
    if sum(section) != num_frequencies:
        raise ModelError(f"mrope_section {section} does not sum to half of the dims that turn, {num_frequencies}")


def inverse_frequencies(config: ModelConfig, num_positions: int) -> tuple[Tensor, float]:
    """((F,) float32 inverse frequencies, factor on cos and sin). `num_positions` bounds the positions in use."""
    rope, num_dims = config.rope, _num_dims(config)
    powers_F = torch.arange(0, num_dims, 2, dtype=torch.int64).float() / num_dims
    base_F = 1.0 / (rope.theta**powers_F)
    try:
        if rope.kind == "default":
            return base_F, 1.0
        if rope.kind == "linear":
            return base_F / rope.parameters["factor"], 1.0
        if rope.kind == "dynamic":
            _refuse_growth("dynamic", num_positions, config.max_position_embeddings)
            return base_F, 1.0
        if rope.kind == "llama3":
            return _llama3(base_F, rope.parameters, config), 1.0
        if rope.kind == "yarn":
            return _yarn(base_F, config)
        if rope.kind == "longrope":
            return _longrope(powers_F, config, num_positions)
    except KeyError as missing:
        raise ModelError(f"rope parameters of kind {rope.kind!r} lack {missing}") from None
    raise ModelError(
        f"rope kind {rope.kind!r} is not supported; supported are default, linear, dynamic, llama3, yarn, longrope")


def _refuse_growth(kind: str, num_positions: int, limit: int) -> None:
    """Kinds whose frequencies change with the length of each sequence cannot keep a cache of rotated keys."""
    if num_positions > limit:
        raise ConfigError(
            f"rope kind {kind!r} changes every cached key beyond {limit} tokens; set max_model_len to at most {limit}")


def _num_dims(config: ModelConfig) -> int:
    return config.rope.rotary_dim or config.head_dim


def _original_length(rope: RopeConfig, config: ModelConfig) -> int:
    return int(rope.parameters.get("original_max_position_embeddings") or config.max_position_embeddings)


def _llama3(base_F: Tensor, parameters: dict[str, Any], config: ModelConfig) -> Tensor:
    factor, low, high = (float(parameters[k]) for k in ("factor", "low_freq_factor", "high_freq_factor"))
    original = _original_length(config.rope, config)
    wavelength_F = 2 * math.pi / base_F
    # 0 where waves are long (scaled in full), 1 where they are short (kept), a ramp between.
    keep_F = ((original / wavelength_F - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - keep_F) * base_F / factor + keep_F * base_F


def _yarn(base_F: Tensor, config: ModelConfig) -> tuple[Tensor, float]:
    parameters, dim = config.rope.parameters, _num_dims(config)
    original = _original_length(config.rope, config)
    factor = float(parameters.get("factor") or config.max_position_embeddings / original)

    def dim_with_rotations(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(config.rope.theta))

    low = dim_with_rotations(parameters.get("beta_fast") or 32)
    high = dim_with_rotations(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp_F = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
    return base_F / factor * ramp_F + base_F * (1 - ramp_F), _yarn_attention_factor(parameters, factor)


def _yarn_attention_factor(parameters: dict[str, Any], factor: float) -> float:
    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])

    def scale(multiplier: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * multiplier * math.log(factor) + 1.0

    mscale, mscale_all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return scale(mscale) / scale(mscale_all_dim)
    return scale(1.0)


def _longrope(powers_F: Tensor, config: ModelConfig, num_positions: int) -> tuple[Tensor, float]:
    parameters = config.rope.parameters
    original = _original_length(config.rope, config)
    _refuse_growth("longrope", num_positions, original)
    factor = float(parameters.get("factor") or config.max_position_embeddings / original)
    attention_factor = parameters.get("attention_factor")
    if attention_factor is None:
        attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    short_F = torch.tensor(parameters["short_factor"], dtype=torch.float32)
    return 1.0 / (short_F * config.rope.theta**powers_F), float(attention_factor)
