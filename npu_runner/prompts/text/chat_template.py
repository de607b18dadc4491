"""Finds a checkpoint's chat template and renders it as transformers does. Knows nothing of tokens or images.

Templates come from checkpoints, so they run in jinja2's sandbox and see plain strings, lists and dicts only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, get_args

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.utils

from npu_runner.checkpoint.files import read_json, read_text
from npu_runner.errors import ModelError, RequestError
from npu_runner.prompts.text.template_sandbox import TEMPLATE_FAULTS, BoundedEnvironment
from npu_runner.prompts.text.tokenizer import read_special_tokens
from npu_runner.request.limits import field_error, shown

_OURS = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})
"""Variables that a request cannot set."""
DEFAULT = "default"
"""The name of the template for requests that name none."""
_TOOL_USE = "tool_use"
"""The name of the template for requests with tools."""
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
_MAX_WORDS = 1000
"""Characters of a template's own message, and of its pattern for a date."""
_EFFORT = "reasoning_effort"
"""OpenAI's word for what some templates read beside a conversation."""


class ChatTemplate:
    """One compiled template. A template that does not compile is a ModelError."""

    def __init__(self, source: str, token_variables: Mapping[str, str]):
        self.source = source
        self.token_variables = dict(token_variables)
        try:
            self._template, self._syntax_tree, read = _compiled(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"the chat template does not compile, line {error.lineno}: {error.message}") from error
        except TEMPLATE_FAULTS as error:
            raise ModelError(f"the chat template does not compile: {error or type(error).__name__}") from error
        self.reads_tools = "tools" in read
        self.variables = read - _OURS - self.token_variables.keys()
        """The names that it reads beside the conversation, which `chat_template_kwargs` may set."""

    def check_kwargs(self, kwargs: Mapping[str, Any]) -> None:
        """Raises RequestError for a name that the template never reads: it would have no effect."""
        for name in kwargs:
            where = f"chat_template_kwargs.{name[:60]}"
            if name in _OURS or name in self.token_variables:
                raise field_error(where, "is not for a request to set", "unsupported_parameter")
            if name not in self.variables:
                known = ", ".join(sorted(self.variables)) or "no others"
                raise field_error(where, f"the model's chat template reads no such name; it reads {known}",
                                  "unknown_parameter")

    def render(self, messages: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any] | None = None, *,
               tools: Sequence[Mapping[str, Any]] | None = None, add_generation_prompt: bool = True) -> str:
        """The prompt text; with `add_generation_prompt` it ends where the assistant's answer begins. A template that
        refuses is a RequestError.

        kwargs: `chat_template_kwargs`, checked.
        """
        ours = {
            "messages": messages, "tools": tools or None, "documents": None,
            "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render({**(kwargs or {}), **self.token_variables, **ours})
        except TEMPLATE_FAULTS as error:
            raise RequestError(
                f"the model's chat template refuses these messages{' with these chat_template_kwargs' * bool(kwargs)}: "
                f"{str(error)[:_MAX_WORDS] or type(error).__name__}",
                code="chat_template_error",
                param="messages") from error

    def literals(self) -> list[str]:
        """Every piece of text the template itself can write or compare with."""
        pieces = [node.data for node in self._syntax_tree.find_all(jinja2.nodes.TemplateData)]
        constants = (node.value for node in self._syntax_tree.find_all(jinja2.nodes.Const))
        return pieces + [value for value in constants if isinstance(value, str)]


def read_chat_template(folder: Path, *, has_vision: bool, given: str | None = None) -> ChatTemplate | None:
    """The checkpoint's template, None when it has none; or the one with the `given` text.

    Order as in transformers: processor_config.json and chat_template.json (models with a processor), then
    chat_template.jinja, then tokenizer_config.json. Of several named templates `default` counts.
    """
    if given is not None:
        return ChatTemplate(given, read_special_tokens(folder))
    source = next(_sources(folder, has_vision=has_vision), None)
    return None if source is None else ChatTemplate(_text_of(source, DEFAULT, folder), read_special_tokens(folder))


def read_tool_template(folder: Path) -> ChatTemplate | None:
    """The template for requests with tools, None where the default one is for them, too.

    Tokenizers of transformers choose it; its processors, which models with vision have, never do.
    """
    source: Any = read_text(folder, named_template_file(_TOOL_USE))
    if source is None:
        named = _by_name(next(_sources(folder, has_vision=False), None))
        source = {_TOOL_USE: named[_TOOL_USE]} if isinstance(named, dict) and _TOOL_USE in named else None
    return None if source is None else ChatTemplate(_text_of(source, _TOOL_USE, folder), read_special_tokens(folder))


def named_template_file(name: str) -> str:
    """Where transformers keeps a template that is not the default one."""
    return f"additional_chat_templates/{name}.jinja"


def read_named_template(folder: Path, name: str, *, has_vision: bool) -> ChatTemplate:
    """One of several templates. Raises ModelError where there is none of that name."""
    source: Any = read_text(folder, named_template_file(name))
    several = (_by_name(source) for source in _sources(folder, has_vision=has_vision))
    if source is None:
        source = next((named for named in several if isinstance(named, dict) and name in named), {name: None})
    return ChatTemplate(_text_of(source, name, folder), read_special_tokens(folder))


def _sources(folder: Path, *, has_vision: bool) -> Iterator[Any]:
    """The chat templates of the files, in transformers' order: each a text, or several by name."""
    for name in ("processor_config.json", "chat_template.json") if has_vision else ():
        if (source := (read_json(folder, name) or {}).get("chat_template")) is not None:
            yield source
    if (text := read_text(folder, "chat_template.jinja")) is not None:
        yield text
    if (source := (read_json(folder, "tokenizer_config.json") or {}).get("chat_template")) is not None:
        yield source


def _by_name(source: Any) -> Any:
    if isinstance(source, list):  # [{"name": ..., "template": ...}]
        return {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
    return source


def _text_of(source: Any, name: str, folder: Path) -> str:
    source = _by_name(source)
    if isinstance(source, dict):
        names = sorted(str(name) for name in source)
        source = source.get(name)
        if source is None:
            raise ModelError(f"{folder}: chat templates {names} have no {name!r}; name one of them so")
    if not isinstance(source, str):
        raise ModelError(f"{folder}: the chat template is a {type(source).__name__}, text is needed")
    return source


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training masks; here it is only a scope."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own interface

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class _GuardedNamespace(jinja2.utils.Namespace):
    """jinja2's namespace() without underscore names, through which a template could reach the interpreter."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # no `self` by name: namespace(self=...) is legal
        for name in dict(*args[1:], **kwargs):
            _GuardedNamespace._refuse_private(name)
        jinja2.utils.Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _GuardedNamespace._refuse_private(name)
        super().__setitem__(name, value)

    @staticmethod
    def _refuse_private(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"namespace attribute {name!r} starts with an underscore")


@functools.lru_cache(maxsize=8)
def _compiled(source: str) -> tuple[jinja2.Template, jinja2.nodes.Template, frozenset[str]]:
    """A template, its syntax tree and the names that it reads: 20 ms for a template of Qwen's, and a process opens a
    model more than once. Raises jinja2's error for one that does not compile."""
    environment = _environment()
    tree = environment.parse(source)
    return environment.from_string(source), tree, frozenset(jinja2.meta.find_undeclared_variables(tree))


def _environment() -> BoundedEnvironment:
    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols])
    environment.plain_types |= {_GuardedNamespace}
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=lambda pattern: datetime.now().strftime(pattern[:_MAX_WORDS]),
        dict=lambda *args, **kwargs: dict(*args, **kwargs),  # the function, not the class with its attributes
        namespace=_GuardedNamespace,
    )
    return environment


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def kwargs_with_effort(kwargs: Mapping[str, Any] | None, effort: str | None,
                       template_reads: Callable[[str], bool]) -> Mapping[str, Any] | None:
    """chat_template_kwargs with the effort; `kwargs` themselves if there is none.

    Raises RequestError for a value that OpenAI does not have, for a template that does not read it, and for two
    efforts.
    """
    if effort is None:
        return kwargs
    if effort not in get_args(Effort):
        raise field_error(_EFFORT, f"{shown(effort)} is not one of {', '.join(get_args(Effort))}")
    if not template_reads(_EFFORT):
        raise field_error(_EFFORT, f"{effort!r} would do nothing, the model's chat template reads none; what it does "
                          "read goes into chat_template_kwargs", "unsupported_parameter")
    if (kwargs or {}).get(_EFFORT, effort) != effort:
        raise field_error(_EFFORT, f"{effort!r}, and another one stands in chat_template_kwargs; give one of them")
    return {**(kwargs or {}), _EFFORT: effort}
