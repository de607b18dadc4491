"""What the layers' sliding windows mean for the KV cache: whether blocks are freed behind them, and the ledger's line.

Knows windows and blocks, no models or bytes.
"""

from __future__ import annotations

from collections.abc import Sequence


def cache_window(windows: Sequence[int | None]) -> int | None:
    """The most tokens that any layer sees; None where one sees all (or none has a cache)."""
    sliding = [window for window in windows if window is not None]
    return max(sliding) if sliding and len(sliding) == len(windows) else None


def about_windows(windows: Sequence[int | None], *, frees_blocks: bool, blocks_per_sequence: int) -> str:
    """A line for the ledger; nothing where no layer slides."""
    sliding = [window for window in windows if window is not None]
    if not sliding:
        return ""
    lengths = " and ".join(str(length) for length in sorted(set(sliding)))
    if frees_blocks:
        return (f"\n  sliding window of {lengths} tokens in every layer: blocks behind it are freed, a sequence "
                f"holds at most {blocks_per_sequence}")
    reason = "other layers see all" if len(sliding) < len(windows) else "the prefix cache goes by states"
    return (f"\n  sliding window of {lengths} tokens in {len(sliding)} of {len(windows)} layers: masked only, no block "
            f"is freed behind it, since {reason}")
