"""What vLLM's scripts import from `vllm.outputs`, under the same names."""

from npu_runner.request.outputs import (
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from npu_runner.request.pooling_outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
)

__all__ = ["ClassificationOutput", "ClassificationRequestOutput", "CompletionOutput", "EmbeddingOutput",
           "EmbeddingRequestOutput", "PoolingOutput", "PoolingRequestOutput", "RequestOutput", "ScoringOutput",
           "ScoringRequestOutput"]
