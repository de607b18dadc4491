"""Offline multimodal batch inference on Ascend NPUs, CPUs and CUDA. Public names load on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from npu_runner.config import RunnerConfig
    from npu_runner.llm import LLM
    from npu_runner.request.pooling_params import PoolingParams
    from npu_runner.request.repetition_detection import RepetitionDetectionParams
    from npu_runner.request.sampling_params import SamplingParams
    from npu_runner.request.structured_outputs import StructuredOutputsParams

__version__ = "0.6.0"
__all__ = ["LLM", "PoolingParams", "RepetitionDetectionParams", "RunnerConfig", "SamplingParams",
           "StructuredOutputsParams", "__version__"]

_HOMES = {
    "LLM": "npu_runner.llm",
    "PoolingParams": "npu_runner.request.pooling_params",
    "RepetitionDetectionParams": "npu_runner.request.repetition_detection",
    "RunnerConfig": "npu_runner.config",
    "SamplingParams": "npu_runner.request.sampling_params",
    "StructuredOutputsParams": "npu_runner.request.structured_outputs",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    from npu_runner.threads import wait_briefly

    wait_briefly()  # torch comes with it
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
