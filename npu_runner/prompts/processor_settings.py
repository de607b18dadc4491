"""What decides how prompts are prepared, beside the checkpoint's own files. Knows nothing of those."""

from __future__ import annotations

from dataclasses import dataclass

from npu_runner.checkpoint.model_config import PoolingConfig
from npu_runner.config import PromptConfig


@dataclass(frozen=True, kw_only=True)
class ProcessorSettings(PromptConfig):
    """The user's settings of prompts, and what the family and the rest of the settings add."""

    takes_videos: bool = False
    """The family takes videos."""
    max_model_len: int | None = None
    """A prompt that cannot be shorter is refused before it is tokenized. None: the checkpoint's."""
    uses_mrope: bool | None = None
    """None: as the checkpoint's config says."""
    pooling: PoolingConfig | None = None
    """Prompts are for vectors, made so."""

    def of_videos(self) -> dict[str, float | int | None]:
        return {"video_fps": self.video_fps, "video_max_frames": self.video_max_frames}
