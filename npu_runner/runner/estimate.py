"""Estimates a model's memory on devices of a given size, without one, by the arithmetic of a real start.

Weights, states and KV cache are exact. Activations are a bound. Driver, communicators and graphs are allowances. Prints
nothing; knows no file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from npu_runner.checkpoint.formats.reader import open_weights
from npu_runner.checkpoint.model_config import ModelConfig
from npu_runner.checkpoint.quantization import read_quantization
from npu_runner.checkpoint.weight_files import weights_are_there
from npu_runner.config import RunnerConfig
from npu_runner.core.block_manager import most_blocks
from npu_runner.errors import ConfigError, OutOfMemoryError
from npu_runner.layers.parallel import TensorParallel
from npu_runner.layers.weight_forms import MADE_AT_LOAD, hold_as_floats, hold_as_stored, hold_rounded
from npu_runner.platforms.meta import META, LiveBytes, MetaPlatform
from npu_runner.platforms.platform import Platform
from npu_runner.request.limits import GIB, LIMITS, MIB
from npu_runner.runner.assembly import RankAssembly
from npu_runner.runner.base import MemoryProfile
from npu_runner.runner.kv_cache import KVCachePlan, cache_window, memory_left
from npu_runner.runner.memory import weights_bytes
from npu_runner.runner.settings import Settings, resolve_settings, state_needs
from npu_runner.runner.states import StatePlan, plan_states, size
from npu_runner.strategies import LoadStrategy, open_adapter
from npu_runner.strategies.transformers_model import TransformersStrategy

ACTIVATIONS_MARGIN = 1.1
"""The bound on activations, over what the worst step holds on the meta device: for workspaces of kernels."""
DRIVER_BYTES = GIB
"""An allowance: what driver, context and libraries take of a device. An H100 had 0.7 to 0.9 GiB."""
COMMUNICATORS_BYTES = GIB
"""An allowance, where there are several ranks. HCCL's two communicators have buffers of 528 MiB."""
GRAPH_BYTES_A_SEQUENCE = 4 * MIB
"""An allowance for decode graphs, which lie in what memory_utilization leaves. An H100 had 1.8 to 3."""
GRAPH_BYTES_A_PREFILL_SIZE = 16 * MIB
"""The same for graphs of short prefills. An H200 had 13, with 36 layers. Those of long ones, at most 512 MiB, are not
counted: which of them there are is measured."""
MOST_RANKS = 64


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The need of the rank that needs most: the first one. It samples, and it holds the most of whole experts that do
    not divide."""

    settings: Settings
    num_ranks: int
    memory_utilization: float
    profile: MemoryProfile
    """`outside_bytes` is the allowance for driver and communicators."""
    reserved_bytes: int
    """The largest size of the vision cache."""
    graphs_bytes: int
    """The allowance; 0 without graphs."""
    states: StatePlan | None
    plan: KVCachePlan | None
    """None means that it does not fit."""
    bytes_per_block: int
    blocks_there: int
    """Blocks that there is room for, the null block included. It may be more than are useful."""
    blocks_per_sequence: int
    """Blocks of one sequence at full length."""
    problem: str | None
    """Why it does not fit."""

    @property
    def fits(self) -> bool:
        return self.problem is None

    @property
    def max_model_len(self) -> int:
        """A length that was not given is cut to what the cache holds."""
        return self.settings.max_model_len if self.plan is None else self.plan.max_model_len

    @property
    def kv_cache_bytes(self) -> int:
        return 0 if self.plan is None else self.plan.num_blocks * self.bytes_per_block

    @property
    def num_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return 0 if self.plan is None else (self.plan.num_blocks - 1) * self.settings.block_size

    @property
    def num_sequences(self) -> int:
        """At full length, in the KV cache at once."""
        return 0 if self.plan is None else (self.plan.num_blocks - 1) // self.blocks_per_sequence

    @property
    def spare_bytes(self) -> int:
        """Free bytes of the device after all else. Graphs are made there."""
        profile = self.profile
        taken = (profile.weights_bytes + profile.activation_peak_bytes + profile.staging_bytes + profile.outside_bytes
                 + self.reserved_bytes + (self.states.num_bytes if self.states else 0) + self.kv_cache_bytes)
        return profile.total_bytes - taken


def estimate_memory(strategy: LoadStrategy, config: RunnerConfig, platform: Platform, device_bytes: int) -> Estimate:
    """`config` as the strategy serves it.

    Raises ConfigError for what a start refuses, but for want of memory.
    """
    if isinstance(strategy, TransformersStrategy):
        raise ConfigError("the model is served through transformers, by the generic strategy, which is not estimated; "
                          "take a model of a family with a strategy of its own, or start it on a device")
    model_config, quantization = strategy.model_config_for(config), read_quantization(strategy.path)
    # An adapter is merged into the weights. It takes no memory, unless it gives the model a head of its own.
    if config.lora is not None and open_adapter(config.lora, quantization).has("lm_head.weight"):
        model_config = replace(model_config, tie_word_embeddings=False)
    settings = resolve_settings(config, model_config, platform, quantization)
    rank = _first_rank(strategy, model_config, config, settings, platform, partial(_hold, strategy, config, settings))
    num_ranks = config.parallel.tensor_parallel_size
    outside_bytes = DRIVER_BYTES + (COMMUNICATORS_BYTES if num_ranks > 1 else 0)
    profile = MemoryProfile(total_bytes=device_bytes, weights_bytes=weights_bytes(rank.model),
                            outside_bytes=outside_bytes)
    num_graph_rows = 0 if settings.graph_mode == "eager" else settings.max_num_seqs
    found = Estimate(
        settings=settings, num_ranks=num_ranks, memory_utilization=config.cache.memory_utilization, profile=profile,
        reserved_bytes=rank.reserved_bytes,
        graphs_bytes=(num_graph_rows * GRAPH_BYTES_A_SEQUENCE
                      + len(settings.prefill_sizes) * GRAPH_BYTES_A_PREFILL_SIZE),
        states=None, plan=None,
        bytes_per_block=rank.kv_shape.bytes_per_block, blocks_there=0, blocks_per_sequence=0, problem=None)
    return _with_cache(_with_steps(found, rank), rank)


def most_cached_tokens(strategy: LoadStrategy, config: RunnerConfig, model_config: ModelConfig, settings: Settings,
                       platform: Platform) -> int | None:
    """The max_model_len of a start whose KV cache has a size that its settings give; None where memory gives it."""
    is_measured = platform.visible_devices is not None
    if isinstance(strategy, TransformersStrategy) or (is_measured and config.cache.kv_cache_bytes is None):
        return None
    rank = _first_rank(strategy, model_config, config, settings, platform, hold_as_floats)
    states = None if rank.state_shape is None else plan_states(
        rank.state_shape, state_needs(config, settings, settings.max_num_seqs), budget=None)
    try:
        return rank.plan_cache(MemoryProfile(), states, is_measured=is_measured).max_model_len
    except OutOfMemoryError as error:
        raise ConfigError(str(error).partition("\n")[0]) from error


class _MetaRank(TensorParallel):
    """One of several ranks, without the others: a collective allocates what it would, and sends nothing."""

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        return x

    def gather_into(self, gathered: Tensor, x: Tensor) -> None:
        """No data is exchanged."""

    def minimum(self, value: int, device: torch.device) -> int:
        return value


def _first_rank(strategy: LoadStrategy, model_config: ModelConfig, config: RunnerConfig, settings: Settings,
                platform: Platform, hold: Callable[[nn.Module], None]) -> RankAssembly:
    """The first rank on torch's meta device. `hold` allocates the weights of linears (layers/weight_forms.py).

    Raises ConfigError where the model does not divide by the ranks.
    """
    tp = _MetaRank(0, config.parallel.tensor_parallel_size, has_whole_experts=config.parallel.enable_expert_parallel)
    rank = RankAssembly(strategy, model_config, config, settings, MetaPlatform(platform), tp, META,
                        image_of=lambda most_tokens: strategy.largest_images(config)(most_tokens),
                        end_token_ids=model_config.eos_token_ids)
    context = replace(rank.make_context(), weight_forms=settings.weight_forms)
    with torch.inference_mode():
        model = strategy.build(model_config, settings.max_model_len, context)
    hold(model)
    rank.set_network(model)
    return rank


def _hold(strategy: LoadStrategy, config: RunnerConfig, settings: Settings, model: nn.Module) -> None:
    """In the forms of a start; without files of weights all that they would tell counts as 16 bits."""
    quantization = read_quantization(strategy.path)
    how = MADE_AT_LOAD.get(config.quantization)
    if how is not None and settings.weight_forms:
        hold_rounded(model, how)
    elif quantization is not None and settings.weight_forms and weights_are_there(strategy.path):
        with open_weights(strategy.path, quantization) as reader:
            hold_as_stored(model, reader, strategy.renamed(reader.names))
    else:
        hold_as_floats(model)


def fewest_ranks(strategy: LoadStrategy, config: RunnerConfig, platform: Platform, device_bytes: int) -> int | None:
    """The smallest tensor_parallel_size above `config`'s that fits; None: none up to MOST_RANKS does."""
    for num_ranks in range(config.parallel.tensor_parallel_size + 1, MOST_RANKS + 1):
        try:
            found = estimate_memory(strategy, config.replace(tensor_parallel_size=num_ranks), platform, device_bytes)
        except ConfigError:  # the model does not divide by it
            continue
        if found.fits:
            return num_ranks
    return None


def longest_length(found: Estimate) -> int | None:
    """A lower max_model_len that fits where `found` does not; None: none does."""
    length = (found.blocks_there - 1) * found.settings.block_size
    return length if 0 < length < found.settings.max_model_len else None


def _with_steps(found: Estimate, rank: RankAssembly) -> Estimate:
    """With states and activations, as a start sizes them: states, the worst step over them, then states again."""
    try:
        states = rank.plan_states(found.profile, is_measured=True)
        activations, staging = _worst_step(rank, states)
        found = replace(found, profile=replace(
            found.profile, activation_peak_bytes=int(activations * ACTIVATIONS_MARGIN),
            staging_bytes=int(staging * ACTIVATIONS_MARGIN)))
        states = rank.plan_states(found.profile, is_measured=True)
    except OutOfMemoryError as error:
        return replace(found, problem=str(error).partition("\n")[0])
    if states is not None:
        rank.set_max_num_seqs(states.max_num_seqs)
    return replace(found, states=states, settings=rank.settings)


def _worst_step(rank: RankAssembly, states: StatePlan | None) -> tuple[int, int]:
    """The most bytes at once of the steps that a start measures, beside weights, states and cache; and the bytes of one
    step's images, where they are sent ahead of it."""
    with torch.inference_mode(), LiveBytes() as live:
        rank.bind_cache(num_blocks=1)  # nothing is written
        if states is not None:
            rank.bind_states(states)
            rank.set_max_num_seqs(states.max_num_seqs)
        before, (num_tokens, batch_size), staging = live.now, rank.worst_sizes, 0
        steps = rank.make_steps()
        steps.sampler = rank.make_sampler(LIMITS.max_ngram_window)  # the longest history that any request may have
        steps.check_receipts = lambda *_: None  # type: ignore[method-assign] # no number comes back
        if rank.schedules_ahead and rank.largest_image is not None:
            staged = live.now
            live.reset_peak()
            steps.image_encoder.stage(rank.dummy_images(num_tokens, batch_size))
            staging = live.peak - staged
        live.reset_peak()
        for step in rank.dummy_steps(num_tokens, batch_size):
            steps.submit(step)
        return live.peak - before, staging


def _with_cache(found: Estimate, rank: RankAssembly) -> Estimate:
    if not found.fits:
        return found
    settings, cache = found.settings, rank.config.cache
    left = memory_left(found.profile, cache.memory_utilization, found.reserved_bytes)
    left -= found.states.num_bytes if found.states else 0
    # kv_cache_bytes is taken as it is, whatever memory_utilization allows: then the device is the limit.
    there = left if cache.kv_cache_bytes is None else min(cache.kv_cache_bytes, found.spare_bytes)
    found = replace(found, blocks_there=max(0, there) // found.bytes_per_block)
    if cache.kv_cache_bytes is not None and cache.kv_cache_bytes > there:
        return replace(found, problem=f"kv_cache_bytes {size(cache.kv_cache_bytes)}: {size(max(0, there))} is there")
    try:
        plan = rank.plan_cache(found.profile, found.states, is_measured=True)
    except OutOfMemoryError as error:
        return replace(found, problem=str(error).partition("\n")[0])
    window = None if found.states else cache_window(rank.windows)
    found = replace(found, plan=plan, blocks_per_sequence=most_blocks(
        plan.max_model_len, window, settings.max_num_batched_tokens, settings.block_size))
    if found.spare_bytes < found.graphs_bytes:
        return replace(found, plan=None, problem=(
            f"graphs have an allowance of {size(found.graphs_bytes)}, and {size(max(0, found.spare_bytes))} is "
            "left for them; lower memory_utilization, or set enforce_eager"))
    return found
