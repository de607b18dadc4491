"""vLLM's settings become ours: renamed, left out where they ask for nothing, or refused with their counterpart."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import npu_runner
import npu_runner.config
from npu_runner.config import RunnerConfig
from npu_runner.errors import ConfigError
from npu_runner.llm import vllm_settings
from npu_runner.llm.vllm_settings import own_settings
from npu_runner.serving.options import PreprocessingOptions, ReplicaOptions

FLAT = {**npu_runner.config.flat_fields(RunnerConfig), **npu_runner.config.flat_fields(PreprocessingOptions),
        **npu_runner.config.flat_fields(ReplicaOptions)}


@pytest.mark.parametrize("given", [
    {"quantization": "awq"}, {"quantization": "compressed-tensors"},
    {"trust_remote_code": False, "quantization": None, "disable_log_stats": True, "load_format": "auto"},
    {"tokenizer": "folder/model", "tokenizer_mode": "auto", "skip_tokenizer_init": False, "cpu_offload_gb": 0.0},
    {"max_logprobs": 20, "task": None, "mm_processor_kwargs": None, "pipeline_parallel_size": 1, "swap_space": 0},
    {"dtype": None, "seed": None, "max_num_seqs": None, "enable_prefix_caching": None, "compilation_config": {}},
    {"limit_mm_per_prompt": None, "speculative_config": None, "enable_lora": False},
    {"kv_transfer_config": None, "additional_config": {}, "enable_prompt_embeds": False, "device": "auto",
     "logprobs_mode": "raw_logprobs", "reasoning_parser": None}, {"max_logprobs": -1},
])
def test_what_asks_for_nothing_is_left_out(given: dict[str, Any]) -> None:
    assert RunnerConfig.from_keywords("m", **own_settings("folder/model", given)) == RunnerConfig(model="m")


@pytest.mark.parametrize(("given", "ours"), [
    ({"gpu_memory_utilization": 0.5}, {"memory_utilization": 0.5}),
    ({"kv_cache_memory_bytes": 1 << 30}, {"kv_cache_bytes": 1 << 30}),
    ({"kv_cache_bytes": "64M", "vision_cache_bytes": "1K"}, {"kv_cache_bytes": 64 << 20, "vision_cache_bytes": 1024}),
    ({"dtype": "half"}, {"dtype": "float16"}), ({"dtype": "float"}, {"dtype": "float32"}),
    ({"disable_custom_all_reduce": True}, {"disable_custom_all_reduce": True}),
    ({"dtype": torch.bfloat16}, {"dtype": "bfloat16"}), ({"load_format": "dummy"}, {"load_format": "dummy"}),
    ({"task": "embedding"}, {"task": "embed"}), ({"task": "score"}, {"task": "score"}),
    ({"task": "generate"}, {"runner": "generate"}), ({"quantization": "fp8"}, {"quantization": "fp8"}),
    ({"mm_processor_kwargs": {"min_pixels": 784, "max_pixels": 9999, "fps": 1}},
     {"image_min_pixels": 784, "image_max_pixels": 9999, "video_fps": 1}),
    ({"mm_processor_kwargs": {"num_frames": 8, "max_frames": None}}, {"video_num_frames": 8}),
    ({"limit_mm_per_prompt": {"image": {"count": 2}, "video": 1}}, {"limit_mm_per_prompt": {"image": 2, "video": 1}}),
    ({"limit_mm_per_prompt": {"image": 100}}, {"limit_mm_per_prompt": {"image": 100}, "max_images_per_prompt": 100}),
    ({"enforce_eager": True, "max_model_len": 64, "tensor_parallel_size": 2},
     {"enforce_eager": True, "max_model_len": 64, "tensor_parallel_size": 2}),
])  # fmt: skip
def test_what_means_the_same_is_ours(given: dict[str, Any], ours: dict[str, Any]) -> None:
    found = RunnerConfig.from_keywords("m", **own_settings("m", given))
    assert found == RunnerConfig.from_keywords("m", **ours)
    assert found != RunnerConfig(model="m")


@pytest.mark.parametrize(("given", "words"), [
    ({"quantization": "int4"}, "quantization: 'int4' is not one of auto, int8, fp8"),
    ({"tokenizer": "other/model"}, "tokenizer='other/model' is not served: the tokenizer is the checkpoint's"),
    ({"max_logprobs": 100}, "max_logprobs=100 is not served: a request may have 20 at most"),
    ({"pipeline_parallel_size": 2}, "use tensor_parallel_size"),
    ({"pipeline_parallel_size": True}, "use tensor_parallel_size"),
    ({"task": "reward"}, "task: 'reward' is not one of auto, embed, score"),
    ({"limit_mm_per_prompt": {"image": {"count": 1, "width": 9}}}, "the largest image is measured"),
    ({"mm_processor_kwargs": {"size": 1}}, "mm_processor_kwargs.size: not supported; fps, num_frames"),
    ({"gpu_memory_utilization": 0.5, "memory_utilization": 0.6}, "memory_utilization says the same"),
    ({"mm_processor_kwargs": {"fps": 1}, "video_fps": 2}, "video_fps says the same"),
    ({"device": "cuda:1"}, "to choose a device set CUDA_VISIBLE_DEVICES=1"),
    ({"device": "npu:3"}, "to choose a device set ASCEND_RT_VISIBLE_DEVICES=3"),
    ({"platform": "npu:"}, "to choose a device set ASCEND_RT_VISIBLE_DEVICES=0"),
    ({"device": "cpu:1"}, "platform: 'cpu:1' is not one of auto, npu, cuda, cpu"),
    ({"device": "tpu"}, "platform: 'tpu' is not one of auto, npu, cuda, cpu"),
    ({"reasoning_parser": "qwen3"}, "auto reads the tags"),
    ({"additional_config": {"ascend_scheduler_config": {}}}, "docs/options.md"),
    ({"enable_prompt_embeds": True}, "prompts are text, token ids"),
])  # fmt: skip
def test_what_is_not_served_is_refused_with_what_to_do_instead(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        RunnerConfig.from_keywords("m", **own_settings("m", given))
    assert words in str(refused.value)
    assert len(str(refused.value)) < 200, "and not with all names"


def test_swap_space_is_taken_with_a_note(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger=vllm_settings.__name__):
        assert own_settings("m", {"swap_space": 4}) == {}
    assert ["swap_space 4: there is none here" in record.getMessage() for record in caplog.records] == [True]


def test_each_name_has_one_meaning_and_a_counterpart() -> None:
    names = [*vllm_settings._HARMLESS, *vllm_settings._IGNORED, *vllm_settings._RENAMED, *vllm_settings._SPECIAL]
    assert len(names) == len(set(names))
    assert not set(vllm_settings._HARMLESS) & set(FLAT), "ours are read by their own code"
    of_llm = {"allowed_media_dir"}  # a setting of LLM alone: a job has an option of that name
    assert {*vllm_settings._RENAMED.values(), *vllm_settings._PROCESSOR_KWARGS.values()} - of_llm <= set(FLAT)
    for name, (_, instead) in vllm_settings._HARMLESS.items():
        assert instead, f"{name}: say what to do instead"


def test_public_names_can_be_completed() -> None:
    assert set(npu_runner.__all__) <= set(dir(npu_runner))
