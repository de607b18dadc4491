"""Rows of /v1/embeddings and /v1/classify, a small job that answers them, and vLLM's form of its answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from npu_runner.cli import main as cli
from tests.batch.scripted import read_rows, write_rows

SMALL = ["--platform", "cpu", "--max-model-len", "512", "--kv-cache-bytes", "64M", "--progress", "off"]
IMAGE = ("data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAIAAABLbSncAAAAFElEQVR4nGO8IyfHgA0wYRUdtBIA4FYBKCgC"
         "g6AAAAAASUVORK5CYII=")
MESSAGES = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": IMAGE}},
                                         {"type": "text", "text": "a red circle"}]}]


class Data(BaseModel):
    """vLLM's ClassificationData."""

    model_config = ConfigDict(extra="forbid", strict=True)
    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class Usage(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int] | None = None


class Response(BaseModel):
    """vLLM's ClassificationResponse."""

    model_config = ConfigDict(extra="forbid", strict=True)
    id: str
    object: str
    created: int
    model: str
    data: list[Data]
    usage: Usage


def classify_row(custom_id: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/classify", "body": body}


def job(folder: Path, model: Path, rows: list[dict[str, Any]], *options: str) -> dict[str, dict[str, Any]]:
    """A real job's answers by name."""
    write_rows(folder / "rows.jsonl", rows)
    files = ["-i", str(folder / "rows.jsonl"), "-o", str(folder / "answers.jsonl"), "--model", str(model)]
    assert cli.main(["batch", *files, *SMALL, *options]) in (0, 3)
    return {item["custom_id"]: item for item in read_rows(folder / "answers.jsonl")}


def response(answer: dict[str, Any]) -> Response:
    return Response.model_validate(answer["response"]["body"])


def probs(answer: dict[str, Any]) -> np.ndarray:
    return np.array([item.probs for item in response(answer).data], dtype=np.float32)


def embedding_row(custom_id: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/embeddings", "body": body}
