"""truncate_prompt_tokens: the last tokens of what transformers makes of a prompt; detail low: fewer of an image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from preprocessing_checkpoints import write_qwen_vl

from npu_runner.errors import RequestError
from npu_runner.prompts.media.image_settings import LOW_DETAIL_PIXELS, ImageSettings
from npu_runner.prompts.media.media import MediaRules
from npu_runner.prompts.processor import ChatProcessor, ProcessorSettings
from npu_runner.prompts.text.messages import MediaLimits, parse_messages
from npu_runner.request.sampling_params import SamplingParams

LONG = [{"role": "system", "content": "Answer."}, {"role": "user", "content": "what colour is it? " * 40}]
IMAGE = {"type": "image", "image": Image.new("RGB", (200, 200))}


@pytest.fixture(scope="module")
def short(qwen_folder: Path) -> ChatProcessor:
    return ChatProcessor(str(qwen_folder), ProcessorSettings(max_model_len=50))


@pytest.mark.parametrize("most", [1, 7, 49])
def test_a_long_prompt_keeps_its_last_tokens(short: ChatProcessor, hf_qwen: Any, most: int) -> None:
    whole = hf_qwen.tokenizer.apply_chat_template(LONG, add_generation_prompt=True, return_dict=False)
    assert len(whole) > 50
    assert short(LONG, truncate_prompt_tokens=most).token_ids == whole[-most:]
    raw = hf_qwen.tokenizer(LONG[1]["content"])["input_ids"]
    assert short.from_text(LONG[1]["content"], truncate_prompt_tokens=most).token_ids == raw[-most:]
    assert short.from_text(raw, truncate_prompt_tokens=most).token_ids == raw[-most:]


def test_a_prompt_that_is_short_enough_stays_as_it_is(qwen: ChatProcessor) -> None:
    whole = qwen(LONG)
    assert qwen(LONG, truncate_prompt_tokens=len(whole.token_ids)).token_ids == whole.token_ids
    with_image = [{"role": "user", "content": [IMAGE, {"type": "text", "text": "?"}]}]
    assert qwen(with_image, truncate_prompt_tokens=500).token_ids == qwen(with_image).token_ids


def test_a_prompt_with_images_is_refused_and_not_cut(qwen: ChatProcessor) -> None:
    with pytest.raises(RequestError) as caught:
        qwen([{"role": "user", "content": [IMAGE, {"type": "text", "text": "?"}]}], truncate_prompt_tokens=5)
    assert (caught.value.code, caught.value.param) == ("prompt_not_truncated", "truncate_prompt_tokens")


def test_minus_one_leaves_room_for_the_answer(short: ChatProcessor) -> None:
    def most(asked: int | None, max_tokens: int | None) -> int | None:
        return short.most_prompt_tokens(SamplingParams(truncate_prompt_tokens=asked, max_tokens=max_tokens))

    assert [most(None, 5), most(-1, None), most(-1, 20), most(50, 20)] == [None, 49, 30, 50]
    for asked, max_tokens in ((51, 1), (-1, 50)):
        with pytest.raises(RequestError) as caught:
            most(asked, max_tokens)
        assert (caught.value.code, caught.value.param) == ("invalid_sampling_parameter", "truncate_prompt_tokens")


def test_a_text_that_nobody_should_tokenize_is_refused_all_the_same(short: ChatProcessor) -> None:
    with pytest.raises(RequestError) as caught:
        short.from_text("x" * 1_000_000, truncate_prompt_tokens=5)
    assert caught.value.code == "prompt_too_long"


def test_a_prompt_that_was_prepared_without_it_is_not_served_longer(short: ChatProcessor) -> None:
    prompt = short.from_text([5] * 30)
    short.check_length(prompt, SamplingParams(truncate_prompt_tokens=30))
    with pytest.raises(RequestError, match="30 tokens, 29 are to be kept"):
        short.check_length(prompt, SamplingParams(truncate_prompt_tokens=29))


def url_of(image: Image.Image, folder: Path) -> str:
    image.save(folder / "a.png")
    return "a.png"


def asked(url: str, *details: str | None) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url, "detail": each}} for each in details]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}]


def test_low_detail_is_an_image_of_at_most_512_by_512(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    processor = ChatProcessor(str(write_qwen_vl(folder)), ProcessorSettings(image_max_pixels=4096 * 4096))
    noise = np.random.default_rng(0).integers(0, 256, (1500, 1000, 3), dtype=np.uint8)
    url = url_of(Image.fromarray(noise), tmp_path)
    rules = MediaRules(allowed_dir=tmp_path)
    prompt = processor(asked(url, "low", "auto", None, "high", "low"), media=rules)
    sizes = [image.pixels_HWC.shape[:2] for image in prompt.images]
    assert sizes[0] == sizes[4] != sizes[1] == sizes[2] == sizes[3]
    bounded = ChatProcessor(str(folder), ProcessorSettings(image_max_pixels=LOW_DETAIL_PIXELS))
    (expected,) = bounded(asked(url, "auto"), media=rules).images
    np.testing.assert_array_equal(prompt.images[0].pixels_HWC, expected.pixels_HWC)
    assert prompt.images[0].num_tokens < prompt.images[1].num_tokens


def test_low_detail_changes_no_small_image_and_no_smaller_bound() -> None:
    settings = ImageSettings(min_pixels=64, max_pixels=100_000)
    assert settings.with_low_detail() == settings
    least = ImageSettings(min_pixels=1_000_000, max_pixels=2_000_000).with_low_detail()
    assert (least.min_pixels, least.max_pixels) == (1_000_000, 1_000_000)


def test_both_details_of_an_image_count_its_bytes_once(tmp_path: Path) -> None:
    url = url_of(Image.new("RGB", (64, 64)), tmp_path)
    size = (tmp_path / url).stat().st_size
    limits = MediaLimits(has_vision=True, max_images=2)
    parse_messages(asked(url, "low", "high"), limits, MediaRules(allowed_dir=tmp_path, max_total_bytes=size))
    with pytest.raises(RequestError, match=f"at most {size - 1} are allowed"):
        parse_messages(asked(url, "low", "high"), limits, MediaRules(allowed_dir=tmp_path, max_total_bytes=size - 1))
