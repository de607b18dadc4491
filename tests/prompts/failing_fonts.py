"""Makes the process fail that finds the fonts of PDFs, and no other. Holds no tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from npu_runner.prompts.media import pdf_fonts

KILLED = "os.kill(os.getpid(), signal.SIGKILL)"


def with_fonts_child(folder: Path, code: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """From here on that process runs `code` at its start. Returns a file with a line of each such process."""
    site, starts = folder / "site", folder / "starts"
    site.mkdir()
    starts.touch()
    (site / "sitecustomize.py").write_text(f"""
import os, signal, sys, time
if {pdf_fonts.__name__!r} in sys.orig_argv:
    with open({str(starts)!r}, "a") as file:
        file.write("started\\n")
    {code}
""")
    monkeypatch.setenv("PYTHONPATH", str(site))
    pdf_fonts._fonts_of_child.cache_clear()
    return starts
