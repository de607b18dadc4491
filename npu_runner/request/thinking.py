"""Whether an answer is split into reasoning and content, and at which tokens. Plain data; knows no tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Thinking = Literal["open", "closed", "unsaid"]
"""Where a prompt ends: inside the reasoning, behind it, or saying nothing of it."""


@dataclass(frozen=True, kw_only=True)
class ReasoningTokens:
    """The two tokens around the reasoning."""

    start: str
    end: str
    start_id: int
    end_id: int

    def to_json(self) -> dict[str, str | int]:
        """As a manifest names them."""
        return {"start": self.start, "end": self.end, "start_id": self.start_id, "end_id": self.end_id}
