"""One rank of the model, from nothing to ready: loads it, profiles memory, allocates the KV cache, compiles its decode.

Knows one strategy and one platform by their contracts; nothing of requests, text or other processes. What a step is
stands in step.py.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from npu_runner.checkpoint.quantization import arithmetic
from npu_runner.core.batch import ScheduledBatch
from npu_runner.errors import ModelError, RequestError
from npu_runner.grammars.matchers import Matchers, Rule
from npu_runner.layers.attention import bind_kv_cache, make_kv_cache, resolve_windows
from npu_runner.layers.gated_delta import gated_delta_shape, unbind_states
from npu_runner.layers.parallel import LayerContext, TensorParallel
from npu_runner.models.contract import LanguageModel
from npu_runner.platforms import pick_platform
from npu_runner.request.limits import size
from npu_runner.request.prompt_inputs import ImageInput
from npu_runner.runner.base import MemoryProfile, ModelRunnerBase, ModelRunnerOutput, RunnerInfo, StateInfo
from npu_runner.runner.clocks import PhaseClock
from npu_runner.runner.decode_graphs import DecodeParts, compile_decode_graphs
from npu_runner.runner.dummy import dummy_images, dummy_prefill, dummy_rows
from npu_runner.runner.images import ImageEncoder, VisionCache
from npu_runner.runner.kv_cache import KVCacheShape, cache_window, check_kv_cache_bytes, fit_states, plan_kv_cache
from npu_runner.runner.memory import MemoryGuard, MemoryMeter, weights_bytes
from npu_runner.runner.mtp_step import MTPStepRunner
from npu_runner.runner.pooling_step import PoolingStepRunner
from npu_runner.runner.settings import model_needs, resolve_settings, state_needs, state_shape
from npu_runner.runner.speculative_step import SpeculativeStepRunner
from npu_runner.runner.states import StatePool
from npu_runner.runner.step import StepRunner, StepUnderWay
from npu_runner.runner.weights import load, with_proven_forms
from npu_runner.sampling.sampler import Sampler
from npu_runner.sampling.token_constraints import ConstrainedRows
from npu_runner.strategies import OpenedCheckpoint

logger = logging.getLogger(__name__)

_ROWS_AHEAD, _TOKENS_A_ROW_AHEAD = 4, 8


class ModelRunner(ModelRunnerBase):
    """Ready to serve once constructed. `tp` is this rank's place in an initialised process group.

    `progress(phase)` is called with what the rank is doing, some hundred times at most. `wants_grammars` is called
    while it loads; once it is true, the token table of grammars is built beside the load.
    """

    def __init__(self, checkpoint: OpenedCheckpoint, tp: TensorParallel | None = None,
                 progress: Callable[[str], None] = lambda phase: None,
                 wants_grammars: Callable[[], bool] = lambda: False):
        self._report_phase = progress
        self._wants_grammars = wants_grammars
        self._is_ready = False
        self._phase = "starting"
        self._start_clock = PhaseClock()
        self._start_clock.add("reading config and tokenizer", checkpoint.seconds)
        self.checkpoint = checkpoint
        self.config, self.model_config = checkpoint.config, checkpoint.model_config
        self.strategy = checkpoint.strategy
        self.tp = tp or TensorParallel()
        self.platform = pick_platform(self.config.platform)
        self._enter("setting the device")
        self.device = self.platform.devices.set_device(self.tp.rank)
        self.settings = resolve_settings(self.config, self.model_config, self.platform, checkpoint.quantization)
        self._wanted_num_seqs = self.settings.max_num_seqs
        self.max_model_len = self.settings.max_model_len
        self.dtype, self.kv_dtype = self.settings.torch_dtypes
        self._matchers = Matchers(checkpoint.processor.tokenizer, self.model_config.vocab_size,
                                  checkpoint.end_token_ids)
        if self.config.prepare_structured_outputs and self.tp.rank == 0 and self.model_config.pooling is None:
            self._matchers.start()
        # A prompt is shorter than max_model_len, and an image is never longer than its prompt.
        most_tokens = max(1, self.max_model_len - 1)
        self.largest_image = checkpoint.processor.largest_image(most_tokens) if self.strategy.is_multimodal else None
        self.vision_cache = VisionCache(self.config.cache.vision_cache_bytes)
        self.guard = MemoryGuard(self.platform.memory, self.vision_cache.release, can_retry=self.tp.size == 1)
        # With one step after the other there is nothing that could be sent ahead of it.
        is_of_use = self.strategy.is_multimodal and self._schedules_ahead
        self._side_stream = self.platform.memory.side_stream() if is_of_use else None
        check_kv_cache_bytes(self.config.cache.kv_cache_bytes, self.platform.memory.free_bytes(),
                             # Where memory is no device's own, ranks share the host's.
                             num_sharing=self.tp.size if self.platform.memory.info() is None else 1)
        self._start()

    def _start(self) -> None:
        with torch.inference_mode(), self.guard.starting(lambda: self._phase):
            self.load_model()
            self.allocate_states(self._meter.settled_profile(weights_bytes(self.model)))
            profile = self.profile_run()
            self.allocate_states(profile)
            self.allocate_kv_cache(profile)
            if self.settings.graph_mode != "eager":
                self.compile_decode()
        self._is_ready = True
        self._start_clock.end()
        logger.info("ready: %s", self._start_clock.describe())
        logger.debug("kernels that were not compiled ahead: %s", ", ".join(self._compiled_late()) or "none")

    def _progress(self, phase: str, what: str = "") -> None:
        """`_enter`, and begin what grammars share where that is wanted by now."""
        self._enter(phase, what)
        if self._wants_grammars():
            self._matchers.start()

    def _enter(self, phase: str, what: str = "") -> None:
        """`what` of a phase is begun; the start's seconds are booked by phase."""
        self._report(f"{phase} {what}".rstrip())
        if not self._is_ready:
            self._start_clock.enter(phase)

    def _report(self, phase: str) -> None:
        self._phase = phase
        self._report_phase(phase)

    def _report_weights(self, num_read: int, num_bytes: int) -> None:
        self._report(f"loading weights: {size(num_read)} of {size(num_bytes)}")

    # -- start-up --------------------------------------------------------------------------------------------------

    def load_model(self) -> None:
        self._progress("loading weights")
        self._meter = MemoryMeter(self.platform.memory)
        num_heads = self.tp.share(self.model_config.num_heads, "num_attention_heads")[1]
        self.platform.check_model(model_needs(self.settings, self.model_config, num_heads, self._num_kv_heads))
        self.settings = with_proven_forms(self.settings, self.checkpoint, self.platform)
        self.attention = self.platform.make_attention(
            self.config.attention_backend, num_heads=num_heads, num_kv_heads=self._num_kv_heads,
            head_dim=self.model_config.head_dim, block_size=self.settings.block_size, dtype=self.dtype)
        logger.info("attention: %s", self.attention.name)
        self.ops = self.platform.make_ops()
        self.delta_shape = gated_delta_shape(self.model_config, self.tp)
        self.gated_delta = None
        if self.delta_shape is not None:
            self.gated_delta = self.platform.make_gated_delta(self.delta_shape, self.dtype)
            logger.info("Gated DeltaNet: %s", self.gated_delta.name)
        context = LayerContext(self.ops, self.attention, self.tp, self.dtype, self.device, self.gated_delta)
        self.model = load(self.checkpoint, self.settings, context, self.platform.memory, self._report_weights)
        self.model.requires_grad_(False).eval()
        self.windows = resolve_windows(self.model, self.settings.max_model_len)
        self.states: StatePool | None = None
        self.steps = self._make_steps()

    def get_model(self) -> nn.Module:
        return self.model

    def profile_run(self) -> MemoryProfile:
        """Run the worst step the settings allow, and measure what it takes; a small one where nothing is measured.

        Over a cache of one block; a runner that is ready keeps the cache it has, and its graphs count as activations.
        """
        most_tokens, longest = self.settings.max_num_batched_tokens, self.max_model_len - 1
        batch_size = min(self.settings.max_num_seqs, most_tokens)
        few = min(_ROWS_AHEAD, batch_size)
        small = min(most_tokens, few * min(_TOKENS_A_ROW_AHEAD, longest)), few
        if not self._is_ready:
            self._bind_cache(num_blocks=1)
            self._progress("compiling kernels")
            # Variants do not depend on how much a step does, so a small one meets them all.
            self._compiled_late = self.platform.devices.compile_ahead(lambda: self.dummy_run(*small))
        self._progress("profiling memory")
        is_measured = self.platform.memory.info() is not None
        num_tokens, batch_size = (min(most_tokens, batch_size * longest), batch_size) if is_measured else small
        staging_bytes = self._profile_staging(num_tokens, batch_size)
        self._meter.start_step()
        self.dummy_run(num_tokens, batch_size)
        states_bytes = self.states.num_bytes if self.states else 0
        return self._meter.profile(weights_bytes=weights_bytes(self.model), staging_bytes=staging_bytes,
                                   cache_bytes=self.k_cache.nbytes + self.v_cache.nbytes + states_bytes)

    def _profile_staging(self, num_tokens: int, batch_size: int) -> int:
        """Bytes of the images of a next step: the allocator gives a side stream memory that steps never get."""
        if self._side_stream is None or self.largest_image is None:
            return 0
        encoder = self._make_image_encoder(VisionCache(0))
        images = self._images_of_dummy_run(num_tokens, batch_size)
        with torch.inference_mode():
            return self._meter.peak_of(lambda: encoder.stage(images))

    def allocate_states(self, profile: MemoryProfile) -> None:
        """Size the pool of states by the ledger, which may lower max_num_seqs, and bind it to the layers.

        Called before the worst step is known, too: that step needs states, and no more of them than may be there.
        """
        if self.delta_shape is None:
            return
        self._progress("allocating states")
        shape = state_shape(self.settings, self.model_config, self.delta_shape, self._wanted_num_seqs)
        needs = state_needs(self.config, self.settings, self._wanted_num_seqs)
        plan = fit_states(
            shape, needs, profile, is_measured=self.platform.memory.info() is not None,
            memory_utilization=self.config.cache.memory_utilization, reserved_bytes=self._reserved_bytes)
        num_seqs = self.tp.minimum(plan.max_num_seqs, self.device)
        plan = dataclasses.replace(plan, max_num_seqs=num_seqs, num_padding=needs.padding_of(num_seqs),
                                   num_spares=self.tp.minimum(plan.num_spares, self.device),
                                   num_snapshots=self.tp.minimum(plan.num_snapshots, self.device))
        if self.states is None or self.states.plan != plan:
            self.states = self.steps.states = None
            unbind_states(self.model)
            self.platform.memory.empty_cache()
            self.states = StatePool(plan, shape, self.model, self.dtype, self.device)
        self.settings = dataclasses.replace(self.settings, max_num_seqs=num_seqs)
        self.steps = self._make_steps()

    def allocate_kv_cache(self, profile: MemoryProfile) -> None:
        """Size the cache by the ledger, agree with the other ranks on the smallest, and bind it to the layers."""
        self._progress("allocating the KV cache")
        is_measured = self.platform.memory.info() is not None
        shape = KVCacheShape(len(self.model_config.attention_layers), self.settings.block_size,
                             self._num_kv_heads * self.model_config.head_dim, self.kv_dtype.itemsize)
        plan = plan_kv_cache(
            shape, profile, is_measured=is_measured, kv_cache_bytes=self.config.cache.kv_cache_bytes,
            memory_utilization=self.config.cache.memory_utilization,
            reserved_bytes=self._reserved_bytes, states=self.states.plan if self.states else None,
            max_model_len=self.settings.max_model_len, max_model_len_is_given=self.settings.max_model_len_is_given,
            max_num_seqs=self.settings.max_num_seqs, windows=self.windows,
            max_num_batched_tokens=self.settings.max_num_batched_tokens)
        self.num_blocks = self.tp.minimum(plan.num_blocks, self.device)
        self.max_model_len = self.tp.minimum(plan.max_model_len, self.device)
        self.steps.size_tables(self.max_model_len)
        self.ledger = self.guard.ledger = plan.ledger
        self._bind_cache(self.num_blocks)

    def compile_decode(self) -> None:
        """Compile the decode forward for every bucket, largest first."""
        parts = DecodeParts(
            steps=self.steps, settings=self.settings, model_config=self.model_config, dtype=self.dtype,
            num_blocks=self.num_blocks, max_model_len=self.max_model_len,
            graph_batch_sizes=self.config.graphs.graph_batch_sizes,
            step_timeout_seconds=self.config.parallel.step_timeout_seconds,
            run_bucket=lambda size: self.dummy_run(size, size, expected_decode_len=2, in_capturing=True),
            run_made_up=self._run_made_up)
        compile_decode_graphs(parts, self._progress)
        self.k_cache.zero_()
        self.v_cache.zero_()
        self.steps.last_tokens_S.zero_()
        self.steps.tables.clear()
        parts.reset_states()
        self.platform.memory.synchronize()

    def dummy_run(self, num_tokens: int, batch_size: int, expected_decode_len: int = 1,
                  in_capturing: bool = False) -> None:
        steps = [] if in_capturing else [dummy_prefill(
            num_tokens, batch_size, block_size=self.settings.block_size, uses_mrope=self.uses_mrope,
            images=self._images_of_dummy_run(num_tokens, batch_size))]
        first_len = 1 if in_capturing else max(1, num_tokens // batch_size)
        num_decodes = 0 if self.model_config.pooling is not None else expected_decode_len  # those pool their prefills
        max_num_seqs, spares = self.settings.max_num_seqs, self.states.draft_slots if self.states else None
        steps += [dummy_rows(batch_size, min(context_len, self.max_model_len), max_num_seqs, spares)
                  for context_len in range(first_len, first_len + num_decodes)]
        if self.settings.most_drafted_rows and not in_capturing and self.platform.memory.info() is not None:
            steps.append(dummy_rows(self.settings.most_drafted_rows, 1, max_num_seqs, spares))
        self._run_made_up(steps)

    def _run_made_up(self, steps: Sequence[ScheduledBatch]) -> None:
        with torch.inference_mode(), self._serving_state_aside(steps):
            for step in steps:
                self.execute_model(step)

    def _images_of_dummy_run(self, num_tokens: int, batch_size: int) -> list[ImageInput]:
        if self.largest_image is None:
            return []
        # Where a chunk begins or ends within an image, that goes through the tower whole.
        most = min(self.settings.max_num_batched_tokens, num_tokens + (batch_size + 1) * self.largest_image.num_tokens)
        return dummy_images(self.largest_image, most, self.checkpoint.processor.largest_image,
                            is_measured=self.platform.memory.info() is not None)

    @contextmanager
    def _serving_state_aside(self, made_up: Sequence[ScheduledBatch]) -> Iterator[None]:
        """Serving's counters, cached values and rules are put aside inside, and restored afterwards.

        Made-up steps take the slots of sequences that may run, and make the sampler count tokens: memory that many a
        job never needs.
        """
        steps = self.steps
        kept = steps.sampler, steps.image_encoder, steps.clock, self._matchers.asked
        tokens_S = steps.last_tokens_S.clone()
        steps.sampler, steps.clock, self._matchers.asked = self._make_sampler(), PhaseClock(), {}
        steps.image_encoder = self._make_image_encoder(VisionCache(self.config.cache.vision_cache_bytes))
        try:
            states_aside = self.states.aside(made_up) if self.states and self._is_ready else nullcontext()
            with steps.tables.aside(), states_aside:
                yield
        finally:
            steps.sampler, steps.image_encoder, steps.clock, self._matchers.asked = kept
            steps.last_tokens_S.copy_(tokens_S)

    def info(self) -> RunnerInfo:
        """Facts for the engine, once the runner is ready."""
        description = {**self.settings.describe(), "attention": self.attention.name}
        if self.model_config.pooling is not None:
            description["pooling"] = self.model_config.pooling.describe()
        forms = self.checkpoint.multiplied_forms(self.settings.weight_forms)
        weights = arithmetic(self.checkpoint.quantization, self.config.quantization, forms)
        if weights is not None:
            description["quantization"] = weights
        if self.gated_delta is not None:
            description["gated_delta"] = self.gated_delta.name
        return RunnerInfo(
            num_blocks=self.num_blocks,
            block_size=self.settings.block_size,
            max_model_len=self.max_model_len,
            max_model_len_is_given=self.settings.max_model_len_is_given,
            max_num_seqs=self.settings.max_num_seqs,
            max_num_batched_tokens=self.settings.max_num_batched_tokens,
            max_image_tokens=self.max_image_tokens,
            uses_mrope=self.uses_mrope,
            num_steps_under_way=2 if self._schedules_ahead else 1,
            sliding_window=None if self.states else cache_window(self.windows),
            ledger=self.ledger,
            state=self._state_info(),
            graphs=self.steps.describe_graphs(),
            start_seconds=dict(self._start_clock.seconds),
            description={**self.platform.describe(), **description})

    def _state_info(self) -> StateInfo | None:
        if self.states is None:
            return None
        plan = self.states.plan
        return StateInfo(plan.first_snapshot, plan.num_snapshots, plan.spares)

    @property
    def _schedules_ahead(self) -> bool:
        return self.config.scheduler.schedules_ahead(self.platform.defaults.async_scheduling)

    def submit(self, batch: ScheduledBatch) -> StepUnderWay:
        self._matchers.ask(batch.new_rules if self.tp.rank == 0 else ())
        with torch.inference_mode():
            return self.steps.submit(batch)

    def collect(self, step: StepUnderWay) -> ModelRunnerOutput | None:
        with torch.inference_mode():
            output = self.steps.collect(step)
        if output is not None:
            output.rules = self._matchers.answers()
        return output

    def build_rules(self, rules: Sequence[Rule], patience: float) -> dict[int, RequestError | None]:
        """Without a step: begin to build, and say what is done within `patience` seconds. Rank 0 builds for all."""
        if self.tp.rank != 0:
            return {}
        self._matchers.ask(rules)
        return self._matchers.answers(patience)

    def close(self) -> None:
        """Release graphs, caches and weights, and give the device back what the allocator holds. May be called twice.

        The caller must drop its references to them. Tokens of a step that is under way are lost.
        """
        if not self._is_ready:
            return
        self._is_ready = False
        self.vision_cache.release()
        self._matchers.close()
        if self.steps.buckets is not None:
            self.steps.buckets.compiler.release()
        del self.steps, self.model, self.k_cache, self.v_cache, self.states, self.attention, self.ops
        if self.settings.graph_mode != "eager":
            gc.collect()  # compiled callables and their frames hold each other; all else goes at once
        try:
            self.platform.memory.empty_cache()
        except RuntimeError as failure:  # why the device failed has been said: closing comes after that
            logger.warning("the device did not take its memory back: %s", str(failure).strip().partition("\n")[0])

    @property
    def max_image_tokens(self) -> int:
        """Merged tokens that the tower takes at once."""
        return max(self.settings.max_num_batched_tokens, self.largest_image.num_tokens if self.largest_image else 0)

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _make_steps(self) -> StepRunner:
        if not isinstance(self.model, LanguageModel):
            raise ModelError(f"{type(self.strategy).__name__} built a {type(self.model).__name__}, not to be run: "
                             "a network has embed, forward and compute_logits (npu_runner/models/contract.py)")
        placed = self.model, self.attention, self.platform, self.device
        shared: dict[str, Any] = {
            "tp": self.tp, "block_size": self.settings.block_size, "max_num_seqs": self.settings.max_num_seqs,
            "max_model_len": self.max_model_len, "guard": self.guard, "gated_delta": self.gated_delta,
            "images": self._make_image_encoder(self.vision_cache), "states": self.states,
            "most_rows": self.settings.most_graph_rows,
        }
        if self.model_config.pooling is not None:
            return PoolingStepRunner(*placed, pooling=self.model_config.pooling,
                                     hidden_size=self.model_config.hidden_size, **shared)
        if self.settings.speculative is not None:
            kind = MTPStepRunner if self.settings.speculative.has_head else SpeculativeStepRunner
            return kind(*placed, sampler=self._make_sampler(), **shared, speculative=self.settings.speculative,
                        graphs_take_drafts=self.settings.graphs_take_drafts)
        return StepRunner(*placed, sampler=self._make_sampler(), **shared)

    def _make_image_encoder(self, cache: VisionCache) -> ImageEncoder:
        return ImageEncoder(self.strategy, self.model, cache, self.max_image_tokens, self._side_stream)

    @property
    def _reserved_bytes(self) -> int:
        return self.config.cache.vision_cache_bytes if self.strategy.is_multimodal else 0

    def _bind_cache(self, num_blocks: int) -> None:
        sizes = (len(self.model_config.attention_layers), num_blocks, self.settings.block_size, self._num_kv_heads,
                 self.model_config.head_dim)
        self.k_cache, self.v_cache = make_kv_cache(sizes, self.kv_dtype, self.device)
        bind_kv_cache(self.model, self.k_cache, self.v_cache)

    def _make_sampler(self) -> Sampler | None:
        if self.tp.rank != 0 or self.model_config.pooling is not None:
            return None
        return Sampler(
            vocab_size=self.model_config.vocab_size,
            max_num_seqs=self.settings.max_num_seqs,
            max_model_len=self.max_model_len,
            eos_token_ids=self.checkpoint.end_token_ids,
            device=self.device,
            sort_ascending=self.ops.sort_ascending,
            draw_from_softmax=self.ops.softmax_draw(),
            draws_greedily=self.ops.draws_greedily,
            add_at=self.ops.add_at,
            allow_tokens=self.ops.allow_tokens,
            allowed_draw=self.ops.allowed_draw(),
            download=self.platform.memory.download,
            host_buffer=self.platform.memory.host_buffer,
            constrained=ConstrainedRows(self._matchers, self.checkpoint.processor.reasoning_tokens,
                                self.checkpoint.end_token_ids))

    @property
    def uses_mrope(self) -> bool:
        return self.model_config.rope.mrope_section is not None

    @property
    def _num_kv_heads(self) -> int:
        return self.tp.kv_head_share(self.model_config.num_kv_heads)[1]
