"""Puts a prompt's images and videos in the place of their placeholders. Knows no chat template and no pixels.

A video's place takes its pairs of frames. In Qwen3-VL's form each stands behind the time it is shown at, the text of
transformers' processor; in GLM's it is an image, and its time stands behind it; in Qwen2-VL's pairs follow each other.
Positions are M-RoPE's, three for each token: the Qwen2-VL report, section 2.1 (arXiv 2409.12191), and for seconds the
Qwen2.5-VL report (arXiv 2502.13923).

T prompt tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import Tokenizer

from npu_runner.errors import ModelError, RequestError
from npu_runner.prompts.media.image_settings import ImageSettings
from npu_runner.prompts.media.images import open_image, prepare_image
from npu_runner.prompts.media.media import Media
from npu_runner.prompts.media.pages import OpenDocuments
from npu_runner.prompts.media.processor_kwargs import FIELD, IMAGE_BOUNDS, bounded, checked_kwargs, most_tokens
from npu_runner.prompts.media.transformers_images import TransformersImages
from npu_runner.prompts.media.video_settings import VideoForm, VideoSettings, read_video_settings
from npu_runner.prompts.media.videos import Video, VideoInput, no_videos, prepare_video
from npu_runner.prompts.text.messages import Seen
from npu_runner.prompts.text.tokenizer import TextLength
from npu_runner.request.limits import field_error
from npu_runner.request.prompt_inputs import ImageInput, ImageSpan, PromptInputs

_STEPS_PER_SECOND = 4
# Fields of config.json: what stands around everything that is seen, or around images and videos where they differ.
_AROUND_ALL = ("vision_start_token_id", "vision_end_token_id")
_AROUND_IMAGES = ("image_start_token_id", "image_end_token_id")
_AROUND_VIDEOS = ("video_start_token_id", "video_end_token_id")


@dataclass(frozen=True)
class Shown:
    """An image in a prompt, with the tokens that are written around it for its sake."""

    image: ImageInput
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    later: int | None = None  # as in ImageSpan
    token: int | None = None
    """The token of each of its places; None: its placeholder."""

    @property
    def num_tokens(self) -> int:
        return len(self.before) + self.image.num_tokens + len(self.after)


Known = dict[tuple[bool, int], list[Shown]]
"""Images and videos that are prepared: by whether it is a video, and the id of the object, which must live as long."""


@dataclass(frozen=True, kw_only=True)
class VideoPrompts:
    """`start_id`, `end_id`: the tokens around each pair that has a timestamp; `video_token`: id and text of a video's
    placeholder; `pair_token_id`: what stands for each token of a pair, None: the placeholder; `steps_per_second`:
    positions in time, where the form has them."""

    tokenizer: Tokenizer
    settings: VideoSettings
    video_token: tuple[int, str]
    start_id: int
    end_id: int
    form: VideoForm = VideoForm.TIMESTAMPS
    pair_token_id: int | None = None
    steps_per_second: float = 0.0

    def show(self, data: bytes, check_tokens: Callable[[int], None]) -> list[Shown]:
        """An encoded video. `check_tokens` hears of its tokens before they are decoded. Raises RequestError."""
        video: VideoInput = prepare_video(data, self.settings, check_tokens=check_tokens)
        if self.form.is_one_run:
            times = self._times(len(video.pairs), video.seconds_per_pair)
            return [Shown(pair, later=later) for pair, later in zip(video.pairs, [None, *times[1:]], strict=True)]
        return [self._with_time(pair, seconds) for pair, seconds in zip(video.pairs, video.timestamps, strict=True)]

    def without_outer(self, token_ids: list[int]) -> list[int]:
        """The prompt without the tokens around a video's placeholder, where each pair of frames brings its own: the
        processor of Qwen3-VL's release replaced all three tokens by the pairs, and transformers did so up to 5.9."""
        video, around = self.video_token[0], (self.start_id, self.end_id)
        if self.form is not VideoForm.TIMESTAMPS or video not in token_ids:
            return token_ids
        outer = {place + step for place in range(1, len(token_ids) - 1) for step in (-1, 1)
                 if token_ids[place] == video and (token_ids[place - 1], token_ids[place + 1]) == around}
        return [token for place, token in enumerate(token_ids) if place not in outer]

    def written_behind(self, token_ids: list[int], before: tuple[int, ...]) -> tuple[int, ...]:
        """`before`, the time of a pair, as the tokenizer writes it directly behind `token_ids`. Punctuation at their
        end may become one token with it, and is removed from them."""
        marks: list[int] = []
        while self.form is VideoForm.TIMESTAMPS and token_ids:
            piece = self.tokenizer.decode([token_ids[-1]], skip_special_tokens=False)
            is_text = any(c.isalnum() or c.isspace() or c == "\ufffd" for c in piece.removeprefix(" "))
            if is_text or not piece.strip(" "):
                break
            marks.insert(0, token_ids.pop())
            if piece.startswith(" "):
                break
        if not marks:
            return before
        return *self._written(self.tokenizer.decode([*marks, *before[:-1]], skip_special_tokens=False)), before[-1]

    def _with_time(self, pair: ImageInput, seconds: float) -> Shown:
        if self.form is VideoForm.TIMESTAMPS:
            return Shown(pair, (*self._written(f"<{seconds:.1f} seconds>"), self.start_id), (self.end_id,))
        behind = str(int(seconds)) if self.form is VideoForm.WHOLE_SECONDS_BEHIND else f"{seconds:.1f} seconds"
        return Shown(pair, (self.start_id,), (self.end_id, *self._written(behind)), token=self.pair_token_id)

    def _times(self, num_pairs: int, seconds_per_pair: float) -> list[int]:
        """Positions in time from the first pair on. In float32, as transformers counts them."""
        is_timed = self.form is VideoForm.SECONDS
        step = np.float32(seconds_per_pair) * np.float32(self.steps_per_second) if is_timed else np.float32(1)
        times: list[int] = (np.arange(num_pairs, dtype=np.float32) * step).astype(np.int64).tolist()
        return times

    def _written(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids


def read_video_prompts(folder: Path, config: Mapping[str, Any], tokenizer: Tokenizer, *, form: VideoForm,
                       fps: float | None, max_frames: int | None, num_frames: int | None = None,
                       min_pixels: int | None = None, max_pixels: int | None = None) -> VideoPrompts:
    """The video prompts of a checkpoint whose family accepts videos. Raises ModelError if its files lack settings."""
    start, end = _AROUND_IMAGES if form.is_of_images else _AROUND_ALL
    tokens: dict[str, tuple[int, str]] = {}
    for name in ("video_token_id", start, end):
        token = config_token(config, name, tokenizer)
        if token is None:
            raise ModelError(f"config.json's {name} {config.get(name)!r} is no token of tokenizer.json")
        tokens[name] = token
    return VideoPrompts(
        tokenizer=tokenizer,
        settings=read_video_settings(folder, config, form=form, fps=fps, max_frames=max_frames,
                                     num_frames=num_frames, min_pixels=min_pixels, max_pixels=max_pixels),
        video_token=tokens["video_token_id"], start_id=tokens[start][0], end_id=tokens[end][0], form=form,
        pair_token_id=read_image_token(config, tokenizer)[0] if form.is_of_images else None,
        steps_per_second=float(config["vision_config"].get("tokens_per_second", _STEPS_PER_SECOND)))


@dataclass(frozen=True)
class RequestedMedia:
    """The settings of one request's images and videos; None where the model accepts none."""

    images: ImageSettings | None
    videos: VideoPrompts | None
    bounds: Mapping[str, int] = field(default_factory=dict)
    """The request's min_pixels and max_pixels, which also apply to shown videos."""
    num_images: int = 1
    """Images of the prompt."""


class VisionPrompts:
    """Token ids, images and videos to what the engine takes, for one checkpoint.

    `image_token`: id and text of the placeholder, `settings`: None where the model reads text only, or where
    `by_transformers` prepares its images. `videos`: None where it sees none, which `no_videos` gives the reason for.
    """

    def __init__(self, *, image_token: tuple[int, str] | None, video_token_id: int | None,
                 settings: ImageSettings | None, videos: VideoPrompts | None, no_videos: str, text_length: TextLength,
                 max_source_pixels: int, uses_mrope: bool, by_transformers: TransformersImages | None = None):
        self.image_token_id: int | None = image_token[0] if image_token else None
        self.image_token: str | None = image_token[1] if image_token else None
        self.video_token_id = video_token_id
        self.settings = settings
        self.videos = videos
        self._no_videos = no_videos
        self._text_length = text_length
        self._max_source_pixels = max_source_pixels
        self._uses_mrope = uses_mrope
        self._by_transformers = by_transformers
        self.documents = OpenDocuments()
        self._by_default = RequestedMedia(settings, videos)

    @property
    def why_no_videos(self) -> str | None:
        """None: there are videos."""
        return self._no_videos if self.videos is None else None

    def in_order(self, token_ids: list[int], seen: Sequence[tuple[Seen, str]]) -> list[tuple[Seen, str]]:
        """(image or video, its field), in the order of their placeholders.

        Raises RequestError where placeholders are not as many, and for a video where the model sees none.
        """
        images = [located for located in seen if not isinstance(located[0], Video)]
        videos = [located for located in seen if isinstance(located[0], Video)]
        if videos and self.videos is None:
            raise no_videos(self._no_videos, videos[0][1])
        if self.videos is None and self.video_token_id is not None and self.video_token_id in token_ids:
            raise RequestError("the prompt has a video placeholder; videos are not supported", "unsupported_part")
        _check_count(token_ids, self.image_token_id, self.image_token, "image", len(images))
        if self.videos is not None:
            _check_count(token_ids, *self.videos.video_token, "video", len(videos))
        waiting = {self.image_token_id: iter(images), self.video_token_id: iter(videos)}
        return [next(waiting[token]) for token in token_ids if token in waiting] if seen else []

    def requested(self, kwargs: Mapping[str, Any] | None) -> RequestedMedia:
        """The settings of a request with these `mm_processor_kwargs`. Raises RequestError."""
        if not kwargs:
            return self._by_default
        name = FIELD
        is_map = isinstance(kwargs, Mapping)
        if self.videos is None and is_map and any(key not in IMAGE_BOUNDS for key in kwargs if kwargs[key] is not None):
            raise field_error(name, f"it is about videos, and this model takes none: {self._no_videos}; leave it out",
                              "model_has_no_video")
        given = checked_kwargs(kwargs)
        if self._by_transformers is not None:
            return RequestedMedia(None, None, self._by_transformers.bounded(given))
        if self.settings is None and given:
            raise field_error(name, "this model reads text only; leave it out", "model_has_no_vision")
        of_videos = {key: value for key, value in given.items() if key not in IMAGE_BOUNDS}
        images = None if self.settings is None else bounded(self.settings, given)
        videos = self.videos
        if videos is not None and of_videos:
            videos = replace(videos, settings=videos.settings.with_kwargs(of_videos))
        return RequestedMedia(images, videos, {key: value for key, value in given.items() if key in IMAGE_BOUNDS})

    def prompt(self, token_ids: list[int], seen: Sequence[tuple[Seen, str]], most_tokens: int | None,
               requested: RequestedMedia, known: Known | None = None, *, text: str | None = None) -> PromptInputs:
        """`seen`: as `in_order` gives them, `requested`: as `requested` does. `most_tokens`: keep the last; None: all.
        `known`: what other prompts of the same objects have prepared of them; it grows."""
        if most_tokens is not None and not seen:
            token_ids = token_ids[-most_tokens:]
        if not seen and not self._uses_mrope:
            self._text_length.check_tokens(len(token_ids))
            return PromptInputs(token_ids, text=text)
        if self.videos is not None and seen:
            token_ids = self.videos.without_outer(token_ids)
        known = {} if known is None else known
        requested = replace(self._with_bounded_frames(requested, [item for item, _ in seen]), num_images=len(seen))
        prompt = self._assemble(token_ids, self._prepare(seen, len(token_ids), requested, known))
        if most_tokens is not None and len(prompt.token_ids) > most_tokens:
            raise not_cut(len(prompt.token_ids), most_tokens, "has images, and half of one is none")
        return replace(prompt, text=text)

    def _with_bounded_frames(self, requested: RequestedMedia, seen: Sequence[Seen]) -> RequestedMedia:
        """`requested`, with its bounds of pixels for videos, too, where the family has them for each frame. Raises
        RequestError where they would bound nothing."""
        num_videos = sum(isinstance(item, Video) for item in seen)
        if not requested.bounds or not num_videos:
            return requested
        assert requested.videos is not None, "videos were refused before"
        assert self.settings is not None, "videos come with settings of images"
        settings = requested.videos.settings
        if not settings.bounds_each_frame:
            if num_videos < len(seen):
                return requested
            where = f"{FIELD}.{next(iter(requested.bounds))}"
            raise field_error(where, "it bounds images, and this prompt shows videos alone, whose pixels `size` in the "
                              "checkpoint's file bounds; leave it out", "unsupported_field")
        loaded = max(self.settings, settings.frame, key=most_tokens)
        frame = bounded(settings.frame, requested.bounds, loaded)
        return replace(requested, videos=replace(requested.videos, settings=replace(settings, frame=frame)))

    def _prepare(self, seen: Sequence[tuple[Seen, str]], num_text_tokens: int, requested: RequestedMedia,
                 known: Known) -> list[list[Shown]]:
        """Prepare each different one once. A prompt that gets too long is refused before the rest is prepared."""
        num_tokens = num_text_tokens
        self._text_length.check_tokens(num_tokens)
        keys = [(isinstance(item, Video), id(item.source if isinstance(item, Video) else item)) for item, _ in seen]
        for key, (item, where) in zip(keys, seen, strict=True):
            if key not in known:
                known[key] = self._show(item, where, num_tokens - 1, requested)
            num_tokens += sum(shown.num_tokens for shown in known[key]) - 1
            self._text_length.check_tokens(num_tokens)
        return [known[key] for key in keys]

    def _show(self, item: Seen, where: str, num_tokens_before: int, requested: RequestedMedia) -> list[Shown]:
        source = item.source if isinstance(item, Video) else item
        is_low = isinstance(source, Media) and source.detail == "low"
        name, page = "", None
        if isinstance(source, Media):
            where, name = source.where, source.name
            source, page = (source.load(), None) if isinstance(item, Video) else self.documents.load_image(
                source, self._max_source_pixels)
        try:
            if not isinstance(item, Video):
                image = self._prepare_image(source, requested, is_low=is_low)
                return [Shown(image if page is None else replace(image, page=page))]
            assert requested.videos is not None, "videos were refused before"
            assert isinstance(source, bytes), "a video is encoded bytes"
            return requested.videos.show(source, lambda num: self._text_length.check_tokens(num_tokens_before + num))
        except RequestError as error:
            raise field_error(where, f"{name}{error.message}", error.code) from error

    def _prepare_image(self, image: bytes | Image.Image, requested: RequestedMedia, *, is_low: bool) -> ImageInput:
        settings = requested.images
        if self._by_transformers is not None:
            opened = open_image(image, max_source_pixels=self._max_source_pixels)
            return self._by_transformers.prepare(opened, max_pixels=requested.bounds.get("max_pixels"), is_low=is_low,
                                                 num_images=requested.num_images)
        assert settings is not None, "a prompt for a model that reads text only has no images"
        return prepare_image(image, settings, max_source_pixels=self._max_source_pixels, is_low=is_low)

    def _assemble(self, token_ids: list[int], seen: list[list[Shown]]) -> PromptInputs:
        placeholders = (self.image_token_id, self.video_token_id)
        written = None if self.videos is None else self.videos.written_behind
        token_ids, images, spans = _expand_placeholders(token_ids, placeholders, seen, written)
        if not self._uses_mrope:
            return PromptInputs(token_ids, images, spans)
        settings = self.settings or self._by_transformers
        merge_size = settings.merge_size if settings else 1
        grids = [image.grid_thw for image in images]
        positions_3T, delta = mrope_positions(len(token_ids), spans, grids, merge_size)
        if delta > 0:  # the tables of rotary embeddings end at the longest prompt
            raise RequestError(f"the prompt's videos reach position {len(token_ids) + delta}, behind its "
                               f"{len(token_ids)} tokens; show more frames of each second "
                               "(mm_processor_kwargs.fps)", "video_positions")
        return PromptInputs(token_ids, images, spans, positions_3T, delta)


def not_cut(num_tokens: int, most: int, why: str) -> RequestError:
    """The error of a prompt that should have been truncated to `most` tokens."""
    name = "truncate_prompt_tokens"
    return field_error(name, f"the prompt has {num_tokens} tokens, {most} are to be kept, but it {why}; shorten it",
                       "prompt_not_truncated")


def config_token(config: Mapping[str, Any], name: str, tokenizer: Tokenizer) -> tuple[int, str] | None:
    """Id and text of the token that the field `name` of config.json names; None: there is none."""
    token_id = config.get(name)
    token = tokenizer.id_to_token(token_id) if isinstance(token_id, int) and token_id >= 0 else None
    return None if token is None else (token_id, token)  # type: ignore[return-value]


def read_image_token(config: Mapping[str, Any], tokenizer: Tokenizer) -> tuple[int, str]:
    """Id and text of the placeholder of images. Raises ModelError where there is none."""
    token = config_token(config, "image_token_id", tokenizer)
    if token is None:
        raise ModelError(f"config.json has a vision_config but image_token_id {config.get('image_token_id')!r} is not "
                         "a token of tokenizer.json; the files belong to different checkpoints")
    return token


def read_vision_tokens(config: Mapping[str, Any], tokenizer: Tokenizer) -> list[str]:
    """The texts of all tokens around and in the place of images and videos."""
    names = ("image_token_id", "video_token_id", *_AROUND_ALL, *_AROUND_IMAGES, *_AROUND_VIDEOS)
    return [token[1] for name in names if (token := config_token(config, name, tokenizer)) is not None]


def _check_count(token_ids: list[int], token_id: int | None, token: str | None, kind: str, num_given: int) -> None:
    num_placeholders = token_ids.count(token_id) if token_id is not None else 0
    if num_placeholders != num_given:
        raise RequestError(
            f"the prompt has {num_placeholders} {kind} placeholders ({token}) for {num_given} {kind}s; "
            f"give one for each",
            code=f"{kind}_count_mismatch")


def _expand_placeholders(token_ids: list[int], placeholders: Sequence[int | None], seen: list[list[Shown]],
                         written: Callable[[list[int], tuple[int, ...]], tuple[int, ...]] | None,
                         ) -> tuple[list[int], list[ImageInput], list[ImageSpan]]:
    """Replace each placeholder by the tokens of its image: those of the image itself, or the placeholder's once per
    token, with the tokens around it. `written`: VideoPrompts.written_behind."""
    if not seen:
        return token_ids, [], []
    expanded: list[int] = []
    images: list[ImageInput] = []
    spans: list[ImageSpan] = []
    waiting = iter(seen)
    for token in token_ids:
        if token not in placeholders:
            expanded.append(token)
            continue
        for shown in next(waiting):
            expanded.extend(written(expanded, shown.before) if shown.before and written else shown.before)
            spans.append(ImageSpan(len(expanded), shown.image.num_tokens, len(images), shown.later))
            images.append(shown.image)
            if shown.image.token_ids is not None:
                expanded.extend(shown.image.token_ids.tolist())
            else:
                expanded.extend([token if shown.token is None else shown.token] * shown.image.num_tokens)
            expanded.extend(shown.after)
    return expanded, images, spans


def asks_for_mrope(config: Mapping[str, Any]) -> bool:
    """Whether a checkpoint's config.json names an `mrope_section`; families that have a default know it themselves."""
    text_config = config.get("text_config") or config
    rope = text_config.get("rope_scaling") or text_config.get("rope_parameters")
    return isinstance(rope, Mapping) and "mrope_section" in rope


def mrope_positions(num_tokens: int, spans: Sequence[ImageSpan], grids_thw: Sequence[tuple[int, int, int]],
                    merge_size: int) -> tuple[np.ndarray, int]:
    """Positions int32 (3, T) and the delta: token i after the prompt has position i + delta in all three rows.

    Text counts up in all rows. An image's tokens share one time. Its rows and columns count from that number. Pairs of
    frames that go on with a video have its first pair's rows and columns, and a later time. The text after it continues
    past the largest position: the models were trained so, although transformers 5.23 continues past the longer side
    alone. `spans` are in prompt order; grids by image_index.
    """
    positions_3T = np.empty((3, num_tokens), dtype=np.int32)
    next_position, token, first = 0, 0, 0
    for span in spans:
        num_text = span.start - token
        positions_3T[:, token : span.start] = np.arange(next_position, next_position + num_text)
        if span.later is None:
            first = next_position + num_text
        _, grid_height, grid_width = grids_thw[span.image_index]
        height, width = grid_height // merge_size, grid_width // merge_size
        assert height * width == span.num_tokens, f"{span.num_tokens} tokens for {height}x{width} merged patches"
        token = span.start + span.num_tokens
        positions_3T[0, span.start : token] = first + (span.later or 0)
        positions_3T[1, span.start : token] = first + np.repeat(np.arange(height), width)
        positions_3T[2, span.start : token] = first + np.tile(np.arange(width), height)
        next_position = first + max(height, width, 1 + (span.later or 0))
    positions_3T[:, token:] = np.arange(next_position, next_position + num_tokens - token)
    next_position += num_tokens - token
    return positions_3T, next_position - num_tokens
