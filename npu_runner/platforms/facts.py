"""The abilities of a platform's backends, read before one exists and on hosts without its device. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class AttentionFacts:
    """The abilities of an attention backend."""

    block_sizes: tuple[int, ...] | None = None
    """The sizes of KV blocks that it reads; None: any."""
    vision_head_dims: tuple[int, ...] | None = None
    """The head dims that it computes for vision towers, in ascending order; None: any."""
    fp8_prompt_room: int | None = None
    """None means that keys and values stay in the model's dtype; else it can keep them in e4m3. A prefill then has room
    in 16 bits for this multiple of the largest prefill's tokens."""
    longest_context: int | None = None
    """The most tokens of a sequence that it reads; None: any number."""
    most_elements: int | None = None
    """The most elements of a layer's keys that it addresses; None: any number."""
    records_prefills: bool = False
    """Its prefills are recorded in graphs, in every graph mode but eager (`graph_tiles`)."""


@dataclass(frozen=True, kw_only=True)
class StateFacts:
    """The abilities of a platform's Gated DeltaNet backend."""

    most_drafts: int | None = 0
    """The most drafts of a row that it verifies; None: any number."""
    drafts_in_graphs: bool = False
    """Decode graphs take steps with drafts."""
    ring_length: int = 0
    """Steps without drafts between two writes of a state. The backend is then a RingedGatedDelta, and drafts go into
    rings, too. 0: every step writes the state."""
