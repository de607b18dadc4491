"""jinja2's sandbox with a budget: each render counts loop turns, and the characters that it makes or reads.

Templates come from checkpoints and from users' files, so none may use up the time or memory of the process that renders
it. Work is counted before it is done. Constants are folded within a small budget while a template is compiled;
a larger one is left for the render, which may never reach it. Knows nothing of messages or records.

The syntax tree is changed before code is made of it. Filters with names that no template can write count the operands
of comparisons, of `~` and of slices; a property of the environment counts loop turns.
"""

from __future__ import annotations

import functools
import json
import re
import threading
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Sized, ValuesView
from types import BuiltinMethodType, MethodType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import TemplateRuntimeError
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEscapeFormatter, SandboxedFormatter
from jinja2.visitor import NodeTransformer
from markupsafe import Markup

MAX_TURNS = 1 << 20
"""Turns of all loops, items that filters pass on, and calls of one render. A long body counts as several turns."""
MAX_CHARS = 1 << 26
"""Characters that one render makes or reads, each time that it does; and `_TIMES_GIVEN` times those it is given."""
_TIMES_GIVEN = 64
_FOLDED_CHARS = 10_000
_MAX_INTEGER_BITS = 4096
_MAX_DIGITS = 400  # of round()
_ITEM_CHARS = 8  # the bytes of an entry of a list
_FREE_CHARS = 64  # they are not counted where they are compared or joined: counting would take longer
_BODY = 32  # nodes of a body that count as a turn

TEMPLATE_FAULTS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError,
                   RecursionError, MemoryError, SyntaxError)
"""The exceptions of compiling and rendering a faulty template."""

# How filters and methods of texts use their values. Those that stand nowhere read their values once.
_FREE = {"first", "last", "length", "count", "default", "d", "random", "attr"}
_FREE_OF_DICT = {"get", "items", "keys", "values"}
_ITEM_BY_ITEM = {"map", "select", "reject", "selectattr", "rejectattr", "list", "reverse"}
_NEEDS_ALL = {"sort", "sum", "max", "min", "groupby", "join"}
_PADS = {"center", "ljust", "rjust", "zfill", "to_bytes", "batch", "slice"}
_MULTIPLIES = {"indent", "wordwrap", "urlize", "expandtabs", "translate", "tojson"}
_BY_WIDTH = {"indent", "expandtabs", "tojson"}
_FACTORS = {"sort": 32, "dictsort": 32, "groupby": 32, "wordwrap": 64, "urlize": 64, "pprint": 64, "unique": 4,
            "splitlines": 8, "urlencode": 4, "escape": 4, "e": 4, "forceescape": 4,
            "tojson": 4}
_PIECE_CHARS = 60  # the bytes of a short text
_TEXT_ENCODINGS = {"utf-8", "utf8", "ascii", "latin-1"}  # others take time with the square of the text

_FIELD = re.compile(r"%(?:\([^)%]*\))?[#0\- +]*(\*|\d+)?(?:\.(\*|\d+))?")
_COMPARED, _SEARCHED, _READ, _SLICED = "=compared", "=searched", "=read", "=sliced"
_ADDED = "=added"
_FORMATS = ("format", "format_map")
_NAMES_OF_DICT = frozenset(dir(dict))


class _Budget(threading.local):
    turns = MAX_TURNS
    chars = MAX_CHARS
    given: Any = None
    """Its characters count once the budget is spent, so that a short render never counts them."""


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox whose templates raise TemplateRuntimeError where they would take more than `MAX_TURNS` or
    `MAX_CHARS`."""

    plain_types: frozenset[type] = frozenset({str, LoopContext})
    """Values whose public attributes change nothing, and that have no items by name."""
    intercepted_binops = frozenset({"*", "**", "%", "//"})

    def __init__(self, **settings: Any):
        self._budget = _Budget()
        shown = settings.pop("finalize", None)

        def printed(value: Any) -> Any:
            value = value if shown is None else shown(value)
            return value if type(value) is str else self._read(value)

        super().__init__(finalize=printed, **settings)
        self.template_class = _BoundedTemplate
        del self.globals["lipsum"]  # random text, of any length
        for name, function in list(self.filters.items()):
            self.set_filter(name, function)
        for name in ("in", "eq", "equalto", "==", "ne", "!=", "lt", "lessthan", "<", "le", "<=", "gt", "greaterthan",
                     ">", "ge", ">=", "upper", "lower"):
            self.tests[name] = self._counted_test(self.tests[name])
        self.set_filter("tojson", self._to_json)  # jinja2's own escapes HTML characters
        self.filters |= {
            _COMPARED: self._compared, _SEARCHED: self._searched, _READ: self._read, _SLICED: self._kept,
            _ADDED: self._added}
        setattr(self, "concat", self._joined)  # noqa: B010 - jinja2 calls it as a plain function

    def restart(self, given: Any = None, most: int | None = None) -> None:
        """Give this thread a whole budget, or one of `most` turns and characters. `given`: the values of the render."""
        budget = self._budget
        budget.turns, budget.chars, budget.given = most or MAX_TURNS, most or MAX_CHARS, given

    def set_filter(self, name: str, function: Callable[..., Any]) -> None:
        """Templates have `function` as filter of that name, and its work is counted."""
        self.filters[name] = self._bounded(name, function)

    # -- counting --------------------------------------------------------------------------------------------------

    @property
    def turn(self) -> bool:
        """True; reading it is a turn of a loop."""
        budget = self._budget
        budget.turns -= 1
        if budget.turns < 0:
            raise TemplateRuntimeError(f"it takes more than {MAX_TURNS:,} loop turns; loop over less")
        return True

    def spend(self, chars: int, turns: int = 0) -> None:
        """Count this before it is done."""
        budget = self._budget
        budget.chars -= chars
        budget.turns -= turns
        if budget.chars < 0 and budget.given is not None:
            given, left = budget.given, budget.chars
            budget.given, budget.chars = None, 0
            budget.chars = left + _TIMES_GIVEN * self.weigh(given)
        if budget.chars < 0:
            raise TemplateRuntimeError(f"it makes or reads more than {MAX_CHARS:,} characters, and {_TIMES_GIVEN} "
                                       "times those that it is given; write less")
        if budget.turns < 0:
            self.turn  # noqa: B018 - raises

    def weigh(self, value: Any) -> int:
        """Characters that `value` has when it is written out, roughly; looking at its parts is counted."""
        if isinstance(value, (str, bytes)):
            return len(value) + 1
        if not isinstance(value, (list, tuple, dict, set, frozenset)):
            self.spend(0, len(value) if isinstance(value, (range, KeysView, ValuesView, ItemsView)) else 0)
            return _ITEM_CHARS
        total, todo = 0, [value]
        while todo:
            part = todo.pop()
            if isinstance(part, (str, bytes)):
                total += len(part)
            elif isinstance(part, (list, tuple, dict, set, frozenset)):
                self.spend(0, len(part))
                todo.extend(part)
                if isinstance(part, dict):
                    todo.extend(part.values())
            total += _ITEM_CHARS
        return total

    def _read(self, value: Any) -> Any:
        if type(value) is not str or len(value) > _FREE_CHARS:
            self.spend(self.weigh(value))
        return value

    def _compared(self, value: Any) -> Any:
        return self._read(value) if isinstance(value, (str, list, tuple, dict, bytes)) else value

    def _searched(self, value: Any) -> Any:
        return value if isinstance(value, dict) else self._compared(value)

    def _kept(self, value: Any) -> Any:
        """Count the result of a filter, a method or a slice."""
        if isinstance(value, (str, bytes)):
            self.spend(len(value))
        elif isinstance(value, (list, tuple)):
            self.spend(len(value) * _ITEM_CHARS)
        elif isinstance(value, Iterator):
            return self._counted(value)
        return value

    def _counted(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.turn  # noqa: B018 - counts
            yield item

    # -- what the generated code calls -----------------------------------------------------------------------------

    def _joined(self, pieces: Iterable[str]) -> str:
        pieces = list(pieces)
        self.spend(sum(map(len, pieces)))
        return "".join(pieces)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """See jinja2. The usual ones take a shorter way to the same value."""
        kind = type(obj)
        if kind is dict and attribute not in _NAMES_OF_DICT:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if kind in self.plain_types and attribute[0] != "_" and attribute not in _FORMATS:
            try:
                return getattr(obj, attribute)
            except AttributeError:
                return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        self = __self
        self.turn  # noqa: B018 - counts
        if type(__obj) is not BuiltinMethodType:
            return self._kept(super().call(__context, __obj, *args, **kwargs))
        kwargs.pop("_loop_vars", None)  # of the generated code, for functions that are given the context
        kwargs.pop("_block_vars", None)
        owner, name = __obj.__self__, __obj.__name__
        if isinstance(owner, dict) and name in _FREE_OF_DICT:
            return __obj(*args, **kwargs)
        if name == "join" and args:
            args = (self._all_of(args[0]), *args[1:])
            self._foresee(name, args[0], (owner,), kwargs)
        else:
            self._foresee(name, owner, args, kwargs)
        return self._kept(__obj(*args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            bits = {"*": left.bit_length() + right.bit_length(), "**": left.bit_length() * max(right, 0)}.get(
                operator, max(left.bit_length(), right.bit_length()))
            self._check_bits(bits)
        elif operator == "%" and isinstance(left, (str, bytes)):
            self._foresee_format(left, right)
        elif operator == "*":
            times, sequence = (left, right) if isinstance(left, int) else (right, left)
            if isinstance(times, int) and isinstance(sequence, (str, bytes, list, tuple)):
                self.spend(max(times, 0) * self._size(sequence))
        return super().call_binop(context, operator, left, right)

    def _added(self, value: Any, num_sums: int) -> Any:
        """Count the result of `num_sums` additions in a row."""
        if type(value) is str and len(value) <= _FREE_CHARS:
            return value
        if isinstance(value, int):
            self._check_bits(value.bit_length())
        elif isinstance(value, (str, bytes, list, tuple)):
            self.spend(num_sums * self._size(value))
        return value

    @staticmethod
    def _check_bits(num_bits: int) -> None:
        if num_bits > _MAX_INTEGER_BITS:
            raise TemplateRuntimeError(f"an integer of {num_bits} bits: at most {_MAX_INTEGER_BITS} are allowed")

    def wrap_str_format(self, value: Any) -> Any:
        """See jinja2; the widths of fields are counted."""
        if not isinstance(value, (MethodType, BuiltinMethodType)) or value.__name__ not in _FORMATS:
            return None
        text, is_format_map = value.__self__, value.__name__ == "format_map"
        if not isinstance(text, str):
            return None
        formatter = _EscapedFields(self, escape=text.escape) if isinstance(text, Markup) else _Fields(self)

        def formatted(*args: Any, **kwargs: Any) -> str:
            if is_format_map:
                (kwargs,) = args
                args = ()
            self.spend(len(text))
            return type(text)(formatter.vformat(text, args, kwargs))

        return formatted

    # -- what work will be done ------------------------------------------------------------------------------------

    def _foresee(self, name: str, value: Any, args: Iterable[Any], kwargs: Mapping[str, Any]) -> None:
        """Count the work and the characters of a filter, or of a method of `value`."""
        length = len(value) if isinstance(value, Sized) else 0
        if name in _ITEM_BY_ITEM:
            return self.spend(0, length)
        given = [*args, *kwargs.values()]
        size = self.weigh(value) * _FACTORS.get(name, 1)
        numbers = [abs(each) for each in given if isinstance(each, int)]
        if name in _PADS:
            size += max(numbers, default=0)
        elif name in _MULTIPLIES:
            texts = [self.weigh(each) for each in given if isinstance(each, (str, dict, tuple, list))]
            size *= max([1, *texts, *(numbers if name in _BY_WIDTH else ())])
        elif name == "join":
            size += self.weigh(given[0]) * length if given else 0
        elif name == "replace" and len(given) > 1:
            count = value.count(given[0]) if isinstance(value, bytes) else str(value).count(str(given[0]))
            size += count * self.weigh(given[1])
        elif name in ("split", "rsplit"):
            size += _PIECE_CHARS * (value.count(given[0]) if given and given[0] else length // 2)
        elif name == "striptags":
            size *= 1 + str(value).count("<")
        elif name == "sum" and len(given) > 1:
            size *= 1 + length
        elif name == "round" and max(numbers, default=0) > _MAX_DIGITS:
            raise TemplateRuntimeError(f"round to {max(numbers)} digits: at most {_MAX_DIGITS} are allowed")
        elif name in ("encode", "decode") and given and given[0] not in _TEXT_ENCODINGS:
            size *= size
        elif name == "format":
            self._foresee_format(str(value), tuple(given))
        self.spend(size)
        return None

    def _foresee_format(self, text: str | bytes, values: Any) -> None:
        shown = text.decode("latin-1") if isinstance(text, bytes) else text
        fields = _FIELD.findall(shown)
        given = values if isinstance(values, (list, tuple)) else [values]
        stars = max((abs(value) for value in given if isinstance(value, int)), default=0)
        widths = (stars if width == "*" else int(width) for field in fields for width in field if width)
        self.spend(len(text) + sum(widths) + len(fields) * self.weigh(values))

    def _to_json(self, value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None,
                 sort_keys: bool = False) -> str:
        encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        return encoder.encode(value) if indent is None else "".join(map(self._read, encoder.iterencode(value)))

    def _size(self, value: Any) -> int:
        return len(value) * (1 if isinstance(value, (str, bytes)) else _ITEM_CHARS) if isinstance(value, Sized) else 0

    def _all_of(self, items: Any) -> Any:
        return list(self._counted(items)) if isinstance(items, Iterator) else items

    def _bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        first = int(hasattr(function, "jinja_pass_arg"))

        @functools.wraps(function)  # also jinja2's marks
        def bounded(*args: Any, **kwargs: Any) -> Any:
            value = args[first]
            if name in _NEEDS_ALL:
                value = self._all_of(value)
                args = (*args[:first], value, *args[first + 1 :])
            if name in _FREE:
                return function(*args, **kwargs)
            self._foresee(name, value, args[first + 1 :], kwargs)
            return self._kept(function(*args, **kwargs))

        return bounded

    def _counted_test(self, test: Any) -> Callable[..., Any]:
        def counted(*values: Any) -> Any:
            return test(*map(self._compared, values))

        return counted

    # -- compiling -------------------------------------------------------------------------------------------------

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        _Counting().visit(source)
        source.set_environment(self)
        self.restart(most=_FOLDED_CHARS)
        try:
            return super()._generate(source, *args, **kwargs)
        finally:
            self.restart()


class _BoundedTemplate(jinja2.Template):
    def render(self, *args: Any, **kwargs: Any) -> str:
        environment = self.environment
        assert isinstance(environment, BoundedEnvironment), "it makes these"
        given = dict(*args, **kwargs)
        environment.restart(given)
        return super().render(given)


class _Counting(NodeTransformer):
    """Puts what counts into a syntax tree."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        if node.test is not None:
            for _ in range(_num_turns([node.test])):
                node.test = nodes.And(nodes.EnvironmentAttribute("turn"), node.test, lineno=node.lineno)
        return self.visit_Macro(node)

    def visit_Macro(self, node: nodes.For | nodes.Macro | nodes.CallBlock) -> nodes.Node:
        num_turns = _num_turns(node.body)
        self.generic_visit(node)
        node.body[:0] = [nodes.ExprStmt(nodes.EnvironmentAttribute("turn"), lineno=node.lineno)] * num_turns
        return node

    visit_CallBlock = visit_Macro

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        if len(node.ops) == 1 and _is_short(node.expr, node.ops[0]):
            return node
        node.expr = _counted(node.expr, _COMPARED)
        for operand in node.ops:
            operand.expr = _counted(operand.expr, _SEARCHED if operand.op in ("in", "notin") else _COMPARED)
        return node

    def visit_Add(self, node: nodes.Add) -> nodes.Node:
        left, num_sums = node.left, 1
        while isinstance(left, nodes.Add):
            left, num_sums = left.left, num_sums + 1
        self._visit_operands(node)
        return _counted(node, _ADDED, nodes.Const(num_sums))

    def _visit_operands(self, node: nodes.Add) -> None:
        while True:
            node.right = self.visit(node.right)
            if not isinstance(node.left, nodes.Add):
                node.left = self.visit(node.left)
                return
            node = node.left

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [_counted(part, _READ) for part in node.nodes]
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _counted(node, _SLICED) if isinstance(node.arg, nodes.Slice) else node


def _num_turns(body: list[Any]) -> int:
    return 1 + sum(1 for part in body for _ in part.find_all(nodes.Node)) // _BODY


def _is_short(left: nodes.Expr, operand: nodes.Operand) -> bool:
    """Whether a comparison takes no more time than a constant of the template has characters."""
    right = operand.expr
    if operand.op in ("in", "notin"):
        return (isinstance(right, (nodes.List, nodes.Tuple))
                and all(isinstance(item, nodes.Const) for item in right.items))
    return isinstance(left, nodes.Const) or isinstance(right, nodes.Const)


def _counted(node: nodes.Expr, name: str, *args: nodes.Expr) -> nodes.Expr:
    """The node's value, seen by the filter of that name."""
    if isinstance(node, nodes.Const):
        return node
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)


class _Fields(SandboxedFormatter):
    def format_field(self, value: Any, format_spec: str) -> Any:
        assert isinstance(self._env, BoundedEnvironment), "it makes these"
        self._env.spend(self._env.weigh(value) + sum(map(int, re.findall(r"\d+", format_spec))))
        return super().format_field(value, format_spec)


class _EscapedFields(_Fields, SandboxedEscapeFormatter):
    pass
