"""vLLM's names of settings in ours: what means the same is renamed, what asks for nothing is left out, the rest is
refused with its counterpart. Knows no model.

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
_ANY = object()
_RENAMED = {"gpu_memory_utilization": "memory_utilization", "kv_cache_memory_bytes": "kv_cache_bytes",
            "allowed_local_media_path": "allowed_media_dir"}
_PROCESSOR_KWARGS = {
    "min_pixels": "image_min_pixels", "max_pixels": "image_max_pixels", "fps": "video_fps",
    "num_frames": "video_num_frames", "max_frames": "video_max_frames"}
_TASKS = {"generate": {"runner": "generate"}, "embedding": {"task": "embed"}}
_HARMLESS: dict[str, tuple[tuple[Any, ...], str]] = {
    "trust_remote_code": ((False,), "no code of a checkpoint is ever run; docs/models.md says which models are served"),
    "disable_log_stats": ((_ANY,), ""),
    "tokenizer_mode": (("auto", "hf"), "tokenizer.json of the checkpoint is read"),
    "tokenizer_revision": ((), "the tokenizer is the checkpoint's; revision names its version"),
    "skip_tokenizer_init": ((False,), "give token ids as prompts, and SamplingParams(detokenize=False)"),
    "cpu_offload_gb": ((0,), "weights stay on the devices; use more of them, tensor_parallel_size"),
    "enable_chunked_prefill": ((True,), "long prompts are always computed in chunks, of max_num_batched_tokens"),
    "disable_custom_all_reduce": ((_ANY,), ""),
    "max_seq_len_to_capture": ((), "graphs serve contexts of any length; graph_batch_sizes says how many rows"),
    "use_v2_block_manager": ((_ANY,), ""),
    "hf_config_path": ((), "config.json lies in the folder of the checkpoint"),
    "hf_overrides": (({},), "change config.json in a copy of the checkpoint"),
    "hf_token": ((False,), "the variable HF_TOKEN is read"),
    "download_dir": ((), "the variable HF_HOME names the folder of downloads"),
    "config_format": (("auto", "hf"), "config.json is read"),
    "generation_config": (("auto",), "generation_config.json is read; SamplingParams say otherwise"),
    "override_generation_config": (({},), "give SamplingParams"),
    "model_impl": (("auto",), "docs/generic.md says when transformers' code is taken"),
    "enable_lora": ((False,), "lora=PATH merges one adapter for all requests"),
    "pipeline_parallel_size": ((1,), "use tensor_parallel_size, and data_parallel_size"),
    "distributed_executor_backend": (("mp", "uni"), "ranks are processes of this host; batch --ray uses many hosts"),
    "compilation_config": (({}, 0), "graph_mode, graph_batch_sizes and graph_prefill_sizes say what is captured"),
    "structured_outputs_config": (({},), "the backend is llguidance; docs/structured.md says what it takes"),
    "guided_decoding_backend": (("auto", "guidance"), "the backend is llguidance; docs/structured.md"),
    "num_gpu_blocks_override": ((), "kv_cache_bytes sets the size of the cache"),
    "rope_scaling": (({},), "change config.json in a copy of the checkpoint"),
    "rope_theta": ((), "change config.json in a copy of the checkpoint"),
    "disable_sliding_window": ((False,), "windows of a model are served"),
    "enable_sleep_mode": ((False,), "close the LLM, and load it again"),
    "disable_cascade_attn": ((_ANY,), ""),
    "pooler_config": ((), "modules.json of the checkpoint says how vectors are pooled"),
    "override_pooler_config": ((), "modules.json of the checkpoint says how vectors are pooled"),
    "logits_processors": ((), "SamplingParams have logit_bias, bad_words, allowed_token_ids and structured_outputs"),
    "served_model_name": ((_ANY,), ""),
    "mm_processor_cache_gb": ((), "vision_cache_bytes is the cache of images, of their embeddings"),
    "disable_mm_preprocessor_cache": ((False,), "vision_cache_bytes=0 keeps no image"),
    "interleave_mm_strings": ((False,), "write messages in parts, in the order in which they are to be seen"),
    "skip_mm_profiling": ((False,), "kv_cache_bytes sets what would be measured"),
    "scheduling_policy": (("fcfs",), "requests are served in their order"),
    "preemption_mode": (("recompute",), "a preempted sequence is computed again"),
    "allowed_media_domains": (([],), "nothing is downloaded; fetch images before"),
    "additional_config": (({},), "graph_mode, graph_batch_sizes and the other options of docs/options.md say it"),
    "kv_transfer_config": (({},), "prompts are computed by the engine that answers them"),
    "enable_prompt_embeds": ((False,), "prompts are text, token ids, images and videos"),
    "logprobs_mode": (("raw_logprobs",), "log probabilities are those of the model's own distribution"),
    "reward": ((), "classifiers are served: LLM.classify, /v1/classify"),
}
"""Each setting of vLLM's that is not ours: values that ask for nothing beside None, and what to do instead."""


def own_settings(model: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of an `LLM` under our names, from ours and vLLM's. Raises ConfigError for one that is not served."""
    ours = {name: field for kind in (RunnerConfig, PreprocessingOptions, ReplicaOptions)
            for name, field in flat_fields(kind).items()}
    found: dict[str, Any] = {}
    for name, value in given.items():
        for own, own_value in _translated(model, name, value).items():
            if own in found or (own != name and own in given):
                raise ConfigError(f"{name}: {own} says the same; set one of them")
            # None asks for nothing, in vLLM as here.
            if own_value is not None or own not in ours or ours[own].default is None:
                found[own] = own_value
    return found


def _translated(model: str, name: str, value: Any) -> dict[str, Any]:
    """None, one or several of our settings."""
    if name in _SPECIAL:
        return _SPECIAL[name](model, value)
    if name in _RENAMED:
        return {_RENAMED[name]: value}
    if name not in _HARMLESS:
        return {name: value}  # ours, or nobody's
    harmless, instead = _HARMLESS[name]
    if value is None or any(item is _ANY or _is_same(value, item) for item in harmless):
        return {}
    raise ConfigError(f"{name}={shown(value)} is not served: {instead}")


def _is_same(value: Any, item: Any) -> bool:
    return isinstance(value, bool) == isinstance(item, bool) and bool(value == item)


def _device(_: str, value: Any) -> dict[str, Any]:
    """vLLM's older name. A number behind it chooses a device, which only the platform's variable does here."""
    if value is None or value == "auto":
        return {}
    check_name(str(value))  # names that variable, where there is one
    return {"platform": str(value)}


def _reasoning_parser(_: str, value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if value not in ("auto", "none") and isinstance(value, str):
        raise ConfigError(f"reasoning_parser={shown(value)} is not served: auto reads the tags from the checkpoint's "
                          "template and tokenizer, none leaves the reasoning in the text")
    return {"reasoning_parser": value}


def _load_format(_: str, value: Any) -> dict[str, Any]:
    return {} if value in (None, "auto") else {"load_format": value}


def _tokenizer(model: str, value: Any) -> dict[str, Any]:
    if value is None or str(value).rstrip("/") == model.rstrip("/"):
        return {}
    raise ConfigError(f"tokenizer={shown(str(value))} is not served: the tokenizer is the checkpoint's; put its "
                      "tokenizer.json into a copy of the folder")


def _quantization(_: str, value: Any) -> dict[str, Any]:
    """A format's name asks for what the checkpoint says of itself (`check_format`). fp8 is no such name: it makes such
    weights of others, too."""
    is_named = isinstance(value, str) and value in FORMATS
    return {} if value is None or is_named else {"quantization": value}


def _swap_space(_: str, value: Any) -> dict[str, Any]:
    if value:
        logger.warning("swap_space %s: there is none here; a preempted sequence is computed again, mostly out of the "
                       "prefix cache", value)
    return {}


def _max_logprobs(_: str, value: Any) -> dict[str, Any]:
    if value is None or (type(value) is int and 0 <= value <= MAX_TOP_LOGPROBS):
        return {}
    raise ConfigError(f"max_logprobs={shown(value)} is not served: a request may ask for {MAX_TOP_LOGPROBS} at most")


def _task(_: str, value: Any) -> dict[str, Any]:
    """vLLM's older words; what is left is ours, or nobody's."""
    return {} if value is None else _TASKS.get(value, {"task": value})


def _processor_kwargs(_: str, value: Any) -> dict[str, Any]:
    try:
        given = checked_kwargs({} if value is None else value)
    except RequestError as error:  # not a request: a setting
        raise ConfigError(error.message) from error
    return {_PROCESSOR_KWARGS[name]: number for name, number in given.items()}


def _limit_of_kinds(_: str, value: Any) -> dict[str, Any]:
    """vLLM's options of a kind, {"image": {"count": 2}}, as far as they count."""
    if not isinstance(value, Mapping):
        return {"limit_mm_per_prompt": value}
    counts = {}
    for kind, most in value.items():
        if isinstance(most, Mapping):
            if set(most) != {"count"}:
                raise ConfigError(f"limit_mm_per_prompt.{kind}: {shown(most)} is not served: the largest image is "
                                  "measured (image_max_pixels); give count alone")
            most = most["count"]
        counts[kind] = most
    return {"limit_mm_per_prompt": counts}


_SPECIAL: dict[str, Callable[[str, Any], dict[str, Any]]] = {
    "load_format": _load_format, "tokenizer": _tokenizer, "swap_space": _swap_space, "max_logprobs": _max_logprobs,
    "task": _task, "quantization": _quantization, "mm_processor_kwargs": _processor_kwargs,
    "limit_mm_per_prompt": _limit_of_kinds, "device": _device, "reasoning_parser": _reasoning_parser}
