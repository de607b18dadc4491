"""The generic strategy: any text or image model of transformers, with its own modules, over our scheduler and cache.

For families without a strategy here. This module, transformers_internals.py and the images of
prompts/media/transformers_images.py alone import transformers, and only when such a checkpoint is served.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import cached_property, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from npu_runner.checkpoint.config_reading import RawConfig, read_dtype, read_eos, reading_config
from npu_runner.checkpoint.files import require_json
from npu_runner.checkpoint.model_config import (
    AttentionConfig,
    ClassPooling,
    LayerConfig,
    MLPConfig,
    ModelConfig,
    RopeConfig,
)
from npu_runner.checkpoint.renamed_weights import RenamedReader
from npu_runner.checkpoint.weights_reader import WeightsReader
from npu_runner.config import RunnerConfig
from npu_runner.errors import ConfigError, ModelError
from npu_runner.layers.parallel import LayerContext
from npu_runner.layers.weights_loader import load_weights
from npu_runner.models.transformers_check import (
    ComparedPrompt,
    compare_at_start,
    compared,
    compared_image,
    compared_text,
)
from npu_runner.models.transformers_fusion import merge_linears
from npu_runner.models.transformers_images import features_function
from npu_runner.models.transformers_model import TransformersModel, attend
from npu_runner.models.transformers_parts import Recipe, context_without_traffic, match_stacks, replace_parts
from npu_runner.models.transformers_probe import Observed, claim_mask, observe
from npu_runner.prompts.media.transformers_images import TransformersImages
from npu_runner.prompts.processor import ChatProcessor
from npu_runner.request.prompt_inputs import ImageInput
from npu_runner.strategies.base import LoadStrategy, VisionEmbeddings
from npu_runner.strategies.transformers_internals import (
    calls_attention_by_name,
    eager_mask,
    experts_of,
    keeps_states,
    make_network,
    other_attention,
    own_attention_function,
    stored_names,
    tied_names,
    tp_plan,
    turned_linear,
)

logger = logging.getLogger(__name__)

_OLDEST = (5, 20)
REQUIRED = "transformers 5.20 or newer (pip install 'transformers>=5.20,<6')"
_SERVING, _PROBING, _COMPARING = "npu_runner", "npu_runner_probe", "npu_runner_compared"
_ATTENDING = {"full_attention", "sliding_attention"}
_GROWING_ROPES = ("dynamic", "longrope")
# What a class of transformers raises that does not fit; a RuntimeError may also be a want of memory.
_OF_FOREIGN_CODE = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
_OF_MEMORY = re.compile("memory|alloc|207001", re.IGNORECASE)


def installed_version() -> str | None:
    """The installed version of transformers, or None. Imports nothing."""
    try:
        return version("transformers")
    except PackageNotFoundError:
        return None


def is_new_enough(installed: str | None) -> bool:
    """Whether this release of transformers serves; an older one has other classes under the same names."""
    found = re.match(r"(\d+)\.(\d+)", installed or "")
    return found is not None and (int(found[1]), int(found[2])) >= _OLDEST


def knows(model_type: str | None) -> bool:
    """Whether a transformers that serves has a config for it; what its code cannot be imported for is said later."""
    if model_type is None or not is_new_enough(installed_version()):
        return False
    try:
        from transformers import CONFIG_MAPPING
    except ImportError:
        return True
    return model_type in CONFIG_MAPPING


class TransformersStrategy(LoadStrategy):
    """One checkpoint folder, served by the class that transformers has for its model_type; never by code of its own."""

    compares_graphs = True
    is_multimodal = True
    _images: TransformersImages | None = None

    def __init__(self, path: Path):
        super().__init__(path)
        self.is_multimodal = self.images_by_transformers = isinstance(self._raw.get("vision_config"), dict)

    def resolve_config(self, config: RunnerConfig) -> RunnerConfig:
        served = f"model_type {self._raw.get('model_type')!r} is served through transformers"
        num_ranks, graph_mode = config.parallel.tensor_parallel_size, config.graphs.graph_mode
        if config.parallel.enable_expert_parallel:
            raise ConfigError(f"enable_expert_parallel: {served}, whose experts are cut by their width; leave it out")
        if graph_mode == "max-autotune":
            raise ConfigError(f"graph_mode 'max-autotune': {served}, whose modules were never tried with a compiler; "
                              "leave it at auto, or set it to reduce-overhead or eager")
        if isinstance(self.pooling(config), ClassPooling):
            raise ConfigError(f"{served}, which generates text only, and the checkpoint is a classifier; take one of a "
                              "family with a strategy of its own")
        if self.pooling(config) is not None:
            raise ConfigError(f"runner {config.runner!r}: {served}, which generates text only; set runner to generate, "
                              "or take a checkpoint of a family with a strategy of its own")
        rope = _growing_rope(self._config.get_text_config())
        if rope and (config.max_model_len or 0) > rope[1]:
            raise ConfigError(f"max_model_len {config.max_model_len}: rope {rope[0]!r} depends on the longest position "
                              f"of a batch beyond its original {rope[1]}, and a step holds many requests; set "
                              f"max_model_len to at most {rope[1]}")
        if num_ranks > 1:
            self._check_ranks(num_ranks)
        blocks = self._observed.blocks_capture
        if blocks is None or graph_mode == "eager" or config.graphs.enforce_eager:
            return config
        if graph_mode != "auto":
            raise ConfigError(f"graph_mode {graph_mode!r}: {served}, and no graph can be captured of it: {blocks}; "
                              "leave it at auto, or set it to eager")
        return config.replace(graph_mode="eager")

    def read_config(self) -> ModelConfig:
        with reading_config(self.path) as config:
            return self._model_config(config)

    def build(self, model_config: ModelConfig, num_positions: int, context: LayerContext) -> nn.Module:
        """The network with uninitialised weights: its parameters are made by ours, its buffers by transformers."""
        blocks = self._observed.blocks_capture
        logger.warning("model_type %r has no strategy of its own: %s of transformers is served by the generic one, "
                       "which is slower%s", model_config.model_type, self._model_class.__name__,
                       f"; it runs eagerly, as no graph can be captured of it: {blocks}" if blocks else "")
        self._num_positions = num_positions
        _register_attention()
        causal_lm = make_network(self._model_class, self._config, _SERVING, context.dtype)
        whole = replace_parts(causal_lm, self._recipe(causal_lm, is_tied=model_config.tie_word_embeddings), context)
        if context.tp.size > 1 and whole:
            logger.info("each rank computes %d linears whole: %s", len(whole), ", ".join(whole[:4]))
        merge_linears(causal_lm, context)
        return TransformersModel(causal_lm, self._observed.calls, context, model_config.image_token_id,
                                 uses_mrope=model_config.rope.mrope_section is not None)

    def renamed(self, names: Set[str]) -> Mapping[str, str]:
        return {"causal_lm.": ""}

    def named(self, reader: WeightsReader) -> WeightsReader:
        network = _without_weights(self._model_class, self._config, _SERVING, torch.bfloat16)
        return RenamedReader(reader, stored_names(network, reader.names))

    def load_weights(self, model: nn.Module, reader: WeightsReader, model_config: ModelConfig) -> int:
        assert isinstance(model, TransformersModel), f"{type(model).__name__} is not what build makes"
        match_stacks(model.causal_lm, reader.names)
        return load_weights(model, reader, renamed=self.renamed(reader.names))

    def check_network(self, model: nn.Module, model_config: ModelConfig) -> None:
        assert isinstance(model, TransformersModel), f"{type(model).__name__} is not what build makes"
        own_attention = partial(other_attention, name=_COMPARING, afterwards=_SERVING)
        try:
            distances = compare_at_start(model, self._num_positions, self._compared_prompt(model, model_config),
                                         own_attention)
        except _OF_FOREIGN_CODE as error:
            if isinstance(error, RuntimeError) and _OF_MEMORY.search(str(error)):
                raise
            raise self._refusal("the comparison at the start does not run "
                                f"({type(error).__name__}: {error})") from error
        logger.info("compared with transformers: attention differs by %.1e of its size, all else by %.1e",
                    distances.attention, distances.others)

    def _recipe(self, network: Any, *, is_tied: bool) -> Recipe:
        observed = self._observed
        return Recipe(calls=observed.calls, halved=observed.halved, styles=tp_plan(network),
                      tied=tied_names(network) if is_tied else {}, turned=turned_linear(), experts_of=experts_of)

    def _check_ranks(self, num_ranks: int) -> None:
        """Raises ModelError where the network, cut over as many ranks, does not run without weights."""
        context = context_without_traffic(num_ranks)
        network = _without_weights(self._model_class, _without_growth(self._config), _PROBING, torch.bfloat16)
        try:
            replace_parts(network, self._recipe(network, is_tied=False), context)
            found = observe(network).calls
        except (ConfigError, ModelError) as reason:
            raise type(reason)(f"tensor_parallel_size {num_ranks}: {reason}") from reason
        except Exception as error:
            # The border to code of others, which may count on heads that are elsewhere.
            raise ModelError(f"{self.path}: tensor_parallel_size {num_ranks}: the network does not run with some of "
                             f"its heads ({type(error).__name__}: {error}); set it to 1") from error
        for call, whole in zip(found, self._observed.calls, strict=True):
            heads = context.tp.share(whole.num_heads, "num_attention_heads")[1], context.tp.kv_head_share(
                whole.num_kv_heads)[1]
            if (call.num_heads, call.num_kv_heads, call.head_dim) != (*heads, whole.head_dim):
                raise ModelError(f"{self.path}: tensor_parallel_size {num_ranks}: {call.name} has {call.num_heads} "
                                 f"heads for {call.num_kv_heads} of keys, {heads[0]} and {heads[1]} are a rank's; set "
                                 "it to 1")

    def processor(self, config: RunnerConfig) -> ChatProcessor:
        made = super().processor(config)
        self._images = made.transformers_images
        return made

    def encode_images(self, model: nn.Module, images: Sequence[ImageInput]) -> list[VisionEmbeddings]:
        assert isinstance(model, TransformersModel), f"{type(model).__name__} is not what build makes"
        return [VisionEmbeddings(main_MD, []) for main_MD in model.encode(images)]

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _model_config(self, config: RawConfig) -> ModelConfig:
        found, observed = self._config, self._observed
        call = observed.calls[0]
        # Which channel mixers the model has is its own business; none of ours is built.
        mlp = MLPConfig(intermediate_size=observed.hidden_size)
        return ModelConfig(
            model_type=config.model_type,
            vocab_size=observed.vocab_size,
            hidden_size=observed.hidden_size,
            num_heads=call.num_heads,
            num_kv_heads=call.num_kv_heads,
            head_dim=call.head_dim,
            layers=tuple(LayerConfig(mixer=AttentionConfig(sliding_window=each.window), channel=mlp)
                         for each in observed.calls),
            max_position_embeddings=self._longest,
            rms_norm_eps=1e-6,
            tie_word_embeddings=bool(getattr(found, "tie_word_embeddings", False)),
            rope=RopeConfig(mrope_section=self._mrope_section),
            image_token_id=found.image_token_id if self.is_multimodal else None,
            dtype=read_dtype(config),
            eos_token_ids=read_eos(config),
            generation_defaults=config.generation.defaults,
            generation_not_served=config.generation.not_served)

    def _compared_prompt(self, model: TransformersModel, model_config: ModelConfig) -> ComparedPrompt:
        """An image of noise within text where the network has a tower, else text."""
        if model.tower is None:
            return compared_text(self._num_positions, model_config.vocab_size)
        assert self._images is not None, "a checkpoint is opened before its weights are loaded"
        given, image = self._images.sample()
        special = {*_special_ids(self._config.to_dict()), *given["input_ids"].flat}
        text_ids = [token for token in range(model_config.vocab_size) if token not in special]
        return compared_image(model, self._num_positions, text_ids, image, given, self._images.merge_size)

    @cached_property
    def _raw(self) -> dict[str, Any]:
        return require_json(self.path, "config.json")

    @cached_property
    def _config(self) -> Any:
        """transformers' own config object, of what it knows itself."""
        try:
            from transformers import AutoConfig
        except ImportError as error:  # it looks at the versions of what it needs
            raise ModelError(f"{self.path}: served through transformers, which cannot be imported: {error}") from error
        model_type, remote = self._raw.get("model_type"), self._raw.get("auto_map")
        try:
            config = AutoConfig.from_pretrained(self.path, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # of nearly two hundred classes, each with checks of its own
            code = ", and the checkpoint's own code (auto_map) is never run" if remote else ""
            raise ModelError(f"{self.path}: model_type {model_type!r}: transformers {installed_version()} does not "
                             f"take this config{code}: {error}") from error
        for name in ("use_cache", "output_attentions", "output_hidden_states", "output_router_logits"):
            if getattr(config, name, False):
                setattr(config, name, False)
        return config

    @cached_property
    def _model_class(self) -> Any:
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

        model_type, name = self._raw.get("model_type"), "AutoModelForCausalLM"
        mapping = MODEL_FOR_CAUSAL_LM_MAPPING
        if self.is_multimodal:
            name, mapping = "AutoModelForImageTextToText", MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        if type(self._config) not in mapping:
            raise ModelError(f"{self.path}: model_type {model_type!r}: transformers has no {name} for it")
        model_class: Any = mapping[type(self._config)]
        for reason in _reasons(self._config, model_class, is_multimodal=self.is_multimodal):
            raise self._refusal(reason)
        return model_class

    @cached_property
    def _probed(self) -> nn.Module:
        """The network without weights, and of 16 bits because grouped GEMMs need them."""
        with self._looking():
            return _without_weights(self._model_class, _without_growth(self._config), _PROBING, torch.bfloat16)

    @cached_property
    def _observed(self) -> Observed:
        """The network's calls of attention."""
        with self._looking():
            if self.is_multimodal:
                self._check_tower(self._probed)
            return observe(self._probed)

    def _check_tower(self, network: Any) -> None:
        features_function(network)
        token_id, num_tokens = self._config.image_token_id, network.get_input_embeddings().num_embeddings
        if token_id >= num_tokens:
            raise ModelError(f"its image_token_id {token_id} has no embedding; there are {num_tokens}")

    @contextmanager
    def _looking(self) -> Iterator[None]:
        """Turns what is raised inside into a refusal."""
        try:
            yield
        except ModelError as reason:
            raise (reason if str(self.path) in str(reason) else self._refusal(str(reason))) from reason
        except Exception as error:
            # The border to code of others: whatever it raises, the network cannot be looked at.
            raise self._refusal(f"it does not run without weights, by which its attention is found out "
                                f"({type(error).__name__}: {error})") from error

    def _refusal(self, reason: str) -> ModelError:
        return ModelError(f"{self.path}: model_type {self._raw.get('model_type')!r} has no strategy of its own, and "
                          f"the generic one, through transformers, does not serve it: {reason}")

    @property
    def _mrope_section(self) -> tuple[int, int, int] | None:
        """Frequencies of each axis, where positions have three; a config may leave them to the network's code."""
        network: Any = self._probed
        if not hasattr(network.base_model, "get_rope_index"):
            return None
        found: tuple[int, ...] = next((section for module in network.modules()
                      if (section := getattr(module, "mrope_section", None)) is not None), ())
        if len(found) != 3:
            raise self._refusal(f"its positions have axes that are not supported (mrope_section {found})")
        return int(found[0]), int(found[1]), int(found[2])

    @property
    def _longest(self) -> int:
        positions = getattr(self._config.get_text_config(), "max_position_embeddings", None)
        if not positions:
            raise self._refusal("its config says no max_position_embeddings")
        rope = _growing_rope(self._config.get_text_config())
        return min(int(positions), rope[1]) if rope else int(positions)


def _without_weights(model_class: Any, config: Any, attention: str, dtype: torch.dtype) -> nn.Module:
    """The network on the meta device, buffers and all."""
    _register_attention()
    with torch.device("meta"):
        network: nn.Module = make_network(model_class, config, attention, dtype)
    return network


def _register_attention() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(_SERVING, attend)
    AttentionInterface.register(_PROBING, attend)
    # Where no mask function is registered, as for serving, transformers makes no mask.
    AttentionMaskInterface.register(_PROBING, claim_mask)
    AttentionInterface.register(_COMPARING, compared(own_attention_function))
    AttentionMaskInterface.register(_COMPARING, eager_mask())


def _special_ids(fields: dict[str, Any]) -> Iterator[int]:
    """The ids of tokens that a config names: control tokens, and placeholders of media."""
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from _special_ids(value)
        elif isinstance(value, int) and str(name).endswith(("_token_id", "_token_index")):
            yield value


# -- what a config says that our paged attention does not do; what no field says is found by running the network without
# weights (models/transformers_probe.py) -------------------------------------------------------------------------------


def _reasons(config: Any, model_class: Any, *, is_multimodal: bool) -> Iterator[str]:
    """Why a model of `model_class` with this config is not served."""
    fields = config.to_dict()  # attributes of configs whose layers differ must not be asked for
    if fields.get("is_encoder_decoder") or fields.get("add_cross_attention"):
        yield "it has an encoder, or cross attention; only decoders are served"
    parts = _other_parts(config)
    if is_multimodal:
        fields = config.get_text_config().to_dict()
        parts = [name for name in parts if "audio" in name and getattr(config, name, None) is not None]
        if getattr(config, "image_token_id", None) is None:
            yield "its config has no image_token_id, in whose place rows of an image stand"
    if parts:
        yield (f"it is more than a text{' and image' * is_multimodal} model ({', '.join(parts)}); take a checkpoint of "
               f"text{' and images' * is_multimodal} alone")
    if keeps_states(model_class):
        yield "its layers keep a state of another kind than keys and values (mamba, linear attention)"
    others = sorted(set(fields.get("layer_types") or ()) - _ATTENDING)
    if others:
        yield f"its layer_types name {', '.join(map(repr, others))}; served are {', '.join(sorted(_ATTENDING))}"
    if fields.get("kv_lora_rank"):
        yield f"its attention is latent (kv_lora_rank {fields['kv_lora_rank']})"
    if fields.get("num_kv_shared_layers"):
        yield f"layers share keys and values (num_kv_shared_layers {fields['num_kv_shared_layers']})"
    if fields.get("attn_logit_softcapping"):
        yield (f"it caps attention's logits softly (attn_logit_softcapping {fields['attn_logit_softcapping']}), which "
               "the platform's attention does not")
    if fields.get("alibi"):
        yield "its positions are a bias on attention (alibi)"
    if fields.get("is_causal") is False or fields.get("use_bidirectional_attention"):
        yield "it attends in both directions"
    # The file of a class with a tower may have no attention of its own; its decoder's is found by running it.
    if not is_multimodal and not calls_attention_by_name(model_class):
        yield "its attention does not go through transformers' attention interface"


def _other_parts(config: Any) -> list[str]:
    """Names of the sub-configs that are of no text model."""
    return [name for name in config.sub_configs if any(part in name for part in ("text", "vision", "audio", "vq"))]


def _growing_rope(config: Any) -> tuple[str, int] | None:
    """(kind, positions) of a rotary embedding that depends on the longest position of a batch beyond `positions`."""
    for rope in _ropes(config):
        kind = rope.get("rope_type")
        if kind in _GROWING_ROPES:
            return kind, int(rope.get("original_max_position_embeddings") or config.max_position_embeddings)
    return None


def _without_growth(config: Any) -> Any:
    """A copy whose rotary embedding looks at no values of positions: a run without weights has none."""
    copied = copy.deepcopy(config)
    for rope in _ropes(copied.get_text_config()):
        if rope.get("rope_type") in _GROWING_ROPES:
            rope["rope_type"] = "default"
    return copied


def _ropes(config: Any) -> list[dict[str, Any]]:
    """The rotary embedding's parameters, or those of each type of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return [parameters, *(of_layer for of_layer in parameters.values() if isinstance(of_layer, dict))]
