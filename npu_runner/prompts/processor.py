"""From chat messages or a raw prompt to token ids, images and positions. Knows nothing of torch, models or devices.

It reads the checkpoint's own files with tokenizers, jinja2, numpy and Pillow: importing transformers would cost every
worker process seconds. Its results equal those of transformers' processors, which the tests take as their oracle.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import PIL
import tokenizers
from PIL import Image

from npu_runner.checkpoint.files import (
    PROMPT_FILES,
    file_digests,
    model_folder,
    package_versions,
    refuse_changes,
    require_json,
)
from npu_runner.checkpoint.model_config import ClassPooling, ModelConfig, PoolingConfig, ScorePooling, VectorPooling
from npu_runner.config import DEFAULT_MAX_MODEL_LEN, PromptConfig
from npu_runner.errors import ConfigError, ModelError, RequestError
from npu_runner.prompts.media.image_settings import QWEN2_VL_IMAGES, ImageSettings, read_image_settings
from npu_runner.prompts.media.images import largest_image
from npu_runner.prompts.media.media import MediaRules
from npu_runner.prompts.media.transformers_images import ImageRules, TransformersImages
from npu_runner.prompts.media.video_settings import VideoForm
from npu_runner.prompts.media.videos import Video
from npu_runner.prompts.pair_prompts import PairPrompts, TextPairs, pair_files, read_pair_template, why_no_scores
from npu_runner.prompts.request_checks import RequestChecks
from npu_runner.prompts.text.chat_prompt import ChatPrompts
from npu_runner.prompts.text.chat_template import ChatTemplate, read_chat_template, read_tool_template
from npu_runner.prompts.text.control_tokens import ControlTokens
from npu_runner.prompts.text.messages import (
    Conversation,
    MediaLimits,
    Seen,
    check_ending,
    checked_text,
    parse_messages,
)
from npu_runner.prompts.text.reasoning import PAIRS, find_reasoning_tokens, thinking_after
from npu_runner.prompts.text.tokenizer import (
    TextLength,
    checked_ids,
    read_special_tokens,
    read_tokenizer,
)
from npu_runner.prompts.text.tool_parsers import find_tool_parser, forced_calls
from npu_runner.prompts.text.tools import parse_tools, strings_in
from npu_runner.prompts.vision_prompts import (
    VisionPrompts,
    asks_for_mrope,
    read_image_token,
    read_video_prompts,
    read_vision_tokens,
)
from npu_runner.request.limits import field_error
from npu_runner.request.prompt_inputs import ImageInput, PromptInputs
from npu_runner.request.structured_outputs import StructuredOutputsParams


@dataclass(frozen=True, kw_only=True)
class ProcessorSettings(PromptConfig):
    """The user's settings of prompts, and what the family and the rest of the settings add."""

    accepts_videos: bool = False
    """The family takes videos, ..."""
    video_form: VideoForm = VideoForm.TIMESTAMPS
    """... in this form; ..."""
    no_videos: str = "its family has none here"
    """... or the reason why it does not."""
    image_defaults: ImageSettings = QWEN2_VL_IMAGES
    """The family's defaults for fields that the checkpoint's file lacks."""
    images_by_transformers: bool = False
    """Images are prepared by transformers' own processor, ..."""
    image_rules: ImageRules | None = None
    """... by these rules; None: they are still to be found."""
    max_model_len: int | None = None
    """A prompt that cannot be shorter is refused before it is tokenized. None: the checkpoint's."""
    uses_mrope: bool | None = None
    """None: as the checkpoint's config says."""
    pooling: PoolingConfig | None = None
    """The pooling of prompts; None: the model generates text."""

    def of_videos(self) -> dict[str, float | int | None]:
        return {"video_fps": self.video_fps, "video_max_frames": self.video_max_frames,
                "video_num_frames": self.video_num_frames}


_DEFAULTS = ProcessorSettings()
_KEPT_TEMPLATES = 8


class ChatProcessor(RequestChecks):
    """Prepares prompts for one checkpoint. Cheap to pickle: a worker process reads the files again.

    Raises ModelError when the folder lacks a file or has a broken one, RequestError for a prompt it cannot prepare.
    Unpickling raises JobError where the files, or the packages that read them, are not those of the pickled one.
    """

    def __init__(self, model_path: str, settings: ProcessorSettings = _DEFAULTS):
        self.model_path = str(model_path)
        self.settings, self.pooling = settings, settings.pooling
        self.max_logprobs = settings.max_logprobs_per_request
        folder = model_folder(model_path)
        scores = settings.pooling if isinstance(settings.pooling, ScorePooling) else None
        # Before anything is read: what changes in between is another file to every worker.
        self._file_digests = file_digests(folder, (*PROMPT_FILES, *(pair_files(scores.pairs) if scores else ())))
        config = require_json(folder, "config.json")
        self.tokenizer = read_tokenizer(folder)
        self._special_tokens = read_special_tokens(folder)
        text_config = config["text_config"] if isinstance(config.get("text_config"), dict) else config
        self.hidden_size = text_config.get("hidden_size")
        self.vocab_size = text_config.get("vocab_size", config.get("vocab_size"))
        num_positions = text_config.get("max_position_embeddings", DEFAULT_MAX_MODEL_LEN)
        self.max_model_len = settings.max_model_len or min(num_positions, DEFAULT_MAX_MODEL_LEN)
        self._text_length = TextLength(self.tokenizer, self.max_model_len)
        self.has_vision = settings.images_by_transformers or isinstance(config.get("vision_config"), dict)
        self.media_limits = MediaLimits(has_vision=self.has_vision, max_images=settings.max_images_per_prompt,
                                        by_kind=settings.limit_mm_per_prompt or {})
        self.uses_mrope = asks_for_mrope(config) if settings.uses_mrope is None else settings.uses_mrope
        self.image_settings: ImageSettings | None = read_image_settings(
            folder, config, default=settings.image_defaults, min_pixels=settings.image_min_pixels,
            max_pixels=settings.image_max_pixels) if self.has_vision and not settings.images_by_transformers else None
        self.transformers_images = self._read_transformers_images(folder, config)
        """None: images are prepared here, or the model has none."""
        self._vision = self._vision_prompts(folder, config)
        self._package_versions = package_versions(["pillow", "tokenizers", *self._decoder_versions(),
                                                   *["transformers"] * settings.images_by_transformers])
        self._template = self._read_template(folder, config, scores)
        self.reasoning_tokens = find_reasoning_tokens(self.tokenizer) if settings.reasoning_parser == "auto" else None
        of_tools = None if self.has_vision or scores or settings.chat_template else read_tool_template(folder)
        with_tools = of_tools or self._template
        self._tool_call_parser = find_tool_parser(settings.tool_call_parser, with_tools.source if with_tools else None)
        self._vision_tokens = read_vision_tokens(config, self.tokenizer)
        if self.transformers_images is not None:
            self._vision_tokens += self.transformers_images.rules.control_tokens
        self._chat = self._chat_with(self._template)
        self._chat_of_tools = None if of_tools is None else self._chat_with(of_tools)
        """For requests with tools, if the checkpoint has another template for them."""
        self._chat_from = lru_cache(maxsize=_KEPT_TEMPLATES)(self._chat_from_source)  # templates of requests
        self._template_kwargs = self._kwargs_of_settings()
        self._why_no_scores = why_no_scores(
            self.pooling.classes, config, has_template=self._template is not None
        ) if isinstance(self.pooling, ClassPooling) else None
        self.pairs = self._pair_prompts(scores)
        """Makes prompts of a query and a document, where the model gives scores."""

    def _read_template(self, folder: Path, config: Mapping[str, Any],
                       scores: ScorePooling | None) -> ChatTemplate | None:
        if scores is None:
            return read_chat_template(folder, has_vision=self.has_vision, given=self.settings.chat_template)
        return read_pair_template(folder, scores.pairs, config, self.tokenizer, given=self.settings.chat_template)

    def _pair_prompts(self, scores: ScorePooling | None) -> PairPrompts | TextPairs | None:
        if isinstance(self.pooling, ClassPooling):
            return TextPairs(tokenizer=self.tokenizer, vision=self._vision, text_length=self._text_length)
        if scores is None:
            return None
        return PairPrompts(chat=self._chat, vision=self._vision, text_length=self._text_length,
                           settings=scores.pairs, template_kwargs=self._template_kwargs, limits=self.media_limits)

    def _chat_with(self, template: ChatTemplate | None) -> ChatPrompts:
        control = ControlTokens(self.tokenizer, template.literals() if template else (), self._vision_tokens,
                                of_assistants=chain.from_iterable(PAIRS))
        return ChatPrompts(model_path=self.model_path, template=template, control=control,
                           adds_special_tokens=self.has_vision)

    def _chat_from_source(self, source: str) -> ChatPrompts:
        try:
            return self._chat_with(ChatTemplate(source, self._special_tokens))
        except ModelError as error:
            raise field_error("chat_template", f"{error}", "chat_template_error") from error

    def _kwargs_of_settings(self) -> dict[str, Any]:
        try:
            return self._chat.checked_kwargs(self.settings.chat_template_kwargs or {})
        except RequestError as error:  # not a request: a setting
            raise ConfigError(error.message) from error

    def _read_transformers_images(self, folder: Path, config: Mapping[str, Any]) -> TransformersImages | None:
        """Raises ConfigError for a setting of images that transformers' processors do not have."""
        settings = self.settings
        if not settings.images_by_transformers:
            return None
        if settings.image_min_pixels is not None:
            raise ConfigError(f"image_min_pixels {settings.image_min_pixels}: transformers' processor prepares this "
                              "model's images, and has no such bound; leave it out")
        return TransformersImages(folder, config, self.tokenizer, max_pixels=settings.image_max_pixels,
                                  rules=settings.image_rules)

    def _vision_prompts(self, folder: Path, config: Mapping[str, Any]) -> VisionPrompts:
        """Raises ConfigError for settings of videos that the model does not take."""
        settings = self.settings
        videos, no_videos = None, settings.no_videos
        if settings.accepts_videos:
            try:
                videos = read_video_prompts(folder, config, self.tokenizer, form=settings.video_form,
                                            fps=settings.video_fps, max_frames=settings.video_max_frames,
                                            num_frames=settings.video_num_frames,
                                            min_pixels=settings.image_min_pixels,
                                            max_pixels=settings.image_max_pixels)
            except ModelError as error:  # images and text are served all the same
                no_videos = str(error)
        for name, value in settings.of_videos().items():
            if videos is None and value is not None:
                raise ConfigError(f"{name} {value}: this model takes no videos: {no_videos}")
        for name in ("image_min_pixels", "image_max_pixels"):
            if getattr(settings, name) is not None and not self.has_vision:
                raise ConfigError(f"{name} {getattr(settings, name)}: this model reads text only; leave it out")
        by_transformers = self.transformers_images
        image_token = read_image_token(config, self.tokenizer) if self.image_settings is not None else None
        return VisionPrompts(
            image_token=image_token if by_transformers is None else by_transformers.rules.token,
            video_token_id=config.get("video_token_id"), settings=self.image_settings, videos=videos,
            no_videos=no_videos, by_transformers=by_transformers,
            text_length=self._text_length, max_source_pixels=settings.max_source_pixels, uses_mrope=self.uses_mrope)

    def encode_plainly(self, text: str) -> list[int]:
        return self._chat.control.encode_plainly(checked_text(text, "labels"))

    @property
    def why_no_videos(self) -> str | None:
        """None: the checkpoint takes videos."""
        return self._vision.why_no_videos

    def __reduce__(self) -> tuple[Callable[..., ChatProcessor], tuple[Any, ...]]:
        settings, images = self.settings, self.transformers_images
        if images is not None:
            settings = replace(settings, image_rules=images.rules)
        return _read_again, (type(self), self.model_path, settings, self._file_digests, self._package_versions)

    def parser_of_calls(self) -> str | None:
        """The name of what reads calls out of an answer; None: they are to stay text.

        Raises RequestError if it is not set and no parser is known.
        """
        if self._tool_call_parser is None and self.settings.tool_call_parser == "auto":
            raise field_error("tools", "how this model writes its calls is not known; name a parser with "
                              "--tool-call-parser, or none to have them as text", "unsupported_parameter")
        return self._tool_call_parser

    def grammar_of_calls(self, tools: Any, *, name: str | None, is_parallel: bool) -> StructuredOutputsParams:
        """The grammar of an answer of calls of `tools` alone, as OpenAI has them; with `name` of one call of that tool.
        Raises RequestError if these calls cannot be forced with this model."""
        checked = parse_tools(tools, is_call_forced=True)
        return forced_calls(self.parser_of_calls(), checked, name=name, is_parallel=is_parallel)

    def template_reads(self, name: str, chat_template: str | None = None) -> bool:
        """Whether `chat_template_kwargs` may have this name; `chat_template`: the text of another one than ours."""
        template = self._template if chat_template is None else self._chat_from(chat_template).template
        return template is not None and name in template.variables

    def __call__(self, messages: Sequence[Mapping[str, Any]] | Conversation,
                 chat_template_kwargs: Mapping[str, Any] | None = None, *, media: MediaRules | None = None,
                 tools: Sequence[Mapping[str, Any]] | None = None, is_call_forced: bool = False,
                 add_generation_prompt: bool | None = None, continue_final_message: bool = False,
                 truncate_prompt_tokens: int | None = None, mm_processor_kwargs: Mapping[str, Any] | None = None,
                 chat_template: str | None = None) -> PromptInputs:
        """The prompt of a conversation, up to the start of the assistant's answer.

        `messages` are OpenAI's, {"role", "content", ...}, or were parsed before. Content is text, or parts {"type":
        "text", "text"} and {"type": "image", "image": encoded bytes or a PIL image}; with `media` images and videos may
        be addresses that it allows. Control tokens typed in the text are encoded as ordinary characters.
        `chat_template_kwargs`: what the template reads beside them, over the settings' own. With
        `continue_final_message` it ends where the last message, the assistant's, does; with `add_generation_prompt`
        False after it, without the next role. `truncate_prompt_tokens`: the number of last tokens to keep, as
        `most_prompt_tokens` says. `mm_processor_kwargs`: `fps`, `num_frames` or `max_frames` sample videos,
        `min_pixels` and `max_pixels` bound images. `chat_template`: the text of one that replaces the checkpoint's.
        """
        requested = self._vision.requested(mm_processor_kwargs)
        chat = self._chat if chat_template is None else self._chat_from(chat_template)
        own = self._template_kwargs if chat is self._chat else chat.checked_kwargs(self._template_kwargs)
        if chat_template is None and tools is not None and self._chat_of_tools is not None:
            chat = self._chat_of_tools
            own = {name: value for name, value in own.items() if chat.template and name in chat.template.variables}
        kwargs = {**own, **chat.checked_kwargs(chat_template_kwargs or {})}
        conversation = messages if isinstance(messages, Conversation) else parse_messages(
            messages, self.media_limits, media)
        check_ending(conversation, add_generation_prompt, continue_final_message)
        checked_tools = None if tools is None else parse_tools(tools, is_call_forced=is_call_forced)
        texts = [text for _, text in conversation.texts()] + strings_in(checked_tools)
        self._text_length.check(texts, is_cut=truncate_prompt_tokens is not None)
        text, token_ids = chat.text_and_ids(
            conversation, kwargs, tools=checked_tools, continue_final_message=continue_final_message,
            add_generation_prompt=add_generation_prompt is not False)
        seen = self._vision.in_order(token_ids, conversation.seen)
        prompt = self._vision.prompt(token_ids, seen, truncate_prompt_tokens, requested)
        tokens = self.reasoning_tokens
        thinking = None if tokens is None else thinking_after(prompt.token_ids, tokens, self.tokenizer)
        return replace(prompt, thinking=thinking, text=text)

    def from_text(self, prompt: str | Sequence[int], images: Sequence[Image.Image | bytes] = (),
                  videos: Sequence[Video | bytes] = (), *, truncate_prompt_tokens: int | None = None,
                  mm_processor_kwargs: Mapping[str, Any] | None = None) -> PromptInputs:
        """A raw prompt, as text or token ids, with one image token for each image and one video token for each video
        (encoded bytes).

        Control tokens in it are control tokens, and no chat template is applied, except to a text whose vector the
        checkpoint's files make of a user's message. `mm_processor_kwargs`: as for a conversation.
        """
        shown_as = self.pooling.messages if isinstance(self.pooling, VectorPooling) else None
        if shown_as is not None and isinstance(prompt, str) and not images and not videos:
            text = checked_text(prompt, "prompt")
            content = text if shown_as.is_flat or not self.has_vision else [{"type": "text", "text": text}]
            return self([{"role": "user", "content": content}], shown_as.template_kwargs,
                        add_generation_prompt=shown_as.add_generation_prompt,
                        truncate_prompt_tokens=truncate_prompt_tokens)
        requested = self._vision.requested(mm_processor_kwargs)
        located: list[tuple[Seen, str]] = [(image, f"images[{number}]") for number, image in enumerate(images)]
        located += [(Video.from_source(video, where := f"videos[{number}]"), where)
                    for number, video in enumerate(videos)]
        self.media_limits.check(located)
        token_ids = self._raw_token_ids(prompt, is_cut=truncate_prompt_tokens is not None)
        located = self._vision.in_order(token_ids, located)
        return self._vision.prompt(token_ids, located, truncate_prompt_tokens, requested,
                                   text=prompt if isinstance(prompt, str) else None)

    def encode_ahead(self, texts: Sequence[str]) -> None:
        """Encode raw prompts together that `from_text` will be called with next; results are those of one by one."""
        is_shown_as = isinstance(self.pooling, VectorPooling) and self.pooling.messages is not None
        self._chat.control.encode_ahead(() if is_shown_as else texts)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a prompt's tokens, special ones included."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def end_token_ids(self, model_config: ModelConfig) -> tuple[int, ...]:
        """The tokens that end an answer: the ids of the configs, and the tokenizer's own end token, which a fine-tune
        may have changed there alone."""
        ids, eos_token = [*model_config.eos_token_ids], self._special_tokens.get("eos_token")
        token_id = None if eos_token is None else self.tokenizer.token_to_id(eos_token)
        if token_id is not None and token_id not in ids:
            ids.append(token_id)
        return tuple(i for i in ids if i < model_config.vocab_size)  # the model cannot say the others

    def largest_image(self, max_tokens: int) -> ImageInput:
        """A grey image for memory profiling, with the most tokens that any image or pair of frames can get."""
        settings = self.image_settings
        if self.transformers_images is not None:
            return self.transformers_images.largest(max_tokens)
        if settings is None:
            raise ModelError(f"the model in {self.model_path} has no vision_config: it takes no images")
        videos = self._vision.videos
        return largest_image(settings, videos.settings if videos is not None else None, max_tokens)

    def identity(self) -> dict[str, Any]:
        """Everything that shapes prompts, JSON-ready: two processors with equal identities make equal prompts."""
        template = self._template
        return {
            "tokenizer": _digest(self.tokenizer.to_str()),
            "chat_template": _digest(template.source) if template else None,
            "template_variables": template.token_variables if template else {},
            **({"tool_template": _digest(self._chat_of_tools.template.source)}
               if self._chat_of_tools is not None and self._chat_of_tools.template else {}),
            "image_token_id": self._vision.image_token_id,
            "image_settings": self.image_settings.to_json() if self.image_settings else None,
            **({"transformers_images": images.identity()} if (images := self.transformers_images) is not None else {}),
            "uses_mrope": self.uses_mrope,
            "max_images_per_prompt": self.settings.max_images_per_prompt,
            "max_source_pixels": self.settings.max_source_pixels,
            # Another resizing or another split into words is another prompt.
            "pillow": PIL.__version__,
            "tokenizers": tokenizers.__version__,
            # Only where they say something: an output that was begun before they existed goes on with them unset.
            **({"limit_mm_per_prompt": dict(limits)} if (limits := self.settings.limit_mm_per_prompt) else {}),
            **({"decoders": decoders} if (decoders := {**self._decoder_versions(), **self._pdf_library()}) else {}),
            **({"chat_template_kwargs": self._template_kwargs} if self._template_kwargs else {}),
            **({"pairs": self.pairs.identity()} if isinstance(self.pairs, PairPrompts) else {}),
            **({"reasoning_tokens": self.reasoning_tokens.to_json()} if self.reasoning_tokens else {}),
            **{name: value for name, value in self.settings.of_videos().items() if value is not None},
            **({"frame_pixels": pixels} if (pixels := self._frame_pixels()) else {}),
            # What auto comes to follows from the template.
            **({"tool_call_parser": setting} if (setting := self.settings.tool_call_parser) != "auto" else {}),
        }

    def _decoder_versions(self) -> dict[str, str]:
        """Versions of the installed optional decoders, by package. FFmpeg and libheif come with their wheels."""
        packages = ["pillow-heif"] * self.has_vision + ["av"] * (self._vision.videos is not None)
        return {name: version for name, version in package_versions(packages).items() if version is not None}

    def _pdf_library(self) -> dict[str, str]:
        """Whether PDFs are rendered here, which must be so on all hosts or on none. The facts of a page have versions
        (PageFacts.renderer), which are a setting of a job that shows PDFs alone."""
        is_there = self.has_vision and package_versions(["pypdfium2"])["pypdfium2"] is not None
        return {"pdf": "pypdfium2"} if is_there else {}

    def _frame_pixels(self) -> list[int] | None:
        """Bounds of each frame of a video, where settings say so."""
        settings, videos = self.settings, self._vision.videos
        if videos is None or not videos.settings.bounds_each_frame:
            return None
        is_given = settings.image_min_pixels is not None or settings.image_max_pixels is not None
        return [videos.settings.frame.min_pixels, videos.settings.frame.max_pixels] if is_given else None

    def _raw_token_ids(self, prompt: str | Sequence[int], *, is_cut: bool) -> list[int]:
        if isinstance(prompt, str):
            self._text_length.check([prompt], is_cut=is_cut)
            token_ids = self._chat.control.encode(checked_text(prompt, "prompt"), add_special_tokens=True)
        else:
            token_ids = checked_ids(prompt, self.tokenizer.get_vocab_size())
        if not token_ids:
            raise field_error("prompt", "it is empty", "empty_prompt")
        return token_ids


def _read_again(kind: type[ChatProcessor], model_path: str, settings: ProcessorSettings,
                digests: Mapping[str, str | None], versions: Mapping[str, str | None]) -> ChatProcessor:
    """The same processor in another process. Raises JobError where it would be another one."""
    try:
        return kind(model_path, settings)
    finally:  # after the files are read, and also where a change has made them unreadable
        refuse_changes(Path(model_path), digests, versions)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
