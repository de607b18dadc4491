"""How often a fault strikes, counted across processes. Where no folder is named every occasion is a strike.

Imports next to nothing: workers and scripted replicas read it.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

_FOLDER = "FOLDER_OF_STRIKES"


class Strikes:
    """Counted in `folder`, for this process and all that it starts while `patch` lasts."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch):
        folder.mkdir()
        self._folder = folder
        (folder / "spared").write_text(str(os.getpid()))
        self.allow(None)
        patch.setenv(_FOLDER, str(folder))

    def allow(self, limit: int | None) -> None:
        """From here on the fault strikes so often at most, in running processes, too. One at a time meets it."""
        for mark in self._folder.glob("strike-*"):
            mark.unlink()
        (self._folder / "limit").write_text(str(1 << 30 if limit is None else limit))

    @property
    def count(self) -> int:
        """Of strikes since then."""
        return _count(self._folder)


def strikes() -> bool:
    """Whether the fault strikes this time."""
    folder = os.environ.get(_FOLDER)
    if folder is None:
        return True
    number = _count(Path(folder))
    if number >= int((Path(folder) / "limit").read_text()):
        return False
    (Path(folder) / f"strike-{number}").touch(exist_ok=False)
    return True


def die() -> None:
    """Kills this process, unless it is the one that counts the strikes."""
    folder = os.environ.get(_FOLDER)
    assert folder is None or (Path(folder) / "spared").read_text() != str(os.getpid()), "it is done in the test itself"
    os.kill(os.getpid(), signal.SIGKILL)


def _count(folder: Path) -> int:
    return len(list(folder.glob("strike-*")))
