"""Takes docs/report.png, the README's picture of the demo's report. Needs chromium and scripts/demo.sh's output.

usage: .venv/bin/python scripts/report_picture.py [report.html] [picture.png]
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
REPORT, PICTURE = ROOT / "demo-output" / "report.html", ROOT / "docs" / "report.png"
WIDTH, HEIGHT = 1200, 1000  # pixels
NUM_COLORS = 96  # of the palette; the file is a third of one in true colour


def take(report: Path, picture: Path) -> None:
    """Raises SystemExit if there is no browser or no report."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("no chromium on PATH: apt-get install --no-install-recommends chromium")
    if not report.is_file():
        raise SystemExit(f"{report} is not there: run scripts/demo.sh first")
    with tempfile.TemporaryDirectory() as folder:
        shot = Path(folder, "shot.png")
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--screenshot={shot}",
                   f"--user-data-dir={folder}/profile", f"--window-size={WIDTH},{HEIGHT}"]
        subprocess.run([browser, *options, report.resolve().as_uri()], check=True, timeout=120, capture_output=True)
        with Image.open(shot) as image:
            image.convert("RGB").quantize(NUM_COLORS).save(picture, optimize=True)
    print(f"{picture}: {picture.stat().st_size:,} bytes")


if __name__ == "__main__":
    given = [Path(name) for name in sys.argv[1:]]
    take(*given, *(REPORT, PICTURE)[len(given):])
