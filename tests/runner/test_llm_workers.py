"""LLM's workers: started by the first image, limited as a job's are, gone with `close`."""

from __future__ import annotations

import io
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from npu_runner import LLM, SamplingParams
from npu_runner.assets import SHAPES_VL
from npu_runner.errors import JobError, RequestError
from npu_runner.llm.prompt_service import LocalService
from npu_runner.request.limits import MIB
from scripts.shapes.drawing import TEST_SEEDS, draw_example
from tests.full_set import only_full

GREEDY = SamplingParams(temperature=0, max_tokens=4)
SETTINGS: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 1024, "enforce_eager": True,
                            "preprocessing_workers": 1, "worker_memory_bytes": 200 * MIB}
CONVERSATION = draw_example(TEST_SEEDS[0]).conversation()


@pytest.fixture
def llm(platform_name: str) -> Iterator[LLM]:
    with LLM(SHAPES_VL, platform=platform_name, **SETTINGS) as llm:
        yield llm


def workers_of(llm: LLM) -> list[int]:
    service = llm._service
    assert isinstance(service, LocalService)
    return service.workers


def asks(data: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image", "image": data}, {"type": "text", "text": "Which?"}]}]


def huge() -> bytes:
    """A small file that takes half a gigabyte decoded."""
    file = io.BytesIO()
    Image.new("L", (11_000, 11_000)).save(file, "PNG", compress_level=1)
    return file.getvalue()


def assert_gone(pids: list[int]) -> None:
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_workers_start_with_the_first_image_stay_and_end_with_close(llm: LLM) -> None:
    llm.generate(["which"], GREEDY)
    llm.chat([{"role": "user", "content": "which"}], GREEDY)
    assert workers_of(llm) == []
    llm.chat([CONVERSATION], GREEDY)
    pids = workers_of(llm)
    assert len(pids) == 1
    llm.chat([CONVERSATION] * 3, GREEDY)
    assert workers_of(llm) == pids
    llm.close()
    assert_gone(pids)
    llm.close()


def test_a_long_text_is_prepared_in_a_worker(llm: LLM) -> None:
    (long,) = llm.generate(["red " * 1100], SamplingParams(temperature=0, max_tokens=1), return_errors=True)
    assert long.finish_reason != "error" or long.error_code == "prompt_too_long"
    assert len(workers_of(llm)) == 1


@pytest.mark.full("121 megapixels; such a row of a job stays (batch/test_limits.py)")
def test_an_image_that_wants_too_much_memory_fails_by_name_alone(llm: LLM) -> None:
    conversations = [CONVERSATION, asks(huge()), CONVERSATION]
    first, failed, last = llm.chat(conversations, GREEDY, return_errors=True)
    assert failed.error_code in ("image_out_of_memory", "preprocessing_out_of_memory")
    assert first.token_ids == last.token_ids == llm.chat(CONVERSATION, GREEDY)[0].token_ids


def test_the_limits_on_addresses_are_settings(platform_name: str, tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        draw_example(TEST_SEEDS[0]).images[0].save(tmp_path / name)
    size = (tmp_path / "a.png").stat().st_size
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": name} for name in ("a.png", "b.png")]
                 + [{"type": "text", "text": "Which?"}]}]
    for name, limit in (("max_media_bytes", size - 1), ("max_prompt_media_bytes", 2 * size - 1)):
        with (LLM(SHAPES_VL, platform=platform_name, **SETTINGS, **{name: limit}) as llm,
              pytest.raises(RequestError, match=f"{limit} ") as caught):
            llm.chat(messages, GREEDY, allowed_media_dir=tmp_path)
        assert caught.value.code == "media_too_large"


def test_a_worker_that_is_stuck_is_given_up_by_name(platform_name: str) -> None:
    with LLM(SHAPES_VL, platform=platform_name, **SETTINGS, preprocessing_timeout=3.0) as llm:
        (expected,) = llm.chat(CONVERSATION, GREEDY)
        (stuck,) = workers_of(llm)
        os.kill(stuck, signal.SIGSTOP)
        (failed,) = llm.chat(CONVERSATION, GREEDY, return_errors=True)
        assert failed.error_code == "preprocessing_timeout"
        assert failed.error is not None
        assert "longer than 3 s" in failed.error
        assert_gone([stuck])
        assert llm.chat(CONVERSATION, GREEDY)[0].token_ids == expected.token_ids


def test_a_worker_that_is_killed_costs_no_answer(llm: LLM) -> None:
    (expected,) = llm.chat(CONVERSATION, GREEDY)
    (victim,) = workers_of(llm)
    os.kill(victim, signal.SIGSTOP)  # it cannot finish before it dies
    pool: Any = llm._service._server.pool  # type: ignore[attr-defined]

    def kill_at_work() -> None:
        while not any(worker.item for worker in list(pool._workers)):
            time.sleep(0.001)
        os.kill(victim, signal.SIGKILL)

    killer = threading.Thread(target=kill_at_work)
    killer.start()
    (found,) = llm.chat(CONVERSATION, GREEDY)
    killer.join()
    assert found.token_ids == expected.token_ids
    assert victim not in workers_of(llm)


@pytest.mark.parametrize("how", ["a call is interrupted", *only_full("another end of a worker", "a worker is killed")])
def test_workers_that_start_later_prepare_as_the_first_or_not_at_all(
    platform_name: str, tmp_path: Path, how: str
) -> None:
    model = shutil.copytree(SHAPES_VL, tmp_path / "model")
    template = model / "chat_template.jinja"
    with LLM(str(model), platform=platform_name, **SETTINGS) as llm:
        (expected,) = llm.chat(CONVERSATION, GREEDY)
        template.write_text(template.read_text().replace("assistant\\n", "assistant\\nYes. "))
        if how == "a worker is killed":
            os.kill(*workers_of(llm), signal.SIGKILL)
        else:
            with pytest.raises(KeyboardInterrupt):
                llm.chat(interrupted(), GREEDY)
        for _ in range(2):
            with pytest.raises(JobError, match=r"chat_template\.jinja changed after the model was opened"):
                llm.chat(CONVERSATION, GREEDY)
        shutil.copy(SHAPES_VL / template.name, template)
        assert llm.chat(CONVERSATION, GREEDY)[0].token_ids == expected.token_ids


def interrupted() -> Iterator[Any]:
    yield CONVERSATION
    raise KeyboardInterrupt
