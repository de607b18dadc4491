"""Prompts of a query and a document, for a model that scores: parsed, rendered, truncated, with images in their places.
Knows nothing of rows, nor of what is made of a prompt.

A reranker's prompt is rendered by the checkpoint's chat template, if it renders both, else by the published text of
Qwen's rerankers. A template gets one message of each role, and one of role system in front for an instruction, as in
sentence-transformers and vLLM. For a classifier of one label the checkpoint's tokenizer joins both texts, as in
sentence-transformers' CrossEncoder and vLLM. Where these two differ, scores are refused.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from itertools import repeat
from pathlib import Path
from typing import Any

from tokenizers import Encoding, Tokenizer

from npu_runner.checkpoint.model_config import PairSettings
from npu_runner.checkpoint.pooling_files import PAIR_FILES
from npu_runner.errors import ModelError, RequestError
from npu_runner.prompts.media.media import Addresses
from npu_runner.prompts.text.chat_prompt import ChatPrompts
from npu_runner.prompts.text.chat_template import (
    ChatTemplate,
    named_template_file,
    read_chat_template,
    read_named_template,
)
from npu_runner.prompts.text.messages import Conversation, MediaLimits, Seen, checked_text, parse_content
from npu_runner.prompts.text.tokenizer import TextLength
from npu_runner.prompts.vision_prompts import Known, VisionPrompts, config_token, not_cut
from npu_runner.request.limits import field_error, shown
from npu_runner.request.pooling_params import SIGMOID, Classes
from npu_runner.request.prompt_inputs import PromptInputs

logger = logging.getLogger(__name__)

QUERY, DOCUMENT, INSTRUCTION = "query", "document", "system"
_PUBLISHED_TOKENS = ("<|im_start|>", "<|im_end|>")
"""Tokens that the published text needs."""

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
_VARIABLE = "instruction"
_SECOND = 1  # sequence id of a document's tokens


@dataclass(frozen=True)
class Side:
    """A query or a document: what the template sees, and (image or video, where it stood) in order."""

    content: str | list[dict[str, str]]
    seen: list[tuple[Seen, str]] = field(default_factory=list)


def parse_side(content: Any, where: str, limits: MediaLimits, addresses: Addresses | None = None) -> Side:
    """A query or a document of text, or of vLLM's {"content": parts}. Raises RequestError naming the field."""
    if isinstance(content, Mapping):
        if list(content) != ["content"]:
            raise field_error(where, f'an object is {{"content": parts}}, and this one has {shown(list(content))}',
                              "invalid_type")
        content, where = content["content"], f"{where}.content"
    elif not isinstance(content, str):
        raise field_error(where, f'text or an object {{"content": parts}} is needed, not {type(content).__name__}',
                          "invalid_type")
    seen: list[tuple[Seen, str]] = []
    side = Side(parse_content(content, where, limits, seen, addresses), seen)
    limits.check(seen, seen[-1][1] if seen else where)
    return side


def pairs_of(queries: Any, documents: Any) -> Iterable[tuple[Any, Any]]:
    """Each document with its query: one query is for all. Documents may come from an iterator, as queries then.

    Raises RequestError where there are neither one nor as many queries.
    """
    if not _is_one(queries) and isinstance(queries, Sequence) and len(queries) == 1:
        queries = queries[0]
    documents = [documents] if _is_one(documents) else documents
    for given in (queries, documents):
        if not _is_one(given) and not isinstance(given, Iterable):
            message = f'text, an object {{"content": parts}} or a list of these is needed, not {type(given).__name__}'
            raise RequestError(message, "invalid_type")
    if _is_one(queries):
        is_list = isinstance(documents, Sequence)
        return [(queries, document) for document in documents] if is_list else zip(repeat(queries), documents)
    if isinstance(queries, Sized) and isinstance(documents, Sized) and len(queries) != len(documents):
        raise RequestError(f"{len(queries)} queries for {len(documents)} documents; give one, or one for each")
    are_lists = isinstance(queries, Sequence) and isinstance(documents, Sequence)
    return list(zip(queries, documents, strict=True)) if are_lists else zip(queries, documents, strict=True)


def _is_one(given: Any) -> bool:
    return isinstance(given, (str, bytes, Mapping))


def pair_files(settings: PairSettings) -> tuple[str, ...]:
    """The files that shape these prompts, beside PROMPT_FILES."""
    named = () if settings.template_name is None else (named_template_file(settings.template_name),)
    return (*PAIR_FILES, *named)


def read_pair_template(folder: Path, settings: PairSettings, config: Mapping[str, Any],
                       tokenizer: Tokenizer, *, given: str | None = None) -> PairTemplate:
    """`given`: the text of a template in the place of the checkpoint's. Raises ModelError where neither that one nor
    the published text will do."""
    has_vision = isinstance(config.get("vision_config"), dict)
    if settings.template_name is None or given is not None:
        own = read_chat_template(folder, has_vision=has_vision, given=given)
    else:
        own = read_named_template(folder, settings.template_name, has_vision=has_vision)
    template = _pair_template(own, settings, has_vision=has_vision, placeholders=_placeholders(config, tokenizer))
    if template.is_published:
        missing = [token for token in _PUBLISHED_TOKENS if tokenizer.token_to_id(token) is None]
        if missing:
            raise ModelError(f"{folder}: its chat template renders no query and document, and the text that Qwen's "
                             f"rerankers are published with needs {missing[0]!r}, no token of this model; give it a "
                             "chat template that renders messages of the roles query and document")
        logger.info("the checkpoint's chat template renders no query and document: prompts are the text that Qwen's "
                    "rerankers are published with")
    return template


def _placeholders(config: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, str]:
    """The placeholders of an image and of a video in a text: their token, between the tokens around vision."""
    def text(name: str) -> str:
        return (config_token(config, name, tokenizer) or (0, ""))[1]

    start, end = text("vision_start_token_id"), text("vision_end_token_id")
    return {kind: f"{start}{text(f'{kind}_token_id')}{end}" for kind in ("image", "video")}


class PairTemplate(ChatTemplate):
    """A template that renders a query and a document.

    `accepts_parts`: each message's content is a list of parts, else one string with `placeholders` ("image", "video").
    `is_published`: it is the published text, not the checkpoint's.
    """

    def __init__(self, source: str, token_variables: Mapping[str, str], *, accepts_parts: bool,
                 placeholders: Mapping[str, str], is_published: bool = False):
        super().__init__(source, token_variables)
        self.is_published = is_published
        self._takes_parts = accepts_parts
        self._placeholders = placeholders

    def render(self, messages: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any] | None = None, *,
               tools: Sequence[Mapping[str, Any]] | None = None, add_generation_prompt: bool = True) -> str:
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
        """The kwargs that the template reads."""
        return {name: value for name, value in kwargs.items() if name in self.variables}


def _pair_template(own: ChatTemplate | None, settings: PairSettings, *, has_vision: bool,
                   placeholders: Mapping[str, str]) -> PairTemplate:
    """The checkpoint's template if it renders both roles, else the published text.

    A template that hands every role on, as ChatML does, renders them too; it is meant for pairs only where the
    checkpoint was saved as one that scores.
    """
    is_meant = own is not None and (settings.is_saved or {QUERY, DOCUMENT} <= set(own.literals()))
    if own is not None and is_meant:
        # Text models are given strings first, models with vision parts, as transformers does.
        for accepts_parts in (has_vision, not has_vision):
            found = PairTemplate(own.source, own.token_variables, accepts_parts=accepts_parts,
                                 placeholders=placeholders)
            if {QUERY, DOCUMENT} <= set(found.probe(settings)):
                return found
    return PairTemplate(_PUBLISHED_VISION if has_vision else _PUBLISHED, {}, accepts_parts=False,
                        placeholders=placeholders, is_published=True)


class PairPrompts:
    """Prompts of one checkpoint. `template_kwargs`: the settings', under those of a request."""

    def __init__(self, *, chat: ChatPrompts, vision: VisionPrompts, text_length: TextLength, settings: PairSettings,
                 template_kwargs: Mapping[str, Any], limits: MediaLimits):
        assert isinstance(chat.template, PairTemplate), "prompts of pairs need a template that renders them"
        self._chat, self._vision, self._text_length = chat, vision, text_length
        self._settings = settings
        self._template_kwargs = {**chat.template.kept(settings.template_kwargs), **template_kwargs}
        self._limits = limits
        self._is_published = chat.template.is_published
        self._order = chat.template.probe(settings)
        self._reads_variable = _VARIABLE in chat.template.variables

    def identity(self) -> dict[str, Any]:
        """The settings that shape prompts beside the template, JSON-ready."""
        return {"instruction": self._settings.instruction, "chat_template_kwargs": self._template_kwargs,
                "add_generation_prompt": self._settings.add_generation_prompt, "is_published": self._is_published}

    def __call__(self, query: Side, document: Side, *, instruction: str | None = None,
                 chat_template_kwargs: Mapping[str, Any] | None = None, truncate_prompt_tokens: int | None = None,
                 mm_processor_kwargs: Mapping[str, Any] | None = None, known: Known | None = None) -> PromptInputs:
        """`instruction`: the task of the search, in words. `truncate_prompt_tokens`: a longer prompt loses the end of
        the document, and no part of the template. `known`: as in VisionPrompts. Raises RequestError."""
        requested = self._vision.requested(mm_processor_kwargs)
        kwargs = {**self._template_kwargs, **self._chat.checked_kwargs(chat_template_kwargs or {})}
        messages = [{"role": QUERY, "content": query.content}, {"role": DOCUMENT, "content": document.content}]
        instruction = self._settings.instruction if instruction is None else instruction
        if instruction is not None and INSTRUCTION in self._order:
            messages.insert(0, {"role": INSTRUCTION, "content": instruction})
        elif instruction is not None:
            kwargs |= self._as_variable(instruction)
        conversation = Conversation(messages, [*query.seen, *document.seen])
        self._check(conversation, is_cut=truncate_prompt_tokens is not None)
        most = None if conversation.seen else truncate_prompt_tokens
        text, token_ids = self._text_and_ids(conversation, kwargs, most)
        sides = {QUERY: query, DOCUMENT: document}
        in_order = [located for role in self._order if role in sides for located in sides[role].seen]
        seen = self._vision.in_order(token_ids, in_order)
        return self._vision.prompt(token_ids, seen, truncate_prompt_tokens, requested, known, text=text)

    def _as_variable(self, instruction: str) -> dict[str, Any]:
        if not self._reads_variable:
            raise RequestError("instruction: the model's chat template renders none; leave it out",
                               "unsupported_parameter", _VARIABLE)
        return self._chat.checked_kwargs({_VARIABLE: instruction})

    def _check(self, conversation: Conversation, *, is_cut: bool) -> None:
        texts = [text for _, text in conversation.texts()]
        self._text_length.check(texts, is_cut=is_cut)
        if conversation.seen:
            self._limits.check(conversation.seen, conversation.seen[-1][1])
        if not conversation.seen and not any(text.strip() for text in texts[-2:]):
            raise RequestError("query and document are both empty; give text or an image", "empty_prompt")

    def _text_and_ids(self, conversation: Conversation, kwargs: Mapping[str, Any],
                      most: int | None) -> tuple[str, list[int]]:
        add_prompt = self._settings.add_generation_prompt
        text, token_ids = self._chat.text_and_ids(conversation, kwargs, add_generation_prompt=add_prompt)
        if most is None or len(token_ids) <= most:
            return text, token_ids
        shown, behind = self._chat.split_token_ids(conversation, kwargs, add_generation_prompt=add_prompt)
        empty = Conversation([*conversation.messages[:-1], {**conversation.messages[-1], "content": ""}])
        least = len(self._chat.split_token_ids(empty, kwargs, add_generation_prompt=add_prompt)[0]) + len(behind)
        if most <= least:
            raise not_cut(len(token_ids), most, f"has {least} tokens without its document")
        return text, shown[: most - len(behind)] + behind


# -- for a classifier of one label -------------------------------------------------------------------------------------


def why_no_scores(classes: Classes, config: Mapping[str, Any], *, has_template: bool) -> str | None:
    """Why a classifier gives no scores; None: it does. `config`: its config.json."""
    if len(classes.labels) != 1:
        return f"a score needs a classifier of one label, and this one has {len(classes.labels)}"
    if classes.activation != SIGMOID:
        return ("problem_type is regression: sentence-transformers would take the sigmoid of its number, vLLM the "
                "number itself; /v1/classify gives it")
    saved = config.get("sentence_transformers")
    named = saved.get("activation_fn") if isinstance(saved, Mapping) else None
    named = named or config.get("sbert_ce_default_activation_function")
    if named is not None and str(named).rpartition(".")[2] != "Sigmoid":
        return f"config.json asks for the activation {named}, and a score is a sigmoid; /v1/classify gives logits"
    if has_template:
        return ("it has a chat template: sentence-transformers would render the pair with it, vLLM would not; ask "
                "/v1/classify with the text of the pair as the model was trained on")
    return None


class TextPairs:
    """Prompts of one classifier. Images are refused, and so is what a template would read."""

    def __init__(self, *, tokenizer: Tokenizer, vision: VisionPrompts, text_length: TextLength):
        self._tokenizer, self._vision, self._text_length = tokenizer, vision, text_length

    def __call__(self, query: Side, document: Side, *, instruction: str | None = None,
                 chat_template_kwargs: Mapping[str, Any] | None = None, truncate_prompt_tokens: int | None = None,
                 mm_processor_kwargs: Mapping[str, Any] | None = None, known: Known | None = None) -> PromptInputs:
        """`truncate_prompt_tokens`: a longer prompt loses the end of the document. Raises RequestError."""
        for name, value in (("instruction", instruction), ("chat_template_kwargs", chat_template_kwargs),
                            ("mm_processor_kwargs", mm_processor_kwargs)):
            if value:
                raise field_error(name, "a classifier's prompt is the two texts alone; leave it out",
                                  "unsupported_parameter")
        query_text, document_text = _text_of(query, "the query"), _text_of(document, "the document")
        if not query_text.strip() and not document_text.strip():
            raise RequestError("query and document are both empty; give text", "empty_prompt")
        self._text_length.check([query_text, document_text], is_cut=truncate_prompt_tokens is not None)
        token_ids = _cut(self._tokenizer.encode(query_text, document_text), truncate_prompt_tokens)
        self._vision.in_order(token_ids, [])
        prompt = self._vision.prompt(token_ids, [], None, self._vision.requested(None))
        return replace(prompt, text=self._tokenizer.decode(token_ids, skip_special_tokens=False))


def _text_of(side: Side, name: str) -> str:
    if isinstance(side.content, str):
        return checked_text(side.content, name)
    if side.seen:
        raise RequestError(f"{name} shows images or videos; a classifier's pair is two texts", "unsupported_part")
    return "\n".join(checked_text(part["text"], name) for part in side.content)


def _cut(encoding: Encoding, most: int | None) -> list[int]:
    """The ids, without the last ones of the document where there are more than `most`."""
    num_over = 0 if most is None else len(encoding.ids) - most
    if num_over <= 0:
        return list(encoding.ids)
    places = [place for place, number in enumerate(encoding.sequence_ids) if number == _SECOND]
    if num_over >= len(places):
        assert most is not None, "nothing is over without a limit"
        least = len(encoding.ids) - len(places)
        raise not_cut(len(encoding.ids), most, f"has {least} tokens without its document")
    left_out = set(places[-num_over:])
    return [token for place, token in enumerate(encoding.ids) if place not in left_out]
