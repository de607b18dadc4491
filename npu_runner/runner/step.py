"""One step of a model that is ready: prepare, launch, sample, collect. Knows nothing of how it was loaded.

`launch` submits the forward, `sample` the sampler: two launches, because the sampler may need tokens of the step
before. Only `collect` waits. The sampler's tokens stay on the device, in a table by slot. So the next step may be under
way before the host has them.

B sequences in the step, T tokens in the step, S slots, padding's included, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from npu_runner.core.batch import ScheduledBatch
from npu_runner.errors import EngineDeadError
from npu_runner.layers.parallel import TensorParallel
from npu_runner.models.contract import LanguageModel, ModelOfEnds
from npu_runner.platforms.attention import AttentionBackend
from npu_runner.platforms.gated_delta import GatedDeltaBackend, StateSave
from npu_runner.platforms.platform import Platform
from npu_runner.platforms.step_inputs import AttentionMetadata, PromptEnds, StepInputs
from npu_runner.runner.base import ModelRunnerOutput, StepLogprobs
from npu_runner.runner.block_tables import BlockTables
from npu_runner.runner.buckets import Bucket, DecodeBuckets, pad_into, send
from npu_runner.runner.clocks import PhaseClock
from npu_runner.runner.decode_forward import DecodeStep
from npu_runner.runner.images import ImageEncoder, StepImages
from npu_runner.runner.memory import MemoryGuard
from npu_runner.runner.prefill_graphs import PrefillBucket, PrefillBuckets
from npu_runner.runner.states import StatePool
from npu_runner.runner.step_arrays import SAMPLER_ARRAYS, step_arrays, to_device
from npu_runner.runner.token_results import score_prompts, send_states
from npu_runner.sampling.sampler import Sampler, SamplerOutput


@dataclass(frozen=True)
class PreparedStep:
    """A step whose arrays are on their way to the device. `bucket` is the graph that runs it, None for an eager step.

    `number` must return with its tokens. `plan` is the attention backend's for an eager step, `state_plan` the Gated
    DeltaNet backend's for a prefill or a step with drafts. A prefill has its `images`, and `ends` where nothing else of
    it is read.
    """

    batch: ScheduledBatch
    number: int
    tensors: dict[str, Tensor]
    inputs: StepInputs
    bucket: Bucket | None
    plan: Any
    state_plan: Any = None
    images: StepImages | None = None
    ends: PromptEnds | None = None


@dataclass(frozen=True)
class Launched:
    """The results of a submitted forward. `last_BX`: logits (B, V) or hidden states (B, D) of rows with all their
    tokens. `of_prompts`: what was asked for of all tokens of prompts. `states`: hidden states of layers."""

    last_BX: Tensor
    of_prompts: StepResult | None = None
    states: StepResult | None = None


class StepResult(Protocol):
    """The result of a step, on its way to the host."""

    def is_done(self) -> bool: ...
    def to_host(self) -> Any: ...


@dataclass(frozen=True)
class StepUnderWay:
    """A step that was submitted to the device. `sampled` is None if this rank, or the step, samples nothing. Then there
    is a `mark`, a Download, if the next step changes what this one may still read."""

    step: PreparedStep
    sampled: StepResult | None
    of_prompts: StepResult | None = None
    states: StepResult | None = None
    mark: Any = None

    def is_done(self) -> bool:
        """Whether nothing has to be waited for any more."""
        results = self.sampled, self.of_prompts, self.states, self.mark
        return all(result is None or result.is_done() for result in results)

    def wait(self) -> None:
        """Until it has run, as far as this rank can tell."""
        for result in (self.sampled, self.of_prompts, self.states):
            if result is not None:
                result.to_host()
        if self.mark is not None:
            self.mark.wait()


class StepRunner:
    """Runs scheduled batches. `sampler` is None on ranks that do not sample; `buckets` and `prefills` are None until
    compiled.

    `gated_delta` is None for a model without states, as is `states`; that comes with the pool.
    """

    reads_all_of_prompts = False
    """Whether it reads the final hidden states of all tokens of a prefill."""
    of_rows: Mapping[str, type[np.generic]] = MappingProxyType({"uniforms": np.float32})
    """The dtypes of the arrays that `admit` makes."""

    def __init__(self, model: LanguageModel, attention: AttentionBackend, platform: Platform, device: torch.device, *,
                 tp: TensorParallel, block_size: int, max_num_seqs: int, max_model_len: int, images: ImageEncoder,
                 sampler: Sampler | None, guard: MemoryGuard, gated_delta: GatedDeltaBackend | None = None,
                 states: StatePool | None = None, most_rows: int = 0, num_appended: int = 0):
        """`most_rows`: of a decode step, where that is more than `max_num_seqs`. `num_appended`: see DecodeStep."""
        self.model = model
        self.accepts_ends = isinstance(model, ModelOfEnds) and model.accepts_ends and not self.reads_all_of_prompts
        """Whether a prefill's last layer can do with the last tokens of its rows."""
        self.num_appended = num_appended
        self.decode_step = DecodeStep(model, states, gated_delta, num_appended)
        self.head_step: DecodeStep | None = None
        """A second module over a decode step's inputs, after sampling, in graphs of its own."""
        self.attention = attention
        self.platform = platform
        self.device = device
        self.tp = tp
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.image_encoder = images
        self.sampler = sampler
        self.guard = guard
        self.gated_delta = gated_delta
        self.buckets: DecodeBuckets | None = None
        self.prefills: PrefillBuckets | None = None
        self.clock = PhaseClock()
        self.most_rows = max(max_num_seqs, most_rows)
        # Padded rows of a graph have slots behind those of sequences: as many as the largest graph has rows, at most.
        self.last_tokens_S = torch.zeros(max_num_seqs + self.most_rows, dtype=torch.int32, device=device)
        self.size_tables(max_model_len)
        self.copy_blocks: Callable[[np.ndarray], None] | None = None
        """Copies blocks of the KV cache, (source, target) each; None before there is a cache."""
        self._last_number = 0
        self._newest: StepUnderWay | None = None

    @property
    def states(self) -> StatePool | None:
        """None for a model without, and before there is a pool."""
        return self.decode_step.states

    @states.setter
    def states(self, pool: StatePool | None) -> None:
        for step in (self.decode_step, self.head_step):
            if step is not None:
                step.states = pool

    @property
    def graph_step(self) -> DecodeStep:
        """The module that decode graphs record."""
        return self.decode_step

    @property
    def drafted_graph_step(self) -> nn.Module | None:
        """The module that graphs of steps with drafts record, where it is another one."""
        return None

    def describe_graphs(self) -> str:
        if self.buckets is None:
            return "eager"
        decode = self.buckets.describe()
        return decode if self.prefills is None else f"{decode}; prefills of {self.prefills.describe()} tokens"

    def size_tables(self, max_model_len: int) -> None:
        """Allocate the block tables for sequences of `max_model_len` tokens. No step is running, and no graph is
        compiled."""
        assert self.buckets is None, "graphs read the block tables where they are"
        self.tables = BlockTables(self.max_num_seqs, -(-max_model_len // self.block_size), self.device, self.most_rows)

    def submit(self, batch: ScheduledBatch) -> StepUnderWay:
        """Hand a step to the device, behind those that are under way."""
        self.clock.start("prepare")
        self._last_number = number = (self._last_number + 1) % 2**31
        of_rows = self.admit(batch)
        self._newest = self.guard.step(
            lambda: self._submit(batch, number, of_rows), batch.describe,
            why_once=None if self.states is None else "which has changed states by then")
        return self._newest

    def _submit(self, batch: ScheduledBatch, number: int, of_rows: dict[str, np.ndarray]) -> StepUnderWay:
        """The part of a step that may be run twice, without states: it writes the same keys and values to the same
        places."""
        self.clock.enter("prepare")
        step = self.prepare(batch, number, of_rows)
        self.clock.enter("launch")
        if batch.copies:
            assert self.copy_blocks is not None, "blocks are copied within a cache"
            self.copy_blocks(np.array(batch.copies, dtype=np.int32))
        launched = self.launch(step)
        self.clock.enter("sample")
        result = self.make_result(step, launched.last_BX, of_rows)
        mark = self._mark(step, result)
        self.clock.end()
        return StepUnderWay(step, result, launched.of_prompts, launched.states, mark)

    def make_result(self, step: PreparedStep, logits_BV: Tensor, of_rows: dict[str, np.ndarray]) -> StepResult | None:
        """Hand out what makes the step's result; None where this rank, or this step, has none."""
        sampled = self.sample(step, logits_BV)
        # The sampler has counted its tokens: nothing behind it takes memory, for a step made again counts them again.
        self.record_tokens(step, sampled)
        return sampled

    def collect(self, under_way: StepUnderWay) -> ModelRunnerOutput | None:
        """The output of a step, once it has run; steps are collected in order. None on ranks that do not sample.

        Raises EngineDeadError when what comes back is not this step's.
        """
        self.clock.start("wait")
        output = self.guard.step(lambda: self._output(under_way), under_way.step.batch.describe,
                                 why_once="which was under way by then")
        self.clock.end()
        return output

    def admit(self, batch: ScheduledBatch) -> dict[str, np.ndarray]:
        """Register the sequences that entered or left a slot, once a step. Returns `uniforms`, (B,) float32, of the
        rows that sample."""
        if self.sampler is None:
            return {"uniforms": np.zeros(int(batch.samples_B.sum()), dtype=np.float32)}
        for slot in batch.freed_slots:
            self.sampler.remove(slot)
        for entry in batch.new_sampling:
            self.sampler.add(entry.slot, entry.params, entry.prompt_token_ids, entry.output_token_ids, seed=entry.seed,
                             thinking=entry.thinking)
        return {"uniforms": self.sampler.host_inputs(batch.slots_B[batch.samples_B])}

    # -- the four phases -------------------------------------------------------------------------------------------

    def prepare(self, batch: ScheduledBatch, number: int, of_rows: dict[str, np.ndarray]) -> PreparedStep:
        """Send the step's arrays to the device, in one copy, and let the attention plan.

        Images first: those of a prefill are uploaded and cut while the step before runs, before anything waits for that
        one.
        """
        images = self.image_encoder.stage(batch.images) if batch.image_slices else None
        self.tables.learn(batch.new_blocks_N3)
        arrays = step_arrays(batch, of_rows, number, self.block_size, self.tables.on_host_SW)
        if batch.is_prefill and self.prefills is not None:
            prefill = self.prefills.find(batch)
            if prefill is not None:
                return self._prepare_graph_prefill(self.prefills, prefill, batch, number, arrays)
        bucket = self.buckets.find(batch.batch_size) if self.buckets and not batch.is_prefill else None
        if self._newest is not None and bucket is not None and self._waits_for_replay:
            self._newest.wait()
        if bucket is not None:
            self.fill(bucket, batch.new_blocks_N3, arrays, batch.slots_B)
            return PreparedStep(batch, number, bucket.tensors, bucket.inputs, bucket, None)
        news = self.tables.news(batch.new_blocks_N3, batch.slots_B)
        tensors = to_device(self.platform.memory, {**arrays, "table_news": news.flat}, self.device)
        tensors["block_tables"] = self.tables.write(tensors["table_news"], news.num_entries, batch.slots_B)
        context_lens = batch.context_lens_B.tolist()
        tables_BW = self.tables.on_host_SW[batch.slots_B, : -(-max(context_lens) // self.block_size)]
        if not batch.is_prefill:
            tensors["tokens"] = self.last_tokens_S
            plan = self.attention.plan_decode(context_lens, tables_BW, self.device)
            return PreparedStep(batch, number, tensors, StepInputs.from_tensors(tensors), None, plan)
        query_lens = batch.query_lens_B.tolist()
        plan = self.attention.plan_prefill(query_lens, context_lens, tables_BW, self.device)
        saves = [StateSave(row=row, offset=offset, slot=slot) for row, offset, slot in batch.state_saves]
        state_plan = self.gated_delta and self.gated_delta.plan_prefill(query_lens, context_lens, saves, self.device)
        ends = None
        if self._reads_ends_alone(batch):
            ends = PromptEnds(tensors["end_rows"], self.attention.plan_decode(context_lens, tables_BW, self.device))
        inputs = StepInputs.from_tensors(tensors)
        return PreparedStep(batch, number, tensors, inputs, None, plan, state_plan, images, ends)

    def _prepare_graph_prefill(self, prefills: PrefillBuckets, bucket: PrefillBucket, batch: ScheduledBatch,
                               number: int, arrays: dict[str, np.ndarray]) -> PreparedStep:
        slots_R = prefills.pad_into(bucket, batch, arrays)
        news = self.tables.news(batch.new_blocks_N3, slots_R)
        self.tables.write(send(bucket, news.flat, self.platform.memory), news.num_entries, slots_R)
        own = {name: bucket.tensors[name][: len(arrays[name])]
               for name in ("end_rows", "sampled_rows", "receipts", *self.of_rows)}
        return PreparedStep(batch, number, {**bucket.tensors, **own}, bucket.inputs, bucket, None,
                            ends=PromptEnds(own["end_rows"]) if self.accepts_ends else None)

    def _reads_ends_alone(self, batch: ScheduledBatch) -> bool:
        """Where every row is one token there is nothing to be left out."""
        is_read = batch.prompt_scores or batch.prompt_states
        return self.accepts_ends and not is_read and batch.num_tokens > batch.batch_size

    def fill(self, bucket: Bucket, new_blocks_N3: np.ndarray, arrays: dict[str, np.ndarray],
             slots: np.ndarray) -> dict[str, np.ndarray]:
        """Put a decode step's arrays, of rows with the block tables of `slots`, into the bucket's static buffers,
        padded; returns what those hold, and the slots that their block tables are of. `new_blocks_N3`: what is new in
        the tables."""
        assert self.buckets is not None, "a bucket is one of the buckets"
        padded = pad_into(bucket, arrays, slots, self.block_size, max_num_seqs=self.max_num_seqs,
                          num_states=self.states.plan.num_padding if self.states else None,
                          repeats_a_row=self.attention.pads_with_real_rows)
        slots_B = padded["table_slots"]
        news = self.tables.news(new_blocks_N3, slots_B)
        self.tables.write(send(bucket, news.flat, self.platform.memory), news.num_entries, slots_B)
        sequences = [padded["sequences"]] if "sequences" in padded else []
        self.buckets.compiler.before_replay(bucket.batch_size, padded["context_lens"].tolist(), *sequences)
        return padded

    def launch(self, step: PreparedStep) -> Launched:
        """Hand out the forward."""
        if isinstance(step.bucket, PrefillBucket):
            return self._read_prompts(step, step.bucket.run())
        if step.bucket is not None:
            drafted = step.bucket.drafted if step.batch.has_drafts else None
            return self._read_rows(step, (drafted or step.bucket.forward)(step.inputs)[: step.batch.num_tokens])
        if not step.batch.is_prefill:
            return self._read_rows(step, self.decode_step(step.inputs, step.plan, step.state_plan))
        return self._prefill(step)

    def sample(self, step: PreparedStep, logits_BV: Tensor) -> SamplerOutput | None:
        """Hand out the sampler; None where this rank, or this step, samples nothing."""
        samples_B = step.batch.samples_B
        count = int(samples_B.sum())
        if self.sampler is None or not count:
            return None
        inputs = (step.tensors[name][:count] for name in SAMPLER_ARRAYS)
        return self.sampler(logits_BV, *inputs, step.batch.slots_B[samples_B],
                            graph_size=None if step.bucket is None or step.batch.is_prefill else step.bucket.batch_size)

    def record_tokens(self, step: PreparedStep, sampled: SamplerOutput | None) -> None:
        """Put the step's tokens where the next one reads them, on every rank; None where this rank has sampled none."""
        slots_B = step.tensors["slots"][: int(step.batch.samples_B.sum())]
        if not len(slots_B):
            return
        tokens_B = torch.empty_like(slots_B, dtype=torch.int32) if sampled is None else sampled.next_input_ids_B
        self.last_tokens_S.index_copy_(0, slots_B, self.tp.broadcast(tokens_B))

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _mark(self, step: PreparedStep, result: StepResult | None) -> Any:
        """A mark, if a later step must know whether this one has run, and no result shows it. Also for a step between
        two replays: the second replay checks only that."""
        if result is not None or not self._waits_for_replay:
            return None
        return self.platform.memory.download(step.tensors["context_lens"][:1])

    @property
    def _waits_for_replay(self) -> bool:
        """Whether preparing a graph's step changes host memory that a step under way may still read."""
        return self.buckets is not None and self.buckets.compiler.waits_for_replay

    def _output(self, under_way: StepUnderWay) -> ModelRunnerOutput | None:
        step, sampled = under_way.step, under_way.sampled
        if self.sampler is None:
            return None
        batch = step.batch
        scores = under_way.of_prompts.to_host() if under_way.of_prompts is not None else []
        states = under_way.states.to_host() if under_way.states is not None else []
        if sampled is None:
            return ModelRunnerOutput([[] for _ in range(batch.batch_size)], prompt_scores=scores, prompt_states=states)
        assert isinstance(sampled, SamplerOutput), f"a step that samples left {type(sampled).__name__}"
        on_host = sampled.to_host()
        self.check_receipts(step, on_host.receipts_B)
        tokens: list[int] | list[list[int]] = on_host.token_ids_B.tolist()
        if len(tokens) < batch.batch_size:
            of_rows = iter(on_host.token_ids_B.tolist())
            tokens = [[next(of_rows)] if samples else [] for samples in batch.samples_B.tolist()]
        problems = {}
        if on_host.problems:
            rows = np.flatnonzero(batch.samples_B)
            problems = {int(rows[row]): problem for row, problem in on_host.problems.items()}
        logprobs = StepLogprobs.from_sample(batch.batch_size, np.flatnonzero(batch.samples_B), on_host)
        return ModelRunnerOutput(tokens, logprobs, problems=problems, prompt_scores=scores, prompt_states=states)

    def _prefill(self, step: PreparedStep) -> Launched:
        inputs, batch = step.inputs, step.batch
        if self.states is not None:
            self.states.load(batch.state_loads)
        x_TD = self.model.embed(inputs.tokens)
        deepstack = None
        if step.images is not None:
            x_TD, deepstack = self.image_encoder.show(batch, step.images, x_TD, step.tensors["image_rows"])
        metadata = AttentionMetadata.from_inputs(inputs, step.plan, is_prefill=True, state_plan=step.state_plan,
                                                 ends=step.ends)
        hidden_TD = self.model(x_TD, inputs.positions, metadata, deepstack)
        self.record_prompts(step, x_TD, hidden_TD)
        if self.states is not None:
            self.states.end_prompts(inputs.state_slots, inputs.context_lens)
        return self._read_prompts(step, hidden_TD)

    def _read_rows(self, step: PreparedStep, result_TX: Tensor) -> Launched:
        """Send what is appended to the result (hidden states of layers) to the host, where rows want it."""
        if not self.num_appended or step.ends is not None:
            return Launched(result_TX)
        chunks, states = step.batch.prompt_states, None
        if chunks and self.tp.rank == 0:
            states = send_states(chunks, result_TX[:, -self.num_appended :], self.platform.memory.download)
        return Launched(result_TX[:, : -self.num_appended], states=states)

    def _read_prompts(self, step: PreparedStep, result_TX: Tensor) -> Launched:
        """Read all tokens of the step, or its ends; a graph's padding comes behind them."""
        read = self._read_rows(step, result_TX)
        hidden_TD = read.last_BX
        of_prompts = self.prompt_results(step, hidden_TD)
        sampled_rows = step.tensors["sampled_rows"]
        # Without a row that samples it is a chunk in the middle of its prompt.
        if not len(sampled_rows):
            return Launched(hidden_TD[:0], of_prompts, read.states)
        rows = sampled_rows if step.ends is not None else step.tensors["end_rows"].index_select(0, sampled_rows)
        return Launched(self.read_out(hidden_TD.index_select(0, rows)), of_prompts, read.states)

    def record_prompts(self, step: PreparedStep, x_TD: Tensor, hidden_TD: Tensor) -> None:
        """Keep what a head reads of a prefill: its tokens as embedded, and their final hidden states. Nothing here."""

    def prompt_results(self, step: PreparedStep, hidden_TD: Tensor) -> StepResult | None:
        """Hand out what is wanted of all tokens of a prefill: log probabilities. None where this rank keeps none."""
        if not step.batch.prompt_scores:
            return None
        return score_prompts(
            step.batch, hidden_TD, step.tensors["scored_tokens"], step.tensors["prompt_targets"],
            keeps=self.sampler is not None, max_num_seqs=self.max_num_seqs, read_out=self.model.compute_logits,
            download=self.platform.memory.download, as_logits=self.sampler is not None and self.sampler.returns_logits)

    def read_out(self, hidden_BD: Tensor) -> Tensor:
        """The logits (B, V) of the final hidden states of rows whose prompt has ended."""
        return self.model.compute_logits(hidden_BD)

    def check_receipts(self, step: PreparedStep, receipts_B: np.ndarray) -> None:
        """Raises EngineDeadError for what is not this step's."""
        if (receipts_B != step.number).any():
            raise EngineDeadError(f"the device did not run the {step.batch.describe()}: it takes no work since an "
                                  f"operation before failed, and the error of that got lost; "
                                  f"{self.platform.lost_error_remedy}")
