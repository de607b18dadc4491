"""Reads what one torch_npu wheel offers, from its text alone: schemas, and Python files that nobody imports.

A wheel is a folder with the text files of a real one. `Wheel.fact(path)` says what a path of uses.py is there: an
operator's schema, a function's parameters, or a word for anything else; None where the wheel does not have it.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

_CONFIG = "CompilerConfig()"
_OPTIONS = "npugraph_ex options"
_CONVERTER = "GE converter of "


class Wheel:
    def __init__(self, folder: Path):
        self._package = folder / "torch_npu"
        self._roots = {name: self._package / "dynamo" / name for name in ("torchair", "npugraph_ex")}
        self._roots["torch_npu"] = self._package

    def fact(self, path: str) -> str | None:
        """What `path` is in this wheel."""
        if path.startswith("torch.ops.air."):
            return self._air_schemas.get(path.removeprefix("torch.ops.air."))
        for prefix in ("torch.ops.npu.", "torch_npu."):
            if path.startswith(prefix) and path.removeprefix(prefix) in self._schemas:
                return self._schemas[path.removeprefix(prefix)]
        if path.startswith("torch.ops."):
            return None
        if path.removeprefix("torch_npu.") in self._atb_names:
            return "operator of ATB, named in the wheel's Python"
        if path.startswith(_CONVERTER):
            return self._converters.get(path.removeprefix(_CONVERTER))
        if path.startswith(_OPTIONS):
            return "option" if path.partition(".")[2] in self._options else None
        if path.startswith("torch_npu._C"):
            return "named in the wheel's Python" if path in self._compiled_names else None
        if _CONFIG in path:
            return self._setting(path)
        return self._python_name(re.sub(r"^torch\.npu\b", "torch_npu.npu", path))

    # -- operators -------------------------------------------------------------------------------------------------

    @functools.cached_property
    def _schemas(self) -> dict[str, str]:
        """Operators of torch.ops.npu, from the lists that the wheel's bindings were generated from."""
        found: dict[str, str] = {}
        for path in sorted((self._package / "csrc/aten").glob("*.yaml")):
            text = re.sub(r"\n\s{4,}", " ", path.read_text())
            for name, arguments, result in re.findall(r"func: ([\w.]+)\((.*?)\) -> ([^\n]+)", text):
                found.setdefault(name, f"({_plain(arguments)}) -> {result.strip()}")
        return found

    @functools.cached_property
    def _atb_names(self) -> set[str]:
        """Operators that the wheel's own library for ATB registers; their schemas are in that library only."""
        path = self._package / "op_plugin/atb/_atb_ops.py"
        text = path.read_text() if path.is_file() else ""
        return {name for listed in re.findall(r"^API_LIST = \[(.*?)\]", text, re.DOTALL | re.MULTILINE)
                for name in re.findall(r"'(\w+)'", listed)}

    @functools.cached_property
    def _air_schemas(self) -> dict[str, str]:
        """Operators that torchair registers for the graph engine."""
        found = {}
        for path in sorted(self._roots["torchair"].rglob("*.py")):
            text = path.read_text()
            if '"air"' not in text:
                continue
            for name, arguments, result in re.findall(r'define\(\s*"+\s*(\w+)\((.*?)\) -> (.*?)"', text, re.DOTALL):
                found[name] = f"({_plain(arguments)}) -> {result.strip()}"
        return found

    @functools.cached_property
    def _converters(self) -> dict[str, str]:
        """What torchair's converters to the graph engine take, by operator."""
        found = {}
        for path in sorted((self._roots["torchair"] / "_ge_concrete_graph/ge_converter/custom").glob("*.py")):
            for registration, function in _registrations(_parse(path)):
                text = ast.unparse(registration)
                if match := re.fullmatch(r"register_fx_node_ge_converter\((torch\.ops\.npu\.\w+)\.default\)", text):
                    found[match[1]] = _parameters(function)
        return found

    # -- settings --------------------------------------------------------------------------------------------------

    @functools.cached_property
    def _options(self) -> set[str]:
        """What npugraph_ex takes in `options`: its config's attributes, or a table of its own in the first wheels."""
        table = self._roots["npugraph_ex"] / "configs/npugraphex_config.py"
        if table.is_file():
            return set(re.findall(r'^\s+"(\w+)": "[\w.]+",', table.read_text(), re.MULTILINE))
        found = self._resolve("npugraph_ex.CompilerConfig")
        return set(_attributes(found[0])) if found is not None and isinstance(found[0], ast.ClassDef) else set()

    def _setting(self, path: str) -> str | None:
        """An attribute, however deep, of a compiler config."""
        start, _, rest = path.partition("()")
        found = self._resolve(start)
        for name in rest.strip(".").split("."):
            if found is None or not isinstance(found[0], ast.ClassDef):
                return None
            methods = {node.name: node for node in found[0].body if isinstance(node, ast.FunctionDef)}
            if name in methods:
                return _parameters(methods[name])
            value = _attributes(found[0]).get(name)
            if value is None:
                return None
            maker = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
            if not maker.startswith("_"):
                return f"setting, {ast.unparse(value)}"
            found = self._resolve(f"{found[1]}.{maker}")
        return "group of settings"

    # -- Python names ----------------------------------------------------------------------------------------------

    def _python_name(self, path: str) -> str | None:
        if self._file(path) is not None:
            return "module"
        found = self._resolve(path)
        if found is None:
            return self._attribute_of_instance(path)
        node = found[0]
        if isinstance(node, ast.FunctionDef):
            return _parameters(node)
        if isinstance(node, ast.ClassDef):
            start = _initialiser(node)
            return f"class {_parameters(start)}" if start is not None else "class"
        return "value"

    def _attribute_of_instance(self, path: str) -> str | None:
        """`torch.npu.config.allow_internal_format`: a name that the class of a module's value tells apart."""
        owner, _, name = path.rpartition(".")
        found = self._resolve(owner)
        if found is None or not isinstance(found[0], ast.Assign) or not isinstance(found[0].value, ast.Call):
            return None
        home = self._resolve(f"{found[1]}.{ast.unparse(found[0].value.func)}")
        return "value" if home is not None and re.search(rf"\b{name}\b", ast.unparse(home[0])) else None

    def _file(self, module: str) -> Path | None:
        root, _, rest = module.partition(".")
        if root not in self._roots:
            return None
        path = self._roots[root].joinpath(*filter(None, rest.split(".")))
        return next((file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()), None)

    def _resolve(self, path: str, depth: int = 0) -> tuple[ast.stmt, str] | None:
        """The statement that makes this name, and the module it stands in; imports are followed."""
        module, _, name = path.rpartition(".")
        file = self._file(module) if module else None
        if file is None or depth > 8:
            return None
        stars = []
        for node in _statements(_parse(file).body):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
                return node, module
            if isinstance(node, ast.Assign) and any(getattr(target, "id", None) == name for target in node.targets):
                return node, module
            if isinstance(node, ast.ImportFrom):
                home = _absolute(node, module, is_package=file.name == "__init__.py")
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self._resolve(f"{home}.{alias.name}", depth + 1) or (node, module)
                    if alias.name == "*":
                        stars.append(home)
        return next(filter(None, (self._resolve(f"{home}.{name}", depth + 1) for home in stars)), None)

    @functools.cached_property
    def _compiled_names(self) -> set[str]:
        """What is only in the shared library, as far as the wheel's own Python names it."""
        texts = [path.read_text(errors="replace") for path in self._package.rglob("*.py") if "dynamo" not in path.parts]
        found = {name for text in texts for name in re.findall(r"torch_npu\._C\.[\w.]+", text)}
        return found | {name.rsplit(".", depth)[0] for name in found for depth in range(1, name.count("."))}


@functools.cache
def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _registrations(module: ast.Module) -> Iterator[tuple[ast.expr, ast.FunctionDef]]:
    """What a module's functions are given to, with the function: decorators, and calls like `register(op)(f)`."""
    functions = {node.name: node for node in _statements(module.body) if isinstance(node, ast.FunctionDef)}
    for function in functions.values():
        yield from ((decorator, function) for decorator in function.decorator_list)
    for node in _statements(module.body):
        call = node.value if isinstance(node, ast.Expr | ast.Assign) else None
        given = call.args[0] if isinstance(call, ast.Call) and len(call.args) == 1 else None
        if isinstance(call, ast.Call) and isinstance(given, ast.Name) and given.id in functions:
            yield call.func, functions[given.id]


def _statements(body: list[ast.stmt]) -> list[ast.stmt]:
    """Those of a module, and what stands in its try and if blocks."""
    found = []
    for node in body:
        found.append(node)
        for part in ("body", "orelse") if isinstance(node, ast.Try | ast.If) else ():
            found += _statements(getattr(node, part))
    return found


def _absolute(node: ast.ImportFrom, module: str, *, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    parts = parts[: len(parts) - node.level + is_package]
    return ".".join([*parts, *filter(None, [node.module])])


def _parameters(node: ast.FunctionDef) -> str:
    for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
        argument.annotation = None
    return f"({ast.unparse(node.args)})"


def _initialiser(node: ast.ClassDef) -> ast.FunctionDef | None:
    return next((item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"), None)


def _attributes(node: ast.ClassDef) -> dict[str, ast.expr]:
    """What `__init__` gives the instance."""
    start = _initialiser(node)
    if start is None:
        return {}
    return {target.attr: item.value for item in ast.walk(start) if isinstance(item, ast.Assign)
            for target in item.targets if isinstance(target, ast.Attribute)}


def _plain(text: str) -> str:
    """On one line: no continuation, no doubled blanks."""
    return re.sub(r"\s+", " ", text.replace("\\", " ")).strip()
