"""GLM-4.6V-Flash: GLM-4.1V's network under another name; its videos are sampled and timed otherwise."""

from __future__ import annotations

from typing import ClassVar

from npu_runner.prompts.media.video_settings import VideoForm
from npu_runner.strategies.glm4v import Glm4vStrategy


class Glm46vStrategy(Glm4vStrategy):
    model_types: ClassVar[tuple[str, ...]] = ("glm46v",)
    video_form = VideoForm.SECONDS_BEHIND
