"""Makes the graphs of a rank whose cache stands: compiles those of decode steps, warms them up, compares those of
earlier runs, and records those of prefills.

A kept graph is used again if it was made of the same and answers as an eager step does. Knows nothing of how a rank was
loaded, nor of how a platform compiles or stores a graph.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

import npu_runner
from npu_runner.checkpoint.model_config import ModelConfig
from npu_runner.core.batch import ScheduledBatch
from npu_runner.errors import ConfigError
from npu_runner.platforms.graphs import GraphCaptureError, GraphCompiler, GraphResourceError, GraphSettings, Recorder
from npu_runner.platforms.step_inputs import AttentionMetadata, PromptEnds, StepInputs
from npu_runner.runner.buckets import Bucket, DecodeBuckets, Forwards, bucket_sizes
from npu_runner.runner.dummy import dummy_decode, dummy_drafts, dummy_prefill
from npu_runner.runner.prefill_graphs import PrefillBucket, PrefillBuckets, PrefillForward
from npu_runner.runner.settings import SHORT_TOKENS, Settings
from npu_runner.runner.step import StepRunner
from npu_runner.runner.step_arrays import SAMPLER_ARRAYS, step_arrays
from npu_runner.runner.votes import Votes

logger = logging.getLogger(__name__)

_NUM_TOKENS = 4
# Eager and compiled steps round differently in 16 bits: by a few parts in a hundred of the logits' spread at most.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.1}


class Progress(Protocol):
    def __call__(self, phase: str, what: str = "") -> None: ...


@dataclass(frozen=True, kw_only=True)
class DecodeParts:
    """The parts of decode graphs, once the caches are allocated."""

    steps: StepRunner
    settings: Settings
    model_config: ModelConfig
    dtype: torch.dtype
    num_blocks: int
    max_model_len: int
    graph_batch_sizes: tuple[int, ...] | None
    """The user's setting."""
    bytes_a_token: float
    """A long prefill needs at least as many; 0 where nothing was measured."""
    step_timeout_seconds: float
    """After which a rank that does not vote is given up."""
    compares_new: bool
    """Graphs of this run are compared with eager steps, too (`LoadStrategy.compares_graphs`)."""
    is_mode_given: bool
    """The user named the graph mode: it is not exchanged for eager steps without their consent."""
    run_bucket: Callable[[int], None]
    """Runs two dummy decode steps with this number of rows: the first compiles or captures, the second proves that it
    stays."""
    run_dummies: Callable[[Sequence[ScheduledBatch]], None]
    """Runs other dummy steps."""

    def reset_states(self) -> None:
        if self.steps.states is not None:
            self.steps.states.zero()


def compile_decode_graphs(parts: DecodeParts, progress: Progress) -> None:
    """Give the steps a graph for every bucket, largest first, as far as the device has room for them; a model that
    pools has no decode steps, and graphs of prefills alone.

    The caller clears what dummy steps leave in the caches. `progress` is called for each graph that is
    begun.
    """
    steps, settings = parts.steps, parts.settings
    compiler = steps.platform.make_graph_compiler(_graph_settings(parts))
    steps.buckets = buckets = _make_buckets(parts, compiler)
    votes = Votes(steps.tp, parts.step_timeout_seconds)

    order = sorted(buckets.sizes, reverse=True)

    def warm_up(batch_size: int) -> None:
        progress("compiling", f"bucket {batch_size} (graph {order.index(batch_size) + 1} of {len(order)})")
        bucket, below = buckets.compiled()[-1], max((size for size in order if size < batch_size), default=1)
        own = _why_no_graph(parts, lambda: _warm_up(parts, bucket, below))
        if own:
            progress("compiling", f"no graph for bucket {batch_size} ({own}), if all ranks do without")
        # No rank can go without alone: the others would wait for it in that graph's collectives.
        refusal = votes.refusal(f"the graph of batch size {batch_size}", own)
        if refusal:
            raise GraphResourceError(refusal)

    def agrees(bucket: Bucket) -> bool:
        progress("comparing the kept graph of", f"bucket {bucket.batch_size}")
        return _agrees_with_eager(parts, bucket)

    behind, drafted = steps.head_step, steps.drafted_graph_step
    forwards = Forwards(steps.graph_step.forward, behind and behind.forward, drafted and drafted.forward)
    buckets.compile_all(forwards, warm_up, agrees, votes, compares_new=parts.compares_new)
    if parts.compares_new and parts.is_mode_given and buckets.why_none:
        raise ConfigError(f"graph_mode {settings.graph_mode!r}: {buckets.why_none}; leave it at auto, or set it to "
                          "eager")
    _record_sampling(steps, buckets)
    if settings.prefill_sizes:
        recorder = compiler.recorder()
        assert recorder is not None, "a backend whose prefills are recorded comes with a compiler that records"
        _record_prefills(parts, recorder, votes, progress)


def _make_buckets(parts: DecodeParts, compiler: GraphCompiler) -> DecodeBuckets:
    """The buckets to compile: states bound the rows that steps with drafts and padding may have."""
    steps, settings = parts.steps, parts.settings
    most_rows, max_padding = settings.most_graph_rows, None
    if steps.states is not None and steps.states.draft_slots is not None:
        most_rows = min(most_rows, settings.max_num_seqs + steps.states.plan.num_spares)
    if steps.states is not None:
        max_padding = None if most_rows else steps.states.plan.num_padding
    is_eager = settings.graph_mode == "eager"
    sizes = () if is_eager else bucket_sizes(settings.max_num_seqs, parts.graph_batch_sizes, most_rows)
    return DecodeBuckets(sizes, compiler, block_size=settings.block_size, last_tokens=steps.last_tokens_S,
                         tables=steps.tables, max_padding=max_padding)


def _warm_up(parts: DecodeParts, bucket: Bucket, below: int) -> None:
    """Run the graphs of a bucket. That of steps with drafts, where plain steps have another one, is left out if no such
    step has as many tokens, and more than `below`."""
    if bucket.drafted is not None and bucket.drafted is not bucket.forward:
        step = _dummy_drafts(parts, bucket.batch_size, below)
        if step is None:
            bucket.drafted = None
        else:
            parts.run_dummies([step, step])
    # Last: sampling is recorded behind the plain graph over its buffers, where drafts have no state slots.
    parts.run_bucket(bucket.batch_size)


def _dummy_drafts(parts: DecodeParts, most: int, below: int) -> ScheduledBatch | None:
    """The largest step with drafts of up to `most` tokens, and more than `below`, if there is one."""
    speculative, max_num_seqs = parts.settings.speculative, parts.settings.max_num_seqs
    spares = parts.steps.states.draft_slots if parts.steps.states is not None else None
    if speculative is None:
        return None
    for num_tokens in range(most, below, -1):
        num_rows = speculative.rows_for(num_tokens, max_num_seqs)
        fewest = num_tokens - len(spares) if spares is not None else 0
        if num_rows is not None and fewest <= max_num_seqs:
            return dummy_drafts(num_tokens, max(num_rows, fewest), spares)
    return None


def _record_prefills(parts: DecodeParts, recorder: Recorder, votes: Votes, progress: Progress) -> None:
    """Largest first, each that all ranks have room for: a smaller one needs less. Prefills without a graph are eager.
    """
    steps, memory = parts.steps, parts.steps.platform.memory
    model, attention = steps.model, steps.attention

    def forward(inputs: StepInputs, tiles: Mapping[str, Tensor], end_rows_R: Tensor) -> Tensor:
        metadata = AttentionMetadata.from_inputs(inputs, attention.plan_of_tiles(tiles), is_prefill=True,
                                                 ends=PromptEnds(end_rows_R) if steps.accepts_ends else None)
        return model(model.embed(inputs.tokens), inputs.positions, metadata)

    steps.prefills = prefills = PrefillBuckets(attention, steps.tables, block_size=steps.block_size,
                                                uses_mrope=parts.model_config.rope.mrope_section is not None,
                                                of_rows=steps.of_rows)
    order = sorted((*parts.settings.prefill_sizes, *parts.settings.long_prefill_sizes), reverse=True)
    memory.empty_cache()
    before, begun, free_bytes = memory.info(), time.perf_counter(), None
    for number, size in enumerate(order, start=1):
        what = f"the graph of prefills of {size} tokens"
        progress("recording", f"prefills of {size} tokens (graph {number} of {len(order)})")

        def record(size: int = size) -> None:
            prefills.record(size, forward, recorder)
            if parts.compares_new:
                _compare_prefill(parts, forward, size)

        cannot_fit = free_bytes is not None and size > SHORT_TOKENS and size * parts.bytes_a_token > free_bytes
        refusal = votes.refusal(what, "less than it needs is free" if cannot_fit else _why_no_graph(parts, record))
        if refusal:
            prefills.drop(size)
            memory.empty_cache()
            free_bytes = memory.free_bytes() if steps.tp.size == 1 else None  # several ranks would have to agree
            instead = f"are padded to {prefills.sizes[0]} tokens" if prefills.sizes else "run eagerly"
            logger.warning("without %s (%s): such prefills %s", what, refusal, instead)
        if size > SHORT_TOKENS:
            now = memory.info()
            num_bytes = max(0, before.free_bytes - now.free_bytes) if before and now else 0
            prefills.long_cost = num_bytes, time.perf_counter() - begun


def _record_sampling(steps: StepRunner, buckets: DecodeBuckets) -> None:
    """Record the sampler that follows a decode graph in most steps, where the platform can and has room for it.

    A rank may do without by itself: it is no part of what all of them run.
    """
    sampler, recorder = steps.sampler, buckets.compiler.recorder()
    for bucket in buckets.compiled() if recorder is not None else []:
        output_PX = bucket.forward(bucket.inputs)  # with all ranks
        logits_PV = output_PX[:, : output_PX.shape[1] - steps.num_appended]
        if sampler is None or bucket.batch_size > steps.max_num_seqs:  # drafts are sampled position by position
            continue
        try:
            sampler.record(logits_PV, {name: bucket.tensors[name] for name in SAMPLER_ARRAYS}, recorder)
        except (GraphResourceError, RuntimeError, MemoryError) as error:
            if not isinstance(error, GraphResourceError) and not steps.platform.memory.is_out_of_memory(error):
                raise
            logger.warning("no room to record the sampling of batches of %d (%s); they are launched one by one",
                           bucket.batch_size, str(error).partition("\n")[0])


def _why_no_graph(parts: DecodeParts, make: Callable[[], object]) -> str | None:
    """Make a graph; returns what the device lacks for that, if it does."""
    try:
        make()
    except GraphResourceError as full:
        return str(full)
    except (RuntimeError, MemoryError) as error:
        is_full = parts.steps.platform.memory.is_out_of_memory(error)
        # Other ranks may wait in a collective, but an operation that cannot be captured fails on all of them.
        others_wait = parts.steps.tp.size > 1 and (is_full or not isinstance(error, GraphCaptureError))
        if others_wait or not (parts.compares_new or is_full):
            raise
        return str(error).strip().partition("\n")[0]
    return None


def _fill(steps: StepRunner, bucket: Bucket, batch: ScheduledBatch) -> dict[str, np.ndarray]:
    """Fill a dummy decode step into a bucket's buffers."""
    uniforms = {"uniforms": np.zeros(batch.batch_size, dtype=np.float32)}
    steps.tables.learn(batch.new_blocks_N3)
    arrays = step_arrays(batch, uniforms, 0, steps.block_size, steps.tables.on_host_SW)
    return steps.fill(bucket, batch.new_blocks_N3, arrays, batch.slots_B)


def _graph_settings(parts: DecodeParts) -> GraphSettings:
    """With whatever shapes a decode graph, short of the vendor's own versions."""
    steps, settings = parts.steps, dataclasses.replace(parts.settings, graph_cache_dir=None)
    identity = {
        "model_config": repr(parts.model_config), "settings": repr(settings), "num_blocks": parts.num_blocks,
        "max_model_len": parts.max_model_len, "states": repr(steps.states.plan if steps.states else None),
        "rank": steps.tp.rank, "num_ranks": steps.tp.size,
        "has_whole_experts": steps.tp.has_whole_experts,
        # Weights of other forms, or norms with a shift, make another graph of the same config.
        "parameters": _shapes_of(steps.model),
        "source": _source_fingerprint(steps.model),
    }
    return GraphSettings(mode=settings.graph_mode, has_foreign_modules=parts.compares_new, identity=identity,
                         cache_dir=parts.settings.graph_cache_dir)


def _shapes_of(model: nn.Module) -> str:
    shapes = [(name, tuple(each.shape), str(each.dtype)) for name, each in model.named_parameters()]
    return hashlib.sha256(repr(shapes).encode()).hexdigest()


def _source_fingerprint(model: nn.Module) -> str:
    """A hash over our own sources, and over those of the model's classes from other packages (but torch's)."""
    own = Path(npu_runner.__file__).parent
    files = {*own.rglob("*.py"), *(own / "strategies").glob("*.py")}  # a link in a checkout, which rglob may pass by
    for module in model.modules():
        if not type(module).__module__.startswith("torch."):
            files.add(Path(inspect.getfile(type(module))))
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _agrees_with_eager(parts: DecodeParts, bucket: Bucket) -> bool:
    """Whether the bucket's graphs agree with eager steps for random tokens; both write the same keys.

    Only while no sequence uses cache and states: blocks 1 and up are written, one for each sequence as far as they go.
    The last tokens and the block tables are written, too.
    """
    steps = parts.steps
    num_rows = min(bucket.batch_size, steps.max_num_seqs, parts.num_blocks - 1)
    dummies = [dummy_decode(num_rows, place + 1) for place in range(_NUM_TOKENS)]
    rng = np.random.default_rng(0)
    vocab_size = parts.model_config.vocab_size
    tokens = [torch.from_numpy(rng.integers(0, vocab_size, num_rows, dtype=np.int32)) for _ in dummies]
    for step in dummies:
        step.new_blocks_N3 = np.array([(row, 0, row + 1) for row in range(num_rows)], dtype=np.int32)

    def last_of(run: Callable[[dict[str, np.ndarray]], list[Tensor]]) -> list[Tensor]:
        parts.reset_states()
        found: list[Tensor] = []
        for step, ids in zip(dummies, tokens, strict=True):
            steps.last_tokens_S[:num_rows].copy_(ids)
            # Logits and hidden states of layers are compared apart: they differ in size.
            found = [part for output in run(_fill(steps, bucket, step))
                     for part in output[:num_rows].float().tensor_split([output.shape[1] - steps.num_appended], dim=1)
                     if part.shape[1]]
        return found

    def run_eagerly(padded: dict[str, np.ndarray]) -> list[Tensor]:
        tables_BW = steps.tables.on_host_SW[padded["table_slots"]]
        plan = steps.attention.plan_decode(padded["context_lens"].tolist(), tables_BW, bucket.buffer.device)
        both = steps.graph_step, steps.head_step
        return [each.forward(bucket.inputs, plan) for each in both if each is not None]

    def run_graphs(padded: dict[str, np.ndarray]) -> list[Tensor]:
        return [graph(bucket.inputs).clone() for graph in (bucket.forward, bucket.behind) if graph is not None]

    # One after the other: each must begin with the same states.
    expected = last_of(run_eagerly)
    pairs = [*zip(last_of(run_graphs), expected, strict=True)]
    if (drafted := bucket.drafted) is not None:
        pairs += zip(last_of(lambda padded: [drafted(bucket.inputs).clone()]), expected, strict=False)
    return all(_is_close(found, theirs, _TOLERANCE[parts.dtype]) for found, theirs in pairs)


def _compare_prefill(parts: DecodeParts, forward: PrefillForward, size: int) -> None:
    """Raises GraphResourceError where the newest graph, of `size` tokens, differs from an eager prefill of random ones.
    As `_agrees_with_eager` it writes into the cache."""
    steps = parts.steps
    num_tokens = min(size, parts.max_model_len - 1, (parts.num_blocks - 1) * steps.block_size)
    step = dummy_prefill(num_tokens, 1, block_size=steps.block_size, uses_mrope=False)
    step.new_blocks_N3[:, 2] = 1 + np.arange(len(step.new_blocks_N3))
    step.token_ids_T[:] = np.random.default_rng(0).integers(0, parts.model_config.vocab_size, num_tokens)
    bucket = steps.prepare(step, 0, {name: np.zeros(1, dtype=dtype) for name, dtype in steps.of_rows.items()}).bucket
    assert isinstance(bucket, PrefillBucket), "the newest is the smallest"
    found, expected = (run()[: 1 if steps.accepts_ends else num_tokens].float().clone()
                       for run in (bucket.run, functools.partial(bucket.run, forward)))
    if not _is_close(found, expected, _TOLERANCE[parts.dtype]):
        raise GraphResourceError("it answers otherwise than an eager prefill")


def _is_close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    spread = max(float(expected.std()), 1e-6)
    return bool(((found - expected).abs().max() <= tolerance * spread).item())
