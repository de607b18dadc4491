"""What a ChatProcessor is told beside its checkpoint's files. Knows no file and no prompt."""

from __future__ import annotations

from dataclasses import dataclass

from npu_runner.checkpoint.model_config import PoolingConfig
from npu_runner.config import PromptConfig
from npu_runner.prompts.media.image_settings import QWEN2_VL_IMAGES, ImageSettings
from npu_runner.prompts.media.video_settings import VideoForm


@dataclass(frozen=True, kw_only=True)
class ProcessorSettings(PromptConfig):
    """The user's settings of prompts, and what the family and the rest of the settings add."""

    takes_videos: bool = False
    """The family takes videos, ..."""
    video_form: VideoForm = VideoForm.TIMESTAMPS
    """... in this form; ..."""
    no_videos: str = "its family has none here"
    """... or the reason why it does not."""
    image_defaults: ImageSettings = QWEN2_VL_IMAGES
    """What the family's images have that the checkpoint's file does not say."""
    max_model_len: int | None = None
    """A prompt that cannot be shorter is refused before it is tokenized. None: the checkpoint's."""
    uses_mrope: bool | None = None
    """None: as the checkpoint's config says."""
    pooling: PoolingConfig | None = None
    """What is made of prompts; None: text."""

    def of_videos(self) -> dict[str, float | int | None]:
        return {"video_fps": self.video_fps, "video_max_frames": self.video_max_frames,
                "video_num_frames": self.video_num_frames}
