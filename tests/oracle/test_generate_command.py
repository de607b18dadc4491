"""`npu-runner generate` with real weights: an answer on standard output, or the reason for none and exit status 1."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from npu_runner import LLM, SamplingParams
from npu_runner.cli import main as cli
from tests.oracle import reference
from tests.videos import moving_frames, video_of

QUESTION = "which of the two pictures shows a circle?"
OPTIONS = ("--platform", "cpu", "--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "2")


def chat_ids(path: Path) -> list[int]:
    from transformers import AutoTokenizer

    conversation = [{"role": "user", "content": QUESTION}]
    return list(AutoTokenizer.from_pretrained(path).apply_chat_template(conversation, add_generation_prompt=True,
                                                                        return_dict=False))


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_a_model_that_gives_nan_is_an_error_and_not_an_empty_line(
    num_tokens: int, checkpoint: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = shutil.copytree(checkpoint("qwen3"), tmp_path / "model")
    prompt = chat_ids(path)
    (first,), _ = reference.generate(path, prompt, max_new_tokens=1)
    assert first not in prompt
    weights = load_file(path / "model.safetensors")
    weights["model.embed_tokens.weight"][first if num_tokens else slice(None)] = torch.nan
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    assert cli.main(["generate", QUESTION, "--model", str(path), *OPTIONS]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    reason = f"npu-runner: no answer, given up after {num_tokens} tokens: the model's output is not a number"
    assert reason in printed.err
    with LLM(path, platform="cpu", dtype="float32", max_model_len=256, max_num_seqs=2) as llm:
        (result,) = llm.generate([prompt], SamplingParams(temperature=0))
    assert (result.finish_reason, len(result.token_ids), result.error_code) == ("error", num_tokens, None)
    assert result.error is not None
    assert result.error in printed.err


def test_the_answer_is_transformers_with_the_checkpoints_own_defaults(
    checkpoint: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoTokenizer

    path = shutil.copytree(checkpoint("qwen3"), tmp_path / "model")
    generation = {"repetition_penalty": 1.3, "max_new_tokens": 9}
    (path / "generation_config.json").write_text(json.dumps({**generation, "do_sample": False}))
    tokenizer, model, ids = AutoTokenizer.from_pretrained(path), reference.load_model(path), chat_ids(path)
    expected = model.generate(**reference.model_inputs(path, ids))[0, len(ids):]
    assert cli.main(["generate", QUESTION, "--model", str(path), *OPTIONS]) == 0
    assert capsys.readouterr().out == tokenizer.decode(expected, skip_special_tokens=True) + "\n"


def test_an_empty_answer_is_no_answer(checkpoint: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = shutil.copytree(checkpoint("qwen3"), tmp_path / "model")
    (first,), _ = reference.generate(path, chat_ids(path), max_new_tokens=1)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": first}))
    assert cli.main(["generate", QUESTION, "--model", str(path), *OPTIONS]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "npu-runner: no answer: 1 tokens without text (finish_reason stop)" in printed.err
    assert "shapes-vl" not in printed.err


def test_images_and_videos_are_shown_in_the_order_in_which_they_are_named(
    checkpoint: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoTokenizer

    path, image = checkpoint("qwen3_vl"), reference.random_image(np.random.default_rng(7), 70, 45)
    data = video_of(moving_frames(30))
    image.save(tmp_path / "a.png")
    (tmp_path / "b.mp4").write_bytes(data)
    seen = ["--video", str(tmp_path / "b.mp4"), "--image", str(tmp_path / "a.png")]
    options = ["--model", str(path), *OPTIONS, "--max-tokens", "8", "--video-max-frames", "2"]
    assert cli.main(["generate", QUESTION, *seen, *options]) == 0
    printed = capsys.readouterr().out
    with LLM(path, platform="cpu", dtype="float32", max_model_len=256, video_max_frames=2) as llm:
        prompt = llm.processor([{"role": "user", "content": [
            {"type": "video", "video": data}, {"type": "image", "image": image}, {"type": "text", "text": QUESTION},
        ]}])  # fmt: skip
        (expected,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=8))
    assert [image.pixels_HWC.shape[2] for image in prompt.images] == [6, 3]
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert printed == tokenizer.decode(expected.token_ids, skip_special_tokens=True) + "\n"
    assert cli.main(["generate", QUESTION, "--video", str(tmp_path / "none.mp4"), *options]) == 2
    assert "video " in capsys.readouterr().err
