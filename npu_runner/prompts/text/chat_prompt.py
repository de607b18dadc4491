"""Renders a checked conversation through the chat template into token ids. Knows nothing of images' pixels.

Typed control tokens stay text: messages, calls and tools that contain them are rendered between fences.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from npu_runner.errors import RequestError
from npu_runner.prompts.text.chat_template import ChatTemplate
from npu_runner.prompts.text.control_tokens import ControlTokens, unused_fences
from npu_runner.prompts.text.messages import Conversation
from npu_runner.prompts.text.tools import map_strings, strings_in
from npu_runner.request.limits import field_error, plain_template_kwargs

_UNSAID = "tools"  # stands where a role would: no role, so that every control token in tools counts as typed


@dataclass(frozen=True, kw_only=True)
class ChatPrompts:
    """Prompts of one checkpoint. `template`: None where it has none; `adds_special_tokens`: its processor does."""

    model_path: str
    template: ChatTemplate | None
    control: ControlTokens
    adds_special_tokens: bool

    def checked_kwargs(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of `chat_template_kwargs`. Raises RequestError for what the template does not read."""
        if not kwargs:
            return {}
        plain = plain_template_kwargs(kwargs)
        self._needed_template().check_kwargs(plain)
        if self.control.typed_in(("", text) for text in strings_in(list(plain.values()))):
            raise field_error("chat_template_kwargs", "a control token of the model stands in it; only the template "
                              "writes those", "special_token_in_text")
        return plain

    def text_and_ids(self, conversation: Conversation, kwargs: Mapping[str, Any], *,
                     tools: list[dict[str, Any]] | None = None, add_generation_prompt: bool = True,
                     continue_final_message: bool = False) -> tuple[str, list[int]]:
        """The rendered text and its tokens. `tools`: checked. Raises RequestError if the template refuses, or reads no
        tools."""
        template = self._needed_template()
        if tools and not template.reads_tools:
            raise field_error("tools", "the model's chat template reads none; describe them in a message, or choose "
                              "another model", "unsupported_parameter")
        texts = conversation.texts() + [(_UNSAID, text) for text in strings_in(tools)]
        fences, messages = self._fenced(conversation, texts)
        if fences is not None:
            tools = map_strings(tools, lambda text: self.control.fence(_UNSAID, text, False, fences=fences))
        render = partial(template.render, kwargs=kwargs, tools=tools)
        if continue_final_message:
            rendered = _rendered_up_to_the_end(render, messages, mark=_unused_mark(texts, fences))
        else:
            rendered = render(messages, add_generation_prompt=add_generation_prompt)
        _refuse_escaped(fences or (), rendered)
        ids = self.control.encode(rendered, add_special_tokens=self._adds_special_tokens(rendered), fences=fences)
        for fence in fences or ():
            rendered = rendered.replace(fence, "")
        return rendered, ids

    def split_token_ids(self, conversation: Conversation, kwargs: Mapping[str, Any], *,
                        add_generation_prompt: bool) -> tuple[list[int], list[int]]:
        """The tokens up to the end of the last message's text, and those behind it. Side by side they make the prompt,
        unless a token reaches over the end of that text.

        Raises RequestError where the template refuses, or does not write the text once.
        """
        texts = conversation.texts()
        fences, messages = self._fenced(conversation, texts)
        mark = _unused_mark(texts, fences)
        rendered = self._needed_template().render([*messages[:-1], _marked(messages[-1], mark)], kwargs,
                                                  add_generation_prompt=add_generation_prompt)
        _refuse_escaped(fences or (), rendered)
        if rendered.count(mark) != 1:
            message = f"the model's chat template writes this text {rendered.count(mark)} times, so it cannot be cut"
            raise RequestError(message, "prompt_not_truncated")
        before, after = rendered.split(mark)
        start, end = self.control.surroundings if self._adds_special_tokens(rendered) else ([], [])
        ids = [self.control.encode(text, add_special_tokens=False, fences=fences) for text in (before, after)]
        return start + ids[0], ids[1] + end

    def _fenced(self, conversation: Conversation,
                texts: list[tuple[str, str]]) -> tuple[tuple[str, str] | None, list[dict[str, Any]]]:
        """The messages, with typed control tokens between fences; None: there are none."""
        if not self.control.typed_in(texts):
            return None, conversation.messages
        fences = unused_fences([text for _, text in texts])
        return fences, conversation.map_text(partial(self.control.fence, fences=fences))

    def _needed_template(self) -> ChatTemplate:
        if self.template is None:
            raise RequestError(
                f"the model in {self.model_path} has no chat template (chat_template.jinja); give one with "
                "--chat-template FILE (chat_template in Python), or send a raw prompt",
                code="model_has_no_chat_template")
        return self.template

    def _adds_special_tokens(self, rendered: str) -> bool:
        """transformers' rule: tokenizers never add to a chat, processors do unless the template wrote BOS itself."""
        bos_token = self.template.token_variables.get("bos_token") if self.template else None
        return self.adds_special_tokens and not (bos_token and rendered.startswith(bos_token))


def _rendered_up_to_the_end(render: Any, messages: list[dict[str, Any]], *, mark: str) -> str:
    """The prompt up to the last character of the last message, which is not ended: transformers' rule."""
    rendered = render([*messages[:-1], _marked(messages[-1], f"{mark} ")], add_generation_prompt=False)
    if mark not in rendered:
        raise field_error("continue_final_message", "the model's chat template leaves the last message out",
                          "chat_template_error")
    at = rendered.rindex(mark)
    # A template that trims its messages has removed the space behind the mark, and would have removed those before it.
    return str(rendered[:at]) if rendered[at + 1 : at + 2] == " " else str(rendered[:at].rstrip())


def _marked(message: dict[str, Any], mark: str) -> dict[str, Any]:
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": content + mark}
    last = max(index for index, part in enumerate(content) if part["type"] == "text")
    parts = [{**part, "text": part["text"] + mark} if index == last else part for index, part in enumerate(content)]
    return {**message, "content": parts}


def _unused_mark(texts: list[tuple[str, str]], fences: tuple[str, str] | None) -> str:
    return unused_fences([*(text for _, text in texts), *(fences or ())])[0]


def _refuse_escaped(fences: tuple[str, ...], rendered: str) -> None:
    """A template that escapes what it writes would hide the fences, and let control tokens through."""
    for fence in fences:
        if json.dumps(fence)[1:-1] in rendered:
            raise RequestError(
                "the model's chat template escapes characters, so a control token of the model in these messages would "
                "not stay text; take it out", "special_token_in_text", "messages")
