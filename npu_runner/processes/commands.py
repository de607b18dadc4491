"""Starts Python without importing from the working directory. Knows nothing of the program that runs.

`python -m` puts the working directory first in sys.path, and an empty entry of PYTHONPATH means the same. A file that
someone puts there, for example among images, would then run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

# For `-c` Python 3.10 puts the working directory into sys.path, and imports nothing before the first line runs. Later
# versions are told to leave it out. What the child's own site adds (.pth files) stays, behind the parent's path.
_START = """
import sys
own, sys.path = sys.path, {path}
import os
sys.path += [entry for entry in own if os.path.isabs(entry) and entry not in sys.path]
"""
_RUN_MODULE = """
import importlib
importlib.import_module(sys.argv[1]).main(sys.argv[2:])
"""
_SAFE_PATH = ["-P"] if sys.version_info >= (3, 11) else []


def module_command(module: str, *arguments: object, python: str = sys.executable) -> list[str]:
    """Calls `main(arguments)`, as text, of a module of this package in another process."""
    return code_command(_RUN_MODULE, module, *arguments, python=python)


def code_command(code: str, *arguments: object, python: str = sys.executable) -> list[str]:
    """Runs `code` in another process with this one's sys.path, without the working directory; `sys` is imported."""
    return [python, *_SAFE_PATH, "-c", _START.format(path=ascii(passed_path())) + code, *map(str, arguments)]


def environment(of: Mapping[str, str] | None = None) -> dict[str, str]:
    """These variables, or this process's, for a child: PYTHONPATH without entries that lead to the working directory.

    It is for what the child starts in its turn, and for what Python imports by itself (sitecustomize).
    """
    variables = dict(os.environ if of is None else of)
    path = os.pathsep.join(filter(os.path.isabs, variables.pop("PYTHONPATH", "").split(os.pathsep)))
    return {**variables, "PYTHONPATH": path} if path else variables


def passed_path() -> list[str]:
    """This process's sys.path for a child.

    Without the working directory, which `-m` and PYTHONPATH may have added as an absolute path, and without other
    relative entries. Always with the folders of this package, so that a checkout runs without installation.
    """
    refused = set(_relative_entries()) - set(_package_folders())
    path = [entry for entry in sys.path if os.path.isabs(entry) and os.path.realpath(entry) not in refused]
    return path + [folder for folder in _package_folders() if folder not in map(os.path.realpath, path)]


def _relative_entries() -> Iterator[str]:
    """Where the entries of PYTHONPATH that are not absolute lead, and the working directory."""
    try:
        here = os.getcwd()
    except FileNotFoundError:  # it was deleted: nothing can be imported from there
        return
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    named = {os.path.realpath(entry) for entry in given if os.path.isabs(entry)}
    for entry in ("", *given):
        place = os.path.realpath(os.path.join(here, entry))
        if not os.path.isabs(entry) and place not in named:
            yield place


def _package_folders() -> list[str]:
    """The folders that contain npu_runner."""
    return [str(Path(__file__).resolve().parents[2])]
