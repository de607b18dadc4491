"""The start tries no larger image than a prompt has room for; a larger one is an error of its own row alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.nn.modules.module import register_module_forward_pre_hook

from npu_runner import LLM
from npu_runner.errors import RequestError
from npu_runner.models.vision.tower import Tower
from npu_runner.platforms import pick_platform
from tests.families import FAMILIES, accepts_videos, sees_images
from tests.full_set import only_full
from tests.oracle import reference
from tests.oracle.embedding_checkpoints import assert_same, expected_vector
from tests.oracle.running import greedy
from tests.oracle.tiny_checkpoints import make_checkpoint

FAST = ("glm4v", "qwen3_vl")
"""Whose images are pairs of frames, and whose are not."""
LONGEST_EDGE = 16_777_216
MAX_MODEL_LEN = 100
SETTINGS: dict[str, Any] = {"max_num_seqs": 2, "max_model_len": MAX_MODEL_LEN, "dtype": "float32",
                            "kv_cache_bytes": 1 << 22}


@pytest.fixture(scope="module", params=[*FAST, *only_full(
    "families whose towers and processors are those of others", *sorted(
        name for name in filter(sees_images, FAMILIES) if name not in FAST))])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that takes images as large as the published Qwen3-VL does."""
    folder = make_checkpoint(tmp_path_factory.mktemp(request.param), request.param)
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        settings = json.loads((folder / "preprocessor_config.json").read_text())
        settings["size"] = {"shortest_edge": 4096, "longest_edge": LONGEST_EDGE}
        (folder / name).write_text(json.dumps(settings))
    return folder


@contextmanager
def patches_through_the_tower() -> Iterator[list[int]]:
    """Patches of each image that any tower takes inside."""
    seen: list[int] = []

    def note(module: Any, arguments: Any) -> None:
        if isinstance(module, Tower):
            seen.extend(height * width for height, width in arguments[1])

    handle = register_module_forward_pre_hook(note)
    try:
        yield seen
    finally:
        handle.remove()


def side_of(llm: LLM) -> int:
    settings = llm.engine.processor.image_settings
    assert settings is not None
    return settings.side_multiple


def chat_of(seen: Any, kind: str = "image") -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": kind, kind: seen}, {"type": "text", "text": "which"}]}]


def shown_images_of(llm: LLM) -> tuple[Any, Any]:
    """The largest that a prompt has room for, and one row of tokens more."""
    side, rng = side_of(llm), np.random.default_rng(3)
    num_text = len(llm.engine.processor(chat_of(reference.random_image(rng, 8 * side, side))).token_ids) - 8
    room = MAX_MODEL_LEN - 1 - num_text
    columns = next(count for count in range(6, room) if room % count == 0)
    fitting, larger = (reference.random_image(rng, columns * side, rows * side)
                       for rows in (room // columns, room // columns + 1))
    return fitting, larger


def test_the_start_tries_no_larger_image_than_a_prompt_has_room_for(path: Path, platform_name: str) -> None:
    with patches_through_the_tower() as seen, LLM(path, platform=platform_name, **SETTINGS):
        pass
    assert seen, "the tower is tried at the start"
    # A merged token is four patches. Where no memory is measured a small image takes the same path.
    is_measured = pick_platform(platform_name).memory.info() is not None
    assert max(seen) == 4 * (MAX_MODEL_LEN - 1 if is_measured else 64)


def test_the_largest_image_that_fits_is_answered_and_one_more_row_is_refused(path: Path, platform_name: str) -> None:
    with LLM(path, platform=platform_name, **SETTINGS) as llm:
        fitting, larger = shown_images_of(llm)
        prompt = llm.engine.processor(chat_of(fitting))
        assert len(prompt.token_ids) == MAX_MODEL_LEN - 1, "with one generated it is full"
        with patches_through_the_tower() as seen:
            refused, answered = llm.chat([chat_of(larger), chat_of(fitting)], greedy(1), return_errors=True)
    assert answered.token_ids == reference.generate(path, prompt.token_ids, [fitting], max_new_tokens=1)[0]
    assert refused.error_code == "prompt_too_long"
    assert f"the model takes {MAX_MODEL_LEN}" in str(refused.error)
    assert seen == [np.prod(prompt.images[0].grid_thw)], "no other image reaches the tower"


@pytest.mark.parametrize("path", [*filter(accepts_videos, FAST), *only_full(
    "families whose towers and processors are those of others", *sorted(
        name for name in filter(accepts_videos, FAMILIES) if name not in FAST))], indirect=True)
def test_a_video_larger_than_a_prompt_never_reaches_the_tower(path: Path, platform_name: str) -> None:
    pytest.importorskip("av")  # an extra: the other tests do without it
    from tests.videos import moving_frames, video_of

    small, large = (video_of(moving_frames(4, size, size)) for size in (128, 512))
    with LLM(path, platform=platform_name, **SETTINGS) as llm, patches_through_the_tower() as seen:
        refused, answered = llm.chat([chat_of(large, "video"), chat_of(small, "video")], greedy(1), return_errors=True)
        side = side_of(llm)
    assert refused.error_code == "prompt_too_long"
    assert answered.error is None
    assert set(seen) == {(2 * round(128 / side)) ** 2}


def test_embeddings_have_the_same_room(path: Path, platform_name: str) -> None:
    with patches_through_the_tower() as seen, LLM(path, platform=platform_name, runner="pooling", **SETTINGS) as llm:
        fitting, larger = shown_images_of(llm)
        assert max(seen) <= 4 * (MAX_MODEL_LEN - 1)
        seen.clear()
        with pytest.raises(RequestError, match=f"the model takes {MAX_MODEL_LEN}"):
            llm.embed(llm.engine.processor(chat_of(larger)))
        assert not seen
        prompt = llm.engine.processor(chat_of(fitting))
        (result,) = llm.embed([prompt])
    assert_same(result.embedding, expected_vector(path, prompt.token_ids, [fitting]))


def test_where_not_even_the_smallest_image_fits_the_start_is_tried_all_the_same(
        path: Path, platform_name: str) -> None:
    few: dict[str, Any] = {**SETTINGS, "max_model_len": 4}
    with patches_through_the_tower() as seen, LLM(path, platform=platform_name, **few) as llm:
        assert max(seen) == 4 * 3
        (output,) = llm.generate([[5, 6]], greedy(1))
        assert len(output.token_ids) == 1
        assert llm.stats().num_images_encoded == 0
