"""What a row may ask for: at the limit it is served, beyond it refused with value and limit, before any work."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from npu_runner.assets import SHAPES_VL
from npu_runner.batch.job.options import BatchOptions
from npu_runner.config import RunnerConfig, flat_fields
from npu_runner.errors import ConfigError
from npu_runner.prompts.media.allowed_folder import AllowedFolder
from npu_runner.prompts.media.media import MediaRules
from npu_runner.prompts.processor import ChatProcessor, ProcessorSettings
from npu_runner.request.limits import LIMITS, Limits
from tests.batch.job_folder import Job
from tests.batch.scripted import ScriptedProcessor, prepared, read_rows, row
from tests.full_set import every, only_full

MIB = 1 << 20
DOCS = Path(__file__).parents[2] / "docs" / "limits.md"


@pytest.fixture(scope="module")
def processor() -> ChatProcessor:
    return ChatProcessor(str(SHAPES_VL))


def refusal(processor: Any, body: dict[str, Any], **settings: Any) -> tuple[str, str]:
    """Code and message, or ("fine", "")."""
    result = prepared(json.dumps(row("a", **body)).encode(), processor, **settings)
    return (result.error.code, result.error.message) if result.error else ("fine", "")


def words(count: int, length: int = 1) -> list[str]:
    return [f"{n:x}".rjust(length, "x") for n in range(count)]


COUNTED: list[tuple[str, Any, int]] = [
    ("stop", words, LIMITS.max_stop_strings),
    ("stop", lambda n: "x" * n, LIMITS.max_stop_chars),
    ("stop_token_ids", lambda n: list(range(n)), LIMITS.max_stop_token_ids),
    ("bad_words", words, LIMITS.max_bad_words),
    ("bad_words", lambda n: ["x" * n], LIMITS.max_bad_word_chars),
    ("logit_bias", lambda n: {str(token): 1 for token in range(n)}, LIMITS.max_logit_bias),
    ("chat_template_kwargs", lambda n: {str(number): 1 for number in range(n)}, LIMITS.max_template_kwargs),
    ("chat_template_kwargs", lambda n: {"a": "x" * (n - len('{"a": ""}'))}, LIMITS.max_template_kwargs_chars),
    ("model", lambda n: "x" * n, LIMITS.max_name_chars),
    ("user", lambda n: "x" * n, LIMITS.max_name_chars),
    ("messages", lambda n: [{"role": "user", "content": "x"}] * n, LIMITS.max_messages),
    ("messages", lambda n: [{"role": "user", "content": [{"type": "text", "text": "x"}] * n}], LIMITS.max_parts),
]


@pytest.mark.parametrize(("field", "make", "limit"), COUNTED, ids=lambda value: str(value)[:20])
def test_as_much_as_is_allowed_is_served_and_one_more_refused_by_value_and_limit(
    field: str, make: Any, limit: int
) -> None:
    assert refusal(ScriptedProcessor(), {field: make(limit)}) == ("fine", "")
    code, message = refusal(ScriptedProcessor(), {field: make(limit + 1)})
    assert code in ("limit_exceeded", "invalid_sampling_parameter")
    assert message.startswith(f"{field}: ")
    assert f"{limit + 1} " in message
    assert f"at most {limit} " in message


@pytest.mark.parametrize("field", ["stop_token_ids", "stop", "bad_words", "messages"])
def test_lists_of_wrong_things_are_counted_before_each_is_an_error(field: str) -> None:
    """Validation would collect one error for each of them."""
    assert refusal(ScriptedProcessor(), {field: [None] * 40_000})[0] == "limit_exceeded"


def test_a_row_is_as_long_as_its_limit(processor: ChatProcessor) -> None:
    line = json.dumps(row("a")).encode()
    assert prepared(line, processor, max_row_bytes=len(line)).error is None
    result = prepared(line, processor, max_row_bytes=len(line) - 1)
    assert result.error
    assert (result.name, result.error.code) == ("a", "row_too_long")
    assert f"{len(line)} bytes, at most {len(line) - 1}" in result.error.message


@pytest.mark.parametrize(("n", "max_tokens", "top"), [(128, 97, 20), (1, 262_144, 0), (128, None, 20), (1, None, 20)])
def test_log_probabilities_are_counted_before_they_are_made(n: int, max_tokens: int | None, top: int) -> None:
    def asked(max_tokens: int | None) -> tuple[str, str]:
        numbers = {"n": n, "max_tokens": max_tokens, "logprobs": True, "top_logprobs": top}
        return refusal(ChatProcessor(str(SHAPES_VL), ProcessorSettings(max_model_len=300_000)), numbers)

    if max_tokens is not None:
        assert asked(max_tokens) == ("fine", "")
    code, message = asked(None if max_tokens is None else max_tokens + 1)
    assert code == "too_many_logprobs"
    assert "at most 262144" in message
    would_fit = int(message.split("max_tokens ")[-1].split(" ")[0])
    assert asked(would_fit) == ("fine", "")
    assert asked(would_fit + 1)[0] == "too_many_logprobs"


# -- images ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every file that is read."""
    found: list[str] = []
    opened = AllowedFolder.open
    monkeypatch.setattr(AllowedFolder, "open", lambda folder, name: (
        found.append(Path(name).name), opened(folder, name))[1])
    return found


@pytest.fixture
def images(tmp_path: Path) -> Path:
    for name, colour in (("a.bmp", "red"), ("b.bmp", "blue")):
        Image.new("RGB", (64, 64), colour).save(tmp_path / name)
    return tmp_path


def asks(*urls: str) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}]}


def test_an_image_that_comes_often_is_read_once(processor: ChatProcessor, images: Path, reads: list[str]) -> None:
    data = "data:;base64," + base64.b64encode((images / "b.bmp").read_bytes()).decode()
    urls = ["a.bmp", "b.bmp", data] * 20
    result = prepared(json.dumps(row("a", **asks(*urls))).encode(), processor, media=MediaRules(allowed_dir=images))
    assert result.error is None
    assert sorted(reads) == ["a.bmp", "b.bmp"]
    hashes = [image.content_hash for image in result.prompt.images]
    assert len(hashes) == 60
    assert hashes == [hashes[0], hashes[1], hashes[1]] * 20
    assert len({id(image) for image in result.prompt.images}) == 3, "and is held once"


def test_images_are_counted_and_measured_before_any_is_read(
    processor: ChatProcessor, images: Path, reads: list[str]
) -> None:
    size = (images / "a.bmp").stat().st_size
    code, message = refusal(processor, asks(*["a.bmp"] * 65), media=MediaRules(allowed_dir=images))
    assert (code, "65 images and videos, at most 64" in message) == ("too_many_images", True)
    rules = MediaRules(allowed_dir=images, max_bytes=size - 1)
    assert refusal(processor, asks("a.bmp"), media=rules)[0] == "media_too_large"
    rules = MediaRules(allowed_dir=images, max_total_bytes=2 * size - 1)
    code, message = refusal(processor, asks("a.bmp", "b.bmp", "a.bmp"), media=rules)
    assert code == "media_too_large"
    assert f"{2 * size} bytes together, at most {2 * size - 1}" in message
    assert reads == []
    rules = MediaRules(allowed_dir=images, max_bytes=size, max_total_bytes=2 * size)
    assert refusal(processor, asks("a.bmp", "b.bmp", "a.bmp"), media=rules) == ("fine", "")


def test_images_that_no_longer_fit_are_not_read(images: Path, reads: list[str]) -> None:
    for number in range(8):
        Image.new("RGB", (64, 64), (number, 0, 0)).save(images / f"{number}.png")
    encoded = (images / "0.png").read_bytes()
    num_tokens = ChatProcessor(str(SHAPES_VL)).from_text("<|image_pad|>", [encoded]).images[0].num_tokens
    processor = ChatProcessor(str(SHAPES_VL), ProcessorSettings(max_model_len=3 * num_tokens + 20))
    rules = MediaRules(allowed_dir=images)
    assert refusal(processor, asks(*[f"{number}.png" for number in range(8)]), media=rules)[0] == "prompt_too_long"
    assert reads == ["0.png", "1.png", "2.png"]


# -- text --------------------------------------------------------------------------------------------------------------


class CountingTokenizer:
    """The tokenizer itself, and how many characters it was given."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self.num_chars = 0

    def encode(self, text: str, **options: Any) -> Any:
        self.num_chars += len(text)
        return self._tokenizer.encode(text, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def test_text_that_cannot_fit_is_refused_before_it_is_tokenized() -> None:
    processor = ChatProcessor(str(SHAPES_VL), ProcessorSettings(max_model_len=256))
    lengths = processor._text_length
    lengths._tokenizer = counting = CountingTokenizer(processor.tokenizer)
    longest = max(map(len, processor.tokenizer.get_vocab()))
    message = f"{256 * longest + 1} characters; at most {256 * longest} "
    code, said = refusal(processor, {"messages": [{"role": "user", "content": "a" * (256 * longest + 1)}]})
    assert code == "prompt_too_long"
    assert message in said
    assert counting.num_chars == 0


def test_of_a_long_text_no_more_is_tokenized_than_shows_that_it_is_too_long() -> None:
    processor = ChatProcessor(str(SHAPES_VL), ProcessorSettings(max_model_len=40_000))
    counting = CountingTokenizer(processor.tokenizer)
    processor._text_length._tokenizer = counting
    text = "Which shapes are there? " * 20_000
    longest = max(map(len, processor.tokenizer.get_vocab()))
    assert 40_000 * 4 < len(text) <= 40_000 * longest
    num_tokens = len(processor.tokenizer.encode(text).ids)
    assert num_tokens > 2 * 40_000, "the test needs a text that is clearly too long"
    assert refusal(processor, {"messages": [{"role": "user", "content": text}]})[0] == "prompt_too_long"
    assert counting.num_chars < len(text) * 0.8


@pytest.mark.parametrize("text", ["Which shapes are there? ", "ab", "\u4f60\u597d", " \n"])
def test_no_text_is_refused_that_fits(text: str) -> None:
    processor = ChatProcessor(str(SHAPES_VL), ProcessorSettings(max_model_len=1_000_000))
    whole = "?" + text * 3000
    num_tokens = len(processor([{"role": "user", "content": whole}]).token_ids)
    exact = ChatProcessor(str(SHAPES_VL), ProcessorSettings(max_model_len=num_tokens + 1))
    assert len(exact([{"role": "user", "content": whole}]).token_ids) == num_tokens
    tight = ChatProcessor(str(SHAPES_VL), ProcessorSettings(max_model_len=num_tokens))
    assert refusal(tight, {"messages": [{"role": "user", "content": whole}]})[0] == "prompt_too_long"


# -- memory ------------------------------------------------------------------------------------------------------------


def test_rows_that_ask_for_gigabytes_are_done_with_in_a_worker_of_200_mib(job: Job) -> None:
    """64 names of one 20 MiB file, 20 MB of text, 6 MB of numbers, 20 MB of empty objects; and one that is too much.

    In the fast set a fifth of the text, the numbers and the objects.
    """
    Image.new("RGB", (2600, 2600), "red").save(job.folder / "large.bmp")
    Image.new("L", (9000, 9000)).save(job.folder / "huge.png", compress_level=1)
    image = {"type": "image_url", "image_url": {"url": "large.bmp"}}
    question = {"type": "text", "text": "?"}
    rows: list[Any] = [
        row("names", messages=[{"role": "user", "content": [image] * 64 + [question]}]),
        row("too many names", messages=[{"role": "user", "content": [image] * 200 + [question]}]),
        row("text", "What is this? " * (1_400_000 // every(5))),
        row("numbers", stop_token_ids=[1] * (2_000_000 // every(5))),
        json.dumps(row("objects"))[:-1].encode() + b', "x": [' + b"{}," * (7_000_000 // every(5)) + b"{}]}",
        row("huge", **asks("huge.png")),
        row("fine", **asks("large.bmp")),
    ]
    with open(job.input, "wb") as file:
        for item in rows:
            file.write((item if isinstance(item, bytes) else json.dumps(item).encode()) + b"\n")
    job.run(processor=ChatProcessor(str(SHAPES_VL)), worker_memory_bytes=200 * MIB, allowed_media_dir=job.folder,
            preprocessing_workers=1)  # fmt: skip
    codes = {item["custom_id"]: item["error"] and item["error"]["code"] for item in read_rows(job.output)}
    assert codes == {
        "names": "prompt_too_long",  # the scripted engine takes 100 tokens: the row itself was prepared
        "too many names": "too_many_images",
        "text": "prompt_too_long",
        "numbers": "too_many_json_values",
        "objects": "too_many_json_values",
        "huge": "image_out_of_memory",
        "fine": "prompt_too_long",
    }


PEAK = """
import resource, sys
from pathlib import Path
from npu_runner.batch.files.input_file import InputFile
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with InputFile(sys.argv[1], Path(sys.argv[1]).parent) as file:
    assert file.scan().num_rows == 1
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("item", [b'"\\\\",', *only_full("other things than strings fill the row", b"{},", b"[1],")])
def test_to_scan_a_row_of_sixty_megabytes_takes_thirty(tmp_path: Path, item: bytes) -> None:
    line = b'{"custom_id": "a", "body": [' + item * (60_000_000 // len(item)) + b"1]}\n"
    (tmp_path / "in.jsonl").write_bytes(line)
    done = subprocess.run([sys.executable, "-c", PEAK, str(tmp_path / "in.jsonl")], stdout=subprocess.PIPE, check=True)
    assert int(done.stdout) < 30 * 1024, f"{int(done.stdout)} KiB"


# -- the words ---------------------------------------------------------------------------------------------------------


def test_the_page_of_limits_says_what_the_code_does() -> None:
    table = dict(re.findall(r"^\| `([a-z_]+)` \| ([\d,]+) \|", DOCS.read_text(), flags=re.MULTILINE))
    found = {name: int(value.replace(",", "")) for name, value in table.items()}
    assert found == {name: getattr(LIMITS, name) for name in Limits.__dataclass_fields__}


def test_a_limit_that_is_an_option_has_the_default_of_the_list() -> None:
    settings = {**flat_fields(RunnerConfig), **flat_fields(BatchOptions)}
    shared = settings.keys() & Limits.__dataclass_fields__.keys()
    assert len(shared) == 7
    assert {name: settings[name].default for name in shared} == {name: getattr(LIMITS, name) for name in shared}
    options = set(re.findall(r"`--([a-z-]+)`", DOCS.read_text()))
    assert {name.replace("_", "-") for name in shared} <= options


@pytest.mark.parametrize("name", ["max_row_bytes", "max_media_bytes", "max_prompt_media_bytes", "worker_memory_bytes"])
def test_a_limit_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        BatchOptions.from_keywords(input="a", output="b", **{name: 0})
