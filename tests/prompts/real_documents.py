"""Real PDFs: those in the sdists of pypdf and ocrmypdf and in Debian's bash-doc, and damaged copies. Holds no tests.

`scripts/test_all.sh` fetches the packages into `.cache/documents`; without them there are none.
"""

from __future__ import annotations

import functools
import random
import re
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

FOLDER = Path(__file__).parents[2] / ".cache" / "documents"


@functools.cache
def real_documents() -> dict[str, bytes]:
    """PDFs and TIFF files by name."""
    found = {}
    for path in sorted(FOLDER.glob("*.tar.gz")):
        with tarfile.open(path) as archive:
            for member in archive:
                if member.isfile() and member.name.lower().endswith((".pdf", ".tif", ".tiff")):
                    file = archive.extractfile(member)
                    assert file is not None
                    found[member.name.replace("/", "_")] = file.read()
    for path in sorted(FOLDER.glob("*.deb")):
        listed = subprocess.run(["dpkg-deb", "--fsys-tarfile", path], capture_output=True, check=True).stdout
        tar = path.with_suffix(".tar")
        tar.write_bytes(listed)
        with tarfile.open(tar) as archive:
            for member in archive:
                if member.isfile() and member.name.endswith(".pdf"):
                    file = archive.extractfile(member)
                    assert file is not None
                    found[Path(member.name).name] = file.read()
        tar.unlink()
    return found


def _bytes_changed(data: bytearray, rng: random.Random) -> None:
    for _ in range(max(1, len(data) // 2000)):
        data[rng.randrange(len(data))] = rng.randrange(256)


def _zeroed(data: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(data))
    data[start : start + 2000] = bytes(len(data[start : start + 2000]))


def _cut(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(len(data)) :]


def _head_gone(data: bytearray, rng: random.Random) -> None:
    del data[: rng.randrange(1, min(4000, len(data)))]


def _doubled(data: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(data))
    data[start:start] = data[start : start + 3000]


def _digits(data: bytearray, rng: random.Random) -> None:
    for place in rng.sample([match.start() for match in re.finditer(rb"[0-9]", data)] or [0], 1) * 8:
        data[place] = 0x30 + rng.randrange(10)
    for match in list(re.finditer(rb"[0-9]", data))[:: max(1, len(data) // 300)]:
        data[match.start()] = 0x30 + rng.randrange(10)


def _swapped(data: bytearray, rng: random.Random) -> None:
    size = min(1000, len(data) // 3)
    first, second = sorted(rng.sample(range(0, len(data) - size), 2))
    data[first : first + size], data[second : second + size] = data[second : second + size], data[first : first + size]


def _names(data: bytearray, rng: random.Random) -> None:
    for match in list(re.finditer(rb"/[A-Z][A-Za-z]+", data))[rng.randrange(3) :: 5]:
        data[match.start() + 1] = ord("Q")


DAMAGES: list[Callable[[bytearray, random.Random], None]] = [
    _cut, _head_gone, _bytes_changed, _zeroed, _doubled, _digits, _swapped, _names]


def damaged(documents: dict[str, bytes], count: int) -> dict[str, bytes]:
    """Damaged copies of these, by name."""
    rng, names = random.Random(51), sorted(documents)
    found = {}
    for number in range(count):
        name, damage = names[number % len(names)], DAMAGES[number % len(DAMAGES)]
        data = bytearray(documents[name])
        damage(data, rng)
        found[f"{number:03}{damage.__name__}-{Path(name).stem[-40:]}.pdf"] = bytes(data)
    return found
