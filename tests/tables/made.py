"""Answers as a job writes them, rows as `rows` makes them, and tables as others read them. Holds no tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from npu_runner.batch.files.input_file import InputFile
from npu_runner.batch.files.manifest import Manifest
from npu_runner.batch.rows.chat import ChatForm
from npu_runner.batch.rows.completions import CompletionForm
from npu_runner.batch.rows.endpoint import AnswerForm
from npu_runner.batch.rows.openai_response import JobStamp, answer_row, error_row
from npu_runner.batch.rows.pooled import ClassifyForm, EmbeddingForm
from npu_runner.batch.rows.scores import RerankForm, ScoreForm
from npu_runner.errors import RequestError
from npu_runner.request.logprobs import CompactLogprobs
from npu_runner.request.outputs import CompletionOutput, RequestOutput
from npu_runner.request.pooling_params import Classes
from npu_runner.tables.make_rows import MadeRows, make_rows
from npu_runner.tables.make_table import MadeTable, make_table
from npu_runner.tables.options import RowsOptions, TableOptions

STAMP = JobStamp(created=1_700_000_000, system_fingerprint="fp_1", model_name="shapes-vl", splits_reasoning=True)


def rows(
    output: Path, *sources: Path | str, prompt: str | None = "What is this?", **options: Any
) -> list[dict[str, Any]]:
    """What `npu-runner rows` writes."""
    if "template" in options or "prompt_file" in options:
        prompt = None
    made(output, *sources, prompt=prompt, **options)
    return [json.loads(line) for line in output.read_bytes().splitlines()]


def made(output: Path, *sources: Path | str, **options: Any) -> MadeRows:
    return make_rows([str(source) for source in sources], RowsOptions(output=str(output), **options))


def table(answers: Path, output: Path, rows: Path | None = None, **options: Any) -> MadeTable:
    """`rows`: the job's, for `--input`."""
    return make_table(
        str(answers), TableOptions(output=str(output), input=None if rows is None else str(rows), **options)
    )


def shown(row: dict[str, Any]) -> list[str]:
    """Addresses of a chat row."""
    content = row["body"]["messages"][-1]["content"]
    return (
        [part[part["type"]]["url"] for part in content if part["type"] != "text"] if isinstance(content, list) else []
    )


def asked(row: dict[str, Any]) -> str:
    content = row["body"]["messages"][-1]["content"]
    return content if isinstance(content, str) else content[-1]["text"]


def completion(
    text: str,
    index: int = 0,
    *,
    num_tokens: int = 3,
    finish_reason: str = "stop",
    logprobs: list[float] | None = None,
    stop_reason: str | None = None,
    reasoning: str | None = None,
) -> CompletionOutput:
    positions = None
    if logprobs is not None:
        values, ones = np.array(logprobs, dtype=np.float32), np.ones(len(logprobs), dtype=np.int32)
        positions = CompactLogprobs(ones[:, None], values[:, None], ones, lambda token_id: ("x", b"x"))
    return CompletionOutput(
        index=index,
        text=text,
        token_ids=[1] * num_tokens,
        finish_reason=finish_reason,
        logprobs=positions,
        stop_reason=stop_reason,
        reasoning_content=reasoning,
    )


def answered(custom_id: str, *completions: CompletionOutput, num_prompt_tokens: int = 7) -> bytes:
    output = RequestOutput(
        request_id=custom_id, completions=list(completions), num_prompt_tokens=num_prompt_tokens, num_cached_tokens=0
    )
    return answer_row(output, custom_id=custom_id, form=ChatForm(), stamp=STAMP)


def embedded(custom_id: str, *vectors: list[float], is_base64: bool = False) -> bytes:
    completions = [
        CompletionOutput(
            index=index, text="", token_ids=[], finish_reason="stop", pooled=np.array(vector, dtype=np.float32)
        )
        for index, vector in enumerate(vectors)
    ]
    output = RequestOutput(request_id=custom_id, completions=completions, num_prompt_tokens=5, num_cached_tokens=0)
    return answer_row(output, custom_id=custom_id, form=EmbeddingForm(is_base64=is_base64), stamp=STAMP)


def failed(custom_id: str | None, code: str = "media_missing", line: int = 1) -> bytes:
    return error_row(RequestError(code=code, message=f"it is {code}"), custom_id=custom_id, line=line)


def request(custom_id: str, **body: Any) -> bytes:
    row = {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": [{"role": "user", "content": "?"}], **body},
    }
    return json.dumps(row).encode() + b"\n"


CLASSES = Classes(labels=("bad", "good"), activation="softmax")
FORMS: dict[str, Callable[[], AnswerForm]] = {
    "/v1/chat/completions": ChatForm,
    "/v1/completions": CompletionForm,
    "/v1/embeddings": EmbeddingForm,
    "/v1/score": ScoreForm,
    "/v1/rerank": RerankForm,
    "/v1/classify": lambda: ClassifyForm(classes=CLASSES, has_logits=False),
}
"""The form of a plain answer, by endpoint."""
POOLED = {
    "/v1/embeddings": [[1.0, 2.0], [3.0, 4.0]],
    "/v1/score": [[0.5], [-1.0]],
    "/v1/rerank": [[0.5], [2.0]],
    "/v1/classify": [[0.0, 2.0], [1.0, 1.0]],
}
"""Two pooled answers of each endpoint that has no texts."""


def answered_by(url: str, custom_id: str) -> bytes:
    """The result row of an endpoint with two answers, as a job writes it."""
    completions = [completion(f"text {index}", index) for index in range(2)]
    if url in POOLED:
        completions = [CompletionOutput(index, "", [], "stop", pooled=np.array(values, dtype=np.float32))
                       for index, values in enumerate(POOLED[url])]  # fmt: skip
    output = RequestOutput(request_id=custom_id, completions=completions, num_prompt_tokens=5, num_cached_tokens=0)
    return answer_row(output, custom_id=custom_id, form=FORMS[url](), stamp=STAMP)


def begun(output: Path, input: Path, **fields: Any) -> None:
    """The manifest of a job that has begun `output` with `input`."""
    with InputFile(str(input), output.parent) as file:
        identity = file.scan().identity
    given = {"created": 1, "model_name": "m", "model_files": {}, "settings": {"x": "y"}, **fields}
    Manifest(input=identity, **given).save(output)
