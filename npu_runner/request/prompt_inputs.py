"""A prompt that is ready for the engine. Crosses process borders; knows nothing of torch or models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

# H, W pixels of the resized image; T prompt tokens

Thinking = Literal["open", "closed", "unsaid"]
"""The end of a prompt: inside the reasoning, behind it, or without any tag."""


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


@dataclass(frozen=True, kw_only=True)
class PageFacts:
    """The facts of an image that shows a page, or a part of one. `width`, `height`: pixels before the model's own
    resizing."""

    is_blank: bool
    """All its pixels are of nearly one colour."""
    width: int
    height: int
    has_text: bool | None
    """The page has a text layer; None: its file's kind has none."""
    renderer: Mapping[str, str] | None = field(default=None, compare=False)
    """PDFium's version and a digest of the fonts, where it is of a PDF. Another renderer may give other pixels."""

    def to_json(self) -> dict[str, bool | int | None]:
        """As a line of the output names them."""
        return {"blank": self.is_blank, "width": self.width, "height": self.height, "text_layer": self.has_text}


@dataclass(frozen=True)
class PixelScaling:
    """The way from pixels that travel as uint8 to the floats of a tower: (pixel * factor - mean) / std, in float32.

    `names`: the arrays of `ImageInput.tower_inputs` that travel so. `mean` and `std` have one number for all pixels, or
    one for each channel: of arrays (..., C, H, W), or of rows of patches (P, C * ...).
    """

    names: tuple[str, ...]
    factor: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def constants(self, shape: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Mean and std, float32, as arrays that broadcast to an array of this shape."""
        return self._broadcast(self.mean, shape), self._broadcast(self.std, shape)

    @staticmethod
    def _broadcast(values: tuple[float, ...], shape: Sequence[int]) -> np.ndarray:
        numbers = np.array(values, dtype=np.float32)
        if len(values) == 1:
            return numbers
        return numbers.reshape(-1, 1, 1) if len(shape) > 2 else numbers.repeat(shape[-1] // len(values))


@dataclass(frozen=True)
class ImageInput:
    """One image, decoded and resized, still in bytes: the device rescales and normalises it.

    `pixels_HWC`: uint8 (H, W, 3), H and W multiples of patch_size * merge_size. Frames of a video that go through the
    tower together are an image, too, with the colours of each behind those of the one before: (H, W, 6) for two.
    `content_hash`: 16 bytes over pixels, size and processor settings; equal hash means equal embeddings.

    An image that transformers' processor has prepared has `tower_inputs` and `token_ids` instead. Its `pixels_HWC` are
    empty, and its hash is over these two.
    """

    content_hash: bytes
    pixels_HWC: np.ndarray
    grid_thw: tuple[int, int, int]
    """Patches in time (1), height and width, before merging."""
    num_tokens: int
    page: PageFacts | None = None
    """None: it is no page of a document."""
    tower_inputs: Mapping[str, np.ndarray] = field(default_factory=dict)
    """The arrays that transformers' processor makes of this image alone, by name."""
    token_ids: np.ndarray | None = None
    """int32 (num_tokens,): all tokens that replace the placeholder, also those that separate rows of image tokens.
    None: the placeholder's token, repeated."""
    scaling: PixelScaling | None = None
    """None: floats travel as floats."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its arrays."""
        return self.pixels_HWC.nbytes + sum(array.nbytes for array in self.tower_inputs.values())

    @property
    def num_tower_values(self) -> int:
        """Numbers that transformers' processor makes of it for the tower; 0 for an image that is prepared here."""
        return sum(array.size for array in self.tower_inputs.values())


@dataclass(frozen=True)
class ImageSpan:
    """Where image number `image_index` of the prompt lies: tokens [start, start + num_tokens)."""

    start: int
    num_tokens: int
    image_index: int
    later: int | None = None
    """Positions in time between the start of a video and this pair of frames, which goes on with the positions of the
    pair before it. None: it has positions of its own."""


@dataclass(frozen=True)
class PromptInputs:
    """A tokenized prompt with its images.

    `positions_3T`: int32 (3, T) temporal, height and width positions of M-RoPE models; None: 0..T-1.
    `position_delta`: position of token i after the prompt is i + position_delta.
    `thinking`: where it leaves a model that thinks; None: the answer is not split into reasoning and content.
    `text`: the source of the token ids, an image or a video as one placeholder; None: ids were given, or it is unused.
    """

    token_ids: list[int]
    images: Sequence[ImageInput] = ()
    spans: Sequence[ImageSpan] = ()
    positions_3T: np.ndarray | None = None
    position_delta: int = 0
    thinking: Thinking | None = None
    text: str | None = None
    _token_array: np.ndarray | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def token_array(self) -> np.ndarray:
        """`token_ids` as int32 (T,), made when a scheduler first reads it."""
        if self._token_array is None:  # a cached_property would make a dict for each prompt
            object.__setattr__(self, "_token_array", np.array(self.token_ids, dtype=np.int32))
        return self._token_array  # type: ignore[return-value]

    @property
    def pages(self) -> list[PageFacts]:
        """The pages that it shows, in its order."""
        return [page for span in self.spans if (page := self.images[span.image_index].page) is not None]

    def without_text(self) -> PromptInputs:
        return self if self.text is None else replace(self, text=None)

    def without_trailing(self, token_id: int) -> PromptInputs:
        """The prompt without `token_id` at its end; one token always stays."""
        length = len(self.token_ids)
        while length > 1 and self.token_ids[length - 1] == token_id:
            length -= 1
        if length == len(self.token_ids):
            return self
        positions = None if self.positions_3T is None else self.positions_3T[:, :length]
        return replace(self, token_ids=self.token_ids[:length], positions_3T=positions)
