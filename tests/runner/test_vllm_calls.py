"""What calls of LLM take as vLLM's do: bars by position, arrays, paths, classes, templates, chats for vectors."""

from __future__ import annotations

import functools
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import BaseModel
from tqdm import tqdm

from npu_runner import LLM, SamplingParams, StructuredOutputsParams
from npu_runner.assets import SHAPES_VL
from npu_runner.errors import ConfigError, RequestError
from npu_runner.prompts.processor import ChatProcessor, ProcessorSettings
from scripts.shapes.drawing import TEST_SEEDS, draw_example
from tests.oracle import reference
from tests.oracle.running import SMALL, greedy

PICTURE = draw_example(TEST_SEEDS[0]).images[0].convert("RGB")
ASKED = [{"role": "user", "content": "what colour?"}]
TEMPLATE = ("{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
            "{% if add_generation_prompt %}>{% endif %}")


@pytest.fixture(scope="module")
def llm(path: Path, platform_name: str) -> Iterator[LLM]:
    with LLM(path, platform=platform_name, kv_cache_bytes="64M", **SMALL) as llm:
        yield llm


@pytest.fixture(scope="module")
def seeing() -> ChatProcessor:
    return ChatProcessor(str(SHAPES_VL))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_tokenizer_is_transformers(llm: LLM, path: Path) -> None:
    from transformers import AutoTokenizer

    ours, theirs = llm.get_tokenizer(), AutoTokenizer.from_pretrained(path)
    assert ours is llm.get_tokenizer()
    assert ours.encode("what colour?") == theirs.encode("what colour?")


def test_a_bar_is_shown_on_a_terminal_where_it_is_asked_for_or_made(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def shown(stream: io.StringIO, *args: Any, **options: Any) -> str:
        with monkeypatch.context() as patched:
            patched.setattr(sys, "stderr", stream)
            list(llm.chat(ASKED, greedy(1), *args, **options))
        return stream.getvalue()

    assert "1/1" in shown(Terminal())
    assert "1/1" in shown(io.StringIO(), True), "by position, as in vLLM"
    assert "mine: 100%" in shown(io.StringIO(), functools.partial(tqdm, desc="mine"))
    assert shown(Terminal(), False) == shown(io.StringIO()) == shown(Terminal(), stream_results=True) == ""


def test_what_vllm_has_and_is_not_served_may_ask_for_nothing(llm: LLM) -> None:
    llm.chat(messages=ASKED, sampling_params=greedy(1), lora_request=None, chat_template_content_format="auto")
    llm.generate("x", greedy(1), priority=None)
    with pytest.raises(RequestError, match=r"lora_request: .* is not served: LLM\(lora=PATH\) merges one adapter"):
        llm.generate("x", greedy(1), lora_request=object())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"generate\(\) got an unexpected keyword argument 'tools'"):
        llm.generate("x", greedy(1), tools=[])  # type: ignore[call-overload]


class Shape(BaseModel):
    name: str
    count: int


def test_a_class_of_pydantics_is_a_schema(llm: LLM) -> None:
    by_class = StructuredOutputsParams(json=Shape)
    assert by_class == StructuredOutputsParams(json=Shape.model_json_schema())
    with pytest.raises(RequestError, match="is no JSON schema"):
        StructuredOutputsParams(json=dict)


@torch.inference_mode()
def theirs_allowed(path: Path, ids: list[int], allowed: list[int], count: int) -> list[int]:
    model = reference.load_model(path)
    found = model.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), max_new_tokens=count,
                           min_new_tokens=count, do_sample=False, prefix_allowed_tokens_fn=lambda *_: allowed)
    return found[0, len(ids):].tolist()  # type: ignore[no-any-return]


def test_only_allowed_tokens_are_generated(llm: LLM, path: Path) -> None:
    ids = llm.get_tokenizer().encode("what colour is it?")
    allowed = [7, 31, 64, 65, 200, 301]
    params = greedy(9).replace(allowed_token_ids=np.array(allowed))
    free, ours = llm.generate([ids, ids], [greedy(9), params])
    assert ours.token_ids == theirs_allowed(path, ids, allowed, 9) != free.token_ids
    drawn = params.replace(temperature=3.0, n=4, seed=1, logprobs=2, repetition_penalty=1.3)
    (many,) = llm.generate([ids], drawn)
    assert {token for each in many.outputs for token in each.token_ids} <= set(allowed)
    assert len({tuple(each.token_ids) for each in many.outputs}) == 4


def test_allowed_tokens_and_a_rule_hold_together(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    digits = [tokenizer.convert_tokens_to_ids(digit) for digit in "37"]
    ruled = SamplingParams(temperature=1.0, seed=1, max_tokens=20, structured_outputs={"regex": "[0-9]{6}"})
    ends = llm.engine._eos_token_ids
    (output,) = llm.generate(["x"], ruled.replace(allowed_token_ids=[*digits, *ends]))
    assert len(output.text) == 6
    assert set(output.text) <= set("37")
    (stuck,) = llm.generate(["x"], ruled.replace(allowed_token_ids=[tokenizer.convert_tokens_to_ids("a")]))
    assert (stuck.finish_reason, stuck.error_code) == ("error", "no_token_left")


def test_an_end_token_ends_only_where_it_is_allowed(llm: LLM) -> None:
    (end, *_) = llm.engine._eos_token_ids
    params = SamplingParams(temperature=0, max_tokens=5, logit_bias={end: 100.0})
    free, barred = llm.generate(["x", "x"], [params, params.replace(allowed_token_ids=[7, 8])])
    assert (free.finish_reason, barred.finish_reason, len(barred.token_ids)) == ("stop", "length", 5)


@pytest.mark.parametrize(("given", "said"), [
    ({"allowed_token_ids": []}, "allowed_token_ids: it is empty"),
    ({"allowed_token_ids": [99_999]}, "allowed_token_ids: token id 99999 is asked for"),
    ({"allowed_token_ids": ["x"]}, "allowed_token_ids: 'x' is not an integer"),
    ({"allowed_token_ids": range(262_145)}, "allowed_token_ids: 262145 entries, at most 262144"),
    ({"detokenize": False, "stop": "x"}, "detokenize: stop strings are looked for in the text"),
])
def test_wishes_that_cannot_be_are_named(given: dict[str, Any], said: str, llm: LLM) -> None:
    with pytest.raises(RequestError) as refused:
        llm.generate(["x"], SamplingParams(max_tokens=2, **given))
    assert said in str(refused.value)


def test_without_text_the_tokens_are_the_same(llm: LLM) -> None:
    said, unsaid = llm.generate(["x", "x"], [greedy(6), greedy(6).replace(detokenize=False)])
    assert said.text
    assert (unsaid.text, unsaid.token_ids) == ("", said.token_ids)


def test_a_prompt_is_cut_to_its_last_tokens(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode("what colour is it?")
    chat = tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, return_dict=False)
    cut = greedy(2).replace(truncate_prompt_tokens=3)
    outputs = [*llm.generate(["what colour is it?", ids], cut), *llm.chat([ASKED], cut)]
    assert [output.prompt_token_ids for output in outputs] == [ids[-3:], ids[-3:], chat[-3:]]
    (whole,) = llm.generate(["what colour is it?"], greedy(2).replace(truncate_prompt_tokens=-1))
    assert whole.prompt_token_ids == ids


def test_a_template_of_a_call_or_of_a_file_is_transformers_prompt(llm: LLM, path: Path, tmp_path: Path) -> None:
    expected = llm.get_tokenizer().apply_chat_template(ASKED, chat_template=TEMPLATE, tokenize=False,
                                                       add_generation_prompt=True)
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    for given in (TEMPLATE, tmp_path / "t.jinja", str(tmp_path / "t.jinja")):
        (output,) = llm.chat(ASKED, greedy(1), chat_template=given)
        assert output.prompt == expected
    own = ChatProcessor(str(path))
    replaced = ChatProcessor(str(path), ProcessorSettings(chat_template=str(tmp_path / "t.jinja")))
    (tmp_path / "t.jinja").unlink()  # a worker that starts later has the text
    assert replaced(ASKED).text == expected != own(ASKED).text
    assert replaced.identity()["chat_template"] != own.identity()["chat_template"], "a resumed job would be refused"
    for kwargs, message in (({"chat_template": "{% for"}, "chat_template: the chat template does not compile"),
                            ({"chat_template": TEMPLATE, "chat_template_kwargs": {"x": 1}}, "reads no such name")):
        with pytest.raises(RequestError, match=message):
            llm.chat(ASKED, greedy(1), **kwargs)  # type: ignore[call-overload]


def test_a_checkpoint_without_a_template_takes_one(checkpoint: Any, tmp_path: Path, path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in path.iterdir():
        if file.name not in ("chat_template.jinja", "tokenizer_config.json"):
            (bare / file.name).symlink_to(file)
    with pytest.raises(RequestError, match=r"has no chat template .*--chat-template FILE"):
        ChatProcessor(str(bare))(ASKED)
    assert ChatProcessor(str(bare), ProcessorSettings(chat_template=TEMPLATE))(ASKED).text == "[user] what colour?\n>"


def asks(image: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "Which?"}]}]


PIXELS = np.array(PICTURE)


@pytest.mark.parametrize(("image", "same"), [
    (PIXELS, PICTURE), (torch.from_numpy(PIXELS), PICTURE), (PIXELS.transpose(2, 0, 1), PICTURE),
    (torch.from_numpy(PIXELS).permute(2, 0, 1), PICTURE), (PIXELS[..., 0], PICTURE.getchannel(0)),
    (PIXELS[..., :1], PICTURE.getchannel(0)), (np.array(PICTURE.convert("RGBA")), PICTURE),
], ids=["HWC", "tensor", "CHW", "tensor CHW", "grey", "grey HW1", "RGBA"])  # fmt: skip
def test_an_array_is_the_image_that_pillow_makes_of_it(image: Any, same: Image.Image, seeing: ChatProcessor) -> None:
    def hashes(prompt: Any) -> list[bytes]:
        return [each.content_hash for each in prompt.images]

    assert hashes(seeing(asks(image))) == hashes(seeing(asks(same)))


@pytest.mark.parametrize(("image", "said"), [
    (PIXELS / 255, "the array holds float64; uint8 is needed"), (PIXELS[None], "the array has the shape (1, "),
    (np.zeros((5, 7, 9), np.uint8), "the array has the shape (5, 7, 9)"), (np.zeros((0, 7, 3), np.uint8), "no area"),
    (torch.zeros(2, 2, dtype=torch.bfloat16), "cannot be read"),
])  # fmt: skip
def test_an_array_that_is_no_image_is_named(image: Any, said: str, seeing: ChatProcessor) -> None:
    with pytest.raises(RequestError) as refused:
        seeing(asks(image))
    assert said in str(refused.value)
    assert refused.value.param == "messages[0].content[0].image"


@pytest.mark.parametrize("bounds", [{"max_pixels": 64 * 64}, {"min_pixels": 200 * 200},
                                    {"min_pixels": 9, "max_pixels": 9}])
def test_bounds_of_images_are_transformers(bounds: dict[str, int], seeing: ChatProcessor) -> None:
    theirs = reference.load_image_processor(SHAPES_VL)
    size = {"shortest_edge": theirs.size["shortest_edge"], "longest_edge": theirs.size["longest_edge"]}
    edges = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
    size |= {edges[name]: value for name, value in bounds.items()}
    size["shortest_edge"] = min(size.values())
    expected = theirs([PICTURE], size=size, return_tensors="pt")["image_grid_thw"][0].tolist()
    (by_row,) = seeing(asks(PICTURE), mm_processor_kwargs=bounds).images
    assert list(by_row.grid_thw) == expected
    settings = {f"image_{name}": value for name, value in bounds.items()}
    if "min_pixels" in bounds or bounds["max_pixels"] >= theirs.size["shortest_edge"]:
        (for_all,) = ChatProcessor(str(SHAPES_VL), ProcessorSettings(**settings))(asks(PICTURE)).images  # type: ignore[arg-type]
        assert list(for_all.grid_thw) == expected


def test_no_row_sees_more_pixels_than_memory_was_measured_for(seeing: ChatProcessor) -> None:
    assert seeing.image_settings is not None
    most = seeing.image_settings.max_pixels
    assert seeing(asks(PICTURE), mm_processor_kwargs={"max_pixels": most}).images
    for name in ("min_pixels", "max_pixels"):
        with pytest.raises(RequestError, match=rf"{name}: {most + 1} is more than the {most} that the model was"):
            seeing(asks(PICTURE), mm_processor_kwargs={name: most + 1})
    with pytest.raises(RequestError, match=rf"min_pixels: {most} makes images of up to \d+ tokens, and the model was"):
        seeing(asks(PICTURE), mm_processor_kwargs={"min_pixels": most})
    with pytest.raises(RequestError, match="min_pixels 99 is more than max_pixels 98"):
        seeing(asks(PICTURE), mm_processor_kwargs={"min_pixels": 99, "max_pixels": 98})


def test_bounds_are_refused_where_nothing_is_seen(llm: LLM, path: Path) -> None:
    with pytest.raises(RequestError, match="this model reads text only"):
        llm.chat(ASKED, greedy(1), mm_processor_kwargs={"max_pixels": 9})
    with pytest.raises(ConfigError, match="image_max_pixels 9: this model reads text only"):
        ChatProcessor(str(path), ProcessorSettings(image_max_pixels=9))


def test_kinds_are_counted_apart() -> None:
    processor = ChatProcessor(str(SHAPES_VL), ProcessorSettings(limit_mm_per_prompt={"image": 1}))
    assert processor(asks(PICTURE)).images
    with pytest.raises(RequestError, match=r"messages\[1\].content\[0\]: one of 2 images, at most 1 are") as two:
        processor(asks(PICTURE) + asks(PICTURE))
    assert two.value.code == "too_many_images"
    text = "<|vision_start|><|image_pad|><|vision_end|>" * 2
    with pytest.raises(RequestError, match=r"images\[1\]: one of 2 images"):
        processor.from_text(text, [PICTURE, PICTURE])
    assert processor.identity()["limit_mm_per_prompt"] == {"image": 1}
    none = ChatProcessor(str(SHAPES_VL), ProcessorSettings(limit_mm_per_prompt={"image": 0, "audio": 0}))
    with pytest.raises(RequestError, match="at most 0 are allowed"):
        none(asks(PICTURE))


@pytest.fixture(scope="module")
def pooling(platform_name: str) -> Iterator[LLM]:
    with LLM(SHAPES_VL, platform=platform_name, runner="pooling", max_num_seqs=4, max_model_len=1024) as llm:
        yield llm


def test_a_conversation_has_the_vector_of_its_prompt(pooling: LLM, tmp_path: Path) -> None:
    PICTURE.save(tmp_path / "a.png")
    with_image, text = asks(PICTURE), [{"role": "user", "content": "a red circle"}]
    template = pooling.get_tokenizer().apply_chat_template
    prompts: list[Any] = [{"prompt": template(with_image, tokenize=False), "images": [PICTURE]},
                          template(text, tokenize=False)]
    expected = [result.embedding for result in pooling.embed(prompts)]
    only_image = [{**with_image[0], "content": with_image[0]["content"][:1]}]
    results = pooling.embed([with_image, text, prompts[1], only_image])
    assert [result.error for result in results] == [None] * 4, "an image needs no text"
    for found, wanted in zip(results, [*expected, expected[1]], strict=False):
        np.testing.assert_allclose(found.embedding, wanted, atol=1e-5)
    (answering,) = pooling.embed(text, add_generation_prompt=True)
    (wanted,) = pooling.embed(template(text, tokenize=False, add_generation_prompt=True))
    np.testing.assert_allclose(answering.embedding, wanted.embedding, atol=1e-5)
    (by_name,) = pooling.embed(asks("a.png"), allowed_media_dir=tmp_path)
    np.testing.assert_allclose(by_name.embedding, expected[0], atol=1e-5)
    with pytest.raises(RequestError, match="mm_processor_kwargs: belongs to messages"):
        pooling.embed("a red circle", mm_processor_kwargs={"max_pixels": 4096})


def test_text_is_an_address_below_the_allowed_folder_and_a_path_is_read_anywhere(pooling: LLM, tmp_path: Path) -> None:
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    PICTURE.save(tmp_path / "secret.png")
    (tmp_path / "link.png").symlink_to(tmp_path / "secret.png")
    (expected,) = pooling.embed(asks(PICTURE))
    for given in (tmp_path / "secret.png", tmp_path / "link.png"):
        (found,) = pooling.embed(asks(given))
        np.testing.assert_allclose(found.embedding, expected.embedding, atol=1e-5)
    parts = [{"type": "image_pil", "image_pil": PICTURE}, {"type": "text", "text": "Which?"}]
    pil = [{"role": "user", "content": parts}]
    np.testing.assert_allclose(pooling.embed(pil)[0].embedding, expected.embedding, atol=1e-5)
    secret = str(tmp_path / "secret.png")
    for refused in (asks(secret), asks(tmp_path / "secret.png") + asks(secret), asks("../secret.png")):
        with pytest.raises(RequestError) as caught:
            pooling.embed(refused, allowed_media_dir=allowed)
        assert caught.value.code == "media_not_allowed"
        assert caught.value.param is not None
        assert caught.value.param.endswith("content[0].image")
    with pytest.raises(RequestError, match="files are not allowed here"):
        pooling.embed(asks("secret.png"))
