"""Finds every vendor name that `platforms/npu` uses, by reading its source. Runs none of it; knows nothing of wheels.

The source is walked as it would run, with only those values known that matter here: vendor modules and what is reached
from them (paths like `torch.npu.set_device` or `torchair.CompilerConfig().mode`), constant strings, our own functions.
Functions of ours are followed with the arguments they are called with, so `load("torchair")` leads on into `load`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_ROOTS = ("torch.npu.", "torch.ops.npu.", "torch.ops.air.", "torch_npu.", "torchair", "npugraph_ex")
_IMPORTERS = ("import_module", "_import")
_BACKEND = "npugraph_ex backend"
_MOST_CALLS_DEEP = 12


@dataclass(frozen=True)
class Use:
    """One name and how it is called: by name and by place; both empty where it is not called.

    `is_asked`: by hasattr, or by getattr with a default, so that a wheel may lack it.
    """

    path: str
    keywords: tuple[str, ...]
    num_positional: int
    where: str
    is_asked: bool = False


@dataclass(frozen=True)
class Vendor:
    """Something of the vendor's, by the way to it. `is_asked`: somewhere on it a name may be missing."""

    path: str
    is_asked: bool = False


@dataclass(frozen=True)
class Text:
    value: str


@dataclass(frozen=True)
class Options:
    """A dictionary, of which the keys are known."""

    keys: tuple[str, ...]


@dataclass(frozen=True)
class Several:
    """A tuple or list, and what its items may be."""

    items: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True, eq=False)
class Function:
    node: ast.FunctionDef | ast.Lambda
    scope: Scope


Values = tuple[Any, ...]
"""What an expression may be; empty: nothing that matters here."""


@dataclass(eq=False)
class Scope:
    """Names of one module or of one call."""

    module: str
    names: dict[str, Values] = field(default_factory=dict)
    outer: Scope | None = None

    def find(self, name: str) -> Values:
        if name in self.names:
            return self.names[name]
        return self.outer.find(name) if self.outer is not None else ()


class Reader:
    """Walks the modules of a folder, the package called `package`; `uses` has what was found.

    `converters` are the operators for which converters to the graph engine are registered there; `asked_of_torch` are
    names of torch itself that may be missing.
    """

    def __init__(self, folder: Path, package: str):
        self.uses: dict[Use, None] = {}
        self.converters: set[str] = set()
        self.asked_of_torch: set[str] = set()
        self._package = package
        self._modules: dict[str, Scope] = {}
        self._files = {_module_name(folder, path, package): path for path in sorted(folder.rglob("*.py"))}
        self._returned: list[Values] = []
        self._depth = 0
        for name in self._files:
            self._module(name)
        for scope in list(self._modules.values()):
            for values in list(scope.names.values()):
                for value in values:
                    if isinstance(value, Function):
                        self._run(value, {})

    def _module(self, name: str) -> Scope:
        if name not in self._modules:
            scope = self._modules[name] = Scope(name)
            self._block(ast.parse(self._files[name].read_text()).body, scope)
        return self._modules[name]

    def _record(self, path: str, node: ast.AST, scope: Scope, keywords: Iterable[str] = (),
                positional: int = 0, is_asked: bool = False) -> None:
        path = path.partition("._schema")[0].removesuffix(".default")
        is_vendor = path.startswith(_ROOTS) and not path.rpartition(".")[2].startswith("__")
        if is_vendor:
            where = f"{scope.module.rpartition('.')[2]}.py:{node.lineno}"  # type: ignore[attr-defined]
            self.uses[Use(path, tuple(sorted(keywords)), positional, where, is_asked)] = None
        elif is_asked:
            self.asked_of_torch.add(path)

    # -- statements ------------------------------------------------------------------------------------------------

    def _block(self, body: Sequence[ast.stmt], scope: Scope) -> None:
        for statement in body:
            self._statement(statement, scope)

    def _statement(self, node: ast.stmt, scope: Scope) -> None:
        if isinstance(node, ast.Import | ast.ImportFrom):
            self._import(node, scope)
        elif isinstance(node, ast.FunctionDef):
            for decorator in node.decorator_list:
                self._value(decorator, scope)
            scope.names[node.name] = (Function(node, scope),)
            if scope.outer is not None:
                self._run(Function(node, scope), {})
        elif isinstance(node, ast.ClassDef):
            inner = Scope(scope.module, {}, scope)
            self._block(node.body, inner)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            values = self._value(node.value, scope) if node.value is not None else ()
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                self._bind(target, values, scope)
        elif isinstance(node, ast.Return):
            self._returned[-1] += self._value(node.value, scope) if node.value is not None else ()
        elif isinstance(node, ast.If):
            self._branch(node, scope)
        else:
            self._compound(node, scope)

    def _compound(self, node: ast.stmt, scope: Scope) -> None:
        if isinstance(node, ast.For):
            values = self._value(node.iter, scope)
            items = [item for value in values if isinstance(value, Several) for item in value.items]
            self._bind(node.target, tuple(value for item in items for value in item), scope)
        for name, part in ast.iter_fields(node):
            if isinstance(node, ast.For) and name in ("target", "iter"):
                continue
            for child in part if isinstance(part, list) else [part]:
                if isinstance(child, ast.stmt):
                    self._statement(child, scope)
                elif isinstance(child, ast.expr):
                    self._value(child, scope)
                elif isinstance(child, ast.withitem):
                    self._value(child.context_expr, scope)
                elif isinstance(child, ast.ExceptHandler):
                    self._block(child.body, scope)

    def _branch(self, node: ast.If, scope: Scope) -> None:
        """Both ways, unless the condition compares a known text with another."""
        decided = self._decide(node.test, scope)
        self._value(node.test, scope)
        before = dict(scope.names)
        if decided is not False:
            self._block(node.body, scope)
        after, scope.names = scope.names, dict(before) if decided is None else scope.names
        if decided is not True:
            self._block(node.orelse, scope)
        for name, values in after.items():
            scope.names[name] = tuple(dict.fromkeys((*scope.names.get(name, ()), *values)))

    def _decide(self, test: ast.expr, scope: Scope) -> bool | None:
        if not (isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Eq) and len(test.ops) == 1):
            return None
        left, right = self._value(test.left, scope), self._value(test.comparators[0], scope)
        if len(left) == len(right) == 1 and isinstance(left[0], Text) and isinstance(right[0], Text):
            return bool(left[0] == right[0])
        return None

    def _import(self, node: ast.Import | ast.ImportFrom, scope: Scope) -> None:
        for alias in node.names:
            if isinstance(node, ast.Import):
                top = alias.name.partition(".")[0]
                if alias.name != top:
                    self._record(alias.name, node, scope)
                if top in ("torch", "torch_npu"):
                    scope.names[alias.asname or top] = (Vendor(top),)
                continue
            home, bound = node.module or "", alias.asname or alias.name
            if f"{home}.{alias.name}" in self._files:
                scope.names[bound] = (self._module(f"{home}.{alias.name}"),)
            elif home in self._files:
                scope.names[bound] = self._module(home).find(alias.name)
            elif home.split(".")[0] in ("torch_npu", "torchair", "npugraph_ex"):
                self._record(f"{home}.{alias.name}", node, scope)
                scope.names[bound] = (Vendor(f"{home}.{alias.name}"),)

    def _bind(self, target: ast.expr, values: Values, scope: Scope) -> None:
        if isinstance(target, ast.Name):
            scope.names[target.id] = values
        elif isinstance(target, ast.Tuple | ast.List):
            for index, part in enumerate(target.elts):
                several = [value.items for value in values if isinstance(value, Several)]
                items = [items[index] for items in several if index < len(items)]
                self._bind(part, tuple(value for item in items for value in item), scope)
        else:
            self._value(target, scope)

    # -- expressions -----------------------------------------------------------------------------------------------

    def _value(self, node: ast.expr, scope: Scope) -> Values:
        if isinstance(node, ast.Constant):
            return (Text(node.value),) if isinstance(node.value, str) else ()
        if isinstance(node, ast.Name):
            return scope.find(node.id)
        if isinstance(node, ast.Attribute):
            return self._attribute(self._value(node.value, scope), node.attr, node, scope)
        if isinstance(node, ast.Call):
            return self._call(node, scope)
        if isinstance(node, ast.JoinedStr):
            return self._joined(node, scope)
        if isinstance(node, ast.Dict):
            keys = [key.value for key in node.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
            for part in node.values:
                self._value(part, scope)
            return (Options(tuple(keys)),)
        if isinstance(node, ast.Tuple | ast.List):
            return (Several(tuple(self._value(item, scope) for item in node.elts)),)
        if isinstance(node, ast.Lambda):
            function = Function(node, scope)
            self._run(function, {})
            return (function,)
        if isinstance(node, ast.IfExp | ast.BoolOp):
            parts = node.values if isinstance(node, ast.BoolOp) else [node.body, node.orelse]
            return tuple(dict.fromkeys(value for part in parts for value in self._value(part, scope)))
        for child in _expressions_in(node):
            self._value(child, scope)
        return ()

    def _attribute(self, bases: Values, name: str, node: ast.AST, scope: Scope, *, is_asked: bool = False) -> Values:
        found: list[Any] = []
        for base in bases:
            if isinstance(base, Scope):
                found += base.find(name)
            elif isinstance(base, Vendor) and (not base.path.endswith("()") or base.path.endswith("CompilerConfig()")
                                               or "()." in base.path):
                reached = Vendor(f"{base.path}.{name}", is_asked or base.is_asked)
                self._record(reached.path, node, scope, is_asked=reached.is_asked)
                found.append(reached)
        return tuple(found)

    def _joined(self, node: ast.JoinedStr, scope: Scope) -> Values:
        texts = [""]
        for part in node.values:
            values = self._value(part.value if isinstance(part, ast.FormattedValue) else part, scope)
            texts = [text + value.value for text in texts for value in values if isinstance(value, Text)]
        return tuple(map(Text, texts))

    def _call(self, node: ast.Call, scope: Scope) -> Values:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        places = [self._value(argument, scope) for argument in node.args]
        named = {keyword.arg: self._value(keyword.value, scope) for keyword in node.keywords}
        if name in ("hasattr", "getattr"):
            return self._getattr(name, places, node, scope)
        if name in _IMPORTERS:
            modules = [Vendor(value.value) for value in (places[0] if places else ()) if isinstance(value, Text)]
            for module in modules:
                self._record(module.path, node, scope)
            return tuple(modules)
        if name == "lookup_backend":
            return (Vendor(_BACKEND),)
        result: Values = ()
        for function in self._value(node.func, scope):
            if isinstance(function, Function):
                result += self._run(function, self._arguments(function, places, named))
            elif isinstance(function, Vendor):
                result += self._vendor_call(function, places, named, node, scope)
        return result

    def _vendor_call(self, function: Vendor, places: list[Values], named: dict[str | None, Values], node: ast.Call,
                     scope: Scope) -> Values:
        path = function.path
        if path == _BACKEND:
            for value in named.get("options", ()):
                for key in value.keys if isinstance(value, Options) else ():
                    self._record(f"npugraph_ex options.{key}", node, scope)
            return ()
        given = [name for name in named if name is not None]
        given += [key for value in named.get(None, ()) if isinstance(value, Options) for key in value.keys]
        self._record(path, node, scope, given, len(places), function.is_asked)
        if path.endswith(".register_fx_node_ge_converter"):
            for operator in (value for values in places for value in values if isinstance(value, Vendor)):
                self.converters.add(operator.path.removesuffix(".default"))
        for value in (value for values in (*places, *named.values()) for value in values):
            if isinstance(value, Text) and re.fullmatch(r"npu_\w+", value.value):
                self._record(f"torch.ops.npu.{value.value}", node, scope)
        return (Vendor(f"{path.removesuffix('.default')}()", function.is_asked),)

    def _getattr(self, name: str, places: list[Values], node: ast.Call, scope: Scope) -> Values:
        """A name that is asked for with a default, or by hasattr, may be missing in a wheel, but not in all of them."""
        is_asked = name == "hasattr" or len(places) > 2
        found = tuple(value for text in places[1] if isinstance(text, Text)
                      for value in self._attribute(places[0], text.value, node, scope, is_asked=is_asked))
        default = places[2] if len(places) > 2 else ()
        return () if name == "hasattr" else (*found, *default)

    def _arguments(self, function: Function, places: list[Values],
                   named: dict[str | None, Values]) -> dict[str, Values]:
        parameters = [argument.arg for argument in function.node.args.args]
        known = dict(zip(parameters, places, strict=False))
        return known | {name: values for name, values in named.items() if name is not None}

    def _run(self, function: Function, arguments: dict[str, Values]) -> Values:
        """What the function returns for these arguments; those that are left out are unknown."""
        if self._depth > _MOST_CALLS_DEEP:
            return ()
        every = [*function.node.args.args, *function.node.args.kwonlyargs]
        inner = Scope(function.scope.module, {argument.arg: () for argument in every} | arguments, function.scope)
        if isinstance(function.node, ast.Lambda):
            return self._value(function.node.body, inner)
        self._depth += 1
        self._returned.append(())
        self._block(function.node.body, inner)
        self._depth -= 1
        return self._returned.pop()


def _expressions_in(node: ast.AST) -> Iterator[ast.expr]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            yield child
        elif isinstance(child, ast.comprehension | ast.keyword):
            yield from _expressions_in(child)


def _module_name(folder: Path, path: Path, package: str) -> str:
    parts = path.relative_to(folder).with_suffix("").parts
    return ".".join([package, *(part for part in parts if part != "__init__")])
