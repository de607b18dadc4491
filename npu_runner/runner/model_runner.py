"""One rank of the model, from nothing to ready: loads it, profiles memory, allocates the KV cache, compiles its decode.

Knows one strategy and one platform by their contracts; nothing of requests, text or other processes. What a step is
stands in step.py.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from types import MappingProxyType

import numpy as np
import torch
from torch import nn

from npu_runner.checkpoint.quantization import arithmetic
from npu_runner.core.batch import ScheduledBatch
from npu_runner.errors import RequestError
from npu_runner.grammars.matchers import Matchers, Rule
from npu_runner.layers.parallel import TensorParallel
from npu_runner.platforms import pick_platform
from npu_runner.runner.assembly import RankAssembly
from npu_runner.runner.base import MemoryProfile, ModelRunnerBase, ModelRunnerOutput, RunnerInfo, StateInfo
from npu_runner.runner.clocks import PhaseClock
from npu_runner.runner.decode_graphs import DecodeParts, compile_decode_graphs
from npu_runner.runner.images import VisionCache
from npu_runner.runner.kv_cache import cache_window, check_kv_cache_bytes
from npu_runner.runner.long_prefills import LongPrefills, choose_long_prefills
from npu_runner.runner.memory import MemoryMeter, weights_bytes
from npu_runner.runner.settings import SHORT_TOKENS, resolve_settings, state_needs
from npu_runner.runner.step import StepUnderWay
from npu_runner.runner.weights import load
from npu_runner.sampling.token_constraints import ConstrainedRows
from npu_runner.strategies import OpenedCheckpoint

logger = logging.getLogger(__name__)

_ROWS_AHEAD, _TOKENS_A_ROW_AHEAD = 4, 8


class ModelRunner(RankAssembly, ModelRunnerBase):
    """Ready to serve once constructed. `tp` is this rank's place in an initialised process group.

    `progress(phase)` is called with what the rank is doing, some hundred times at most. `wants_grammars` is called
    while it loads; once it is true, the token table of grammars is built beside the load. `fallbacks`: the platform's,
    as `find_fallbacks` has them.
    """

    def __init__(self, checkpoint: OpenedCheckpoint, tp: TensorParallel | None = None,
                 progress: Callable[[str], None] = lambda phase: None,
                 wants_grammars: Callable[[], bool] = lambda: False,
                 fallbacks: Mapping[str, str] = MappingProxyType({})):
        self._report_phase = progress
        self._wants_grammars = wants_grammars
        self._is_ready = False
        self._phase = "starting"
        self._start_clock = PhaseClock()
        self._start_clock.add("reading config and tokenizer", checkpoint.seconds)
        self.checkpoint = checkpoint
        config, model_config, tp = checkpoint.config, checkpoint.model_config, tp or TensorParallel()
        platform = pick_platform(config.platform)
        platform.fallbacks = fallbacks
        self._enter("setting the device")
        device = platform.devices.set_device(tp.rank)
        settings = resolve_settings(config, model_config, platform, checkpoint.quantization)
        super().__init__(checkpoint.strategy, model_config, config, settings, platform, tp, device,
                         image_of=checkpoint.processor.largest_image, end_token_ids=checkpoint.end_token_ids)
        self._matchers = Matchers(checkpoint.processor.tokenizer, self.model_config.vocab_size,
                                  checkpoint.end_token_ids)
        if self.config.prepare_structured_outputs and self.tp.rank == 0 and self.model_config.pooling is None:
            self._matchers.start()
        check_kv_cache_bytes(self.config.cache.kv_cache_bytes, self.platform.memory.free_bytes(),
                             # Where memory is no device's own, ranks share the host's.
                             num_sharing=self.tp.size if self.platform.memory.info() is None else 1)
        self._start()

    def _start(self) -> None:
        with torch.inference_mode(), self.guard.starting(lambda: self._phase):
            self.load_model()
            self.allocate_states(self._meter.final_profile(weights_bytes(self.model)))
            profile = self.profile_run()
            self.allocate_states(profile)
            long_prefills = self.choose_long_prefills() if self.settings.long_prefill_sizes else None
            self.allocate_kv_cache(dataclasses.replace(
                profile, graph_bytes=long_prefills.num_bytes if long_prefills else 0))
            if self.settings.makes_graphs:
                self.compile_decode(long_prefills.bytes_a_token if long_prefills else 0.0)
            if long_prefills and (prefills := self.steps.prefills):
                sizes = [size for size in prefills.sizes if size > SHORT_TOKENS]
                self.ledger += long_prefills.describe(sizes, *prefills.long_cost)
                self.guard.ledger = self.ledger
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

    # -- start-up --------------------------------------------------------------------------------------------------

    def load_model(self) -> None:
        self._progress("loading weights")
        self._meter = MemoryMeter(self.platform.memory)
        # The backend makes its communicator now, in memory that is measured. Later steps may need none of its sums.
        self.tp.minimum(0, self.device)
        context = self.make_context()
        logger.info("attention: %s", self.settings.attention_backend)
        if self.gated_delta is not None:
            logger.info("Gated DeltaNet: %s", self.gated_delta.name)
        self.set_network(load(self.checkpoint, self.settings, context, self.platform.memory, self._report))
        self.steps = self.make_steps()

    def get_model(self) -> nn.Module:
        return self.model

    def profile_run(self) -> MemoryProfile:
        """Run the worst step the settings allow, and measure what it takes; a small one where nothing is measured.

        Over a cache of one block; a runner that is ready keeps the cache it has, and its graphs count as activations.
        """
        worst, most_tokens = self.worst_sizes, self.settings.max_num_batched_tokens
        few = min(_ROWS_AHEAD, worst[1])
        small = min(most_tokens, few * min(_TOKENS_A_ROW_AHEAD, self.max_model_len - 1)), few
        if not self._is_ready:
            self.bind_cache(num_blocks=1)
            self._progress("compiling kernels")
            # Variants do not depend on how much a step does, so a small one meets them all.
            self._compiled_late = self.platform.devices.compile_ahead(lambda: self._meet_kernels(*small))
        self._progress("profiling memory")
        num_tokens, batch_size = worst if self._is_measured else small
        staging_bytes = self._profile_staging(num_tokens, batch_size)
        self._meter.start_step()
        self.dummy_run(num_tokens, batch_size)
        states_bytes = self.states.num_bytes if self.states else 0
        return self._meter.profile(weights_bytes=weights_bytes(self.model), staging_bytes=staging_bytes,
                                   cache_bytes=self.k_cache.nbytes + self.v_cache.nbytes + states_bytes)

    def _meet_kernels(self, num_tokens: int, batch_size: int) -> None:
        self.dummy_run(num_tokens, batch_size)
        self.attention.copy_blocks(self.k_cache, self.v_cache, np.zeros((1, 2), dtype=np.int32))

    def _profile_staging(self, num_tokens: int, batch_size: int) -> int:
        """Bytes of the images of a next step: the allocator gives a side stream memory that steps never get."""
        if self._side_stream is None or self.largest_image is None:
            return 0
        encoder = self.make_image_encoder(VisionCache(0))
        images = self.dummy_images(num_tokens, batch_size)
        with torch.inference_mode():
            return self._meter.peak_of(lambda: encoder.stage(images))

    def allocate_states(self, profile: MemoryProfile) -> None:
        """Size the pool of states by the ledger, which may lower max_num_seqs, and bind it to the layers.

        Called before the worst step is known, too: that step needs states, and no more of them than may be there.
        """
        if self.delta_shape is None:
            return
        self._progress("allocating states")
        plan = self.plan_states(profile, is_measured=self._is_measured)
        assert plan is not None, "the model has states"
        num_seqs = self.tp.minimum(plan.max_num_seqs, self.device)
        needs = state_needs(self.config, self.settings, num_seqs)
        plan = dataclasses.replace(plan, max_num_seqs=num_seqs, num_padding=needs.padding_of(num_seqs),
                                   num_spares=self.tp.minimum(plan.num_spares, self.device),
                                   num_snapshots=self.tp.minimum(plan.num_snapshots, self.device))
        if self.states is None or self.states.plan != plan:
            self.steps.states = None
            self.bind_states(plan)
        self.set_max_num_seqs(num_seqs)
        self.steps = self.make_steps()

    def choose_long_prefills(self) -> LongPrefills:
        """Choose the long prefills to record, while the cache has one block, and let the settings have these alone."""
        self._progress("timing long prefills")
        numbers_a_token = 0 if self.steps.accepts_ends else self.model_config.hidden_size + self.num_appended
        found = choose_long_prefills(self.steps, self.settings.long_prefill_sizes, self._meter,
                                     uses_mrope=self.uses_mrope, bytes_a_token=numbers_a_token * self.dtype.itemsize)
        self.settings = dataclasses.replace(self.settings, long_prefill_sizes=tuple(found.sizes))
        return found

    def allocate_kv_cache(self, profile: MemoryProfile) -> None:
        """Size the cache by the ledger, agree with the other ranks on the smallest, and bind it to the layers."""
        self._progress("allocating the KV cache")
        plan = self.plan_cache(profile, self.states.plan if self.states else None, is_measured=self._is_measured)
        self.num_blocks = self.tp.minimum(plan.num_blocks, self.device)
        self.max_model_len = self.tp.minimum(plan.max_model_len, self.device)
        self.steps.size_tables(self.max_model_len)
        self.ledger = self.guard.ledger = plan.ledger
        self.bind_cache(self.num_blocks)
        self.steps.copy_blocks = partial(self.attention.copy_blocks, self.k_cache, self.v_cache)

    def compile_decode(self, bytes_a_token: float) -> None:
        """Compile the decode forward for every bucket, largest first, and record prefills."""
        parts = DecodeParts(
            steps=self.steps, settings=self.settings, model_config=self.model_config, dtype=self.dtype,
            num_blocks=self.num_blocks, max_model_len=self.max_model_len,
            graph_batch_sizes=self.config.graphs.graph_batch_sizes, bytes_a_token=bytes_a_token,
            step_timeout_seconds=self.config.parallel.step_timeout_seconds,
            compares_new=self.strategy.compares_graphs, is_mode_given=self.config.graphs.graph_mode != "auto",
            run_bucket=lambda size: self.dummy_run(size, size, expected_decode_len=2, in_capturing=True),
            run_dummies=self._run_dummies)
        compile_decode_graphs(parts, self._progress)
        self.k_cache.zero_()
        self.v_cache.zero_()
        self.steps.last_tokens_S.zero_()
        self.steps.tables.clear()
        parts.reset_states()
        self.platform.memory.synchronize()

    def dummy_run(self, num_tokens: int, batch_size: int, expected_decode_len: int = 1,
                  in_capturing: bool = False) -> None:
        self._run_dummies(self.dummy_steps(num_tokens, batch_size, expected_decode_len, in_capturing))

    def _run_dummies(self, steps: Sequence[ScheduledBatch]) -> None:
        with torch.inference_mode(), self._preserve_serving_state(steps):
            for step in steps:
                self.execute_model(step)

    @contextmanager
    def _preserve_serving_state(self, dummies: Sequence[ScheduledBatch]) -> Iterator[None]:
        """Replace serving's counters, cached values and rules inside, and restore them afterwards.

        Dummy steps use the slots of sequences that may run, and make the sampler count tokens: memory that many jobs
        never need.
        """
        steps = self.steps
        kept = steps.sampler, steps.image_encoder, steps.clock, self._matchers.asked
        tokens_S = steps.last_tokens_S.clone()
        steps.sampler, steps.clock, self._matchers.asked = self.make_sampler(), PhaseClock(), {}
        steps.image_encoder = self.make_image_encoder(VisionCache(self.config.cache.vision_cache_bytes))
        try:
            states_preserved = self.states.preserve(dummies) if self.states and self._is_ready else nullcontext()
            with steps.tables.preserve(), states_preserved:
                yield
        finally:
            steps.sampler, steps.image_encoder, steps.clock, self._matchers.asked = kept
            steps.last_tokens_S.copy_(tokens_S)

    def info(self) -> RunnerInfo:
        """Facts for the engine, once the runner is ready."""
        description = {**self.settings.describe(), "attention": self.settings.attention_backend}
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
            max_tower_values=self.max_tower_values,
            uses_mrope=self.uses_mrope,
            num_steps_under_way=2 if self.schedules_ahead else 1,
            sliding_window=None if self.states else cache_window(self.windows),
            ledger=self.ledger,
            state=self._state_info(),
            speculative=self.settings.speculative,
            graphs=self.steps.describe_graphs(),
            start_seconds=dict(self._start_clock.seconds),
            description={**self.platform.describe(), **description})

    def _state_info(self) -> StateInfo | None:
        if self.states is None:
            return None
        plan = self.states.plan
        return StateInfo(plan.first_snapshot, plan.num_snapshots, plan.spares)

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
        if self.settings.makes_graphs:
            gc.collect()  # compiled callables and their frames hold each other; all else goes at once
        try:
            self.platform.memory.empty_cache()
        except RuntimeError as failure:  # why the device failed has been said: closing comes after that
            logger.warning("the device did not take its memory back: %s", str(failure).strip().partition("\n")[0])

    def make_constrained_rows(self) -> ConstrainedRows:
        return ConstrainedRows(self._matchers, self.checkpoint.processor.reasoning_tokens,
                               self.checkpoint.end_token_ids)

    @property
    def _is_measured(self) -> bool:
        """Whether memory is a device's own, and is measured."""
        return self.platform.memory.info() is not None
