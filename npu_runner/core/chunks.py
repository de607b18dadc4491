"""How many tokens of a prompt one prefill step takes. Knows nothing of blocks, slots or other sequences."""

from __future__ import annotations

from npu_runner.core.sequence import Sequence


def chunk_length(seq: Sequence, budget: int, seen_images: dict[bytes, int], *, max_image_tokens: int,
                 alignment: int | None) -> int:
    """Tokens of `seq`'s next chunk: `budget` at most; 0 where it has to wait for the next step.

    `seen_images`: the step's distinct pictures so far, with their tokens; this chunk's are added.
    `alignment`: the next chunk has to begin at a multiple of it, which the first pictures of a step may not prevent.
    """
    left = seq.num_uncomputed_tokens
    are_first_images = not seen_images
    num = _cut_at_image_budget(seq, min(left, budget), seen_images, max_image_tokens)
    if alignment is None or num == left:
        return num
    least = min(left, alignment)
    return num // alignment * alignment or (least if are_first_images and least <= budget else 0)


def _cut_at_image_budget(seq: Sequence, num: int, seen: dict[bytes, int], max_image_tokens: int) -> int:
    """Shorten the chunk so that the step's distinct pictures stay within max_image_tokens (one always may)."""
    start = seq.num_computed_tokens
    for span in seq.prompt.spans:
        if span.start + span.num_tokens <= start:
            continue
        if span.start >= start + num:
            break
        content_hash = seq.prompt.images[span.image_index].content_hash
        if content_hash in seen:
            continue
        if seen and sum(seen.values()) + span.num_tokens > max_image_tokens:
            return max(0, span.start - start)
        seen[content_hash] = span.num_tokens
    return num
