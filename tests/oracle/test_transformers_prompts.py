"""Prompts with images that transformers' processors prepare: ids and arrays are those of its own chats.

The oracle is `apply_chat_template(tokenize=True, return_dict=True)` of the family's processor. No network is needed.
"""

from __future__ import annotations

import base64
import io
import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, models

from npu_runner import LLM, SamplingParams
from npu_runner.batch.job.options import BatchOptions
from npu_runner.config import RunnerConfig
from npu_runner.errors import ConfigError, JobError, ModelError, RequestError
from npu_runner.models.vision.scaling import scaled
from npu_runner.prompts.media import transformers_images
from npu_runner.prompts.processor import ChatProcessor, ProcessorSettings
from npu_runner.prompts.tasks import TextTask
from npu_runner.reports.report import run_batch_and_report
from npu_runner.request.prompt_inputs import ImageInput
from npu_runner.serving.endpoint import prepare_prompt
from npu_runner.serving.workers.forker import private_bytes
from npu_runner.serving.workers.pool import PoolLimits, WorkerPool
from tests.batch.scripted import read_rows, row, write_rows
from tests.full_set import only_full
from tests.oracle.image_checkpoints import TEMPLATE, make_image_checkpoint, make_processor, picture, placeholder

pytest.importorskip("transformers")

ODD = [picture(97, 61, 1), picture(151, 421, 2), picture(701, 233, 3)]
FAMILIES = [
    "llava",  # one size for all images
    "idefics3",  # tiles with tokens for rows and columns; a prompt's images are padded to a common size
    "llava_onevision",  # an image is cut into tiles only where it is alone
    *only_full("the other types whose processor works without torchvision; each mechanism stays",
               "aria", "aya_vision", "deepseek_vl", "exaone4_5", "hyperclovax_vision_v2", "internvl", "janus",
               "lighton_ocr", "llava_next", "llava_next_video", "ovis2", "qianfan_ocr", "video_llama_3", "video_llava",
               "vipllava"),
]
Made = tuple[Path, Any]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """A folder without weights, and the processor that was saved into it."""
    known: dict[str, Made] = {}

    def make(model_type: str) -> Made:
        if model_type not in known:
            from transformers import CONFIG_MAPPING

            folder, config = tmp_path_factory.mktemp(model_type), CONFIG_MAPPING[model_type]()
            processor = make_processor(model_type, config)
            for kind in ("image", "video"):
                if hasattr(config, f"{kind}_token_id"):
                    setattr(config, f"{kind}_token_id", processor.tokenizer.convert_tokens_to_ids(f"<|{kind}|>"))
            config.save_pretrained(folder)
            type(processor).get_attributes = classmethod(lambda kind: ["image_processor", "tokenizer"])
            processor.save_pretrained(folder)
            processor.chat_template = TEMPLATE.replace("PLACEHOLDER", placeholder(processor))
            (folder / "chat_template.json").unlink(missing_ok=True)
            (folder / "chat_template.jinja").write_text(processor.chat_template)
            known[model_type] = folder, processor
        return known[model_type]

    return make


def opened(folder: Path, **settings: Any) -> ChatProcessor:
    return ChatProcessor(str(folder), ProcessorSettings(images_by_transformers=True, max_model_len=1 << 20, **settings))


def chat(*parts: str | Image.Image) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part}
        for part in parts]}]


def floats_of(image: ImageInput) -> dict[str, np.ndarray]:
    """The arrays as the tower gets them."""
    floats = dict(image.tower_inputs)
    for name in image.scaling.names if image.scaling else ():
        assert floats[name].dtype == np.uint8
        floats[name] = scaled(torch.from_numpy(floats[name]), image.scaling).numpy()
    return floats


def assert_holds(whole: np.ndarray, parts: list[np.ndarray], name: str) -> None:
    """`whole` has these parts one after the other, along one of its first axes, apart from padding."""
    if name == "batch_num_images":  # towers ask only whether an image is alone
        assert all((part > 1) == (whole > 1) for part in parts)
        return
    axis = next((axis for axis in (0, 1) if sum(part.shape[axis] for part in parts) == whole.shape[axis]), None)
    assert axis is not None, f"{name}: {whole.shape} of {[part.shape for part in parts]}"
    blocks = np.split(whole, np.cumsum([part.shape[axis] for part in parts])[:-1], axis)
    for block, part in zip(blocks, parts, strict=True):
        np.testing.assert_allclose(block[tuple(map(slice, part.shape))], part, rtol=0, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_ids_and_arrays_equal_those_of_transformers_chats(model_type: str, made: Callable[[str], Made]) -> None:
    folder, processor = made(model_type)
    ours = opened(folder)
    for parts in ([ODD[0], "which colour?"], ["What is ", ODD[1], "this?"], ["first ", ODD[2], " and then ", ODD[0]],
                  [ODD[1], ODD[0], "differ\nhow?"], ["no image"], [ODD[0], ODD[1], ODD[2]]):
        found = ours(chat(*parts))
        right = processor.apply_chat_template(chat(*parts), tokenize=True, return_dict=True, add_generation_prompt=True,
                                              processor_kwargs={"return_tensors": "np"})
        assert found.token_ids == right["input_ids"][0].tolist()
        for span in found.spans:
            image = found.images[span.image_index]
            assert image.token_ids is not None
            assert image.token_ids.tolist() == found.token_ids[span.start : span.start + span.num_tokens]
        images = [floats_of(image) for image in found.images]
        for name in {name for image in images for name in image}:
            assert_holds(np.asarray(right[name]), [image[name] for image in images], name)


def test_most_families_send_bytes(made: Callable[[str], Made]) -> None:
    image = opened(made("llava")[0])(chat(ODD[0])).images[0]
    assert image.scaling is not None
    assert image.num_bytes == 336 * 336 * 3
    assert image.pixels_HWC.size == 0


def test_the_number_of_images_is_part_of_an_images_hash_where_it_matters(made: Callable[[str], Made]) -> None:
    ours, other = opened(made("llava_onevision")[0]), opened(made("llava")[0])
    alone, (first, second) = ours(chat(ODD[2])).images[0], ours(chat(ODD[2], ODD[0])).images
    assert alone.num_tokens > first.num_tokens, "alone it is cut into tiles"
    assert len({alone.content_hash, first.content_hash, second.content_hash}) == 3
    assert ours(chat(ODD[2], "?", ODD[1], ODD[0])).images[0].content_hash == first.content_hash
    assert other(chat(ODD[2])).images[0].content_hash == other(chat(ODD[2], ODD[0])).images[0].content_hash


def test_control_tokens_that_a_person_types_are_text(made: Callable[[str], Made], tmp_path: Path) -> None:
    """Also those that no flag of the tokenizer, no field of config.json and no template names."""
    shutil.copytree(made("idefics3")[0], tmp_path / "copy")
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        values = json.loads((tmp_path / "copy" / name).read_text())
        for token in (*values.get("added_tokens", ()), *values.get("added_tokens_decoder", {}).values()):
            token["special"] = False
        values.pop("image_token_id", None)
        (tmp_path / "copy" / name).write_text(json.dumps(values))
    ours = opened(tmp_path / "copy")
    assert ours.transformers_images is not None
    tokens = ours.transformers_images.rules.control_tokens
    assert len(tokens) == 3, "around an image, in it, and in front of the whole one"
    typed = ours(chat("a", *tokens, ODD[0], "b"))
    (span,) = typed.spans
    ids = {ours.tokenizer.token_to_id(token) for token in tokens}
    around = typed.token_ids[: span.start] + typed.token_ids[span.start + span.num_tokens :]
    assert not ids & set(around)
    assert ours.tokenizer.decode(around, skip_special_tokens=False).count("<image>") == 1


def test_tokens_of_other_rows_and_columns_are_control_tokens() -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.add_tokens(["<row_1_col_1>", "<row_4_col_12>", "<other_1>"])
    assert transformers_images._control_tokens(tokenizer, {0}) == ("<row_1_col_1>", "<row_4_col_12>")


def test_pixels_are_bounded_before_the_processor(made: Callable[[str], Made]) -> None:
    folder, _ = made("lighton_ocr")
    free, bound = opened(folder), opened(folder, image_max_pixels=40_000)
    large = picture(900, 700)
    assert bound(chat(large)).images[0].num_tokens < free(chat(large)).images[0].num_tokens
    smaller = large.resize((226, 176), Image.Resampling.BICUBIC)
    assert _same(bound(chat(large)).images[0], free(chat(smaller)).images[0])
    assert _same(bound(chat(ODD[0])).images[0], free(chat(ODD[0])).images[0]), "it is small enough"
    asked = free(chat(large), mm_processor_kwargs={"max_pixels": 40_000})
    assert _same(asked.images[0], free(chat(smaller)).images[0])
    assert free.transformers_images is not None
    low = free.transformers_images.prepare(picture(1100, 1024), is_low=True)
    assert _same(low, free(chat(picture(1100, 1024).resize((530, 493), Image.Resampling.BICUBIC))).images[0])
    with pytest.raises(RequestError, match="more than the 40000 that the model was loaded for"):
        bound(chat(large), mm_processor_kwargs={"max_pixels": 40_001})
    with pytest.raises(RequestError, match="min_pixels: transformers' processor"):
        free(chat(large), mm_processor_kwargs={"min_pixels": 100})
    with pytest.raises(ConfigError, match="image_min_pixels 100: transformers' processor"):
        opened(folder, image_min_pixels=100)


def _same(first: ImageInput, second: ImageInput) -> bool:
    return all(np.array_equal(array, second.tower_inputs[name]) for name, array in first.tower_inputs.items())


def test_a_worker_gets_the_rules_and_tries_nothing(made: Callable[[str], Made],
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = made("llava")
    ours = opened(folder)
    stored = pickle.dumps(ours)

    def refuse(*_: Any) -> None:
        raise AssertionError("a worker tries the processor")

    monkeypatch.setattr(transformers_images.TransformersImages, "_find_rules", refuse)
    again = pickle.loads(stored)
    assert again.identity() == ours.identity()
    assert again(chat(ODD[0])).images[0].content_hash == ours(chat(ODD[0])).images[0].content_hash


def test_settings_of_the_processor_are_settings_of_a_job(made: Callable[[str], Made], tmp_path: Path) -> None:
    folder, _ = made("llava")
    shutil.copytree(folder, tmp_path / "copy")
    ours = opened(folder)
    before = ours.identity()["transformers_images"]
    assert before["backend"] == "pil"
    assert before["image_processor"] == "LlavaImageProcessorPil"
    file = tmp_path / "copy" / "processor_config.json"
    stored, values = pickle.dumps(opened(tmp_path / "copy")), json.loads(file.read_text())
    values["image_processor"]["resample"] = 0
    file.write_text(json.dumps(values))
    after = opened(tmp_path / "copy")
    assert {name for name, value in after.identity()["transformers_images"].items() if before[name] != value} == {
        "settings"}
    assert after(chat(ODD[0])).images[0].content_hash != ours(chat(ODD[0])).images[0].content_hash
    with pytest.raises(JobError, match=r"processor_config\.json"):
        pickle.loads(stored)
    assert opened(folder, image_max_pixels=1000).identity()["transformers_images"] != before


def test_what_is_not_served_is_refused_by_name(made: Callable[[str], Made]) -> None:
    with pytest.raises(ModelError, match=r"Idefics2Processor.*changes the text beside an image"):
        opened(made("idefics2")[0])
    folder, _ = made("llava")
    images = opened(folder).transformers_images
    assert images is not None
    one = ChatProcessor(str(folder), ProcessorSettings(
        images_by_transformers=True, image_rules=replace(images.rules, why_one="they become one")))
    assert one(chat(ODD[0])).images
    with pytest.raises(RequestError, match=r"has 2 images.*they become one") as raised:
        one(chat(ODD[0], ODD[1]))
    assert raised.value.code == "several_images"


def test_an_image_that_the_processor_refuses_fails_alone(made: Callable[[str], Made]) -> None:
    ours = opened(made("video_llama_3")[0])
    with pytest.raises(RequestError, match="refuses the image of 4000x2 pixels") as raised:
        ours(chat(picture(4000, 2)))
    assert raised.value.code == "image_refused"
    assert ours(chat(ODD[0])).images


def test_the_largest_image_has_as_many_tokens_as_any(made: Callable[[str], Made]) -> None:
    images = opened(made("llava_next")[0]).transformers_images
    assert images is not None
    largest = images.largest(1 << 20).num_tokens
    assert largest == max(images.prepare(picture(*size)).num_tokens
                          for size in ((100, 100), (672, 672), (2000, 1990), (1500, 300), (3000, 2000)))
    assert images.largest(2000).num_tokens <= 2000


@pytest.mark.parametrize("model_type", ["lighton_ocr", *only_full(
    "the search has tests of its own; here are processors of each kind", "aya_vision", "exaone4_5", "idefics3",
    "internvl", "llava_next", "llava_onevision", "video_llama_3")])
@pytest.mark.parametrize("max_tokens", [1 << 20, *only_full("images that a prompt has room for", 8191)])
def test_no_image_is_far_larger_than_the_largest(model_type: str, max_tokens: int,
                                                 made: Callable[[str], Made]) -> None:
    """By its arrays by an eighth, and by its tokens by a quarter; more is refused at the engine."""
    images = opened(made(model_type)[0]).transformers_images
    assert images is not None
    largest, random = images.largest(max_tokens), np.random.default_rng(1)
    assert largest.num_tokens <= max_tokens
    for pixels, shape in zip(10 ** random.uniform(3.5, 6.5, 12), 2 ** random.uniform(-1.6, 1.6, 12), strict=True):
        found = images.prepare(picture(int((pixels * shape) ** 0.5), int((pixels / shape) ** 0.5)))
        if found.num_tokens <= max_tokens:
            assert found.num_tower_values <= largest.num_tower_values * 9 / 8
            assert found.num_tokens <= largest.num_tokens * 5 / 4


def test_what_a_search_and_a_scaling_leave_out_is_logged(made: Callable[[str], Made],
                                                         caplog: pytest.LogCaptureFixture,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = made("video_llama_3")
    with caplog.at_level("DEBUG", logger=transformers_images.__name__):
        images = opened(folder).transformers_images
        assert images is not None
        assert images._measure((4000, 2)) is None
        call = transformers_images.TransformersImages._call

        def refuse(self: Any, given: Any, text: str, **options: Any) -> Any:
            if options:
                raise TypeError(f"no option {sorted(options)[0]}")
            return call(self, given, text)

        monkeypatch.setattr(transformers_images.TransformersImages, "_call", refuse)
        again = opened(folder).transformers_images
        assert again is not None
        assert again.rules.scaling is None
    refused, scales = (record.getMessage() for record in caplog.records)
    assert "refuses a grey image of 4000x2 pixels" in refused
    assert "scales pixels by itself" in scales
    assert "no option do_normalize" in scales


@pytest.mark.full("takes a minute of imports, and is about memory; the workers' own tests fork, too")
def test_sixteen_workers_share_what_transformers_takes(made: Callable[[str], Made]) -> None:
    """400 MiB, and 80 MiB for each."""
    ours, mib = opened(made("idefics3")[0]), 1 << 20
    assert ours.transformers_images is not None
    file = io.BytesIO()
    picture(1000, 1400).save(file, "JPEG")
    prompt = f"see {ours.transformers_images.rules.token[1]} it"
    limits = PoolLimits(num_workers=16, task_timeout_seconds=300.0, worker_memory_bytes=4 << 30, are_forked=True)
    served: set[int] = set()
    with WorkerPool(partial(prepare_prompt, ours), limits) as pool:
        while len(pool.worker_pids()) < 16 or len(served) < 64:
            if len(served) < 64:
                pool.submit(TextTask(number=len(served), prompt=prompt, seen=[(file.getvalue(), "images[0]")]))
            while (item := pool.get(1.0)) is None:
                """The test's own timeout ends this."""
            assert item.result.error is None
            served.add(item.task.number)
        assert pool._forker is not None
        sizes = [private_bytes(pid) for pid in pool.worker_pids()]
        assert pool._forker.pids[0] << 10 <= 400 * mib
        assert sum(sizes) <= 16 * 80 * mib
    assert len(sizes) == 16


@pytest.mark.full("runs a job of a whole checkpoint; each part has tests of its own")
def test_hostile_images_of_a_job_fail_alone(tmp_path: Path) -> None:
    """Its other rows have the answers of `LLM.chat`, and its record names the processor."""
    checkpoint = make_image_checkpoint(tmp_path / "model", "llava")
    black = io.BytesIO()
    Image.new("RGB", (9000, 9000)).save(black, "PNG")
    urls = {"first": _url(ODD[0]), "huge": _url_of(black.getvalue()), "broken": _url(ODD[1])[:-900],
            "last": _url(ODD[2])}
    rows = [row(name) for name in urls]
    for each, url in zip(rows, urls.values(), strict=True):
        each["body"] |= {"max_tokens": 6, "messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what?"}]}]}
    settings: dict[str, Any] = {"platform": "cpu", "max_num_seqs": 8, "dtype": "float32"}
    run_batch_and_report(
        RunnerConfig(model=str(checkpoint.path)).replace(**settings),
        BatchOptions.from_keywords(input=str(write_rows(tmp_path / "in.jsonl", rows)), progress="off",
                                   output=str(tmp_path / "out.jsonl"), preprocessing_workers=2,
                                   worker_memory_bytes=256 << 20))
    answers = {item["custom_id"]: item for item in read_rows(tmp_path / "out.jsonl")}
    codes = {name: item["error"] and item["error"]["code"] for name, item in answers.items()}
    assert codes.pop("huge") in ("preprocessing_out_of_memory", "image_out_of_memory")
    assert codes == {"first": None, "broken": "image_truncated", "last": None}
    with LLM(checkpoint.path, **settings) as llm:
        for name, image in (("first", ODD[0]), ("last", ODD[2])):
            right = llm.chat([chat(image, "what?")], SamplingParams(temperature=0, max_tokens=6))[0].text
            assert answers[name]["response"]["body"]["choices"][0]["message"]["content"] == right
    assert '"backend": "pil"' in "".join(file.read_text() for file in tmp_path.glob("out.jsonl*manifest*"))


def _url(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return _url_of(file.getvalue())


def _url_of(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"
