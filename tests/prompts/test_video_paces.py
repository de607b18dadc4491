"""Videos of GLM's families: which frames, their times and how large. transformers' own functions are the oracle."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from npu_runner.errors import ModelError, RequestError
from npu_runner.prompts.media.image_settings import ImageSettings
from npu_runner.prompts.media.video_settings import (
    SlowingVideoSettings,
    SteadyVideoSettings,
    VideoForm,
    VideoSettings,
    read_video_settings,
)
from tests.full_set import examples
from tests.oracle.videos_reference import GLM4V, GLM46V

LEAST, MOST = 112 * 112, 28 * 28 * 2 * 30000
FRAME = ImageSettings(min_pixels=LEAST, max_pixels=MOST)
CONFIG = {"vision_config": {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}}
STEADY, SLOWING = SteadyVideoSettings(frame=FRAME), SlowingVideoSettings(frame=FRAME)
RATES = [1.0, 5.0, 10.0, 23.976023976023978, 24.0, 25.0, 29.97002997002997, 30.0, 59.94005994005994, 60.0]


def metadata(num: int, rate: float) -> Any:
    """The length is that of a fraction, as in transformers' readers."""
    exact = Fraction(rate).limit_denominator(2000)
    assert float(exact) == rate
    return SimpleNamespace(total_num_frames=num, fps=rate, duration=float(num / exact))


def shown(indices: Any) -> list[int]:
    """An odd frame is shown twice, and one of a video too short for any is its first."""
    return list(indices) or [0, 0]


@settings(max_examples=examples(100), deadline=None)
@example(num=1, rate=10.0, fps=2.0, most=300)
@example(num=9000, rate=30.0, fps=2.0, most=300)
@example(num=9001, rate=30.0, fps=2.0, most=300)
@given(num=st.integers(1, 40_000), rate=st.sampled_from(RATES), fps=st.sampled_from([0.5, 1.0, 2.0, 3.0, 24.0]),
       most=st.sampled_from([10, 300]))
def test_a_steady_pace_is_that_of_transformers(num: int, rate: float, fps: float, most: int) -> None:
    sampler: Any = SimpleNamespace(fps=fps, max_duration=most)
    theirs = shown(GLM4V.Glm4vVideoProcessor.sample_frames(sampler, metadata(num, rate)))
    ours = SteadyVideoSettings(frame=FRAME, fps=fps, max_duration=most, max_frames=100_000)
    assert ours.sample(num, rate).tolist() == theirs
    assert ours.timestamps(theirs, rate) == [index / rate for index in theirs[::2]]


@settings(max_examples=examples(100), deadline=None)
@example(num=1, rate=10.0)
@example(num=300, rate=10.0)
@example(num=301, rate=10.0)
@example(num=3000, rate=10.0)
@example(num=3005, rate=10.0)
@example(num=24_005, rate=10.0)
@example(num=72_000, rate=24.0)
@given(num=st.integers(1, 80_000), rate=st.sampled_from(RATES))
def test_a_pace_that_slows_down_is_that_of_transformers(num: int, rate: float) -> None:
    sampler: Any = SimpleNamespace(temporal_patch_size=2)
    theirs = shown(GLM46V.Glm46VVideoProcessor.sample_frames(sampler, metadata(num, rate)))
    assert SLOWING.sample(num, rate).tolist() == theirs


@pytest.mark.parametrize("rules", [STEADY, SLOWING])
def test_a_request_may_choose_its_frames(rules: VideoSettings) -> None:
    """Which transformers leaves to the caller here: it reads `fps` alone, and for GLM-4.6V nothing."""
    assert rules.with_kwargs({"num_frames": 3}).sample(41, 10.0).tolist() == [0, 20, 40, 40]
    assert rules.with_kwargs({"num_frames": 9}).sample(3, 10.0).tolist() == [0, 1, 2, 2]
    assert rules.with_kwargs({"max_frames": 2}).sample(300, 10.0).tolist()[0] == 0
    assert len(rules.with_kwargs({"max_frames": 2}).sample(300, 10.0)) == 2
    assert rules.with_kwargs({"fps": 1}).sample(40, 10.0).tolist() == [0, 10, 20, 30]


@settings(max_examples=examples(100), deadline=None)
@example(num=4, height=14, width=14)
@given(num=st.integers(1, 320), height=st.integers(1, 5000), width=st.integers(1, 5000))
def test_frames_are_resized_to_the_size_that_transformers_takes(num: int, height: int, width: int) -> None:
    """Which it decides for all frames of a video together; they are even here."""
    try:
        theirs = GLM4V.smart_resize(2 * num, height, width, min_pixels=LEAST, max_pixels=MOST)
        assert GLM46V.smart_resize(2 * num, height, width, min_pixels=LEAST, max_pixels=MOST) == theirs
    except ValueError:
        with pytest.raises(RequestError, match="more than 200") as caught:
            STEADY.fit(2 * num, height, width)
        assert caught.value.code == "video_aspect_ratio"
        return
    assert STEADY.fit(2 * num, height, width) == SLOWING.fit(2 * num, height, width) == theirs
    largest = STEADY.largest_frame(1 << 20)
    assert theirs[0] * theirs[1] <= largest[0] * largest[1]


def test_a_checkpoints_file_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    def read(form: VideoForm) -> Any:
        return read_video_settings(tmp_path, CONFIG, form=form)

    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"patch_size": 14}))
    for form, processor in ((VideoForm.WHOLE_SECONDS_BEHIND, GLM4V.Glm4vVideoProcessor),
                            (VideoForm.SECONDS_BEHIND, GLM46V.Glm46VVideoProcessor)):
        frame = read(form).frame
        assert {"shortest_edge": frame.min_pixels, "longest_edge": frame.max_pixels} == processor.size
        assert np.array_equal(frame.image_mean, processor.image_mean)
    assert (read(VideoForm.WHOLE_SECONDS_BEHIND).fps, read(VideoForm.WHOLE_SECONDS_BEHIND).max_duration) == (
        GLM4V.Glm4vVideoProcessor.fps, GLM4V.Glm4vVideoProcessor.max_duration)
    own = {"size": {"shortest_edge": 12544, "longest_edge": 47_040_000}, "fps": 1, "num_frames": 16, "max_duration": 60,
           "min_pixels": 5, "max_frames": 3}
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(own))
    steady, slowing = read(VideoForm.WHOLE_SECONDS_BEHIND), read(VideoForm.SECONDS_BEHIND)
    assert (steady.frame.min_pixels, steady.fps, steady.max_duration) == (12544, 1.0, 60)
    assert (steady.num_frames, steady.max_frames, slowing.fps, slowing.max_frames) == (None, 768, 0.0, 640)
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps({**own, "do_sample_frames": False}))
    with pytest.raises(ModelError, match="do_sample_frames is false"):
        read(VideoForm.SECONDS_BEHIND)
