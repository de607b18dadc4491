"""The names that vLLM's scripts import from `vllm.sampling_params`."""

from npu_runner.request.repetition_detection import RepetitionDetectionParams
from npu_runner.request.sampling_params import SamplingParams
from npu_runner.request.structured_outputs import StructuredOutputsParams

__all__ = ["RepetitionDetectionParams", "SamplingParams", "StructuredOutputsParams"]
