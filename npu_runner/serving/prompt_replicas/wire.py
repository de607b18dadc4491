"""Requests and answers as bytes, between LLM and its replicas. Knows nothing of who sends them."""

from __future__ import annotations

import functools
import io
import pickle
from typing import Any

from npu_runner.engine.token_bytes import token_text
from npu_runner.errors import RequestError
from npu_runner.prompts.processor import ChatProcessor
from npu_runner.request.outputs import RequestOutput
from npu_runner.serving.prompt_feed import Request

_TOKEN_TEXT = "token_text"


def pack_request(request: Request) -> bytes:
    return pickle.dumps(request, protocol=5)


def unpack_request(data: bytes) -> Request:
    request: Request = pickle.loads(data)
    return request


def pack_answer(answer: RequestOutput | RequestError) -> bytes:
    """Log probabilities hold a function of the tokenizer, megabytes of it: a word travels in its place."""
    packed = io.BytesIO()
    _Packer(packed, protocol=5).dump(answer)
    return packed.getvalue()


def unpack_answer(data: bytes, processor: ChatProcessor) -> RequestOutput | RequestError:
    """`processor`: its tokenizer describes tokens where somebody reads log probabilities."""
    answer: RequestOutput | RequestError = _Unpacker(data, processor).load()
    return answer


class _Packer(pickle.Pickler):
    def persistent_id(self, value: Any) -> str | None:
        is_text = isinstance(value, functools.partial) and value.func is token_text
        return _TOKEN_TEXT if is_text else None


class _Unpacker(pickle.Unpickler):
    def __init__(self, data: bytes, processor: ChatProcessor):
        super().__init__(io.BytesIO(data))
        self._processor = processor

    def persistent_load(self, name: Any) -> Any:
        assert name == _TOKEN_TEXT, f"an answer holds {name!r}"
        return functools.partial(token_text, self._processor.tokenizer)
