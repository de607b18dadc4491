"""Dummy steps of a given size, for warm-up, memory profiling and capture. They touch no block but the null block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from npu_runner.core.batch import NO_NEW_BLOCKS, NO_TOKEN_IDS, ImageSlice, SamplingEntry, ScheduledBatch
from npu_runner.request.prompt_inputs import ImageInput
from npu_runner.request.sampling_params import MAX_TOP_LOGPROBS, SamplingParams

# These take most memory in the sampler: counts of every token, the whole vocabulary sorted, log probabilities, and the
# longest history of n-grams.
_PARAMS = SamplingParams(temperature=1.0, top_p=0.9, min_p=0.01, repetition_penalty=1.1, frequency_penalty=0.1,
                         logprobs=MAX_TOP_LOGPROBS, no_repeat_ngram_size=2)
_OUTPUT = [0, 0]  # long enough to repeat an n-gram


# Large images cost time; where memory is not measured, a small one takes the same path.
_UNMEASURED_IMAGE_TOKENS = 64


def dummy_images(largest: ImageInput, num_tokens: int, image_of: Callable[[int], ImageInput], *,
                 is_measured: bool) -> list[ImageInput]:
    """As many images of the largest size as fit into `num_tokens`, at least one; none is taken for another.

    `image_of(most)`: the image of up to `most` tokens that fills the rest. `is_measured`: it is about memory, else
    about what is gone through.
    """
    if not is_measured:
        return [image_of(min(largest.num_tokens, _UNMEASURED_IMAGE_TOKENS))]
    count = max(1, num_tokens // largest.num_tokens)
    left = num_tokens - count * largest.num_tokens
    images = [largest] * count + ([image_of(left)] if left > 0 else [])
    return [replace(image, content_hash=index.to_bytes(16, "little")) for index, image in enumerate(images)]


def dummy_prefill(num_tokens: int, batch_size: int, *, block_size: int, uses_mrope: bool,
                  images: Sequence[ImageInput] = ()) -> ScheduledBatch:
    """`batch_size` prompts of together `num_tokens` tokens; `images` take the first of these as far as they go."""
    query_lens = np.full(batch_size, num_tokens // batch_size, dtype=np.int32)
    query_lens[: num_tokens % batch_size] += 1
    positions_T = np.concatenate([np.arange(length, dtype=np.int32) for length in query_lens])
    columns = range(-(-int(query_lens.max()) // block_size))
    slots = np.arange(batch_size, dtype=np.int32)
    return ScheduledBatch(
        is_prefill=True,
        request_ids=[f"dummy-{i}" for i in range(batch_size)],
        slots_B=slots,
        token_ids_T=np.zeros(num_tokens, dtype=np.int32),
        positions=np.broadcast_to(positions_T, (3, num_tokens)) if uses_mrope else positions_T,
        query_lens_B=query_lens,
        context_lens_B=query_lens,
        new_blocks_N3=np.array([(slot, column, 0) for slot in slots for column in columns], dtype=np.int32),
        samples_B=np.ones(batch_size, dtype=np.bool_),
        new_sampling=[SamplingEntry(int(slot), _PARAMS, int(slot), [0], _OUTPUT) for slot in slots],
        images=list(images),
        image_slices=_slices(images, num_tokens))


def dummy_decode(batch_size: int, context_len: int) -> ScheduledBatch:
    """One token for each of `batch_size` sequences of `context_len` tokens: what the first slots hold, whose tables are
    as they stand."""
    context_lens = np.full(batch_size, context_len, dtype=np.int32)
    return ScheduledBatch(
        is_prefill=False,
        request_ids=[f"dummy-{i}" for i in range(batch_size)],
        slots_B=np.arange(batch_size, dtype=np.int32),
        token_ids_T=NO_TOKEN_IDS,
        positions=context_lens - 1,
        query_lens_B=np.ones(batch_size, dtype=np.int32),
        context_lens_B=context_lens,
        new_blocks_N3=NO_NEW_BLOCKS,
        samples_B=np.ones(batch_size, dtype=np.bool_))


def dummy_rows(num_rows: int, context_len: int, max_num_seqs: int, spares: range | None = None) -> ScheduledBatch:
    """`dummy_decode`, for more rows than sequences, too: then they have drafts, and all of their tokens are rows. Where
    drafts leave states there are as many as `spares`, at most: slots that they leave theirs in."""
    if spares is not None:
        num_rows = min(num_rows, max_num_seqs + len(spares))
    if num_rows <= max_num_seqs:
        return dummy_decode(num_rows, context_len)
    return dummy_drafts(num_rows, max_num_seqs, spares)


def dummy_drafts(num_tokens: int, batch_size: int, spares: range | None = None) -> ScheduledBatch:
    """A step of `batch_size` sequences and their drafts, with `num_tokens` tokens in all. `spares`: state slots of the
    drafts, where they leave states."""
    query_lens = np.full(batch_size, num_tokens // batch_size, dtype=np.int32)
    query_lens[: num_tokens % batch_size] += 1
    places_T = np.concatenate([np.arange(length, dtype=np.int32) for length in query_lens])
    step = replace(
        dummy_decode(batch_size, 1), token_ids_T=np.zeros(num_tokens, dtype=np.int32), query_lens_B=query_lens,
        positions=places_T, context_lens_B=query_lens)
    if spares is not None:
        step.state_slots = spares.start + np.cumsum(places_T > 0, dtype=np.int32) - 1
        step.state_slots[places_T == 0] = np.arange(batch_size)
    return step


def _slices(images: Sequence[ImageInput], num_tokens: int) -> list[ImageSlice]:
    slices = []
    row = 0
    for image in images:
        num_rows = min(image.num_tokens, num_tokens - row)
        if num_rows > 0:
            slices.append(ImageSlice(image.content_hash, 0, num_rows, row, is_last=True))
            row += num_rows
    return slices
