"""Which blocks of a sequence a sliding window still needs. Knows token counts and block sizes, no blocks' contents.

With a window of w tokens, the token at place p sees the places p - w + 1 to p. Where every layer slides, a block that
lies whole before the window of the next token is never read again: its entry in the block table becomes the null block.
"""

from __future__ import annotations

from npu_runner.core.sequence import Sequence


def first_needed_block(num_computed_tokens: int, window: int | None, block_size: int) -> int:
    """Index of the first block that the next token, or any after it, sees."""
    return 0 if window is None else max(0, num_computed_tokens - window + 1) // block_size


def most_blocks(max_model_len: int, window: int | None, max_chunk: int, block_size: int) -> int:
    """Blocks that one sequence holds at most, while a step computes `max_chunk` tokens of it."""
    whole = -(-max_model_len // block_size)
    if window is None:
        return whole
    # What the chunk's first token sees before it, and the chunk; the first block may begin just before the window.
    return min(whole, -(-(window - 1 + max_chunk) // block_size) + 1)


def take_those_behind(seq: Sequence, window: int, block_size: int) -> list[int]:
    """Take the blocks that no token will see again out of `seq`'s table, which keeps null entries; returns them."""
    start = seq.num_null_blocks
    end = min(first_needed_block(seq.num_computed_tokens, window, block_size), len(seq.block_table))
    if end <= start:
        return []
    behind = seq.block_table[start:end]
    seq.block_table[start:end] = [0] * len(behind)
    seq.num_null_blocks = end
    return behind


def longest_usable(blocks: list[int], window: int, block_size: int) -> list[int]:
    """The longest prefix of `blocks`, 0 for one that is not there, which has all that the token behind it sees.

    Before that stands the null block, which is not read.
    """
    num_usable = num_in_a_row = 0
    for count, block in enumerate(blocks, 1):
        num_in_a_row = num_in_a_row + 1 if block else 0
        if num_in_a_row >= count - first_needed_block(count * block_size, window, block_size):
            num_usable = count
    first = first_needed_block(num_usable * block_size, window, block_size)
    return [0] * first + blocks[first:num_usable]
