"""Tiny checkpoints, our processors for them, and transformers' processors as the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from preprocessing_checkpoints import write_llama, write_qwen_vl

import npu_runner
from npu_runner.prompts.processor import ChatProcessor


@pytest.fixture(scope="session")
def qwen_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen_vl(tmp_path_factory.mktemp("qwen3_vl"))


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def qwen(qwen_folder: Path) -> ChatProcessor:
    return ChatProcessor(str(qwen_folder))


@pytest.fixture(scope="session")
def llama(llama_folder: Path) -> ChatProcessor:
    return ChatProcessor(str(llama_folder))


def hf_processor(folder: Path) -> Any:
    """transformers' Qwen3-VL processor."""
    from transformers import AutoTokenizer, Qwen2VLImageProcessorPil
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

    class WithoutVideo(Qwen3VLProcessor):
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> None:
            """Its video processor needs torchvision, and None is refused; nothing else is checked here."""

    tokenizer = AutoTokenizer.from_pretrained(folder)
    image_processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
    return WithoutVideo(image_processor, tokenizer, None, chat_template=tokenizer.chat_template)


@pytest.fixture(scope="session")
def hf_qwen(qwen_folder: Path) -> Any:
    return hf_processor(qwen_folder)


@pytest.fixture(scope="session")
def shapes_folder() -> Path:
    return Path(npu_runner.__file__).parent / "assets" / "shapes-vl"


@pytest.fixture(scope="session")
def hf_shapes(shapes_folder: Path) -> Any:
    return hf_processor(shapes_folder)


@pytest.fixture(scope="session")
def hf_llama(llama_folder: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(llama_folder)
