"""Another process exchanges folders, files and links in the allowed folder all the time: nothing outside is read."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from npu_runner.errors import RequestError
from npu_runner.prompts.media.media import Media, MediaRules, load_media
from tests.full_set import every

INSIDE, OUTSIDE = b"inside", b"outside, a secret"
EXCHANGE = """
import ctypes, os, sys
renameat2, AT_FDCWD, RENAME_EXCHANGE = ctypes.CDLL(None, use_errno=True).renameat2, -100, 2
first, second = (os.fsencode(name) for name in sys.argv[1:])
print(flush=True)
while True:
    if renameat2(AT_FDCWD, first, AT_FDCWD, second, RENAME_EXCHANGE):
        sys.exit(os.strerror(ctypes.get_errno()))
"""


@pytest.fixture
def allowed(tmp_path: Path) -> Path:
    """`d` and `x.png` are inside; `l`, `m` and `y.png` lead to an outside of the same names, `a` and `b` inside."""
    outside, folder = tmp_path / "outside", tmp_path / "media"
    for place, data in ((outside, OUTSIDE), (folder / "d", INSIDE), (folder / "e" / "d", INSIDE)):
        place.mkdir(parents=True)
        (place / "x.png").write_bytes(data)
    (folder / "x.png").write_bytes(INSIDE)
    (folder / "y.png").symlink_to(outside / "x.png")
    (folder / "l").symlink_to(outside)
    (folder / "m").symlink_to("../outside")
    (folder / "a").symlink_to(folder / "d")
    (folder / "b").symlink_to("e/d")
    return folder


@contextlib.contextmanager
def exchanging(folder: Path, first: str, second: str) -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-c", EXCHANGE, first, second], cwd=folder, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        yield
        assert other.poll() is None, "it has exchanged nothing any more"
        other.kill()


def fates(folder: Path, address: str, num_tries: int) -> Counter[bytes | str]:
    """What came of so many tries."""
    found: Counter[bytes | str] = Counter()
    for _ in range(num_tries):
        try:
            found[load_media(address, folder)] += 1
        except RequestError as error:
            found[error.code] += 1
    return found


def check(allowed: Path, address: str, first: str, second: str, num_tries: int) -> None:
    found: Counter[bytes | str] = Counter()
    with exchanging(allowed, first, second):
        # On a busy machine the other process may wait while all tries of a round are made.
        for _ in range(100):
            found += fates(allowed, address, num_tries)
            if min(found[INSIDE], found["media_not_allowed"]) > num_tries // 100:
                break
    assert OUTSIDE not in found, found
    assert found[INSIDE] > num_tries // 100, "the exchange was seen from both sides"
    assert found["media_not_allowed"] > num_tries // 100
    assert set(found) <= {INSIDE, "media_not_allowed", "media_unreadable"}, found


RACES = [("d/x.png", "d", "l"), ("d/x.png", "d", "m"), ("x.png", "x.png", "y.png"), ("a/x.png", "d", "l"),
         ("e/../d/x.png", "d", "l"), ("{}/d/x.png", "d", "l")]  # fmt: skip


@pytest.mark.parametrize(("address", "first", "second"), RACES)
def test_no_exchange_leads_outside(allowed: Path, address: str, first: str, second: str) -> None:
    """Of 8,000 tries of the first kind a check before opening let hundreds out."""
    check(allowed, address.format(allowed), first, second, 2_000 // every(4))


@pytest.mark.slow
@pytest.mark.full("200,000 tries; 2,000 of each kind stay")
def test_no_exchange_of_many_leads_outside(allowed: Path) -> None:
    check(allowed, "d/x.png", "d", "l", 200_000)


def test_sizes_are_of_files_inside(allowed: Path) -> None:
    media = Media(url="d/x.png", where="here", rules=MediaRules(allowed_dir=allowed))
    sizes: Counter[int] = Counter()
    with exchanging(allowed, "d", "l"):
        for _ in range(4_000 // every(4)):
            with contextlib.suppress(RequestError):
                sizes[media.num_bytes()] += 1
    assert set(sizes) == {len(INSIDE)}


def test_links_within_are_read_while_they_are_exchanged(allowed: Path) -> None:
    """An absolute one and a relative one: whichever is there, nothing is refused."""
    with exchanging(allowed, "a", "b"):
        assert fates(allowed, "a/x.png", 4_000 // every(4)) == {INSIDE: 4_000 // every(4)}


def test_no_descriptor_stays_open(allowed: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    (allowed / "loop").symlink_to("loop")
    for address in ("d/x.png", "a/x.png", "e/../../media/x.png", "l/x.png", "d/no", "loop", "d", "../x", "d/x.png/x"):
        fates(allowed, address, 3)
    assert len(os.listdir("/proc/self/fd")) == before
