"""How a query and a document are shown to a model that scores: the checkpoint's chat template where it renders both, or
else the text that Qwen's rerankers are published with.

A template is given one message of each role, and one of role system in front for an instruction, as
sentence-transformers and vLLM do. Knows no tokens and no pixels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from npu_runner.checkpoint.model_config import PairSettings
from npu_runner.errors import RequestError
from npu_runner.prompts.text.chat_template import ChatTemplate

QUERY, DOCUMENT, INSTRUCTION = "query", "document", "system"
"""The roles."""
PUBLISHED_TOKENS = ("<|im_start|>", "<|im_end|>")
"""What a tokenizer must have for the published text."""

_JUDGE = ('Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that '
          'the answer can only be "yes" or "no".')
_START = "<|im_start|>system\n" + _JUDGE + "<|im_end|>\n<|im_start|>user\n<Instruct>: "
_OF_ROLE = "{{{{ (messages | selectattr('role', 'equalto', '{role}') | first).content }}}}"
_TOLD = ("{{% set told = messages | selectattr('role', 'equalto', 'system') | list %}}"
         "{{{{ told[0].content if told else '{default}' }}}}")
# Model cards of Qwen3-Reranker and Qwen3-VL-Reranker.
_PUBLISHED = (
    _START
    + _TOLD.format(default="Given a web search query, retrieve relevant passages that answer the query")
    + "\n<Query>: " + _OF_ROLE.format(role=QUERY) + "\n<Document>: " + _OF_ROLE.format(role=DOCUMENT)
    + "{{ '<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n' }}"
)
_PUBLISHED_VISION = (
    _START
    + _TOLD.format(default="Given a search query, retrieve relevant candidates that answer the query.")
    + "<Query>:" + _OF_ROLE.format(role=QUERY) + "\n<Document>:" + _OF_ROLE.format(role=DOCUMENT)
    + "{{ '<|im_end|>\n<|im_start|>assistant\n' }}"
)
# No template writes these by itself.
_PROBES = {QUERY: "qprobeq", DOCUMENT: "dprobed", INSTRUCTION: "iprobei"}


class PairTemplate(ChatTemplate):
    """A template that renders a query and a document.

    `takes_parts`: it is given each message's content as a list of parts, else as one string. There `placeholders`
    ("image", "video") stand for what is seen. `is_published`: it is the published text, not the checkpoint's.
    """

    def __init__(self, source: str, token_variables: Mapping[str, str], *, takes_parts: bool,
                 placeholders: Mapping[str, str], is_published: bool = False):
        super().__init__(source, token_variables)
        self.is_published = is_published
        self._takes_parts = takes_parts
        self._placeholders = placeholders

    def render(self, messages: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any] | None = None, *,
               tools: Sequence[Mapping[str, Any]] | None = None, add_generation_prompt: bool = True) -> str:
        """See ChatTemplate."""
        shaped = [{**message, "content": self._shaped(message["content"])} for message in messages]
        return super().render(shaped, kwargs, tools=tools, add_generation_prompt=add_generation_prompt)

    def _shaped(self, content: str | list[dict[str, str]]) -> str | list[dict[str, str]]:
        if self._takes_parts:
            return [{"type": "text", "text": content}] if isinstance(content, str) else content
        if isinstance(content, str):
            return content
        return "".join(part["text"] if part["type"] == "text" else self._placeholders[part["type"]] for part in content)

    def probe(self, settings: PairSettings) -> list[str]:
        """The roles that reach the prompt, in the order in which they stand there."""
        messages = [{"role": role, "content": _PROBES[role]} for role in (INSTRUCTION, QUERY, DOCUMENT)]
        try:
            text = self.render(messages, self.kept(settings.template_kwargs),
                               add_generation_prompt=settings.add_generation_prompt)
        except RequestError:
            return []
        # A template for strings that is given parts writes them out as Python does.
        found = {role: text.find(probe) for role, probe in _PROBES.items() if f"'{probe}'" not in text}
        return sorted((role for role, place in found.items() if place >= 0), key=found.__getitem__)

    def kept(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Those that the template reads."""
        return {name: value for name, value in kwargs.items() if name in self.variables}


def pair_template(own: ChatTemplate | None, settings: PairSettings, *, has_vision: bool,
                  placeholders: Mapping[str, str]) -> PairTemplate:
    """The checkpoint's template if it renders both roles, else the published text.

    A template that hands every role on, as ChatML does, renders them too; it is meant for pairs only where the
    checkpoint was saved as one that scores.
    """
    is_meant = own is not None and (settings.is_saved or {QUERY, DOCUMENT} <= set(own.literals()))
    if own is not None and is_meant:
        # Text models are given strings first, models with vision parts, as transformers does.
        for takes_parts in (has_vision, not has_vision):
            found = PairTemplate(own.source, own.token_variables, takes_parts=takes_parts, placeholders=placeholders)
            if {QUERY, DOCUMENT} <= set(found.probe(settings)):
                return found
    return PairTemplate(_PUBLISHED_VISION if has_vision else _PUBLISHED, {}, takes_parts=False,
                        placeholders=placeholders, is_published=True)
