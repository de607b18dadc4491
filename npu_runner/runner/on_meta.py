"""One rank's network on torch's meta device: what its weights take, and the most that its worst step holds at once.

The strategy builds it and the runner's own step goes through it, so no formula of a model stands here. Knows no device
and no weights' file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from npu_runner.checkpoint.model_config import ModelConfig
from npu_runner.config import RunnerConfig
from npu_runner.layers.attention import bind_kv_cache, make_kv_cache, resolve_windows
from npu_runner.layers.gated_delta import gated_delta_shape
from npu_runner.layers.parallel import LayerContext, TensorParallel
from npu_runner.platforms import reference_platform
from npu_runner.platforms.devices import Memory
from npu_runner.platforms.meta import META, LiveBytes, MetaAttention, MetaOps, MetaQuantisedOps, MetaSideStream
from npu_runner.platforms.platform import Platform
from npu_runner.platforms.torch_gated_delta import TorchGatedDelta
from npu_runner.request.prompt_inputs import ImageInput
from npu_runner.runner.dummy import dummy_decode, dummy_images, dummy_prefill
from npu_runner.runner.images import ImageEncoder, VisionCache
from npu_runner.runner.kv_cache import KVCacheShape
from npu_runner.runner.memory import MemoryGuard, weights_bytes
from npu_runner.runner.mtp_step import MTPStepRunner
from npu_runner.runner.pooling_step import PoolingStepRunner
from npu_runner.runner.settings import Settings, state_shape
from npu_runner.runner.states import StatePlan, StatePool
from npu_runner.runner.step import StepRunner
from npu_runner.sampling.sampler import Sampler
from npu_runner.strategies import LoadStrategy


class MetaRank(TensorParallel):
    """One of `size` ranks, without the others: a collective allocates what it would, and sends nothing."""

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        return x

    def gather_into(self, gathered: Tensor, x: Tensor) -> None:
        """Nothing comes."""

    def minimum(self, value: int, device: torch.device) -> int:
        return value


@dataclass(frozen=True, kw_only=True)
class StepBytes:
    """activations: the most at once, beside weights, states and cache. staging: the images of one step."""

    activations: int
    staging: int


class NetworkOnMeta:
    """Rank `rank` of `config`'s ranks. `settings`: what `resolve_settings` makes of `config`. `hold` allocates the
    weights of linears (layers/weight_forms.py).

    Raises ConfigError where the model does not divide by the ranks.
    """

    def __init__(self, strategy: LoadStrategy, model_config: ModelConfig, config: RunnerConfig, settings: Settings,
                 platform: Platform, rank: int, hold: Callable[[nn.Module], None]):
        self._strategy, self._model_config, self._config = strategy, model_config, config
        self._settings, self._platform = settings, platform
        self._tp = MetaRank(rank, config.parallel.tensor_parallel_size,
                            has_whole_experts=config.parallel.enable_expert_parallel)
        self._dtype, self._kv_dtype = settings.torch_dtypes
        self._attention = MetaAttention(platform.attention_backends[settings.attention_backend])
        delta = gated_delta_shape(model_config, self._tp)
        self._gated_delta = None if delta is None else TorchGatedDelta(delta)
        ops = MetaOps(copies_rows_to_experts=platform.copies_rows_to_experts)
        quantised = MetaQuantisedOps(ops, copies_rows_to_experts=platform.copies_rows_to_experts)
        context = LayerContext(ops, self._attention, self._tp, self._dtype, META, self._gated_delta,
                               settings.weight_forms, quantised)
        with torch.inference_mode():
            self._model: Any = strategy.build(model_config, settings.max_model_len, context)
        hold(self._model)
        self._model.requires_grad_(False).eval()
        self.windows = resolve_windows(self._model, settings.max_model_len)
        self.weights_bytes = weights_bytes(self._model)
        self._num_kv_heads = self._tp.kv_head_share(model_config.num_kv_heads)[1]
        self.kv_shape = KVCacheShape(len(model_config.attention_layers), settings.block_size,
                                     self._num_kv_heads * model_config.head_dim, self._kv_dtype.itemsize)
        self.state_shape = None if delta is None else state_shape(settings, model_config, delta, settings.max_num_seqs)

    def worst_step(self, max_num_seqs: int, states: StatePlan | None) -> StepBytes:
        """Of the steps that the runner measures on a device: a prefill as large as settings allow, and a decode step.
        """
        most_tokens = self._settings.max_num_batched_tokens
        batch_size = min(max_num_seqs, most_tokens)
        num_tokens = min(most_tokens, batch_size * (self._settings.max_model_len - 1))
        images = self._images(num_tokens, batch_size) if self._strategy.is_multimodal else []
        with torch.inference_mode(), LiveBytes() as live:
            self._bind_cache()
            encoder, pool = self._encoder(images), self._bind_states(states)
            stands = live.now
            steps = self._steps(max_num_seqs, encoder, pool)
            if self._schedules_ahead:
                before = live.now
                live.reset_peak()
                encoder.stage(images)
            staging = live.peak - before if self._schedules_ahead else 0
            live.reset_peak()
            steps.submit(dummy_prefill(num_tokens, batch_size, block_size=self._settings.block_size,
                                       uses_mrope=self._model_config.rope.mrope_section is not None, images=images))
            if self._model_config.pooling is None:
                steps.submit(dummy_decode(batch_size, max(1, num_tokens // batch_size)))
            return StepBytes(activations=live.peak - stands, staging=staging)

    # -- helpers ---------------------------------------------------------------------------------------------------

    @property
    def _schedules_ahead(self) -> bool:
        ahead = self._config.scheduler.schedules_ahead(self._platform.defaults.async_scheduling)
        return ahead and self._strategy.is_multimodal

    def _images(self, num_tokens: int, batch_size: int) -> list[ImageInput]:
        image_of = self._strategy.largest_images(self._config)
        largest = image_of(max(1, self._settings.max_model_len - 1))
        most = min(self._settings.max_num_batched_tokens, num_tokens + (batch_size + 1) * largest.num_tokens)
        return dummy_images(largest, most, image_of, is_measured=True)

    def _encoder(self, images: list[ImageInput]) -> ImageEncoder:
        most = max([self._settings.max_num_batched_tokens, *(image.num_tokens for image in images)])
        side_stream = MetaSideStream() if self._schedules_ahead else None
        return ImageEncoder(self._strategy, self._model, VisionCache(self._config.cache.vision_cache_bytes), most,
                            side_stream)

    def _bind_cache(self) -> None:
        """One block is enough: nothing is written."""
        sizes = (self.kv_shape.num_layers, 1, self._settings.block_size, self._num_kv_heads,
                 self._model_config.head_dim)
        bind_kv_cache(self._model, *make_kv_cache(sizes, self._kv_dtype, META))

    def _bind_states(self, states: StatePlan | None) -> StatePool | None:
        if states is None or self.state_shape is None:
            return None
        return StatePool(states, self.state_shape, self._model, self._dtype, META)

    def _steps(self, max_num_seqs: int, encoder: ImageEncoder, pool: StatePool | None) -> StepRunner:
        host = reference_platform()  # a step asks its platform for memory of the host only
        placed = self._model, self._attention, host, META
        shared: dict[str, Any] = {
            "tp": self._tp, "block_size": self._settings.block_size, "max_num_seqs": max_num_seqs,
            "max_model_len": self._settings.max_model_len, "gated_delta": self._gated_delta, "images": encoder,
            "guard": MemoryGuard(host.memory, lambda: None, can_retry=False), "states": pool}
        pooling = self._model_config.pooling
        if pooling is not None:
            return PoolingStepRunner(*placed, pooling=pooling, hidden_size=self._model_config.hidden_size, **shared)
        shared["sampler"] = self._sampler(max_num_seqs, host.memory)
        speculative = self._settings.speculative
        if speculative is not None and speculative.has_head:
            return MTPStepRunner(*placed, speculative=speculative, **shared,
                                 graphs_take_drafts=self._settings.graphs_take_drafts)
        return StepRunner(*placed, **shared)

    def _sampler(self, max_num_seqs: int, memory: Memory) -> Sampler | None:
        if self._tp.rank != 0:
            return None
        ops = MetaOps(copies_rows_to_experts=False)
        return Sampler(
            vocab_size=self._model_config.vocab_size, max_num_seqs=max_num_seqs,
            eos_token_ids=self._model_config.eos_token_ids, device=META, sort_ascending=ops.sort_ascending,
            download=memory.download, host_buffer=memory.host_buffer)
