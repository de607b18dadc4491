"""Chats and raw prompts become the same ids, pixels and positions as in transformers, without importing it."""

from __future__ import annotations

import importlib.metadata
import inspect
import io
import json
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from preprocessing_checkpoints import write_json, write_llama, write_qwen_vl

from npu_runner.checkpoint.files import PROMPT_FILES
from npu_runner.errors import JobError, ModelError, RequestError
from npu_runner.prompts.processor import ChatProcessor, ProcessorSettings
from npu_runner.request.prompt_inputs import PromptInputs
from tests.full_set import examples


def drawn_image(width: int = 100, height: int = 70, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def image(**kwargs: int) -> dict[str, Any]:
    return {"type": "image", "image": drawn_image(**kwargs)}


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


CONVERSATIONS = {
    "text": [user("What colour is it?")],
    "system and turns": [
        {"role": "system", "content": "Answer with one word."},
        user("Hello\n\n"),
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHi."},
        user(" 你好, Größe?  "),
    ],
    "image first": [user([image(), text("What is this?")])],
    "image in the middle": [user([text("Look: "), image(width=333, height=90), text(" and say yes or no.")])],
    "image last": [user([text("Describe "), image(width=31, height=500)])],
    "image alone": [user([image()])],
    "image alone after instructions": [{"role": "system", "content": "Read the page."}, user([image(seed=2)])],
    "adjacent images": [user([image(seed=1), image(width=64, height=64), text("Alike?")])],
    "repeated images": [user([image(), text("a"), image(), text("b"), image()])],
    "images in two turns": [
        user([image(), text("Colour?")]),
        {"role": "assistant", "content": [text("red")]},
        user([text("And "), image(width=700, height=650), text("?")]),
    ],
}


def expected(hf_qwen: Any, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
    return hf_qwen.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=True, **kwargs)


def normalised_patches(processor: ChatProcessor, prompt: PromptInputs) -> np.ndarray:
    """pixel_values of the prompt's images, computed from the uint8 pixels by the definition."""
    s = processor.image_settings
    assert s is not None
    rows = []
    for one in prompt.images:
        values = one.pixels_HWC.astype(np.float64) * s.rescale_factor
        values = ((values - np.array(s.image_mean)) / np.array(s.image_std)).astype(np.float32)
        p, m = s.patch_size, s.merge_size
        for top in range(0, values.shape[0], p * m):
            for left in range(0, values.shape[1], p * m):
                for inner in range(m * m):
                    y, x = top + inner // m * p, left + inner % m * p
                    patch_CHW = values[y : y + p, x : x + p].transpose(2, 0, 1)
                    rows.append(np.stack([patch_CHW] * s.temporal_patch_size, axis=1).ravel())
    return np.stack(rows)


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_chats_equal_transformers(name: str, qwen: ChatProcessor, hf_qwen: Any) -> None:
    messages = CONVERSATIONS[name]
    ours, theirs = qwen(messages), expected(hf_qwen, messages)
    assert ours.token_ids == theirs["input_ids"][0]
    assert [list(one.grid_thw) for one in ours.images] == np.asarray(theirs.get("image_grid_thw", [])).tolist()
    marked = np.zeros(len(ours.token_ids), dtype=int)
    for span in ours.spans:
        marked[span.start : span.start + span.num_tokens] = 1
    assert marked.tolist() == theirs["mm_token_type_ids"][0]
    if ours.images:
        np.testing.assert_allclose(normalised_patches(qwen, ours), theirs["pixel_values"], atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_chats_with_the_embedded_model_equal_transformers(name: str, shapes_folder: Path, hf_shapes: Any) -> None:
    processor = ChatProcessor(str(shapes_folder))
    ours, theirs = processor(CONVERSATIONS[name]), expected(hf_shapes, CONVERSATIONS[name])
    assert ours.token_ids == theirs["input_ids"][0]
    if ours.images:
        np.testing.assert_allclose(normalised_patches(processor, ours), theirs["pixel_values"], atol=1e-6, rtol=0)


def test_encoded_and_decoded_images_make_the_same_prompt(qwen: ChatProcessor) -> None:
    buffer = io.BytesIO()
    drawn_image().save(buffer, "PNG")
    encoded = qwen([user([{"type": "image", "image": buffer.getvalue()}, text("?")])])
    decoded = qwen([user([image(), text("?")])])
    assert encoded.token_ids == decoded.token_ids
    assert encoded.images[0].content_hash == decoded.images[0].content_hash


def test_llama_chats_equal_transformers_and_have_one_bos(llama: ChatProcessor, hf_llama: Any) -> None:
    messages = [user("Is it red?"), {"role": "assistant", "content": "yes"}, user("  Why?")]
    theirs = hf_llama.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert llama(messages).token_ids == theirs
    assert theirs.count(hf_llama.bos_token_id) == 1


# Private-use characters are left out: transformers drops two of them, we keep them all.
ANY_TEXT = st.lists(
    st.one_of(
        st.text(st.characters(exclude_categories=["Cs", "Co"]), max_size=12),
        st.sampled_from(
            [
                "<|im_end|>",
                "<|im_start|>",
                "<|image_pad|>",
                "<|vision_start|>",
                "</s>",
                "<s>",
                "<think>",
                "</think>",
                "<tool_call>",
                "<|",
                "|>",
                "<",
                "im_end",
                "\n",
                " ",
                "[INST]",
                "<0x0A>",
            ]
        ),
    ),
    max_size=8,
).map("".join)


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(question=ANY_TEXT, answer=ANY_TEXT)
def test_any_text_is_encoded_as_transformers_does_with_control_tokens_escaped(
    question: str, answer: str, qwen: ChatProcessor, hf_qwen: Any, llama: ChatProcessor, hf_llama: Any
) -> None:
    # In the model's own words its tags stay tokens; transformers escapes them there too.
    said = answer.replace("think>", "thought>")
    # A tag that this template does not write stays a token in transformers' prompts, whoever typed it; not in ours.
    question, answer = (typed.replace("<think>", "<thought>") for typed in (question, answer))
    messages = [user("q" + question), {"role": "assistant", "content": said}, user([text("one " + answer)])]
    # Only tokenizers do in the last transformers for Python 3.10.
    if "sanitize_control_tokens" in inspect.signature(hf_qwen.apply_chat_template).parameters:
        assert qwen(messages).token_ids == expected(hf_qwen, messages, sanitize_control_tokens=True)["input_ids"][0]
    messages[2] = user("one " + answer)
    theirs = hf_llama.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False, sanitize_control_tokens=True
    )
    assert llama(messages).token_ids == theirs


@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(question=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_ordinary_text_takes_the_plain_path(question: str, qwen: ChatProcessor, hf_qwen: Any) -> None:
    messages = [user("q" + question)]
    assert qwen(messages).token_ids == expected(hf_qwen, messages)["input_ids"][0]


@pytest.mark.parametrize("prompt", ["Hello", "", "<s>Hello</s> x", "  spaces "])
def test_raw_llama_prompts_get_the_bos_of_the_post_processor(prompt: str, llama: ChatProcessor, hf_llama: Any) -> None:
    assert llama.from_text(prompt).token_ids == hf_llama(prompt)["input_ids"]
    assert llama.from_text(prompt).positions_3T is None


def test_raw_prompts_with_images_equal_transformers(qwen: ChatProcessor, hf_qwen: Any) -> None:
    prompt = "<|vision_start|><|image_pad|><|vision_end|>What?<|image_pad|>"
    images = [drawn_image(), drawn_image(200, 90)]
    ours, theirs = qwen.from_text(prompt, images), hf_qwen(text=[prompt], images=images)
    assert ours.token_ids == theirs["input_ids"][0]
    unexpanded = qwen.tokenizer.encode(prompt, add_special_tokens=False).ids
    assert qwen.from_text(unexpanded, images).token_ids == ours.token_ids


@pytest.mark.parametrize(
    ("prompt", "num_images", "code"),
    [
        ("<|image_pad|> ?", 0, "image_count_mismatch"),
        ("<|image_pad|> ?", 2, "image_count_mismatch"),
        ("no placeholder", 1, "image_count_mismatch"),
        ("<|video_pad|>", 0, "unsupported_part"),
        ("<|image_pad|>" * 65, 65, "too_many_images"),
        ("", 0, "empty_prompt"),
        ([], 0, "empty_prompt"),
        ([1, -1], 0, "invalid_type"),
        ([1, 10**9], 0, "invalid_type"),
        ([1, True], 0, "invalid_type"),
        (["a"], 0, "invalid_type"),
        (b"bytes", 0, "invalid_type"),
        (None, 0, "invalid_type"),
        ("\ud800", 0, "invalid_unicode"),
    ],
)
def test_raw_prompts_that_cannot_be_prepared(qwen: ChatProcessor, prompt: Any, num_images: int, code: str) -> None:
    with pytest.raises(RequestError) as caught:
        qwen.from_text(prompt, [drawn_image()] * num_images)
    assert caught.value.code == code


def test_a_text_model_refuses_images_and_joins_text_parts(llama: ChatProcessor) -> None:
    with pytest.raises(RequestError, match="text only") as caught:
        llama([user([text("?"), image()])])
    assert (caught.value.code, caught.value.param) == ("model_has_no_vision", "messages[0].content[1]")
    with pytest.raises(RequestError) as caught:
        llama.from_text("?", [drawn_image()])
    assert caught.value.code == "model_has_no_vision"
    assert llama([user([text("a"), text("b")])]).token_ids == llama([user("a\nb")]).token_ids


def test_a_pickled_processor_makes_the_same_prompt(qwen_folder: Path) -> None:
    first = ChatProcessor(str(qwen_folder), ProcessorSettings(image_max_pixels=96 * 96, max_images_per_prompt=2))
    again = pickle.loads(pickle.dumps(first))
    messages = [user([image(width=300, height=300), text("?")])]
    assert again(messages).token_ids == first(messages).token_ids
    assert again(messages).images[0].content_hash == first(messages).images[0].content_hash
    assert again.identity() == first.identity()


@pytest.mark.parametrize("name", PROMPT_FILES)
def test_a_pickled_processor_is_read_again_from_the_same_files_or_not_at_all(tmp_path: Path, name: str) -> None:
    folder = write_qwen_vl(tmp_path)
    pickled = pickle.dumps(ChatProcessor(str(folder), ProcessorSettings(accepts_videos=True)))
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    before = path.read_bytes() if path.exists() else None
    for after in (b"{}", None) if before is not None else (b"{}",):
        path.unlink(missing_ok=True) if after is None else path.write_bytes(after)
        with pytest.raises(JobError, match=re.escape(f"model {folder}: {name} changed")):
            pickle.loads(pickled)
    path.unlink(missing_ok=True) if before is None else path.write_bytes(before)
    pickle.loads(pickled)


@pytest.mark.parametrize("family", ["qwen", "llama"])
def test_all_files_that_a_processor_reads_are_compared(
    family: str, qwen_folder: Path, llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, read_text = [], Path.read_text

    def noted(path: Path, **options: Any) -> str:
        names.extend([path.name] * (path.parent == model))
        return read_text(path, **options)

    model = {"qwen": qwen_folder, "llama": llama_folder}[family]
    monkeypatch.setattr(Path, "read_text", noted)
    ChatProcessor(str(model), ProcessorSettings(accepts_videos=True))
    assert {"config.json", "tokenizer_config.json", "chat_template.jinja"} <= set(names) <= set(PROMPT_FILES)


def test_another_version_of_pillow_is_another_processor(
    qwen_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pickled = pickle.dumps(ChatProcessor(str(qwen_folder)))
    (tmp_path / "pillow-0.1.dist-info").mkdir()
    (tmp_path / "pillow-0.1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: pillow\nVersion: 0.1\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(JobError, match="the package pillow changed"):
        pickle.loads(pickled)


def test_identity_differs_with_every_thing_that_shapes_prompts(qwen_folder: Path, tmp_path: Path) -> None:
    base = ChatProcessor(str(qwen_folder))
    variants = [
        base,
        ChatProcessor(str(qwen_folder), ProcessorSettings(image_max_pixels=96 * 96)),
        ChatProcessor(str(write_qwen_vl(tmp_path / "mean", image_mean=[0.1, 0.2, 0.3]))),
    ]
    changed = write_qwen_vl(tmp_path / "template")
    (changed / "chat_template.jinja").write_text("{{ messages[0].content }}")
    variants.append(ChatProcessor(str(changed)))
    identities = [json.dumps(variant.identity(), sort_keys=True) for variant in variants]
    assert len(set(identities)) == len(variants)
    assert ChatProcessor(str(write_qwen_vl(tmp_path / "copy"))).identity() == base.identity()


@pytest.mark.parametrize("library", ["PIL", "tokenizers"])
def test_identity_holds_the_versions_of_what_makes_prompts(
    library: str, qwen_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = ChatProcessor(str(qwen_folder))
    before = processor.identity()
    monkeypatch.setattr(f"{library}.__version__", "0.0")
    assert processor.identity() != before


def test_identity_holds_the_versions_of_decoders_that_a_model_has_a_use_for(
    qwen_folder: Path, llama: ChatProcessor
) -> None:
    of_images = {"pillow-heif": importlib.metadata.version("pillow-heif"), "pdf": "pypdfium2"}
    accepts_videos = ChatProcessor(str(qwen_folder), ProcessorSettings(accepts_videos=True))
    assert accepts_videos.identity()["decoders"] == {**of_images, "av": importlib.metadata.version("av")}
    assert ChatProcessor(str(qwen_folder)).identity()["decoders"] == of_images
    assert "decoders" not in llama.identity()


def test_preprocessing_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, npu_runner.prompts.processor, npu_runner.prompts.media.media; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = set(done.stdout.split())
    assert "npu_runner.prompts.processor" in imported
    assert not imported & {"torch", "transformers"}


@pytest.mark.parametrize("broken", ["config.json", "tokenizer.json", "preprocessor_config.json"])
def test_a_missing_or_broken_file_is_named(broken: str, tmp_path: Path) -> None:
    folder = write_qwen_vl(tmp_path)
    for content in (None, "{", "[1]", "\udcff"):
        if content is None:
            (folder / broken).unlink()
        else:
            (folder / broken).write_text(content, errors="surrogateescape")
        with pytest.raises(ModelError, match=broken):
            ChatProcessor(str(folder))


def test_a_missing_folder_is_named() -> None:
    with pytest.raises(ModelError, match="nowhere"):
        ChatProcessor("/nowhere/at/all")


def test_an_image_token_outside_the_tokenizer_is_a_model_error(tmp_path: Path) -> None:
    folder = write_qwen_vl(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    for token_id in (None, 10**6, -1, "x"):
        write_json(folder / "config.json", {**config, "image_token_id": token_id})
        with pytest.raises(ModelError, match="image_token_id"):
            ChatProcessor(str(folder))


def test_tokens_listed_only_in_the_tokenizer_config_are_added_as_in_transformers(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    folder = write_llama(tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    size = ChatProcessor(str(folder)).tokenizer.get_vocab_size()
    entry = {
        "content": "<|new|>",
        "lstrip": False,
        "normalized": False,
        "rstrip": False,
        "single_word": False,
        "special": True,
    }
    config["added_tokens_decoder"] = {str(size): entry}
    write_json(folder / "tokenizer_config.json", config)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)("a <|new|> b")["input_ids"]
    assert ChatProcessor(str(folder)).from_text("a <|new|> b").token_ids == theirs
    assert size in theirs
    config["added_tokens_decoder"] = {str(size + 7): entry}
    write_json(folder / "tokenizer_config.json", config)
    with pytest.raises(ModelError, match=r"<\|new\|>"):
        ChatProcessor(str(folder))
