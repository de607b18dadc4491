"""Makes the decode graphs of a rank whose cache stands: compiles them, warms them up, compares those of earlier runs.

Knows a model runner by what it shows to everybody; nothing of what a platform's graph is.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Protocol

import numpy as np

from npu_runner.core.batch import ScheduledBatch
from npu_runner.platforms.base import GraphResourceError, GraphSettings
from npu_runner.runner.buckets import Bucket, DecodeBuckets, bucket_sizes
from npu_runner.runner.kept_graphs import agrees_with_eager, source_fingerprint
from npu_runner.runner.step_arrays import SAMPLER_ARRAYS, step_arrays
from npu_runner.runner.votes import Votes

if TYPE_CHECKING:
    from npu_runner.runner.model_runner import ModelRunner


logger = logging.getLogger(__name__)


class Progress(Protocol):
    def __call__(self, phase: str, what: str = "") -> None: ...


def compile_decode_graphs(runner: ModelRunner, progress: Progress) -> None:
    """Give the runner's steps a graph for every bucket, largest first, as far as the device has room for them.

    What made-up steps leave in the caches is for the caller to clear. `progress` is told each graph that is begun.
    """
    steps, settings = runner.steps, runner.settings
    compiler = runner.platform.make_graph_compiler(_graph_settings(runner))
    buckets = DecodeBuckets(bucket_sizes(settings.max_num_seqs, runner.config.graph_batch_sizes), compiler,
                            block_size=settings.block_size, last_tokens=steps.last_tokens_S, tables=steps.tables,
                            max_padding=runner.states.plan.num_padding if runner.states else None)
    steps.buckets = buckets
    eager = steps.decode_step.forward
    votes = Votes(runner.tp, runner.config.step_timeout_seconds)

    def warm_up(batch_size: int) -> None:
        progress("compiling", f"bucket {batch_size}")
        own = _why_no_graph(runner, batch_size)
        if own:
            progress("compiling", f"no graph for bucket {batch_size} ({own}), if all ranks do without")
        # No rank can go without alone: the others would wait for it in that graph's collectives.
        refusal = votes.refusal(f"the graph of batch size {batch_size}", own)
        if refusal:
            raise GraphResourceError(refusal)

    def agrees(bucket: Bucket) -> bool:
        progress("comparing the kept graph of", f"bucket {bucket.batch_size}")
        return agrees_with_eager(
            bucket, eager, runner.attention, lambda batch: _fill(runner, bucket, batch), runner.reset_states,
            last_tokens=steps.last_tokens_S, tables=steps.tables, num_blocks=runner.num_blocks,
            vocab_size=runner.model_config.vocab_size, dtype=runner.dtype,
        )

    buckets.compile_all(eager, warm_up, agrees, votes)
    _record_draws(runner, buckets)


def _record_draws(runner: ModelRunner, buckets: DecodeBuckets) -> None:
    """What follows a decode graph in most steps becomes one launch, too, where the platform can and has room for it.

    A rank may do without by itself: it is no part of what all of them run.
    """
    sampler = runner.steps.sampler
    for bucket in buckets.compiled() if buckets.compiler.records else []:
        logits_PV = bucket.forward(bucket.inputs)  # with all ranks
        if sampler is None:
            continue
        try:
            sampler.record(logits_PV, {name: bucket.tensors[name] for name in SAMPLER_ARRAYS}, buckets.compiler.record)
        except (GraphResourceError, RuntimeError, MemoryError) as error:
            if not isinstance(error, GraphResourceError) and not runner.platform.is_out_of_memory(error):
                raise
            logger.warning("no room to record the draws of batches of %d (%s); they are launched one by one",
                           bucket.batch_size, str(error).partition("\n")[0])


def _why_no_graph(runner: ModelRunner, batch_size: int) -> str | None:
    """Run a bucket until nothing is compiled any more; returns what the device lacks for that, if it does."""
    try:
        # The first call compiles or captures, the second proves that it stays compiled.
        runner.dummy_run(batch_size, batch_size, expected_decode_len=2, in_capturing=True)
    except GraphResourceError as full:
        return str(full)
    except (RuntimeError, MemoryError) as error:
        # With several ranks it may have run out between two collectives, where the others wait.
        if runner.tp.size > 1 or not runner.platform.is_out_of_memory(error):
            raise
        return str(error).partition("\n")[0]
    return None


def _fill(runner: ModelRunner, bucket: Bucket, batch: ScheduledBatch) -> dict[str, np.ndarray]:
    """A made-up decode step into a bucket's buffers."""
    uniforms_B = np.zeros(batch.batch_size, dtype=np.float32)
    tables = runner.steps.tables
    tables.learn(batch.new_blocks_N3)
    arrays = step_arrays(batch, uniforms_B, 0, runner.settings.block_size, tables.on_host_SW)
    return runner.steps.fill(bucket, batch, arrays)


def _graph_settings(runner: ModelRunner) -> GraphSettings:
    """With whatever shapes a decode graph, short of the vendor's own versions."""
    settings = dataclasses.replace(runner.settings, graph_cache_dir=None)
    identity = {
        "model_config": repr(runner.model_config), "settings": repr(settings), "num_blocks": runner.num_blocks,
        "max_model_len": runner.max_model_len, "states": repr(runner.states.plan if runner.states else None),
        "rank": runner.tp.rank, "num_ranks": runner.tp.size,
        "source": source_fingerprint(runner.model),
    }
    return GraphSettings(mode=runner.settings.graph_mode, identity=identity,
                         cache_dir=runner.settings.graph_cache_dir)
