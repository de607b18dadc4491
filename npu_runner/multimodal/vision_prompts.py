"""Puts a prompt's pictures in the place of their placeholders. Knows no chat template and no text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image
from tokenizers import Tokenizer

from npu_runner.errors import ModelError, RequestError
from npu_runner.multimodal.image_settings import ImageSettings
from npu_runner.multimodal.images import prepare_image
from npu_runner.multimodal.inputs import ImageInput, ImageSpan, PromptInputs
from npu_runner.multimodal.media import Media
from npu_runner.multimodal.mrope import mrope_positions
from npu_runner.multimodal.text_length import TextLength

Picture = bytes | Image.Image | Media


class VisionPrompts:
    """Token ids and pictures to what the engine takes, for one checkpoint.

    `image_token`: id and text of the placeholder, `settings`: None where the model reads text only.
    """

    def __init__(
        self, *, image_token: tuple[int, str] | None, video_token_id: int | None, settings: ImageSettings | None,
        text_length: TextLength, max_source_pixels: int, uses_mrope: bool,
    ):  # fmt: skip
        self.image_token_id, self.image_token = image_token or (None, None)
        self.video_token_id = video_token_id
        self.settings = settings
        self._text_length = text_length
        self._max_source_pixels = max_source_pixels
        self._uses_mrope = uses_mrope

    def check_placeholders(self, token_ids: list[int], num_images: int) -> None:
        """Raises RequestError where they are not as many as the pictures."""
        if self.video_token_id in token_ids:
            raise RequestError("the prompt has a video placeholder; videos are not supported", "unsupported_part")
        num_placeholders = token_ids.count(self.image_token_id) if self.image_token_id is not None else 0
        if num_placeholders != num_images:
            raise RequestError(
                f"the prompt has {num_placeholders} image placeholders ({self.image_token}) for {num_images} images; "
                f"give one for each",
                code="image_count_mismatch",
            )

    def prompt(
        self, token_ids: list[int], images: Sequence[tuple[Picture, str]], most_tokens: int | None
    ) -> PromptInputs:
        """`images`: in the order of their placeholders, each with where it stood. `most_tokens`: keep the last so
        many; None: all."""
        if most_tokens is not None and not images:
            token_ids = token_ids[-most_tokens:]
        prompt = self._assemble(token_ids, self._prepare_images(images, len(token_ids)))
        if most_tokens is not None and len(prompt.token_ids) > most_tokens:
            raise not_cut(len(prompt.token_ids), most_tokens, "has pictures, and half of one is none")
        return prompt

    def _prepare_images(self, images: Sequence[tuple[Picture, str]], num_text_tokens: int) -> list[ImageInput]:
        """One after the other, each different one once; as soon as they make the prompt too long the rest is left."""
        known: dict[int, ImageInput] = {}
        num_tokens = num_text_tokens
        self._text_length.check_tokens(num_tokens)
        for image, where in images:
            if id(image) not in known:
                known[id(image)] = self._prepare_image(image, where)
            num_tokens += known[id(image)].num_tokens - 1
            self._text_length.check_tokens(num_tokens)
        return [known[id(image)] for image, _ in images]

    def _prepare_image(self, image: Picture, where: str) -> ImageInput:
        assert self.settings is not None, "a prompt for a model that reads text only has no pictures"
        is_low = isinstance(image, Media) and image.detail == "low"
        if isinstance(image, Media):
            where, image = image.where, image.load()
        try:
            return prepare_image(image, self.settings, max_source_pixels=self._max_source_pixels, is_low=is_low)
        except RequestError as error:
            raise RequestError(f"{where}: {error.message}", error.code, where) from error

    def _assemble(self, token_ids: list[int], images: list[ImageInput]) -> PromptInputs:
        token_ids, spans = _expand_placeholders(token_ids, self.image_token_id, images)
        if not self._uses_mrope:
            return PromptInputs(token_ids, images, spans)
        merge_size = self.settings.merge_size if self.settings else 1
        grids = [image.grid_thw for image in images]
        positions_3T, delta = mrope_positions(len(token_ids), spans, grids, merge_size)
        return PromptInputs(token_ids, images, spans, positions_3T, delta)


def not_cut(num_tokens: int, most: int, why: str) -> RequestError:
    """The error of a prompt that should have been truncated to `most` tokens."""
    name = "truncate_prompt_tokens"
    message = f"{name}: the prompt has {num_tokens} tokens, {most} are to be kept, but it {why}; shorten it"
    return RequestError(message, "prompt_not_truncated", name)


def read_image_token(config: Mapping[str, Any], tokenizer: Tokenizer) -> tuple[int, str]:
    """Id and text of the placeholder of pictures. Raises ModelError where there is none."""
    token_id = config.get("image_token_id")
    token = tokenizer.id_to_token(token_id) if isinstance(token_id, int) and token_id >= 0 else None
    if token is None:
        raise ModelError(
            f"config.json has a vision_config but image_token_id {token_id!r} is not a token of tokenizer.json; "
            f"the files belong to different checkpoints"
        )
    return token_id, token  # type: ignore[return-value]


def read_vision_tokens(config: Mapping[str, Any], tokenizer: Tokenizer) -> list[str]:
    """The texts of all tokens that stand around and in the place of what is seen."""
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    ids = [config.get(name) for name in names]
    tokens = [tokenizer.id_to_token(token_id) for token_id in ids if isinstance(token_id, int) and token_id >= 0]
    return [token for token in tokens if token is not None]


def _expand_placeholders(
    token_ids: list[int], image_token_id: int | None, images: list[ImageInput]
) -> tuple[list[int], list[ImageSpan]]:
    """Repeat each placeholder as often as its picture has tokens."""
    if not images:
        return token_ids, []
    expanded: list[int] = []
    spans: list[ImageSpan] = []
    for token in token_ids:
        if token != image_token_id:
            expanded.append(token)
            continue
        num_tokens = images[len(spans)].num_tokens
        spans.append(ImageSpan(len(expanded), num_tokens, len(spans)))
        expanded.extend([token] * num_tokens)
    return expanded, spans
