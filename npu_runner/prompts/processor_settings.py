"""What may be said about how prompts are prepared, beside the checkpoint's own files. Knows nothing of either."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from npu_runner.checkpoint.model_config import PoolingConfig
from npu_runner.request.limits import LIMITS


@dataclass(frozen=True)
class ProcessorSettings:
    """None: as the checkpoint says."""

    image_min_pixels: int | None = None
    """Of a picture once it is resized, as is the next; `max_source_pixels` is the file's."""
    image_max_pixels: int | None = None
    max_source_pixels: int = LIMITS.max_source_pixels
    max_images_per_prompt: int = LIMITS.max_images_per_prompt
    takes_videos: bool = False
    """The family sees films; the next two say how many frames of them."""
    video_fps: float | None = None
    video_max_frames: int | None = None
    max_model_len: int | None = None
    """A prompt that cannot be shorter is refused before it is tokenized."""
    max_logprobs: int = LIMITS.max_logprobs_per_request
    uses_mrope: bool | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    """For conversations that do not set the same name themselves."""
    reasoning_parser: str = "auto"
    tool_call_parser: str = "auto"
    pooling: PoolingConfig | None = None
    """Prompts are for vectors, made so."""

    def of_films(self) -> dict[str, float | int | None]:
        return {"video_fps": self.video_fps, "video_max_frames": self.video_max_frames}
