"""Videos of Qwen2-VL and Qwen2.5-VL: which frames, how large, and positions. transformers' own functions are the
oracle, but for where text goes on behind a video."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from PIL import Image
from preprocessing_checkpoints import write_qwen_vl

from npu_runner.errors import ModelError, RequestError
from npu_runner.prompts.media.image_settings import ImageSettings
from npu_runner.prompts.media.video_settings import FrameVideoSettings, VideoForm, read_video_settings
from npu_runner.prompts.media.videos import Video
from npu_runner.prompts.processor import ChatProcessor, ProcessorSettings
from npu_runner.prompts.vision_prompts import mrope_positions
from npu_runner.request.prompt_inputs import ImageSpan
from tests.full_set import examples
from tests.oracle.positions_reference import go_on_behind_the_largest_position
from tests.oracle.videos_reference import OF_FRAMES
from tests.videos import moving_frames, video_of

LEAST, MOST = 128 * 28 * 28, 768 * 28 * 28
FRAME = ImageSettings(min_pixels=LEAST, max_pixels=MOST)
CONFIG = {"vision_config": {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}}
PROCESSOR = OF_FRAMES.Qwen2VLVideoProcessor


@settings(max_examples=examples(100), deadline=None)
@given(num=st.integers(2, 200_000), rate=st.floats(0.1, 240), fps=st.floats(0.1, 60), most=st.integers(2, 1000))
def test_frames_are_sampled_as_transformers_samples_them(num: int, rate: float, fps: float, most: int) -> None:
    least = min(4, most)
    sampler: Any = SimpleNamespace(fps=fps, min_frames=least, max_frames=most, num_frames=None, temporal_patch_size=2)
    theirs = PROCESSOR.sample_frames(sampler, SimpleNamespace(total_num_frames=num, fps=rate)).numpy()
    ours = FrameVideoSettings(frame=FRAME, fps=fps, min_frames=least, max_frames=most).sample(num, rate)
    # Its float32 may round up to one frame more than it wanted, which does not exist, and to a whole frame's number.
    theirs = theirs[:-1] if theirs[-1] == num else theirs
    places = np.arange(len(ours)) * (num / len(ours))
    is_clear = np.abs(places - places.round()) > num * 1e-6
    assert ours[is_clear].tolist() == theirs[is_clear].tolist()
    assert np.abs(ours - theirs).max() <= 1


@pytest.mark.parametrize(("num", "wanted"), [(9, 6), (9, 5), (40, 3), (41, 7)])
def test_as_many_frames_are_sampled_as_are_asked_for(num: int, wanted: int) -> None:
    sampler: Any = SimpleNamespace(fps=None, min_frames=4, max_frames=768, num_frames=None, temporal_patch_size=2)
    theirs = PROCESSOR.sample_frames(sampler, SimpleNamespace(total_num_frames=num, fps=5.0), num_frames=wanted)
    ours = FrameVideoSettings(frame=FRAME, num_frames=wanted)
    assert ours.sample(num, 5.0).tolist() == theirs.tolist()


@pytest.mark.parametrize(("num", "expected"), [(1, [0]), (2, [0, 1]), (3, [0, 1])])
def test_a_video_of_few_frames_is_shown(num: int, expected: list[int]) -> None:
    assert FrameVideoSettings(frame=FRAME).sample(num, 30.0).tolist() == expected


@settings(max_examples=examples(100), deadline=None)
@example(num=4, height=14, width=14, is_capped=False)
@given(num=st.integers(2, 800), height=st.integers(1, 5000), width=st.integers(1, 5000), is_capped=st.booleans())
def test_frames_are_resized_to_the_size_that_transformers_takes(num: int, height: int, width: int,
                                                                is_capped: bool) -> None:
    ours = FrameVideoSettings(frame=FRAME, cap_pixels_per_frame=is_capped, max_video_tokens=20_000)
    most = MOST  # Qwen2VLVideoProcessor.resize, whose own resize is torchvision's
    if is_capped:
        most = max(min(MOST, int(20_000 * 28 * 28 * 0.9) * 2 // num), int(LEAST * 1.05))
    try:
        theirs = OF_FRAMES.smart_resize(height, width, 28, LEAST, most)
    except ValueError:
        with pytest.raises(RequestError, match="more than 200") as caught:
            ours.fit(num, height, width)
        assert caught.value.code == "video_aspect_ratio"
        return
    assert ours.fit(num, height, width) == theirs
    largest = ours.largest_frame(1 << 20)
    assert theirs[0] * theirs[1] <= largest[0] * largest[1]


def test_limits_of_images_are_not_those_of_frames(tmp_path: Path) -> None:
    """Qwen2-VL's published folders have one file, of images; its videos were always bounded by the class's defaults."""

    def read(form: VideoForm = VideoForm.STEPS) -> Any:
        return read_video_settings(tmp_path, CONFIG, form=form)

    images = {"min_pixels": 3136, "max_pixels": 12_845_056, "patch_size": 14}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(images))
    assert (read().frame.min_pixels, read().frame.max_pixels) == (PROCESSOR.size["shortest_edge"],
                                                                  PROCESSOR.size["longest_edge"])
    assert read().frame.image_mean == tuple(PROCESSOR.image_mean)
    own = {"min_pixels": 4096, "max_pixels": 65_536, "do_sample_frames": False}
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(own))
    assert (read().frame.min_pixels, read().frame.max_pixels, read().fps) == (4096, 65_536, 2.0)
    with pytest.raises(ModelError, match="do_sample_frames is false"):
        read(VideoForm.TIMESTAMPS)


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen2_5_vl"])
def model(request: pytest.FixtureRequest) -> Any:
    """Its positions alone: (transformers' own function, the same with text behind the largest position, steps)."""
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel

    kind = Qwen2VLModel if request.param == "qwen2_vl" else Qwen2_5_VLModel
    vision = SimpleNamespace(spatial_merge_size=2, tokens_per_second=4)
    bare = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
    bare.get_vision_position_ids = lambda *given, **named: kind.get_vision_position_ids(None, *given, **named)
    bare.get_rope_index = lambda *given, **named: kind.get_rope_index(bare, *given, **named)
    as_it_stands = bare.get_rope_index
    go_on_behind_the_largest_position(bare)
    return SimpleNamespace(name=request.param, as_it_stands=as_it_stands, trained=bare.get_rope_index)


def layout_of(parts: list[tuple[int, int, int, int]], step: np.float32) -> tuple[list[int], list[ImageSpan]]:
    """Kinds of tokens, and spans, of (text before, pairs, height, width) in tokens; no pairs: an image."""
    kinds: list[int] = []
    spans: list[ImageSpan] = []
    for text, pairs, height, width in parts:
        kinds += [0] * text
        for index in range(max(1, pairs)):
            later = int(np.float32(index) * step) if index else None
            spans.append(ImageSpan(len(kinds), height * width, len(spans), later))
            kinds += [2 if pairs else 1] * (height * width)
    return kinds + [0] * 3, spans


def both(model: Any, parts: list[tuple[int, int, int, int]], seconds: float, *, trained: bool = True) -> Any:
    """(our positions and delta, transformers')."""
    is_timed = model.name == "qwen2_5_vl"
    kinds, spans = layout_of(parts, np.float32(seconds) * np.float32(4) if is_timed else np.float32(1))
    grids = [(1, 2 * height, 2 * width) for _, pairs, height, width in parts for _ in range(max(1, pairs))]
    ours = mrope_positions(len(kinds), spans, grids, 2)
    images = [(1, 2 * height, 2 * width) for _, pairs, height, width in parts if not pairs]
    videos = [(pairs, 2 * height, 2 * width) for _, pairs, height, width in parts if pairs]
    timed = {"second_per_grid_ts": torch.full((len(videos),), seconds)} if is_timed else {}
    theirs = (model.trained if trained else model.as_it_stands)(
        torch.zeros(1, len(kinds), dtype=torch.long), torch.tensor([kinds]),
        torch.tensor(images) if images else None, torch.tensor(videos) if videos else None, **timed)
    return ours, (theirs[0][:, 0].numpy(), int(theirs[1]))


# At least one token between what is seen: transformers takes what touches for one.
PART = st.tuples(st.integers(1, 6), st.integers(0, 5), st.integers(1, 4), st.integers(1, 4))


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(parts=st.lists(PART, max_size=4), seconds=st.sampled_from([0.1, 0.3, 1.0, 1.3, 7.7]))
def test_positions_equal_transformers(parts: list[tuple[int, int, int, int]], seconds: float, model: Any) -> None:
    (ours, delta), (theirs, their_delta) = both(model, parts, seconds)
    np.testing.assert_array_equal(ours, theirs)
    assert delta == their_delta


def test_text_behind_a_video_goes_on_behind_its_largest_position(model: Any) -> None:
    """Three pairs 1.3 seconds apart, two tokens high and three wide, behind two tokens of text."""
    parts = [(2, 3, 2, 3)]
    (ours, _), (theirs, _) = both(model, parts, 1.3, trained=False)
    last = {"qwen2_vl": 4, "qwen2_5_vl": 12}[model.name]
    assert ours[0, 2:20:6].tolist() == theirs[0, 2:20:6].tolist() == [2, 3 if last == 4 else 7, last]
    assert ours[:, 20:].tolist() == [list(range(max(last, 4) + 1, max(last, 4) + 4))] * 3
    np.testing.assert_array_equal(ours[:, :20], theirs[:, :20])
    if last > 4:  # transformers 5.23 lets text go back in time
        assert theirs[0, 20:].tolist() == [5, 6, 7]


def test_a_video_that_reaches_behind_the_prompts_length_is_refused(tmp_path: Path) -> None:
    path = write_qwen_vl(tmp_path)
    (path / "video_preprocessor_config.json").write_text(json.dumps(
        {"size": {"shortest_edge": 1024, "longest_edge": 1024}, "patch_size": 16}))
    slow = video_of(moving_frames(4, 32, 32), times=[0, 1000, 2000, 3000])
    messages = [{"role": "user", "content": [{"type": "video", "video": Video(slow)},
                                             {"type": "text", "text": "x"}]}]
    for form in (VideoForm.STEPS, VideoForm.SECONDS):
        processor = ChatProcessor(str(path), ProcessorSettings(accepts_videos=True, video_form=form))
        if form is VideoForm.STEPS:
            assert len(processor(messages).images) == 2
            continue
        with pytest.raises(RequestError, match=r"reach position \d+, behind its \d+ tokens") as caught:
            processor(messages)
        assert caught.value.code == "video_positions"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen_vl(tmp_path_factory.mktemp("frames"))


QUESTION = {"type": "text", "text": "What is this?"}


@pytest.mark.parametrize(("kwargs", "by_whom"), [*itertools.product(
    [{"max_pixels": 64 * 64}, {"min_pixels": 96 * 192}, {"min_pixels": 32 * 32, "max_pixels": 64 * 96},
     {"max_pixels": 64 * 64, "num_frames": 2}], ["a request", "a setting"]),
    ({"max_pixels": 32 * 32}, "a request"),  # less than the file's min_pixels
])  # fmt: skip
def test_bounds_of_pixels_are_of_each_frame(kwargs: dict[str, int], by_whom: str, folder: Path) -> None:
    """As Qwen2VLVideoProcessor._standardize_kwargs makes a size of them."""
    size = {"shortest_edge": kwargs.get("min_pixels", 64 * 64), "longest_edge": kwargs.get("max_pixels", 640 * 640)}
    size["shortest_edge"] = min(size.values())
    expected = OF_FRAMES.smart_resize(90, 160, factor=32, min_pixels=size["shortest_edge"],
                                      max_pixels=size["longest_edge"])
    bounds = {f"image_{name}": value for name, value in kwargs.items() if name in ("min_pixels", "max_pixels")}
    given: dict[str, Any] = bounds if by_whom == "a setting" else {}
    rest = {name: value for name, value in kwargs.items() if by_whom == "a request" or f"image_{name}" not in bounds}
    processor = ChatProcessor(str(folder), ProcessorSettings(accepts_videos=True, video_form=VideoForm.STEPS, **given))
    part = {"type": "video", "video": Video(video_of(moving_frames(12, 160, 90)))}
    prompt = processor([{"role": "user", "content": [part, QUESTION]}], mm_processor_kwargs=rest)
    assert {image.pixels_HWC.shape[:2] for image in prompt.images} == {expected}
    assert len(prompt.images) == (1 if "num_frames" in kwargs else 2)
    assert ("frame_pixels" in processor.identity()) == bool(given), "another size of frames is another prompt"


def test_bounds_that_would_do_nothing_or_too_much_are_refused(folder: Path) -> None:
    video = {"type": "video", "video": Video(video_of(moving_frames(12)))}
    image = {"type": "image", "image": Image.new("RGB", (90, 60))}
    of_all = ChatProcessor(str(folder), ProcessorSettings(accepts_videos=True))
    of_each = ChatProcessor(str(folder), ProcessorSettings(accepts_videos=True, video_form=VideoForm.STEPS))
    for processor, name, value, code in ((of_all, "max_pixels", 4096, "unsupported_field"),
                                         (of_all, "min_pixels", 4096, "unsupported_field"),
                                         (of_each, "max_pixels", 641 * 640, "invalid_value")):
        with pytest.raises(RequestError) as caught:
            processor([{"role": "user", "content": [video, QUESTION]}], mm_processor_kwargs={name: value})
        assert (caught.value.code, caught.value.param) == (code, f"mm_processor_kwargs.{name}")
    messages = [{"role": "user", "content": [video, image, QUESTION]}]
    assert of_all(messages, mm_processor_kwargs={"max_pixels": 4096}).images, "there it bounds the image"


def test_a_least_above_the_most_of_a_frame_leaves_images(tmp_path: Path) -> None:
    path = write_qwen_vl(tmp_path)
    (path / "video_preprocessor_config.json").write_text(json.dumps(
        {"size": {"shortest_edge": 1024, "longest_edge": 2048}, "patch_size": 16}))
    processor = ChatProcessor(str(path), ProcessorSettings(accepts_videos=True, video_form=VideoForm.STEPS,
                                                           image_min_pixels=4096))
    why = processor.why_no_videos
    assert why is not None
    assert "image_min_pixels 4096 is more than a frame's 2048" in why
