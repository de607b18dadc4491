"""transformers is asked a question once in a run; another question, or another checkpoint, is no old one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.oracle import reference


def test_a_question_is_asked_once(checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    ask = reference._generate
    monkeypatch.setattr(reference, "answers_folder", tmp_path)
    monkeypatch.setattr(reference, "_generate", lambda *question: asked.append(question) or ask(*question))
    one, other = checkpoint("qwen3"), checkpoint("qwen3", seed=1)
    first, again = (reference.generate(one, [5, 6, 7], max_new_tokens=3) for _ in range(2))
    assert len(asked) == 1
    assert first[0] == again[0]
    assert torch.equal(first[1], again[1])
    for path, token_ids, count in ((one, [5, 6], 3), (one, [5, 6, 7], 2), (other, [5, 6, 7], 3)):
        tokens, logits = reference.generate(path, token_ids, max_new_tokens=count)
        right, exact = ask(path, token_ids, [], count)
        assert tokens == right
        assert torch.equal(logits, exact)
    assert len(asked) == 4


def test_images_are_part_of_a_question(checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "answers_folder", tmp_path)
    monkeypatch.setattr(reference, "_generate", lambda path, token_ids, images, count: ([len(asked)], torch.ones(1)))
    asked: list[Any] = []
    path = checkpoint("qwen3")
    for image in (Image.new("RGB", (8, 8)), Image.new("RGB", (8, 8), "red"), Image.new("RGB", (4, 16)), b"a video"):
        asked.append(image)
        assert reference.generate(path, [5], [image], max_new_tokens=1)[0] == [len(asked)]
        assert reference.generate(path, [5], [image], max_new_tokens=1)[0] == [len(asked)]
