"""Which frames, how large, when, and what stands in the prompt: transformers' own functions are the oracle."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from preprocessing_checkpoints import write_qwen_vl
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor, smart_resize

from npu_runner.errors import RequestError
from npu_runner.prompts.media.image_settings import ImageSettings
from npu_runner.prompts.media.video_settings import VideoForm, VideoSettings, read_video_settings
from npu_runner.prompts.media.videos import Video
from npu_runner.prompts.processor import ChatProcessor, ProcessorSettings
from npu_runner.prompts.tasks import text_task
from tests.full_set import examples, only_full
from tests.videos import moving_frames, video_of

LEAST, MOST = 128 * 32 * 32, 768 * 32 * 32
SETTINGS = VideoSettings(frame=ImageSettings(patch_size=16, min_pixels=LEAST, max_pixels=MOST))
CONFIG = {"vision_config": {"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2}}


@given(num=st.integers(1, 200_000), rate=st.floats(0.1, 240), fps=st.floats(0.1, 60), most=st.integers(1, 1000))
def test_frames_are_sampled_as_transformers_samples_them(num: int, rate: float, fps: float, most: int) -> None:
    sampler: Any = SimpleNamespace(fps=fps, min_frames=min(4, most), max_frames=most, num_frames=None)
    theirs = Qwen3VLVideoProcessor.sample_frames(sampler, SimpleNamespace(total_num_frames=num, fps=rate))
    ours = VideoSettings(frame=SETTINGS.frame, fps=fps, min_frames=min(4, most), max_frames=most)
    assert ours.sample(num, rate).tolist() == theirs.tolist()


@given(indices=st.lists(st.integers(0, 100_000), min_size=1, max_size=9, unique=True).map(sorted),
       rate=st.floats(0.1, 240))  # fmt: skip
def test_each_pair_has_the_time_that_transformers_writes(indices: list[int], rate: float) -> None:
    assert SETTINGS.timestamps(indices, rate) == Qwen3VLProcessor._calculate_timestamps(None, list(indices), rate, 2)


@settings(max_examples=examples(300))
@example(num=3, height=480, width=480, is_capped=False)  # an odd number, of which one more or less decides
@given(num=st.integers(2, 800), height=st.integers(1, 5000), width=st.integers(1, 5000), is_capped=st.booleans())
def test_frames_are_resized_to_the_size_that_transformers_takes(
    num: int, height: int, width: int, is_capped: bool
) -> None:
    ours = VideoSettings(frame=SETTINGS.frame, cap_pixels_per_frame=is_capped)
    processor: Any = SimpleNamespace(size={"shortest_edge": LEAST, "longest_edge": MOST}, patch_size=16, merge_size=2,
                                     temporal_patch_size=2, cap_pixels_per_frame=is_capped, max_video_tokens=768)
    try:
        theirs = Qwen3VLVideoProcessor.get_num_of_video_patches(processor, num, height, width)
    except ValueError:
        with pytest.raises(RequestError, match="more than 200"):
            ours.fit(num, height, width)
        return
    fitted = ours.fit(num, height, width)
    assert fitted[0] * fitted[1] // 256 * -(-num // 2) == theirs
    if not is_capped:
        assert fitted == smart_resize(num, height, width, 2, 32, LEAST, MOST)
    largest = ours.largest_frame(1 << 20)
    assert fitted[0] * fitted[1] <= largest[0] * largest[1]


def test_pillow_resizes_a_frame_as_torch_does_within_a_grey_level() -> None:
    """torchvision, which transformers' video processor calls, hands bytes to this function of torch."""
    frame = moving_frames(1, 200, 120)[0]
    ours = np.asarray(Image.fromarray(frame).resize((96, 64), Image.Resampling.BICUBIC)).astype(int)
    theirs = torch.nn.functional.interpolate(
        torch.from_numpy(frame).permute(2, 0, 1)[None], (64, 96), mode="bicubic", antialias=True
    )
    assert np.abs(ours - theirs[0].permute(1, 2, 0).numpy()).max() <= 1


def test_settings_come_from_the_files_in_the_order_of_transformers(tmp_path: Path) -> None:
    def read() -> VideoSettings:
        return read_video_settings(tmp_path, CONFIG)

    def theirs() -> Any:
        values, _ = Qwen3VLVideoProcessor.get_video_processor_dict(tmp_path)
        return values

    size = {"shortest_edge": 4096, "longest_edge": 65536}
    for name, values in (
        ("preprocessor_config.json", {"size": size, "patch_size": 16}),
        ("video_preprocessor_config.json", {"size": {**size, "longest_edge": 9 << 16}, "fps": 3, "max_frames": 9}),
        ("processor_config.json", {"video_processor": {"size": {**size, "longest_edge": 7 << 16}, "min_frames": 2}}),
    ):
        (tmp_path / name).write_text(json.dumps(values))
        assert read().frame.max_pixels == theirs()["size"]["longest_edge"]
    assert (read().min_frames, read().fps, read().max_frames) == (2, 2, 768)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> ChatProcessor:
    return ChatProcessor(str(write_qwen_vl(tmp_path_factory.mktemp("videos"))), ProcessorSettings(accepts_videos=True))


def asks(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What is this?"}]}]


def test_a_typed_placeholder_of_a_video_stays_text(seeing: ChatProcessor) -> None:
    data = video_of(moving_frames(4))
    prompt = seeing([{"role": "user", "content": [
        {"type": "text", "text": "<|video_pad|><|vision_start|>"}, {"type": "video", "video": data}]}])  # fmt: skip
    assert prompt.token_ids.count(seeing.tokenizer.token_to_id("<|video_pad|>")) == sum(
        image.num_tokens for image in prompt.images)


def test_a_pair_holds_two_frames_and_the_last_one_is_repeated(seeing: ChatProcessor) -> None:
    prompt = seeing(asks({"type": "video", "video": video_of(moving_frames(5))}))
    assert [image.pixels_HWC.shape[2] for image in prompt.images] == [6, 6]  # 4 of 5 frames
    (one,) = seeing(asks({"type": "video", "video": video_of(moving_frames(1))})).images
    np.testing.assert_array_equal(one.pixels_HWC[..., :3], one.pixels_HWC[..., 3:])
    two_frames = prompt.images[0].pixels_HWC
    assert not np.array_equal(two_frames[..., :3], two_frames[..., 3:])


def test_a_video_that_is_too_long_for_the_model_is_not_decoded(tmp_path: Path) -> None:
    """Its frames are damaged, which nobody gets to see."""
    short = ChatProcessor(str(write_qwen_vl(tmp_path)), ProcessorSettings(accepts_videos=True, max_model_len=64))
    data = bytearray(video_of(moving_frames(300), faststart=True))
    data[-2000:] = bytes(2000)
    with pytest.raises(RequestError) as caught:
        short(asks({"type": "video", "video": bytes(data)}))
    assert (caught.value.code, caught.value.param) == ("prompt_too_long", "messages[0].content[0]")


@pytest.mark.parametrize(("part", "code"), [
    ({"type": "video", "video": "a.mp4"}, "invalid_type"),
    ({"type": "video", "video": b"x" * 99}, "video_not_recognised"),
    ({"type": "video_url", "video_url": {"url": "a.mp4"}}, "unsupported_part"),
])  # fmt: skip
def test_a_part_that_is_no_video_is_named(part: Any, code: str, seeing: ChatProcessor) -> None:
    with pytest.raises(RequestError) as caught:
        seeing(asks(part))
    assert caught.value.code == code
    assert str(caught.value.param).startswith("messages[0].content[0]")


@pytest.mark.parametrize(("kwargs", "num_pairs"), [
    (None, 3), ({}, 3), ({"fps": 5}, 8), ({"num_frames": 3}, 2), ({"fps": 5, "max_frames": 2}, 1), ({"fps": None}, 3),
])  # fmt: skip
def test_a_request_chooses_its_frames(kwargs: Any, num_pairs: int, seeing: ChatProcessor) -> None:
    messages = asks({"type": "video", "video": video_of(moving_frames(30))})
    assert len(seeing(messages, mm_processor_kwargs=kwargs).images) == num_pairs


@pytest.fixture(scope="module")
def any_form(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that names the tokens that each form needs."""
    path = write_qwen_vl(tmp_path_factory.mktemp("forms"))
    config = json.loads((path / "config.json").read_text())
    around = {f"image_{end}_token_id": config[f"vision_{end}_token_id"] for end in ("start", "end")}
    (path / "config.json").write_text(json.dumps({**config, **around}))
    return path


@pytest.mark.parametrize(("form", "name", "value"), [
    *((form, "fps", 5.0) for form in VideoForm), (VideoForm.SECONDS, "num_frames", 4),
    (VideoForm.SECONDS, "max_frames", 2),
    *only_full("each setting in each form; each form stays with one, and each setting in one form", *(
        (form, name, value) for form in VideoForm for name, value in (("num_frames", 4), ("max_frames", 2))
        if form != VideoForm.SECONDS))])
def test_each_setting_of_videos_acts_whoever_says_it(form: VideoForm, name: str, value: Any, any_form: Path) -> None:
    def num_pairs(settings: dict[str, Any], kwargs: dict[str, Any]) -> int:
        processor = ChatProcessor(str(any_form), ProcessorSettings(accepts_videos=True, video_form=form, **settings))
        return len(processor(messages, mm_processor_kwargs=kwargs).images)

    messages = asks({"type": "video", "video": video_of(moving_frames(30))})
    assert num_pairs({f"video_{name}": value}, {}) == num_pairs({}, {name: value}) != num_pairs({}, {})


def test_videos_are_limited_by_themselves(any_form: Path) -> None:
    processor = ChatProcessor(str(any_form), ProcessorSettings(accepts_videos=True, limit_mm_per_prompt={"video": 1}))
    video = {"type": "video", "video": video_of(moving_frames(4))}
    image = {"type": "image", "image": Image.new("RGB", (64, 64))}
    assert processor(asks(video, image, image)).images
    with pytest.raises(RequestError, match=r"content\[2\]: one of 2 videos, at most 1 are allowed") as caught:
        processor(asks(video, image, video))
    assert caught.value.code == "too_many_images"


@pytest.mark.parametrize(("kwargs", "field"), [
    ({"fps": 0}, ".fps"), ({"fps": True}, ".fps"), ({"num_frames": 1.5}, ".num_frames"),
    ({"max_frames": 0}, ".max_frames"), ({"size": 3}, ".size"), ({"fps": 1, "num_frames": 2}, ""),
    ({"fps": float("nan")}, ".fps"),
])  # fmt: skip
def test_a_wish_that_cannot_be_is_named(kwargs: Any, field: str, seeing: ChatProcessor, qwen: ChatProcessor) -> None:
    with pytest.raises(RequestError) as caught:
        seeing(asks(), mm_processor_kwargs=kwargs)
    assert caught.value.param == f"mm_processor_kwargs{field}"
    with pytest.raises(RequestError) as caught:  # of a model that sees none
        qwen(asks(), mm_processor_kwargs=kwargs)
    assert caught.value.code == "model_has_no_video"


@pytest.mark.parametrize("kind", [bytearray, memoryview, Video])
def test_encoded_bytes_of_any_kind_are_a_video(kind: Any, seeing: ChatProcessor) -> None:
    data, text = video_of(moving_frames(4)), "<|vision_start|><|video_pad|><|vision_end|>"
    expected = seeing.from_text(text, videos=[data])
    assert expected.images
    for item in ({"prompt": text, "videos": [kind(data)]}, {"prompt": text, "multi_modal_data": {"video": kind(data)}}):
        assert text_task(item).prepare(seeing).token_ids == expected.token_ids
    assert seeing.from_text(text, videos=[kind(data)]).token_ids == expected.token_ids
    part = {"type": "video", "video": kind(data)}
    assert seeing(asks(part)).token_ids == seeing(asks({"type": "video", "video": data})).token_ids


def test_a_video_of_a_raw_prompt_that_is_none_is_named(seeing: ChatProcessor) -> None:
    with pytest.raises(RequestError, match=r"videos\[1\]: the encoded bytes of a video are needed, not str") as caught:
        seeing.from_text("<|video_pad|>" * 2, videos=[video_of(moving_frames(4)), "a.mp4"])  # type: ignore[list-item]
    assert (caught.value.code, caught.value.param) == ("invalid_type", "videos[1]")


@pytest.mark.parametrize("before", ["", "Look: (", "Look:", "Zahlen 1.", "这是：", "a <|im_end|", "x ..."])
def test_pairs_stand_in_the_place_of_the_placeholder_and_what_is_around_it(before: str, seeing: ChatProcessor) -> None:
    """As in the processor that Qwen3-VL was released with. The text is tokenized as a whole."""
    video = video_of(moving_frames(6))
    for text in (f"{before}<|vision_start|><|video_pad|><|vision_end|> end", f"{before}<|video_pad|> end"):
        ids = seeing.from_text(text, videos=[video]).token_ids
        written = seeing.tokenizer.decode(ids, skip_special_tokens=False)
        pair = r"<\d+\.\d seconds><\|vision_start\|>(<\|video_pad\|>)+<\|vision_end\|>"
        assert re.fullmatch(f"{re.escape(before)}({pair})+ end", written), written
        assert seeing.tokenizer.encode(written, add_special_tokens=False).ids == ids


def test_placeholders_are_counted_by_kind(seeing: ChatProcessor) -> None:
    with pytest.raises(RequestError, match=r"1 video placeholders \(<\|video_pad\|>\) for 0 videos") as caught:
        seeing.from_text("<|video_pad|>")
    assert caught.value.code == "video_count_mismatch"
