"""What stands in a prompt in the place of a video: its pairs of frames, each behind the time it is shown at.

The text is that of transformers' Qwen3-VL processor, put in the place of the video's one placeholder. Knows no pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from npu_runner.errors import ModelError
from npu_runner.prompts.media.video_settings import VideoSettings, read_video_settings
from npu_runner.prompts.media.videos import VideoInput, prepare_video
from npu_runner.request.prompt_inputs import ImageInput


@dataclass(frozen=True)
class Shown:
    """An image in a prompt, with the tokens that are written around it for its sake."""

    image: ImageInput
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.before) + self.image.num_tokens + len(self.after)


@dataclass(frozen=True, kw_only=True)
class VideoPrompts:
    """`start_id`, `end_id`: the tokens around each pair; `video_token`: id and text of a video's placeholder."""

    tokenizer: Tokenizer
    settings: VideoSettings
    video_token: tuple[int, str]
    start_id: int
    end_id: int

    def show(self, data: bytes, check_tokens: Callable[[int], None]) -> list[Shown]:
        """An encoded video. `check_tokens` hears of its tokens before they are decoded. Raises RequestError."""
        video: VideoInput = prepare_video(data, self.settings, check_tokens=check_tokens)
        return [
            Shown(pair, (*self._written(f"<{seconds:.1f} seconds>"), self.start_id), (self.end_id,))
            for pair, seconds in zip(video.pairs, video.timestamps, strict=True)
        ]

    def _written(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids


def read_video_prompts(
    folder: Path, config: Mapping[str, Any], tokenizer: Tokenizer, *, fps: float | None, max_frames: int | None
) -> VideoPrompts:
    """Of a checkpoint whose family sees videos. Raises ModelError where its files do not say how."""
    tokens: dict[str, tuple[int, str]] = {}
    for name in ("video_token_id", "vision_start_token_id", "vision_end_token_id"):
        token_id = config.get(name)
        token = tokenizer.id_to_token(token_id) if isinstance(token_id, int) and token_id >= 0 else None
        if token is None:
            raise ModelError(f"config.json's {name} {token_id!r} is no token of tokenizer.json")
        tokens[name] = token_id, token  # type: ignore[assignment]
    return VideoPrompts(
        tokenizer=tokenizer, settings=read_video_settings(folder, config, fps=fps, max_frames=max_frames),
        video_token=tokens["video_token_id"], start_id=tokens["vision_start_token_id"][0],
        end_id=tokens["vision_end_token_id"][0],
    )  # fmt: skip
