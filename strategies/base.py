"""The contract of a load strategy. Knows nothing of a particular model family."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, NamedTuple

from torch import Tensor, nn

from npu_runner.checkpoint.files import require_json
from npu_runner.checkpoint.model_config import LayerConfig, ModelConfig, PoolingConfig, ScorePooling
from npu_runner.checkpoint.pooling_files import read_pooling
from npu_runner.checkpoint.weights_reader import WeightsReader
from npu_runner.config import RunnerConfig, flat_values
from npu_runner.errors import ConfigError, Contract, ModelError
from npu_runner.layers.parallel import LayerContext
from npu_runner.prompts.media.image_settings import QWEN2_VL_IMAGES, ImageSettings, read_image_settings
from npu_runner.prompts.media.images import largest_image
from npu_runner.prompts.media.video_settings import VideoForm, read_video_settings
from npu_runner.prompts.processor import ChatProcessor, ProcessorSettings
from npu_runner.prompts.text.tokenizer import read_tokenizer
from npu_runner.request.prompt_inputs import ImageInput

# P patches, X values of a patch, M image tokens, D hidden size of the decoder


@dataclass(frozen=True)
class VisionEmbeddings:
    """One image as the decoder sees it: main (M, D), and one (M, D) per deepstack level."""

    main_MD: Tensor
    deepstack: list[Tensor]

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.main_MD, *self.deepstack))


class TowerInputs(NamedTuple):
    """One call of the tower: images by their indices, their patches (P, X), and what is computed from their sizes
    alone."""

    indices: list[int]
    patches_PX: Tensor
    places: list[Tensor]


class StagedImages(list[ImageInput]):
    """Images of which all that the tower takes is on the device, or on its way to it: what `stage_images` makes for
    `encode_images`. `groups`: by their indices in this list."""

    def __init__(self, images: Sequence[ImageInput], groups: Sequence[TowerInputs]):
        super().__init__(images)
        self._groups = list(groups)

    @property
    def tensors(self) -> list[Tensor]:
        """All that is there for them."""
        return [tensor for group in self._groups for tensor in (group.patches_PX, *group.places)]

    def pop_groups(self) -> Iterator[TowerInputs]:
        """The groups, once; the caller owns each group's memory."""
        while self._groups:
            yield self._groups.pop(0)


class LoadStrategy(Contract, ABC):
    """One family's home: how its config is read, its network built and loaded, its prompts and images prepared.

    One instance belongs to one checkpoint folder.
    """

    _REPLACED: ClassVar = {"takes_videos": "accepts_videos", "takes_ranks": "supports_ranks",
                           "takes_graphs": "supports_graphs"}

    model_types: ClassVar[tuple[str, ...]] = ()
    """The model types of our own strategies; one of another package has its entry point's name instead."""
    is_multimodal: bool = False
    """It has a vision tower. Of the generic strategy, an instance knows it."""
    accepts_videos: ClassVar[bool] = False
    """Its images may be frames of videos, in pairs: ImageInput says how."""
    supports_ranks: ClassVar[bool] = True
    """Served with tensor_parallel_size above 1."""
    supports_graphs: ClassVar[bool] = True
    """Its decode steps may be graphs, on platforms that have them."""
    compares_graphs: ClassVar[bool] = False
    """Its modules are not ours: each graph is compared with an eager step, and steps run eagerly where they differ, or
    where nothing can be captured."""
    returns_hidden_states: ClassVar[bool] = False
    """Its network appends hidden states of layers to its result (`ModelConfig.hidden_state_layers`)."""
    has_states: ClassVar[bool] = False
    """Some of its layers keep a state instead of keys and values, so the prefix cache holds snapshots."""
    video_form: ClassVar[VideoForm] = VideoForm.TIMESTAMPS
    no_videos: ClassVar[str] = ProcessorSettings.no_videos
    """Why videos are refused, where none are taken."""
    image_defaults: ClassVar[ImageSettings] = QWEN2_VL_IMAGES
    """Defaults for images that the checkpoint's file does not set, and the rule for resizing."""
    images_by_transformers: bool = False
    """Its images are prepared by transformers' own processor: ImageInput says how."""

    def __init__(self, path: Path):
        self.path = path

    def resolve_config(self, config: RunnerConfig) -> RunnerConfig:
        """`config` as this family serves it. Raises ConfigError for a setting that it does not serve."""
        return config

    @abstractmethod
    def read_config(self) -> ModelConfig:
        """Read config.json. Raises ModelError for missing fields and for values that the family does not support."""

    def pooling(self, config: RunnerConfig) -> PoolingConfig | None:
        """The pooling of prompts, or None if the checkpoint generates text. Raises ModelError for a pooling that is not
        served."""
        return read_pooling(self.path, runner=config.runner, task=config.task,
                            token_id=lambda token: read_tokenizer(self.path).token_to_id(token))

    def mtp_layer(self, config: RunnerConfig) -> LayerConfig:
        """The layer of the checkpoint's head for multi-token prediction. Raises ConfigError for a family that has none,
        ModelError for a checkpoint."""
        raise ConfigError(f"speculative_config.method mtp: {self.read_config().model_type} has no head for multi-token "
                          "prediction that is served; take another method, or leave speculative_config out")

    def model_config_for(self, config: RunnerConfig) -> ModelConfig:
        """The result of `read_config`, with pooling if `config` or the checkpoint asks for it, and with the head that
        drafts if `config` does."""
        pooling, read = self.pooling(config), self.read_config()
        if isinstance(pooling, ScorePooling) and max(pooling.token_ids) >= read.vocab_size:
            raise ModelError(f"{self.path}: scores are made of the tokens {pooling.token_ids}, the model has tokens "
                             f"0 to {read.vocab_size - 1}; the files belong to different checkpoints")
        speculative = config.scheduler.speculative
        layers = self._hidden_state_layers(config, read, pooling)
        mtp = self.mtp_layer(config) if speculative is not None and speculative.has_head and not pooling else None
        return dataclasses.replace(read, pooling=pooling, mtp=mtp, hidden_state_layers=layers)

    def _hidden_state_layers(self, config: RunnerConfig, read: ModelConfig,
                             pooling: PoolingConfig | None) -> tuple[int, ...]:
        """The layers that `config` names, counted from 0. Raises ConfigError where they are not returned."""
        given, most, problem = config.hidden_state_layers or (), read.num_layers, None
        layers = tuple(layer + most + 1 if layer < 0 else layer for layer in given)
        wrong = [layer for layer in given if not -most - 1 <= layer <= most]
        if not given:
            return ()
        if not self.returns_hidden_states:
            problem = f"the network that serves {read.model_type} returns those of no layer; leave it out"
        elif pooling is not None:
            problem = "the model pools its prompts; leave it out (LLM.encode returns the states of all tokens)"
        elif config.scheduler.speculative is not None:
            problem = "speculative_config makes steps with drafts, which may be rejected; set one of the two"
        elif wrong:
            problem = f"there is no layer {wrong[0]}, the model has {-most - 1} to {most}; correct it"
        elif len(set(layers)) < len(layers):
            problem = f"{given} names a layer twice; name it once"
        if problem is not None:
            raise ConfigError(f"hidden_state_layers: {problem}")
        return layers

    def processor(self, config: RunnerConfig) -> ChatProcessor:
        """Chat messages and images to prompts; picklable, for worker processes."""
        settings = ProcessorSettings(
            **flat_values(config.prompts),
            accepts_videos=self.accepts_videos,
            video_form=self.video_form,
            no_videos=self.no_videos,
            image_defaults=self.image_defaults,
            images_by_transformers=self.images_by_transformers,
            max_model_len=config.max_model_len,
            uses_mrope=self.read_config().rope.mrope_section is not None,
            pooling=self.pooling(config))
        return ChatProcessor(str(self.path), settings)

    def largest_images(self, config: RunnerConfig) -> Callable[[int], ImageInput]:
        """A function that makes the largest image of at most a given number of tokens. It reads only the settings of
        images and videos; `processor` also needs a tokenizer."""
        raw = require_json(self.path, "config.json")
        images = read_image_settings(self.path, raw, default=self.image_defaults,
                                     min_pixels=config.prompts.image_min_pixels,
                                     max_pixels=config.prompts.image_max_pixels)
        videos = None
        if self.accepts_videos:
            with suppress(ModelError):  # images and text are served all the same
                videos = read_video_settings(self.path, raw, form=self.video_form)
        return partial(largest_image, images, videos)

    @abstractmethod
    def build(self, model_config: ModelConfig, num_positions: int, context: LayerContext) -> nn.Module:
        """The network with uninitialised parameters, for positions below `num_positions`."""

    def renamed(self, names: Set[str]) -> Mapping[str, str]:
        """Prefixes of the checkpoint's `names` by prefixes of the model's names."""
        return {}

    def named(self, reader: WeightsReader) -> WeightsReader:
        """`reader` by the model's names, where no prefixes say them."""
        return reader

    @abstractmethod
    def load_weights(self, model: nn.Module, reader: WeightsReader, model_config: ModelConfig) -> int:
        """Fill `model`; returns the bytes read. Raises WeightsError naming every tensor that does not fit."""

    def check_network(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Called when all weights are there, random ones too. May exchange modules. Raises ModelError for a network
        that cannot be served."""
        return None

    def stage_images(self, model: nn.Module, images: Sequence[ImageInput]) -> Sequence[ImageInput]:
        """`images` for `encode_images`, with what it needs of them sent to the device ahead of it: StagedImages.

        Handed out while the step before runs, so it may read nothing that a step writes. As they are: nothing is sent
        ahead.
        """
        return images

    def encode_images(self, model: nn.Module, images: Sequence[ImageInput]) -> list[VisionEmbeddings]:
        """Embeddings of `images`, in order, through one call of the tower. `images` may be what `stage_images` made."""
        raise TypeError(f"{type(self).__name__} has no vision tower")
