"""One rank of the model: loads it, gives it a KV cache, compiles its decode path and runs scheduled batches.

Knows one strategy and one platform by their contracts; nothing of requests, text or other processes.

B sequences in the step, T tokens in the step, W blocks per sequence, D hidden size, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from npu_runner.config import RunnerConfig
from npu_runner.core.batch import ScheduledBatch
from npu_runner.errors import EngineDeadError
from npu_runner.layers.attention import bind_kv_cache
from npu_runner.layers.parallel import LayerContext, TensorParallel
from npu_runner.layers.sampler import Sampler
from npu_runner.models.decoder import CausalLM
from npu_runner.multimodal.inputs import ImageInput
from npu_runner.multimodal.vision_cache import VisionCache
from npu_runner.platforms import pick_platform
from npu_runner.platforms.base import AttentionMetadata, GraphResourceError, GraphSettings
from npu_runner.runner.base import MemoryProfile, ModelRunnerBase, ModelRunnerOutput, RunnerInfo, StepLogprobs
from npu_runner.runner.buckets import Bucket, DecodeBuckets, bucket_sizes, pad_into
from npu_runner.runner.decode_step import DecodeStep
from npu_runner.runner.dummy import dummy_decode, dummy_images, dummy_prefill
from npu_runner.runner.inputs import to_device
from npu_runner.runner.kept_graphs import agrees_with_eager, source_fingerprint
from npu_runner.runner.kv_cache import KVCacheShape, plan_kv_cache
from npu_runner.runner.memory_guard import MemoryGuard
from npu_runner.runner.settings import resolve_settings
from npu_runner.runner.step_clock import StepClock
from npu_runner.weights.loader import fill_with_random_weights
from npu_runner.weights.reader import CheckpointReader
from strategies import VisionEmbeddings, pick_strategy

logger = logging.getLogger(__name__)


class ModelRunner(ModelRunnerBase):
    """Ready to serve once constructed. `tp` is this rank's place in an initialised process group.

    `progress(phase)` is told what the rank is doing, for whoever watches over it.
    """

    def __init__(self, config: RunnerConfig, model_path: Path, tp: TensorParallel | None = None,
                 progress: Callable[[str], None] = lambda phase: None):
        self._report_phase = progress
        self._phase = "starting"
        self.tp = tp or TensorParallel()
        self.platform = pick_platform(config.platform)
        self._progress("setting the device")
        self.device = self.platform.set_device(self.tp.rank)
        self.strategy = pick_strategy(model_path)
        self.model_path = model_path
        self.model_config = self.strategy.read_config()
        self.config = config
        self.settings = resolve_settings(config, self.model_config, self.platform)
        self.dtype: torch.dtype = getattr(torch, self.settings.dtype)
        self.processor = self.strategy.processor(self.config)
        self.largest_image = self.processor.largest_image() if self.strategy.is_multimodal else None
        self.vision_cache: VisionCache[VisionEmbeddings] = VisionCache(self.config.vision_cache_bytes)
        self.num_images_encoded = 0
        self.clock = StepClock()
        self._step_number = 0
        self.buckets: DecodeBuckets | None = None
        self.guard = MemoryGuard(self.platform, self.vision_cache.release, can_retry=self.tp.size == 1)
        with torch.inference_mode(), self.guard.starting(lambda: self._phase):
            self.load_model()
            self.sampler = self._make_sampler()
            profile = self.profile_run()
            self.allocate_kv_cache(profile)
            if self.settings.graph_mode != "eager":
                self.compile_decode()

    def _progress(self, phase: str) -> None:
        self._phase = phase
        self._report_phase(phase)

    # -- start-up --------------------------------------------------------------------------------------------------

    def load_model(self) -> None:
        self._progress("loading weights")
        started = time.perf_counter()
        before = self.platform.memory_info()
        self._free_before = before.free_bytes if before else 0
        self._allocated_before = before.allocated_bytes if before else 0
        self._reserved_before = before.reserved_bytes if before else 0
        attention = self.platform.make_attention(
            self.config.attention_backend,
            num_heads=self.tp.share(self.model_config.num_heads, "num_attention_heads")[1],
            num_kv_heads=self._num_kv_heads,
            head_dim=self.model_config.head_dim,
            block_size=self.settings.block_size,
            dtype=self.dtype,
        )
        self.attention = attention
        logger.info("attention: %s", attention.name)
        context = LayerContext(self.platform.make_ops(), attention, self.tp, self.dtype, self.device)
        self.model = self.strategy.build(self.model_config, self.settings.max_model_len, context)
        if self.config.load_format == "dummy":
            fill_with_random_weights(self.model, self.config.seed)
        else:
            with CheckpointReader(self.model_path) as reader:
                self.strategy.load_weights(self.model, reader, self.model_config)
        self.model.requires_grad_(False).eval()
        self.decode_step = DecodeStep(self._causal_lm)
        self._weights_bytes = sum(t.numel() * t.element_size() for t in (*self.model.parameters(),
                                                                        *self.model.buffers()))
        logger.info("weights loaded in %.1f s", time.perf_counter() - started)

    def get_model(self) -> nn.Module:
        return self.model

    def profile_run(self) -> MemoryProfile:
        """Run the worst step the settings allow, over a cache of one block, and measure what it takes."""
        self._progress("profiling memory")
        self._bind_cache(num_blocks=1)
        self.platform.empty_cache()
        self.platform.reset_peak_memory()
        batch_size = min(self.settings.max_num_seqs, self.settings.max_num_batched_tokens)
        longest = batch_size * (self.settings.max_model_len - 1)
        self.dummy_run(min(self.settings.max_num_batched_tokens, longest), batch_size)
        self.platform.synchronize()
        info = self.platform.memory_info()
        if info is None:
            return MemoryProfile(weights_bytes=self._weights_bytes)
        self.platform.empty_cache()
        settled = self.platform.memory_info() or info
        other = info.total_bytes - self._free_before
        return MemoryProfile(
            total_bytes=info.total_bytes,
            free_before_bytes=self._free_before,
            weights_bytes=info.allocated_bytes - self._allocated_before,
            activation_peak_bytes=info.peak_allocated_bytes - info.allocated_bytes,
            # What the driver gave since the start, less what the allocator holds of it.
            outside_bytes=max(0, settled.total_bytes - settled.free_bytes - other - settled.reserved_bytes
                              + self._reserved_before),
            other_bytes=other,
        )

    def allocate_kv_cache(self, profile: MemoryProfile) -> None:
        """Size the cache by the ledger, agree with the other ranks on the smallest, and bind it to the layers."""
        self._progress("allocating the KV cache")
        is_measured = self.platform.memory_info() is not None
        plan = plan_kv_cache(
            self._kv_shape, profile, is_measured=is_measured, kv_cache_bytes=self.config.kv_cache_bytes,
            memory_utilization=self.config.memory_utilization,
            reserved_bytes=self.config.vision_cache_bytes if self.strategy.is_multimodal else 0,
            max_model_len=self.settings.max_model_len, max_model_len_is_given=self.settings.max_model_len_is_given,
            max_num_seqs=self.settings.max_num_seqs,
        )
        self.num_blocks = self.tp.minimum(plan.num_blocks, self.device)
        self.max_model_len = self.tp.minimum(plan.max_model_len, self.device)
        self.ledger = self.guard.ledger = plan.ledger
        self._bind_cache(self.num_blocks)

    def compile_decode(self) -> None:
        """Compile the decode forward for every bucket, largest first."""
        sizes = self.config.graph_batch_sizes or bucket_sizes(self.settings.max_num_seqs)
        self.buckets = DecodeBuckets(sizes, -(-self.max_model_len // self.settings.block_size), self.device)
        self.compiler = self.platform.make_graph_compiler(self._graph_settings())

        def warm_up(batch_size: int) -> None:
            self._progress(f"compiling bucket {batch_size}")
            try:
                # The first call compiles or captures, the second proves that it stays compiled.
                self.dummy_run(batch_size, batch_size, expected_decode_len=2, in_capturing=True)
            except (RuntimeError, MemoryError) as error:
                # One rank of several cannot go without a graph alone: others would wait in that graph's collectives.
                if self.tp.size > 1 or not self.platform.is_out_of_memory(error):
                    raise
                raise GraphResourceError(str(error).partition("\n")[0]) from error

        def agrees(bucket: Bucket) -> bool:
            self._progress(f"comparing the kept graph of bucket {bucket.batch_size}")
            return agrees_with_eager(
                bucket.forward, self.decode_step.forward, bucket.inputs, self.attention, num_blocks=self.num_blocks,
                block_size=self.settings.block_size, vocab_size=self.model_config.vocab_size, dtype=self.dtype,
            )

        self.buckets.compile_all(self.compiler, self.decode_step.forward, warm_up, agrees)
        self.k_cache.zero_()
        self.v_cache.zero_()
        self.platform.synchronize()

    def _graph_settings(self) -> GraphSettings:
        """With whatever shapes a decode graph, short of the vendor's own versions."""
        settings = dataclasses.replace(self.settings, graph_cache_dir=None)
        identity = {
            "model_config": repr(self.model_config), "settings": repr(settings), "num_blocks": self.num_blocks,
            "max_model_len": self.max_model_len, "rank": self.tp.rank, "num_ranks": self.tp.size,
            "source": source_fingerprint(self.model),
        }
        folder = self.settings.graph_cache_dir
        return GraphSettings(mode=self.settings.graph_mode, identity=identity, cache_dir=folder)

    def dummy_run(self, num_tokens: int, batch_size: int, expected_decode_len: int = 1,
                  in_capturing: bool = False) -> None:
        images = []
        if self.largest_image is not None:
            # Many pictures cost time; where nobody measures memory, one takes the same path.
            is_measured = self.platform.memory_info() is not None
            # Where a chunk begins or ends within a picture, that goes through the tower whole.
            most = min(self.settings.max_num_batched_tokens,
                       num_tokens + (batch_size + 1) * self.largest_image.num_tokens)
            images = dummy_images(self.largest_image, most if is_measured else 0)
        steps = [] if in_capturing else [dummy_prefill(
            num_tokens, batch_size, block_size=self.settings.block_size, uses_mrope=self.uses_mrope, images=images
        )]
        first_len = 1 if in_capturing else max(1, num_tokens // batch_size)
        for context_len in range(first_len, first_len + expected_decode_len):
            context_len = min(context_len, self.settings.max_model_len)
            steps.append(dummy_decode(batch_size, context_len, block_size=self.settings.block_size))
        for step in steps:
            self.run(step)
        if self.sampler is not None and not in_capturing:
            self.sampler = self._make_sampler()  # counts of tokens and all: memory that many a job never needs
        self.vision_cache.clear()
        self.num_images_encoded = 0
        self.clock = StepClock()

    def info(self) -> RunnerInfo:
        """What the engine needs to know once the runner is ready."""
        largest_image_tokens = self.largest_image.num_tokens if self.largest_image else 0
        description = {"dtype": self.settings.dtype, "graph_mode": self.settings.graph_mode,
                       "attention": self.attention.name}
        return RunnerInfo(
            num_blocks=self.num_blocks,
            block_size=self.settings.block_size,
            max_model_len=self.max_model_len,
            max_num_seqs=self.settings.max_num_seqs,
            max_num_batched_tokens=self.settings.max_num_batched_tokens,
            max_image_tokens=max(self.settings.max_num_batched_tokens, largest_image_tokens),
            uses_mrope=self.uses_mrope,
            ledger=self.ledger,
            graphs=self.buckets.describe() if self.buckets else "eager",
            description={**self.platform.describe(), **description},
        )

    # -- one step --------------------------------------------------------------------------------------------------

    def execute_model(self, batch: ScheduledBatch) -> ModelRunnerOutput | None:
        with torch.inference_mode():
            return self.run(batch)

    def run(self, batch: ScheduledBatch) -> ModelRunnerOutput | None:
        """Prepare, forward, sample. None on ranks that do not sample."""
        self.clock.start()
        self._step_number = (self._step_number + 1) % 2**31
        uniforms_B = self.prepare_sample(batch)
        return self.guard.step(lambda: self._run(batch, uniforms_B), batch.describe)

    def _run(self, batch: ScheduledBatch, uniforms_B: np.ndarray) -> ModelRunnerOutput | None:
        """The part of a step that may be run twice: it writes the same keys and values to the same places."""
        bucket = None
        if not batch.is_prefill:
            bucket = self.buckets.find(batch.batch_size) if self.buckets else None
        if bucket is not None:
            inputs = bucket.inputs
            self.prepare_decode_padded(batch, uniforms_B, bucket)
            self.clock.end_prepare()
            logits_BV = bucket.forward(*(inputs[name] for name in _DECODE_ARGUMENTS))[: batch.batch_size]
        else:
            prepare = self.prepare_prefill if batch.is_prefill else self.prepare_decode
            inputs = prepare(batch, uniforms_B)
            self.clock.end_prepare()
            logits_BV = self.run_model(batch, inputs)
        self.clock.end_launch()
        return None if self.sampler is None else self._sample(batch, logits_BV, inputs)

    def prepare_sample(self, batch: ScheduledBatch) -> np.ndarray:
        """Register who entered or left a slot; (B,) float32 uniforms for the rows that sample."""
        if self.sampler is None:
            return np.zeros(int(batch.samples_B.sum()), dtype=np.float32)
        for slot in batch.freed_slots:
            self.sampler.remove(slot)
        for entry in batch.new_sampling:
            self.sampler.add(entry.slot, entry.params, entry.prompt_token_ids, entry.output_token_ids, seed=entry.seed)
        return self.sampler.host_inputs(batch.slots_B[batch.samples_B])

    def prepare_prefill(self, batch: ScheduledBatch, uniforms_B: np.ndarray) -> dict[str, Tensor]:
        ends_B = np.cumsum(batch.query_lens_B)
        image_rows = [np.arange(s.token_row, s.token_row + s.num_rows) for s in batch.image_slices]
        arrays = {
            "input_ids": batch.token_ids_T,
            "positions": np.ascontiguousarray(batch.positions),
            "slot_mapping": self._slot_mapping(batch),
            "context_lens": batch.context_lens_B,
            "block_tables": self.prepare_block_tables(batch),
            "last_rows": (ends_B - 1)[batch.samples_B].astype(np.int32),
            "slots": batch.slots_B[batch.samples_B],
            "uniforms": uniforms_B,
            "receipts": self._receipts(uniforms_B),
            "image_rows": np.concatenate(image_rows).astype(np.int32) if image_rows else np.zeros(0, dtype=np.int32),
        }
        return to_device(self.platform, arrays, self.device)

    def prepare_decode(self, batch: ScheduledBatch, uniforms_B: np.ndarray) -> dict[str, Tensor]:
        return to_device(self.platform, self._decode_arrays(batch, uniforms_B), self.device)

    def prepare_decode_padded(self, batch: ScheduledBatch, uniforms_B: np.ndarray, bucket: Bucket) -> None:
        """Fill the bucket's static buffers, through one copy."""
        arrays = self._decode_arrays(batch, uniforms_B)
        padded = pad_into(bucket, arrays, self.platform, self.settings.block_size)
        self.attention.plan_replay(padded["context_lens"], padded["block_tables"])
        self.compiler.before_replay(bucket.batch_size, batch.context_lens_B.tolist())

    def prepare_block_tables(self, batch: ScheduledBatch) -> np.ndarray:
        return np.ascontiguousarray(batch.block_tables_BW)

    def run_model(self, batch: ScheduledBatch, inputs: dict[str, Tensor]) -> Tensor:
        """Logits (B, V) of the rows that sample, eagerly."""
        if not batch.is_prefill:
            plan = self.attention.plan_decode(batch.context_lens_B.tolist(), batch.block_tables_BW, self.device)
            return self.decode_step(inputs["input_ids"], inputs["positions"], inputs["slot_mapping"],
                                    inputs["context_lens"], inputs["block_tables"], plan)
        model = self._causal_lm
        plan = self.attention.plan_prefill(batch.query_lens_B.tolist(), batch.context_lens_B.tolist(),
                                           batch.block_tables_BW, self.device)
        metadata = AttentionMetadata(
            True, inputs["slot_mapping"], inputs["context_lens"], inputs["block_tables"], plan
        )
        x_TD = model.embed(inputs["input_ids"])
        deepstack = None
        if batch.image_slices:
            x_TD, deepstack = self._show_images(batch, x_TD, inputs["image_rows"])
        hidden_TD = model(x_TD, inputs["positions"], metadata, deepstack)
        if not batch.samples_B.any():  # a chunk in the middle of its prompt
            return hidden_TD.new_zeros((0, self.model_config.vocab_size))
        return model.compute_logits(hidden_TD[inputs["last_rows"]])

    # -- pictures --------------------------------------------------------------------------------------------------

    def encode_images(self, images: Sequence[ImageInput]) -> dict[bytes, VisionEmbeddings]:
        """Embeddings by content hash; those not cached go through the tower together."""
        found = {image.content_hash: self.vision_cache.get(image.content_hash) for image in images}
        missing = [image for image in images if found[image.content_hash] is None]
        if missing:
            for image, value in zip(missing, self.strategy.encode_images(self.model, missing), strict=True):
                self.vision_cache.put(image.content_hash, value)
                found[image.content_hash] = value
            self.num_images_encoded += len(missing)
        return {key: value for key, value in found.items() if value is not None}

    def _show_images(self, batch: ScheduledBatch, x_TD: Tensor,
                     rows_M: Tensor) -> tuple[Tensor, tuple[Tensor, list[Tensor]]]:
        """Put the pictures' rows into the embeddings; returns those and what the first layers add."""
        embeddings = self.encode_images(batch.images)
        self.vision_cache.pin_only({s.content_hash: embeddings[s.content_hash] for s in batch.image_slices
                                    if not s.is_last})
        cuts = [(embeddings[s.content_hash], slice(s.first_row, s.first_row + s.num_rows)) for s in batch.image_slices]
        rows_M = rows_M.long()
        x_TD = x_TD.index_copy(0, rows_M, torch.cat([value.main_MD[cut] for value, cut in cuts]))
        num_levels = len(cuts[0][0].deepstack)
        levels = [torch.cat([value.deepstack[level][cut] for value, cut in cuts]) for level in range(num_levels)]
        return x_TD, (rows_M, levels)

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _sample(self, batch: ScheduledBatch, logits_BV: Tensor, inputs: dict[str, Tensor]) -> ModelRunnerOutput:
        assert self.sampler is not None, "this rank does not sample"
        rows = np.flatnonzero(batch.samples_B)
        tokens: list[list[int]] = [[] for _ in range(batch.batch_size)]
        logprobs = None
        if len(rows):
            count = len(rows)
            on_device = self.sampler(
                logits_BV, *(inputs[name][:count] for name in ("slots", "uniforms", "receipts")), batch.slots_B[rows]
            )
            self.clock.end_sample()
            sampled = on_device.to_host()
            self.clock.end_wait()
            if (sampled.receipts_B != self._step_number).any():
                raise EngineDeadError(f"the device did not run the {batch.describe()}: it takes no work since an "
                                      "operation before failed, and the error of that got lost; "
                                      f"{self.platform.lost_error_remedy}")
            for row, token in zip(rows, sampled.token_ids_B.tolist(), strict=True):
                tokens[row] = [token]
            if sampled.records_LC is not None:
                places_B = np.full(batch.batch_size, -1, dtype=np.int32)
                places_B[rows[sampled.logprob_rows]] = np.arange(len(sampled.logprob_rows), dtype=np.int32)
                logprobs = StepLogprobs(places_B, sampled.records_LC)
        request_ids = batch.request_ids
        return ModelRunnerOutput(request_ids, {name: i for i, name in enumerate(request_ids)}, tokens, logprobs)

    def _decode_arrays(self, batch: ScheduledBatch, uniforms_B: np.ndarray) -> dict[str, np.ndarray]:
        return {
            "input_ids": batch.token_ids_T, "positions": batch.positions, "slot_mapping": self._slot_mapping(batch),
            "context_lens": batch.context_lens_B, "slots": batch.slots_B, "uniforms": uniforms_B,
            "receipts": self._receipts(uniforms_B), "block_tables": self.prepare_block_tables(batch),
        }

    def _receipts(self, uniforms_B: np.ndarray) -> np.ndarray:
        """One int32 for each row that samples: the step's number, which must come back with its tokens."""
        return np.full(len(uniforms_B), self._step_number, dtype=np.int32)

    def _slot_mapping(self, batch: ScheduledBatch) -> np.ndarray:
        """(T,) int32: block * block_size + offset of each of the step's tokens."""
        if batch.is_prefill:
            rows_T = np.repeat(np.arange(batch.batch_size), batch.query_lens_B)
            firsts_B = np.cumsum(batch.query_lens_B) - batch.query_lens_B
            starts_B = batch.context_lens_B - batch.query_lens_B
            places_T = np.arange(batch.num_tokens) - firsts_B[rows_T] + starts_B[rows_T]
        else:
            rows_T, places_T = np.arange(batch.batch_size), batch.context_lens_B - 1
        blocks_T = batch.block_tables_BW[rows_T, places_T // self.settings.block_size]
        return (blocks_T * self.settings.block_size + places_T % self.settings.block_size).astype(np.int32)

    def _bind_cache(self, num_blocks: int) -> None:
        # Keys and values are tensors of their own: graph compilers leave a write in place only where the arguments that
        # it writes do not share their memory.
        sizes = (self.model_config.num_layers, num_blocks, self.settings.block_size, self._num_kv_heads,
                 self.model_config.head_dim)
        # Flat first: a device may keep memory of five dimensions in a layout that no other view of it has.
        flat = (math.prod(sizes),)
        self.k_cache, self.v_cache = (torch.zeros(flat, dtype=self.dtype, device=self.device).view(sizes)
                                      for _ in range(2))
        bind_kv_cache(self.model, self.k_cache, self.v_cache)

    def _make_sampler(self) -> Sampler | None:
        if self.tp.rank != 0:
            return None
        tokenizer = self.processor.tokenizer
        return Sampler(
            vocab_size=self.model_config.vocab_size,
            max_num_seqs=self.settings.max_num_seqs,
            eos_token_ids=self.model_config.eos_token_ids,
            device=self.device,
            encode=lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        )

    @property
    def uses_mrope(self) -> bool:
        return self.model_config.rope.mrope_section is not None

    @property
    def _causal_lm(self) -> CausalLM:
        assert isinstance(self.model, CausalLM), f"{type(self.model).__name__} is no CausalLM"
        return self.model

    @property
    def _kv_shape(self) -> KVCacheShape:
        width = self._num_kv_heads * self.model_config.head_dim
        return KVCacheShape(self.model_config.num_layers, self.settings.block_size, width, self.dtype.itemsize)

    @property
    def _num_kv_heads(self) -> int:
        return self.tp.kv_head_share(self.model_config.num_kv_heads)[1]


_DECODE_ARGUMENTS = ("input_ids", "positions", "slot_mapping", "context_lens", "block_tables")

