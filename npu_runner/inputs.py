"""The names that vLLM's scripts import from `vllm.inputs`: the forms of a raw prompt that `LLM.generate` accepts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict


class _Media(TypedDict, total=False):
    multi_modal_data: Mapping[str, Any]
    """"image" and "video": one or several, in the order of their placeholders."""
    mm_processor_kwargs: Mapping[str, Any]


class TextPrompt(_Media):
    """A prompt as text."""

    prompt: str


class TokensPrompt(_Media):
    """A prompt as token ids."""

    prompt_token_ids: Sequence[int]


__all__ = ["TextPrompt", "TokensPrompt"]
