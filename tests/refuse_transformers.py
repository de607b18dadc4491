"""`import transformers` is an error. scripts/test_environments.sh puts this file among the oldest packages.

A .pth file imports it at every start of that Python, so it holds in child processes, too. Knows nothing of npu_runner.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder


class Refuses(MetaPathFinder):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: object = None) -> None:
        if fullname == "transformers":
            raise ImportError("transformers is imported, where nothing needs it")


sys.meta_path.insert(0, Refuses())
