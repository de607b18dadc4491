"""What the Python API takes: images by address, sampling that is settled before it is queued, the limits of a row."""

from __future__ import annotations

import base64
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from npu_runner import LLM, SamplingParams
from npu_runner.assets import SHAPES_VL
from npu_runner.errors import RequestError
from npu_runner.request.limits import LIMITS
from scripts.shapes.drawing import TEST_SEEDS, draw_example

GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def llm(platform_name: str) -> Iterator[LLM]:
    with LLM(SHAPES_VL, platform=platform_name, max_num_seqs=4, enforce_eager=True) as llm:
        yield llm


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("media")
    draw_example(TEST_SEEDS[0]).images[0].save(made / "a.png")
    return made


def asks(part: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [part, {"type": "text", "text": "Which shapes are there?"}]}]


def test_an_image_by_address_is_the_image(llm: LLM, folder: Path) -> None:
    data = (folder / "a.png").read_bytes()
    inline = "data:image/png;base64," + base64.b64encode(data).decode()
    (expected,) = llm.chat(asks({"type": "image", "image": data}), GREEDY)
    for url in (inline, "a.png", f"file://{folder}/a.png"):
        for value in (url, {"url": url, "detail": "auto"}):
            conversation = asks({"type": "image_url", "image_url": value})
            (found,) = llm.chat(conversation, GREEDY, allowed_media_dir=folder)
            assert found.token_ids == expected.token_ids
    (found,) = llm.chat(asks({"type": "image_url", "image_url": inline}), GREEDY)
    assert found.token_ids == expected.token_ids


@pytest.mark.parametrize(
    ("url", "code"), [("a.png", "media_not_allowed"), ("https://x/a.png", "media_scheme"), (7, "invalid_type")]
)
def test_an_address_that_is_not_read_is_named_with_its_prompt(llm: LLM, url: Any, code: str) -> None:
    fine, bad = asks({"type": "text", "text": "x"}), asks({"type": "image_url", "image_url": {"url": url}})
    with pytest.raises(RequestError, match=r"prompt 1: messages\[0\].content\[0\].image_url") as caught:
        llm.chat([fine, bad], GREEDY)
    assert caught.value.code == code


def test_a_part_that_is_not_taken_is_told_what_is(llm: LLM) -> None:
    with pytest.raises(RequestError, match="'audio' parts are not supported: a part is text, image"):
        llm.chat(asks({"type": "audio", "audio": "x"}))
    with pytest.raises(RequestError, match="'image_url' parts are not supported: this address was not resolved"):
        llm.engine.processor(asks({"type": "image_url", "image_url": "x"}))


def test_prompts_come_in_vllms_shapes(llm: LLM, folder: Path) -> None:
    text = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Which shapes are there?<|im_end|>\n"
    data, image = (folder / "a.png").read_bytes(), Image.open(folder / "a.png")
    ids = llm.engine.processor.tokenizer.encode(text, add_special_tokens=False).ids
    (expected,) = llm.generate([{"prompt": text, "images": [data]}], GREEDY)
    assert expected.outputs == expected.completions
    shapes = [
        {"prompt": text, "multi_modal_data": {"image": image}},
        {"prompt": text, "multi_modal_data": {"image": [data], "video": None}, "mm_processor_kwargs": None},
        {"prompt_token_ids": ids, "multi_modal_data": {"image": data}},
        {"prompt_token_ids": ids, "prompt": text, "multi_modal_data": {"image": [image]}},
    ]
    assert [found.outputs[0].token_ids for found in llm.generate(shapes, GREEDY)] == [expected.token_ids] * 4
    plain = llm.generate([{"prompt_token_ids": [5, 6]}, {"prompt": "x", "multi_modal_data": None}, [5, 6]], GREEDY)
    assert plain[0].token_ids == plain[2].token_ids


def test_token_ids_come_as_arrays_and_tensors(llm: LLM) -> None:
    ids = [5, 6, 300, 7]
    (expected,) = llm.generate([ids], GREEDY)
    one = [np.array(ids), np.array(ids, np.uint16), torch.tensor(ids), torch.tensor(ids, dtype=torch.int32),
           [np.int64(token) for token in ids], list(torch.tensor(ids)), tuple(np.array(ids)), array("I", ids),
           {"prompt_token_ids": np.array(ids)}, {"prompt": torch.tensor(ids)}]  # fmt: skip
    for prompt in one:
        (found,) = llm.generate(prompt, GREEDY)
        assert found.token_ids == expected.token_ids
    many = [np.array([ids, ids]), torch.tensor([ids, ids]), [np.array(ids), ids], iter([torch.tensor(ids), ids])]
    for prompts in many:
        assert [found.token_ids for found in llm.generate(prompts, GREEDY)] == [expected.token_ids] * 2
    found, wanted = (llm.generate(texts, GREEDY) for texts in (np.array(["red", "a circle"]), ["red", "a circle"]))
    assert [each.token_ids for each in found] == [each.token_ids for each in wanted]
    assert llm.generate(np.array([], np.int64), GREEDY) == [], "as of an empty list"


@pytest.mark.parametrize("prompt", [
    np.array([5.0, 6.0]), np.array([True]), np.array(5), torch.tensor(5), torch.tensor([0.5]), [5, np.float32(6)],
    [5, torch.tensor(True)], np.array([[[5]]]), np.array([5, 2**60]), np.array([-1]), [np.True_],
    [b"red"], [bytearray(b"red")], [{"prompt_token_ids": b"red"}], pytest.param([memoryview(b"red")], id="memoryview"),
], ids=repr)  # fmt: skip
def test_numbers_that_are_no_token_ids_are_named(llm: LLM, prompt: Any) -> None:
    with pytest.raises(RequestError) as caught:
        llm.generate(prompt, GREEDY)
    assert caught.value.code == "invalid_type"


@pytest.mark.parametrize(("prompts", "params", "named"), [
    ("a", {"max_tokens": 3}, "dict {'max_tokens': 3} is not SamplingParams"), ("a", {}, "dict"), ("a", 5, "int 5"),
    (["a", "b"], "ab", "str 'ab'"), ("a", "x", "str 'x'"), (iter(["a"]), {"max_tokens": 3}, "dict"),
    (["a", "b"], [GREEDY, {"max_tokens": 3}], "prompt 1: .*dict"), (["a"], [None], "prompt 0: .*NoneType None"),
    (iter(["a", "b"]), iter([GREEDY, "b"]), "prompt 1: .*str 'b'"),
], ids=range(9))  # fmt: skip
def test_what_is_no_sampling_params_is_named(llm: LLM, prompts: Any, params: Any, named: str) -> None:
    with pytest.raises(RequestError, match=named) as caught:
        llm.generate(prompts, params)
    assert caught.value.param == "sampling_params"


def test_what_is_no_sampling_params_costs_its_prompt_alone_where_errors_are_results(llm: LLM) -> None:
    params: Any = [GREEDY, {"max_tokens": 3}, GREEDY]
    fine, bad, last = llm.generate(["a", "b", "c"], params, return_errors=True)
    assert (bad.finish_reason, bad.error_code) == ("error", "invalid_type")
    assert fine.token_ids
    assert last.token_ids


@pytest.mark.parametrize(("item", "param"), [
    ({}, "prompt"), ({"text": "x"}, "text"), ({"prompt_token_ids": "x"}, "prompt_token_ids"),
    ({"prompt": "x", "multi_modal_data": {"video": np.zeros((2, 8, 8, 3))}}, "multi_modal_data.video"),
    ({"prompt": "x", "multi_modal_data": {"video": [b"x", "a.mp4"]}}, "multi_modal_data.video"),
    ({"prompt": "x", "multi_modal_data": {"audio": b"x"}}, "multi_modal_data.audio"),
    ({"prompt": "x", "multi_modal_data": {"image": b"x"}, "videos": [b"x"]}, "videos"),
    ({"prompt": "x", "videos": b"x"}, "videos"), ({"prompt": "x", "videos": [b"x"] * 65}, "videos"),
    ({"prompt": "<|video_pad|>", "videos": [b"x" * 99]}, "videos[0]"),
    ({"prompt": "x", "mm_processor_kwargs": [1]}, "mm_processor_kwargs"),
    ({"prompt": "x", "mm_processor_kwargs": {"fps": 0}}, "mm_processor_kwargs.fps"),
    ({"prompt": "x", "multi_modal_data": [1]}, "multi_modal_data"),
    ({"prompt": "x", "multi_modal_data": {"image": b"x"}, "images": [b"x"]}, "images"),
    ({"prompt": "x", "multi_modal_data": {"image": "a.png"}}, "multi_modal_data.image"),
    ({"prompt": "x", "images": b"x"}, "images"), ({"prompt": "x", "cache_salt": "y"}, "cache_salt"),
])  # fmt: skip
def test_what_is_no_prompt_is_named_with_its_index(llm: LLM, item: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError, match="prompt 1: ") as caught:
        llm.generate(["fine", item], GREEDY)
    assert param in caught.value.message or caught.value.code == "too_many_images"
    assert caught.value.param == param


def test_no_step_waits_for_a_tokenizer(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    (free,) = llm.generate(["red"], GREEDY)
    banned = llm.engine.processor.tokenizer.decode(free.token_ids[:1])
    assert banned
    engine = llm.engine
    params = engine.processor.resolve_params(GREEDY.replace(bad_words=[banned]))
    engine.add_request("banned", engine.processor.from_text("red"), params)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a step tokenized")

    monkeypatch.setattr(engine.processor.tokenizer.__class__, "encode", refuse, raising=False)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert outputs[0].completions[0].token_ids[0] != free.token_ids[0]


def test_the_limits_of_a_row_are_those_of_a_prompt(llm: LLM) -> None:
    most = llm.engine.config.prompts.max_logprobs_per_request
    with pytest.raises(RequestError, match=f"at most {most}") as caught:
        llm.generate(["red"], SamplingParams(n=128, max_tokens=most, logprobs=20))
    assert caught.value.code == "too_many_logprobs"
    with pytest.raises(RequestError, match="max_model_len") as caught:
        llm.generate(["red " * 1_000_000], GREEDY)
    assert caught.value.code == "prompt_too_long"
    with pytest.raises(RequestError, match=f"{LIMITS.max_messages + 1} messages, at most {LIMITS.max_messages}"):
        llm.chat([[{"role": "user", "content": "x"}] * (LIMITS.max_messages + 1)], GREEDY)
    assert not llm.engine.has_unfinished_requests()
