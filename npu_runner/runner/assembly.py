"""One rank of a model, put together on a platform: its network, caches, states and steps. A start does it on a device,
an estimate on torch's meta device (platforms/meta.py). Loads no weights and measures nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from npu_runner.checkpoint.model_config import ModelConfig
from npu_runner.config import RunnerConfig
from npu_runner.core.batch import PromptStates, ScheduledBatch
from npu_runner.layers.attention import bind_kv_cache, make_kv_cache, resolve_windows
from npu_runner.layers.gated_delta import gated_delta_shape, unbind_states
from npu_runner.layers.parallel import LayerContext, TensorParallel
from npu_runner.platforms.platform import Platform
from npu_runner.request.prompt_inputs import ImageInput
from npu_runner.runner.base import MemoryProfile
from npu_runner.runner.dummy import dummy_images, dummy_prefill, dummy_rows
from npu_runner.runner.images import HostTier, ImageEncoder, VisionCache
from npu_runner.runner.kv_cache import KVCachePlan, KVCacheShape, fit_states, plan_kv_cache
from npu_runner.runner.memory import MemoryGuard
from npu_runner.runner.mtp_step import step_runner_for
from npu_runner.runner.settings import Settings, state_needs, state_shape
from npu_runner.runner.states import StatePlan, StatePool, StateShape
from npu_runner.runner.step import StepRunner
from npu_runner.sampling.sampler import Sampler
from npu_runner.strategies import LoadStrategy


class RankAssembly:
    """`settings`: what `resolve_settings` makes of `config`. `image_of` makes the largest image of up to a number of
    tokens; a model without a vision tower ignores it.
    """

    def __init__(self, strategy: LoadStrategy, model_config: ModelConfig, config: RunnerConfig, settings: Settings,
                 platform: Platform, tp: TensorParallel, device: torch.device, *, image_of: Callable[[int], ImageInput],
                 end_token_ids: Sequence[int]):
        self.strategy, self.model_config, self.config, self.settings = strategy, model_config, config, settings
        self.platform, self.tp, self.device = platform, tp, device
        self.dtype, self.kv_dtype = settings.torch_dtypes
        self._wanted_num_seqs, self.max_model_len = settings.max_num_seqs, settings.max_model_len
        self._image_of, self._end_token_ids = image_of, end_token_ids
        # A prompt is shorter than max_model_len, and an image is never longer than its prompt.
        self.largest_image = image_of(max(1, self.max_model_len - 1)) if strategy.is_multimodal else None
        host_bytes = config.cache.vision_cache_host_bytes // tp.size
        self.vision_cache = VisionCache(config.cache.vision_cache_bytes,
                                        HostTier(host_bytes, platform.memory, device) if host_bytes else None)
        self.guard = MemoryGuard(platform.memory, self.vision_cache.release, can_retry=tp.size == 1)
        # Where each step waits for the one before, no image is sent ahead.
        sends_ahead = strategy.is_multimodal and self.schedules_ahead
        self._side_stream = platform.memory.side_stream() if sends_ahead else None
        self.states: StatePool | None = None

    # -- parts -----------------------------------------------------------------------------------------------------

    def make_context(self) -> LayerContext:
        """Make the attention, the operators and the Gated DeltaNet backend that layers are built with.

        Raises ConfigError where the model does not divide by the ranks.
        """
        self.attention = self.platform.make_attention(
            self.config.attention_backend, num_heads=self.num_heads, num_kv_heads=self.num_kv_heads,
            head_dim=self.model_config.head_dim, block_size=self.settings.block_size, dtype=self.dtype)
        self.ops = self.platform.make_ops()
        self.delta_shape = gated_delta_shape(self.model_config, self.tp)
        self.gated_delta = None
        if self.delta_shape is not None:
            self.gated_delta = self.platform.make_gated_delta(self.delta_shape, self.dtype)
        return LayerContext(self.ops, self.attention, self.tp, self.dtype, self.device, self.gated_delta,
                            block_size=self.settings.block_size,
                            quantised=self.platform.make_quantised_ops(self.ops))

    def set_network(self, model: Any) -> None:
        self.model = model.requires_grad_(False).eval()
        self.windows = resolve_windows(self.model, self.settings.max_model_len)

    def bind_cache(self, num_blocks: int) -> None:
        """Allocate the KV cache and hand it to the layers."""
        sizes = (self.kv_shape.num_layers, num_blocks, self.settings.block_size, self.num_kv_heads,
                 self.model_config.head_dim)
        self.k_cache, self.v_cache = make_kv_cache(sizes, self.kv_dtype, self.device)
        bind_kv_cache(self.model, self.k_cache, self.v_cache)

    def bind_states(self, plan: StatePlan) -> None:
        """Allocate the states of `plan` in the place of others, and hand them to the layers."""
        assert self.state_shape is not None, "the model has states"
        if self.states is not None:
            self.states = None
            unbind_states(self.model)
            self.platform.memory.empty_cache()
        self.states = StatePool(plan, self.state_shape, self.model, self.dtype, self.device)

    def make_steps(self) -> StepRunner:
        """The runner of steps for the network, the states and the settings as they are now."""
        pooling, speculative = self.model_config.pooling, self.settings.speculative
        own: dict[str, Any] = {"sampler": self.make_sampler()}
        if pooling is not None:
            own = {"pooling": pooling, "hidden_size": self.model_config.hidden_size}
        elif speculative is not None:
            own |= {"speculative": speculative, "graphs_accept_drafts": self.settings.graphs_accept_drafts}
        return step_runner_for(pooling, speculative)(
            self.model, self.attention, self.platform, self.device, tp=self.tp, block_size=self.settings.block_size,
            max_num_seqs=self.settings.max_num_seqs, max_model_len=self.max_model_len, guard=self.guard,
            gated_delta=self.gated_delta, images=self.make_image_encoder(self.vision_cache), states=self.states,
            most_rows=self.settings.most_graph_rows, num_appended=self.num_appended, **own)

    def make_image_encoder(self, cache: VisionCache) -> ImageEncoder:
        return ImageEncoder(self.strategy, self.model, cache, self.max_image_tokens, self.max_tower_values,
                            self._side_stream)

    def make_sampler(self, max_model_len: int | None = None) -> Sampler | None:
        """None on ranks that sample nothing. `max_model_len`: in the place of the rank's."""
        if self.tp.rank != 0 or self.model_config.pooling is not None:
            return None
        ops, memory = self.ops, self.platform.memory
        return Sampler(
            vocab_size=self.model_config.vocab_size, max_num_seqs=self.settings.max_num_seqs,
            max_model_len=max_model_len or self.max_model_len, eos_token_ids=self._end_token_ids, device=self.device,
            sort_ascending=ops.sort_ascending, softmax_sampler=ops.softmax_sampler(greedy=False),
            samples_greedily=ops.softmax_sampler(greedy=True) is not None, add_at=ops.add_at,
            allow_tokens=ops.allow_tokens, masked_sampler=ops.masked_sampler(), download=memory.download,
            host_buffer=memory.host_buffer, constrained=self.make_constrained_rows(),
            logprobs_mode=self.config.logprobs_mode)

    def make_constrained_rows(self) -> Any:
        """New ConstrainedRows for a sampler; None: no request has a grammar."""
        return None

    @property
    def num_appended(self) -> int:
        """Numbers that the network appends to the final hidden state of a token."""
        return len(self.model_config.hidden_state_layers) * self.model_config.hidden_size

    # -- sizes -----------------------------------------------------------------------------------------------------

    @property
    def num_heads(self) -> int:
        return self.tp.share(self.model_config.num_heads, "num_attention_heads")[1]

    @property
    def num_kv_heads(self) -> int:
        return self.tp.kv_head_share(self.model_config.num_kv_heads)[1]

    @property
    def kv_shape(self) -> KVCacheShape:
        return KVCacheShape(len(self.model_config.attention_layers), self.settings.block_size,
                            self.num_kv_heads * self.model_config.head_dim, self.kv_dtype.itemsize,
                            self.platform.attention_backends[self.settings.attention_backend].most_elements)

    @property
    def state_shape(self) -> StateShape | None:
        """None for a model without states."""
        if self.delta_shape is None:
            return None
        return state_shape(self.settings, self.model_config, self.delta_shape, self._wanted_num_seqs)

    @property
    def reserved_bytes(self) -> int:
        """The bytes that the vision cache may take."""
        return self.config.cache.vision_cache_bytes if self.strategy.is_multimodal else 0

    @property
    def max_image_tokens(self) -> int:
        """Merged tokens that the tower takes at once."""
        return max(self.settings.max_num_batched_tokens, self.largest_image.num_tokens if self.largest_image else 0)

    @property
    def max_tower_values(self) -> int:
        """The numbers in the arrays of `max_image_tokens` tokens of the largest image."""
        image = self.largest_image
        return 0 if image is None else image.num_tower_values * self.max_image_tokens // image.num_tokens

    @property
    def uses_mrope(self) -> bool:
        return self.model_config.rope.mrope_section is not None

    @property
    def schedules_ahead(self) -> bool:
        return self.config.scheduler.schedules_ahead(self.platform.defaults.async_scheduling)

    def plan_states(self, profile: MemoryProfile, *, is_measured: bool) -> StatePlan | None:
        """The states that memory allows, which may lower max_num_seqs; None for a model without states."""
        shape = self.state_shape
        return None if shape is None else fit_states(
            shape, state_needs(self.config, self.settings, self._wanted_num_seqs), profile, is_measured=is_measured,
            memory_utilization=self.config.cache.memory_utilization, reserved_bytes=self.reserved_bytes)

    def plan_cache(self, profile: MemoryProfile, states: StatePlan | None, *, is_measured: bool) -> KVCachePlan:
        """The KV cache that memory allows beside `states`. Raises OutOfMemoryError where it is too small."""
        settings, cache = self.settings, self.config.cache
        return plan_kv_cache(
            self.kv_shape, profile, is_measured=is_measured, kv_cache_bytes=cache.kv_cache_bytes,
            memory_utilization=cache.memory_utilization, reserved_bytes=self.reserved_bytes, states=states,
            max_model_len=settings.max_model_len, max_model_len_is_given=settings.max_model_len_is_given,
            max_num_seqs=settings.max_num_seqs, windows=self.windows,
            max_num_batched_tokens=settings.max_num_batched_tokens)

    # -- dummy steps -----------------------------------------------------------------------------------------------

    @property
    def worst_sizes(self) -> tuple[int, int]:
        """The tokens and the prompts of the largest prefill that the settings allow."""
        most_tokens = self.settings.max_num_batched_tokens
        batch_size = min(self.settings.max_num_seqs, most_tokens)
        return min(most_tokens, batch_size * (self.max_model_len - 1)), batch_size

    def dummy_steps(self, num_tokens: int, batch_size: int, expected_decode_len: int = 1,
                    in_capturing: bool = False) -> list[ScheduledBatch]:
        """The steps of `ModelRunnerBase.dummy_run`, and where memory is measured one with as many drafts as there may
        be."""
        steps = [] if in_capturing else [dummy_prefill(
            num_tokens, batch_size, block_size=self.settings.block_size, uses_mrope=self.uses_mrope,
            images=self.dummy_images(num_tokens, batch_size))]
        if steps and self.num_appended:  # and with the states of all tokens, the most that may be sent
            steps.append(replace(steps[0], prompt_states=[PromptStates(0, 0, num_tokens, 0)]))
        first_len = 1 if in_capturing else max(1, num_tokens // batch_size)
        num_decodes = 0 if self.model_config.pooling is not None else expected_decode_len  # those pool their prefills
        max_num_seqs, spares = self.settings.max_num_seqs, self.states.draft_slots if self.states else None
        steps += [dummy_rows(batch_size, min(context_len, self.max_model_len), max_num_seqs, spares)
                  for context_len in range(first_len, first_len + num_decodes)]
        if self.settings.most_drafted_rows and not in_capturing and self.platform.memory.info() is not None:
            steps.append(dummy_rows(self.settings.most_drafted_rows, 1, max_num_seqs, spares))
        return steps

    def dummy_images(self, num_tokens: int, batch_size: int) -> list[ImageInput]:
        """The images of such a prefill; none for a model without a tower."""
        if self.largest_image is None:
            return []
        # Where a chunk begins or ends within an image, that goes through the tower whole.
        most = min(self.settings.max_num_batched_tokens, num_tokens + (batch_size + 1) * self.largest_image.num_tokens)
        return dummy_images(self.largest_image, most, self._image_of,
                            is_measured=self.platform.memory.info() is not None)

    def set_max_num_seqs(self, max_num_seqs: int) -> None:
        self.settings = replace(self.settings, max_num_seqs=max_num_seqs)
