"""Bounds of a model: the settings that are known before its weights load, then the blocks of its cache, the size of a
step, and the prompts that it accepts. Knows nothing of callers or of running requests.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

from npu_runner.checkpoint.model_config import ModelConfig, VectorPooling
from npu_runner.checkpoint.quantization import arithmetic
from npu_runner.config import RunnerConfig
from npu_runner.core.block_manager import BlockManager
from npu_runner.core.scheduler import SchedulerLimits
from npu_runner.core.state_snapshots import StateSnapshots, state_alignment
from npu_runner.errors import RequestError
from npu_runner.layers.expert_weights import FORMS_OF_EXPERTS
from npu_runner.layers.parallel import TensorParallel
from npu_runner.platforms import AUTO, find_platform, pick_platform, platform_of_host
from npu_runner.platforms.platform import Platform
from npu_runner.prompts.processor import ChatProcessor
from npu_runner.prompts.text.tokenizer import check_prompt_length, check_sampling_ids
from npu_runner.request.pooling_params import PoolingParams
from npu_runner.request.prompt_inputs import PromptInputs
from npu_runner.request.sampling_params import SamplingParams, check_hidden_states
from npu_runner.runner.base import RunnerInfo
from npu_runner.runner.settings import Settings, check_expert_parallel, model_needs, resolve_settings
from npu_runner.strategies import OpenedCheckpoint

logger = logging.getLogger(__name__)

LARGER_SHARE = 8
"""An image may be larger than the start's by this part: of the shapes between, some round up."""


def settings_before_loading(checkpoint: OpenedCheckpoint) -> dict[str, str]:
    """The part of `LLMEngine.describe` that follows from settings and files.

    Raises ConfigError for settings that the model cannot do, and that the platform cannot, where this process is to run
    the model.
    """
    config, pooling = checkpoint.config, checkpoint.model_config.pooling
    check_expert_parallel(config, checkpoint.model_config)
    num_ranks = config.parallel.tensor_parallel_size
    known = {"tensor_parallel_size": str(num_ranks), "seed": str(config.seed)}
    if config.parallel.enable_expert_parallel and num_ranks > 1:
        known["enable_expert_parallel"] = "true"
    if config.logprobs_mode != RunnerConfig.logprobs_mode:
        known["logprobs_mode"] = config.logprobs_mode
    if config.max_model_len is not None:
        known["max_model_len"] = str(config.max_model_len)
    if checkpoint.adapter is not None:
        known["lora"] = checkpoint.adapter.fingerprint
    if pooling is not None:
        known["pooling"] = pooling.describe()
    if num_ranks == 1:  # else this process loads no platform: ranks do
        platform = pick_platform(config.platform)
        platform.fallbacks = find_fallbacks(checkpoint)
        settings = resolve_settings(config, checkpoint.model_config, platform, checkpoint.quantization)
        known |= {"platform": platform.name, **settings.describe()}
        forms = checkpoint.multiplied_forms(settings.weight_forms)
        said = arithmetic(checkpoint.quantization, config.quantization, forms)
        if said is not None:
            known["quantization"] = said
    return known


def find_fallbacks(checkpoint: OpenedCheckpoint) -> Mapping[str, str]:
    """`Platform.find_fallbacks` of the platform that a start takes, for all ranks. Sets no device in this process."""
    config, model_config = checkpoint.config, checkpoint.model_config
    platform = platform_of_host(config.platform)
    tp = TensorParallel(0, config.parallel.tensor_parallel_size,
                        has_whole_experts=config.parallel.enable_expert_parallel)
    settings = resolve_settings(config, model_config, platform, checkpoint.quantization)
    forms: Collection[str] = ()
    if config.quantization != "auto":
        forms = [config.quantization]
    elif checkpoint.quantization is not None:
        forms = checkpoint.multiplied_forms(settings.weight_forms)
    forms = {*forms, *(FORMS_OF_EXPERTS[form] for form in forms if form in FORMS_OF_EXPERTS)}
    held = tuple(form for form in settings.weight_forms if form in forms)
    return platform.find_fallbacks(model_needs(settings, model_config, tp, held))


def make_block_manager(info: RunnerInfo, *, enable_prefix_caching: bool) -> BlockManager:
    """The KV cache's, with snapshots of states where the model has such."""
    snapshots = None
    if info.state is not None and enable_prefix_caching:
        if info.state.num_snapshots:
            snapshots = StateSnapshots(info.state.num_snapshots, info.state.first_snapshot,
                                       state_alignment(info.block_size))
        else:
            logger.warning("no snapshot of states is kept, so there is no prefix cache: prompts that begin alike are "
                           "computed anew; max_state_snapshots and the memory ledger say why")
            enable_prefix_caching = False
    return BlockManager(info.num_blocks, info.block_size, enable_prefix_caching=enable_prefix_caching,
                        snapshots=snapshots, sliding_window=info.sliding_window,
                        keys_look_ahead=info.speculative is not None and info.speculative.has_head)


def scheduler_limits(info: RunnerInfo) -> SchedulerLimits:
    """The limits of a step, as memory allows them."""
    return SchedulerLimits(
        max_num_seqs=info.max_num_seqs, max_num_batched_tokens=info.max_num_batched_tokens,
        max_image_tokens=info.max_image_tokens, uses_mrope=info.uses_mrope,
        state_alignment=None if info.state is None else state_alignment(info.block_size),
        state_spares=info.state.spares if info.state is not None and info.state.spares else None)


def warn_of_unsupported_parts(model_config: ModelConfig) -> None:
    """Warn of settings in the checkpoint's files that have no effect here."""
    pooling = model_config.pooling
    if isinstance(pooling, VectorPooling) and pooling.default_prompt is not None:
        logger.warning("the checkpoint's config_sentence_transformers.json puts its prompt %r before every text, which "
                       "is not done here: write it into the texts that need it", pooling.default_prompt)
    if model_config.generation_not_served:
        logger.warning("the checkpoint's generation_config.json asks for what is not done here, answers may differ "
                       "from those it was made for: %s", model_config.generation_not_served)


def known_limits(checkpoint: OpenedCheckpoint) -> Settings:
    """The settings of a start, as far as no memory decides them. A platform that is named need not be one of this host.

    Raises ConfigError for settings that model or platform cannot do.
    """
    platform = _platform_of(checkpoint.config)
    return resolve_settings(checkpoint.config, checkpoint.model_config, platform, checkpoint.quantization)


def _platform_of(config: RunnerConfig) -> Platform:
    return pick_platform(config.platform) if config.platform == AUTO else find_platform(config.platform)


def most_cached_tokens(checkpoint: OpenedCheckpoint, settings: Settings) -> int | None:
    """The longest sequence that the KV cache holds, where its size follows from the settings; None where the device's
    memory decides it, and for models of the generic strategy.

    Raises ConfigError where a given max_model_len does not fit.
    """
    from npu_runner.runner import estimate  # imports every layer

    platform = _platform_of(checkpoint.config)
    return estimate.most_cached_tokens(checkpoint.strategy, checkpoint.config, checkpoint.model_config, settings,
                                       platform)


def check_request(prompt: PromptInputs, params: SamplingParams | PoolingParams, processor: ChatProcessor,
                  model_config: ModelConfig, max_model_len: int) -> None:
    """Raises RequestError when the request cannot be served. `params`: as `ChatProcessor.resolve_params` made them."""
    processor.check_length(prompt, params)
    _check_prompt(prompt, model_config, max_model_len)
    if isinstance(params, SamplingParams):
        assert params.is_resolved, "ChatProcessor.resolve_params comes first"
        processor.check_thinking(prompt, params)
        check_sampling_ids(params, model_config.vocab_size)
        if params.return_hidden_states:
            num_tokens = min(max_model_len, len(prompt.token_ids) + (params.max_tokens or max_model_len)) - 1
            check_hidden_states(len(model_config.hidden_state_layers), model_config.hidden_size, num_tokens)
    elif params.labels is not None and not processor.end_token_ids(model_config):
        raise RequestError("labels: no file of the checkpoint names an end token, and a label's likelihood contains "
                           "that of an end behind it; write eos_token_id into its generation_config.json",
                           "unsupported_parameter", "labels")


def check_images(prompt: PromptInputs, info: RunnerInfo) -> None:
    """Raises RequestError for an image that is larger than those of the step that the start ran. Only transformers'
    processors make such: no rule bounds their results, and the start tries few shapes of images."""
    for number, image in enumerate(prompt.images if info.max_tower_values else ()):
        for what, size, most in (("tokens", image.num_tokens, info.max_image_tokens),
                                 ("numbers", image.num_tower_values, info.max_tower_values)):
            if size > most + most // LARGER_SHARE:
                raise RequestError(
                    f"images[{number}]: the model's processor makes {size} {what} of it, and the start measured memory "
                    f"for {most}; send it smaller, bound it by max_pixels of mm_processor_kwargs, or load the model "
                    "with a higher max_num_batched_tokens", "image_not_measured")


def _are_below(prompt: PromptInputs, vocab_size: int) -> bool:
    """Whether all its token ids are of the vocabulary. The array that the scheduler needs has the answer sooner than
    the list."""
    try:
        ids_T = prompt.token_array
        return bool(ids_T.min() >= 0 and ids_T.max() < vocab_size)
    except OverflowError:  # no int32
        return False


def _check_prompt(prompt: PromptInputs, model_config: ModelConfig, max_model_len: int) -> None:
    """Raises RequestError for a prompt that is empty or too long, or has token ids or images that the model cannot
    take."""
    length = len(prompt.token_ids)
    if length == 0:
        raise RequestError("the prompt is empty", code="empty_prompt")
    check_prompt_length(length, max_model_len)
    if not _are_below(prompt, model_config.vocab_size):
        raise RequestError(f"a token id is outside 0 to {model_config.vocab_size - 1}", code="invalid_token_id")
    if prompt.images and model_config.image_token_id is None:
        raise RequestError("the model has no vision tower; send text only", code="model_has_no_vision")
