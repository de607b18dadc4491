"""The image that takes most memory, by a checkpoint's settings. Knows no tower and no device."""

from __future__ import annotations

import numpy as np

from npu_runner.prompts.media.image_settings import ImageSettings
from npu_runner.prompts.media.images import image_input
from npu_runner.prompts.media.video_settings import VideoSettings
from npu_runner.request.prompt_inputs import ImageInput


def largest_image(images: ImageSettings, videos: VideoSettings | None, max_tokens: int) -> ImageInput:
    """A grey image with the most tokens, up to `max_tokens`, that any image or pair of frames can get. With `videos` it
    has a pair's colour channels."""
    sizes, num_frames = [images.largest_size(max_tokens)], 1
    if videos is not None:
        sizes.append(videos.largest_frame(max_tokens))
        num_frames = images.temporal_patch_size
    height, width = max(sizes, key=lambda size: size[0] * size[1])
    return image_input(np.full((height, width, 3 * num_frames), 127, dtype=np.uint8), images)
