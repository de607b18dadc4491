"""Which of a checkpoint's templates, flags of tokens and image sizes count: the same as in transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from preprocessing_checkpoints import write_llama, write_qwen_vl
from transformers import AutoTokenizer, Qwen2VLImageProcessorPil

from npu_runner.batch.files.fingerprint import fingerprint_model
from npu_runner.errors import ModelError, RequestError
from npu_runner.prompts.media.image_settings import ImageSettings, read_image_settings, settings_from
from npu_runner.prompts.processor import ChatProcessor, ProcessorSettings

TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
ASK = [{"role": "user", "content": "the time"}]
PLAIN = "D:{{ messages[0].content }}"
READS_TOOLS = PLAIN + "{% if tools %}<tool_call>{% endif %}{{ style }}"
TOOL_USE = "T:{{ messages[0].content }}{{ tools | tojson }}<tool_call>"


def with_templates(folder: Path, *, listed: dict[str, str] | str | None = None, **files: str) -> Path:
    """`listed`: in tokenizer_config.json; `files`: by the name of the template."""
    write_llama(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = listed if isinstance(listed, (str, type(None))) else [
        {"name": name, "template": template} for name, template in listed.items()]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    for name, template in files.items():
        path = folder / ("chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja")
        path.parent.mkdir(exist_ok=True)
        path.write_text(template)
    return folder


@pytest.mark.parametrize("default", [PLAIN, READS_TOOLS], ids=["reads no tools", "reads tools"])
@pytest.mark.parametrize("where", ["listed", "in files", "a file beside a list"])
def test_tool_use_is_the_template_of_requests_with_tools(where: str, default: str, tmp_path: Path) -> None:
    both, others = {"default": default, "tool_use": TOOL_USE}, {"default": "x", "tool_use": "y"}
    folder = {"listed": lambda: with_templates(tmp_path, listed=both),
              "in files": lambda: with_templates(tmp_path, **both),
              "a file beside a list": lambda: with_templates(tmp_path, listed=others, **both),
              }[where]()
    ours, theirs = ChatProcessor(str(folder)), AutoTokenizer.from_pretrained(folder)
    for tools in (None, [TOOL]):
        prompt = ours(ASK, tools=tools)
        assert prompt.text == theirs.apply_chat_template(ASK, tools=tools, tokenize=False)
        assert list(prompt.token_ids) == theirs.apply_chat_template(ASK, tools=tools)["input_ids"]
    assert ours.parser_of_calls() == "hermes"


def test_a_default_template_in_a_file_puts_a_list_aside(tmp_path: Path) -> None:
    folder = with_templates(tmp_path, listed={"default": "x", "tool_use": TOOL_USE}, default=READS_TOOLS)
    theirs = AutoTokenizer.from_pretrained(folder)
    prompt = ChatProcessor(str(folder))(ASK, tools=[TOOL])
    assert prompt.text == theirs.apply_chat_template(ASK, tools=[TOOL], tokenize=False) == "D:the time<tool_call>"


def test_a_template_that_is_given_is_that_of_tools_too(tmp_path: Path) -> None:
    folder = with_templates(tmp_path, default=PLAIN, tool_use=TOOL_USE)
    given = ChatProcessor(str(folder), ProcessorSettings(chat_template=READS_TOOLS))
    assert given(ASK, tools=[TOOL]).text == "D:the time<tool_call>"
    assert ChatProcessor(str(folder))(ASK, tools=[TOOL], chat_template=READS_TOOLS).text == "D:the time<tool_call>"


def test_settings_that_the_template_of_tools_does_not_read_are_left_out_of_it(tmp_path: Path) -> None:
    folder = with_templates(tmp_path, default=READS_TOOLS, tool_use=TOOL_USE)
    ours = ChatProcessor(str(folder), ProcessorSettings(chat_template_kwargs={"style": "!"}))
    assert (ours(ASK).text, str(ours(ASK, tools=[TOOL]).text)[:10]) == ("D:the time!", "T:the time")
    with pytest.raises(RequestError, match="reads no such name"):
        ours(ASK, {"style": "?"}, tools=[TOOL])


def test_another_template_of_tools_is_another_model(tmp_path: Path) -> None:
    folder = with_templates(tmp_path, default=PLAIN, tool_use=TOOL_USE)
    before = fingerprint_model(folder), ChatProcessor(str(folder)).identity()
    (folder / "additional_chat_templates/tool_use.jinja").write_text(TOOL_USE + ".")
    after = fingerprint_model(folder), ChatProcessor(str(folder)).identity()
    assert before[0] != after[0]
    assert before[1] != after[1]


FLAGS = ("special", "lstrip", "rstrip", "normalized", "single_word")


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize("content", ["</tool>", "</s>", "<new>"])
def test_flags_of_tokenizer_config_count(content: str, value: bool, flag: str, tmp_path: Path) -> None:
    """Of an added token, of one that ends answers, and of one that tokenizer.json lacks."""
    write_llama(tmp_path)
    state = json.loads((tmp_path / "tokenizer.json").read_text())
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    numbers = {token["content"]: token["id"] for token in state["added_tokens"]}
    size = len(state["model"]["vocab"])
    if content == "</tool>":
        state["added_tokens"].append({"id": size, "content": content, **added, flag: not value})
        (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"] = {
        str(numbers.get(content, size)): {"content": content, **added, "special": content == "</s>", flag: value}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours, theirs = ChatProcessor(str(tmp_path)).tokenizer, AutoTokenizer.from_pretrained(tmp_path)
    for text in (f"a {content} b", f"a{content}b", f"A  {content}", content):
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False).ids == ids, text
        shown = theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert ours.decode(ids, skip_special_tokens=True) == shown, text


BOUNDS = {"shortest_edge": 3136, "longest_edge": 20000}
SIZES: list[dict[str, Any]] = [
    {"size": size, **more} for size in (
        {}, 448, BOUNDS, {"max_pixels": 20000}, {"longest_edge": 20000}, {"shortest_edge": 3136},
        {"height": 224, "width": 224}, {"min_pixels": 3136, "max_pixels": 20000}, {**BOUNDS, "height": 224}, None)
    for more in ({}, {"min_pixels": 3136, "max_pixels": 30000}, {"max_pixels": 30000})]


@pytest.mark.parametrize("values", SIZES, ids=str)
def test_a_size_bounds_images_or_is_refused_where_transformers_refuses_it(values: dict[str, Any]) -> None:
    values = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2, **values}
    try:
        theirs = Qwen2VLImageProcessorPil(**json.loads(json.dumps(values)))
        right = None if not (theirs.size["shortest_edge"] and theirs.size["longest_edge"]) else dict(theirs.size)
    except (ValueError, AttributeError, TypeError, KeyError):
        right = None
    if right is None:
        with pytest.raises(ModelError, match=r"size is .*; shortest_edge and longest_edge are needed"):
            settings_from(values)
    else:
        ours: ImageSettings = settings_from(values)
        assert (ours.min_pixels, ours.max_pixels) == (right["shortest_edge"], right["longest_edge"])


def test_the_file_with_a_size_of_another_kind_is_named(tmp_path: Path) -> None:
    folder = write_qwen_vl(tmp_path, size={"height": 224, "width": 224})
    config = json.loads((folder / "config.json").read_text())
    with pytest.raises(ModelError, match=r"preprocessor_config\.json: size is {'height': 224, 'width': 224}"):
        read_image_settings(folder, config)
