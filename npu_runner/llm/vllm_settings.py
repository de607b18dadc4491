"""Translates vLLM's settings into ours: renames, leaves out values that change nothing, and refuses the rest with a
remedy. Knows no model.

docs/from-vllm.md has the same as a table.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from npu_runner.config import RunnerConfig, flat_fields
from npu_runner.engine.checked_format import FORMATS
from npu_runner.errors import ConfigError, RequestError
from npu_runner.platforms import check_name
from npu_runner.prompts.media.processor_kwargs import checked_kwargs
from npu_runner.request.limits import shown
from npu_runner.request.sampling_params import MAX_TOP_LOGPROBS
from npu_runner.serving.options import PreprocessingOptions, ReplicaOptions

logger = logging.getLogger(__name__)
_RENAMED = {"gpu_memory_utilization": "memory_utilization", "kv_cache_memory_bytes": "kv_cache_bytes",
            "allowed_local_media_path": "allowed_media_dir"}
_PROCESSOR_KWARGS = {
    "min_pixels": "image_min_pixels", "max_pixels": "image_max_pixels", "fps": "video_fps",
    "num_frames": "video_num_frames", "max_frames": "video_max_frames"}
_TASKS = {"generate": {"runner": "generate"}, "embedding": {"task": "embed"}}
_IGNORED = frozenset(("disable_log_stats", "use_v2_block_manager", "disable_cascade_attn", "served_model_name"))
_COPY = "change config.json in a copy of the checkpoint"
_POOLING = "modules.json of the checkpoint says how vectors are pooled"
_HARMLESS: dict[str, tuple[tuple[Any, ...], str]] = {
    "trust_remote_code": ((False,), "no code of a checkpoint is ever run; docs/models.md says which models are served"),
    "tokenizer_mode": (("auto", "hf"), "tokenizer.json of the checkpoint is read"),
    "tokenizer_revision": ((), "the tokenizer is the checkpoint's; revision names its version"),
    "skip_tokenizer_init": ((False,), "give token ids as prompts, and SamplingParams(detokenize=False)"),
    "cpu_offload_gb": ((0,), "weights stay on the devices; use more of them, tensor_parallel_size"),
    "enable_chunked_prefill": ((True,), "long prompts are always computed in chunks, of max_num_batched_tokens"),
    "max_seq_len_to_capture": ((), "graphs serve contexts of any length; graph_batch_sizes sets the numbers of rows"),
    "hf_config_path": ((), "config.json lies in the folder of the checkpoint"),
    "hf_overrides": (({},), _COPY),
    "rope_scaling": (({},), _COPY),
    "rope_theta": ((), _COPY),
    "hf_token": ((False,), "the variable HF_TOKEN is read"),
    "download_dir": ((), "the variable HF_HOME names the folder of downloads"),
    "config_format": (("auto", "hf"), "config.json is read"),
    "generation_config": (("auto",), "generation_config.json is read; SamplingParams say otherwise"),
    "override_generation_config": (({},), "give SamplingParams"),
    "model_impl": (("auto",), "docs/generic.md says when transformers' code is used"),
    "enable_lora": ((False,), "lora=PATH merges one adapter for all requests"),
    "pipeline_parallel_size": ((1,), "use tensor_parallel_size, and data_parallel_size"),
    "distributed_executor_backend": (("mp", "uni"), "ranks are processes of this host; batch --ray uses many hosts"),
    "compilation_config": (({}, 0), "graph_mode, graph_batch_sizes and graph_prefill_sizes say what is captured"),
    "structured_outputs_config": (({},), "the backend is llguidance; docs/structured.md says what it accepts"),
    "guided_decoding_backend": (("auto", "guidance"), "the backend is llguidance; docs/structured.md"),
    "num_gpu_blocks_override": ((), "kv_cache_bytes sets the size of the cache"),
    "disable_sliding_window": ((False,), "windows of a model are served"),
    "enable_sleep_mode": ((False,), "close the LLM, and load it again"),
    "pooler_config": ((), _POOLING),
    "override_pooler_config": ((), _POOLING),
    "logits_processors": ((), "SamplingParams have logit_bias, bad_words, allowed_token_ids and structured_outputs"),
    "mm_processor_cache_gb": ((), "vision_cache_bytes is the cache of images, of their embeddings"),
    "disable_mm_preprocessor_cache": ((False,), "vision_cache_bytes=0 keeps no image"),
    "interleave_mm_strings": ((False,), "write messages in parts, in the order in which the model is to see them"),
    "skip_mm_profiling": ((False,), "kv_cache_bytes sets what would be measured"),
    "scheduling_policy": (("fcfs",), "requests are served in their order"),
    "preemption_mode": (("recompute",), "a preempted sequence is computed again"),
    "allowed_media_domains": (([],), "nothing is downloaded; fetch images before"),
    "additional_config": (({},), "graph_mode, graph_batch_sizes and the other options of docs/options.md set it"),
    "kv_transfer_config": (({},), "prompts are computed by the engine that answers them"),
    "enable_prompt_embeds": ((False,), "prompts are text, token ids, images and videos"),
    "reward": ((), "classifiers are served: LLM.classify, /v1/classify"),
    "max_logprobs": (tuple(range(-1, MAX_TOP_LOGPROBS + 1)), f"a request may have {MAX_TOP_LOGPROBS} at most, or with "
                     "-1 all; max_logprobs_per_request bounds them"),
}
"""Settings of vLLM that are not ours: the values that change nothing, beside None, and the remedy for all others."""


def own_settings(model: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of an `LLM` under our names, from ours and vLLM's. Raises ConfigError for one that is not served."""
    ours = {name: field for kind in (RunnerConfig, PreprocessingOptions, ReplicaOptions)
            for name, field in flat_fields(kind).items()}
    found: dict[str, Any] = {}
    for name, value in given.items():
        for own, own_value in _translated(model, name, value).items():
            if own in found or (own != name and own in given):
                raise ConfigError(f"{name}: {own} says the same; set one of them")
            # None changes nothing, in vLLM as here.
            if own_value is not None or own not in ours or ours[own].default is None:
                found[own] = own_value
    return found


def _translated(model: str, name: str, value: Any) -> dict[str, Any]:
    """None, one or several of our settings."""
    if name in _IGNORED or (value is None and (name in _HARMLESS or name in _SPECIAL)):
        return {}
    if name in _SPECIAL:
        return _SPECIAL[name](model, value)
    if name not in _HARMLESS:
        return {_RENAMED.get(name, name): value}  # ours, or unknown
    harmless, instead = _HARMLESS[name]
    if any(isinstance(value, bool) == isinstance(item, bool) and bool(value == item) for item in harmless):
        return {}
    raise ConfigError(f"{name}={shown(value)} is not served: {instead}")


def _device(_: str, value: Any) -> dict[str, Any]:
    """vLLM's older name. A number behind it chooses a device, which only the platform's variable does here."""
    if value == "auto":
        return {}
    check_name(str(value))  # names that variable, where there is one
    return {"platform": str(value)}


def _reasoning_parser(_: str, value: Any) -> dict[str, Any]:
    if value not in ("auto", "none") and isinstance(value, str):
        raise ConfigError(f"reasoning_parser={shown(value)} is not served: auto reads the tags from the checkpoint's "
                          "template and tokenizer, none leaves the reasoning in the text")
    return {"reasoning_parser": value}


def _tokenizer(model: str, value: Any) -> dict[str, Any]:
    if str(value).rstrip("/") == model.rstrip("/"):
        return {}
    raise ConfigError(f"tokenizer={shown(str(value))} is not served: the tokenizer is the checkpoint's; put its "
                      "tokenizer.json into a copy of the folder")


def _swap_space(_: str, value: Any) -> dict[str, Any]:
    if value:
        logger.warning("swap_space %s: there is none here; a preempted sequence is computed again, mostly out of the "
                       "prefix cache", value)
    return {}


def _processor_kwargs(_: str, value: Any) -> dict[str, Any]:
    try:
        return {_PROCESSOR_KWARGS[name]: number for name, number in checked_kwargs(value).items()}
    except RequestError as error:  # a setting, no request
        raise ConfigError(error.message) from error


def _limit_of_kinds(_: str, value: Any) -> dict[str, Any]:
    """vLLM's options of a kind, {"image": {"count": 2}}, as far as they count."""
    if not isinstance(value, Mapping):
        return {"limit_mm_per_prompt": value}
    for kind, most in value.items():
        if isinstance(most, Mapping) and set(most) != {"count"}:
            raise ConfigError(f"limit_mm_per_prompt.{kind}: {shown(most)} is not served: the largest image is "
                              "measured (image_max_pixels); give count alone")
    return {"limit_mm_per_prompt": {kind: most["count"] if isinstance(most, Mapping) else most
                                    for kind, most in value.items()}}


_SPECIAL: dict[str, Callable[[str, Any], dict[str, Any]]] = {
    "load_format": lambda _, value: {} if value == "auto" else {"load_format": value},
    # A format's name repeats what the checkpoint says of itself (`check_format`); fp8 converts other weights, too.
    "quantization": lambda _, value: {} if isinstance(value, str) and value in FORMATS else {"quantization": value},
    "task": lambda _, value: _TASKS.get(value, {"task": value}),  # vLLM's older words
    "tokenizer": _tokenizer, "swap_space": _swap_space, "mm_processor_kwargs": _processor_kwargs,
    "limit_mm_per_prompt": _limit_of_kinds, "device": _device, "reasoning_parser": _reasoning_parser}
