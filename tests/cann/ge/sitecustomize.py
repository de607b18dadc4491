"""Gives torchair a graph engine where none is installed, without the program knowing.

Python imports this file by itself because environment() puts its folder on PYTHONPATH. It does nothing unless
CANN_EMU is set; then, as soon as torchair's backend module is loaded, the engine behind it is replaced by the
interpreter in cann_ge.
"""

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType

BACKEND = "torchair.core._backend"


class PatchingLoader(importlib.abc.Loader):
    """The module's own loader, and the replacement right after it has run."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self.loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        from cann_ge.session import replace_engine

        replace_engine(module)


class BackendFinder(importlib.abc.MetaPathFinder):
    """Finds the backend like everybody else, but hands out the patching loader."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not name.endswith(BACKEND):
            return None
        for finder in sys.meta_path:
            if finder is self:
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = PatchingLoader(spec.loader)
                return spec
        return None


if os.environ.get("CANN_EMU"):
    sys.meta_path.insert(0, BackendFinder())
