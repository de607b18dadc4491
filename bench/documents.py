"""PDFs of bench.pages and bench.rendering, made by reportlab, and readers of their pages. Knows no engine."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

from PIL import Image, ImageChops, ImageDraw, ImageFont
from reportlab import rl_config
from reportlab.lib.pagesizes import A4
from reportlab.pdfgen.canvas import Canvas

KINDS = ("scans", "text")
_PAGES_EACH, _NUM_SCANS, _PIXELS = 16, 4, (1654, 2339)


def write_documents(folder: Path, num_pages: int, kinds: Sequence[str] = KINDS) -> None:
    """Documents of 16 pages in A4, of one kind each, by turns; no two pages are alike.

    A scan is one of four JPEG images of 200 DPI, with the page's number over it. A page of text has 54 lines in
    Helvetica.
    """
    folder.mkdir()
    with _plain_streams():
        _write_documents(folder, num_pages, kinds)


@contextlib.contextmanager
def _plain_streams() -> Iterator[None]:
    """A scanner writes its image as it is. The setting is reportlab's, for the whole process."""
    before = rl_config.useA85
    rl_config.useA85 = 0
    try:
        yield
    finally:
        rl_config.useA85 = before


def _write_documents(folder: Path, num_pages: int, kinds: Sequence[str]) -> None:
    scans = [folder.with_name(f"{folder.name}-{seed}.jpg") for seed in range(_NUM_SCANS)]
    for seed, path in enumerate(scans[:num_pages] if "scans" in kinds else ()):
        image = Image.new("RGB", _PIXELS, (240, 236, 228))
        font = ImageFont.load_default(26)
        ImageDraw.Draw(image).multiline_text((140, 140), "\n".join(_lines(seed)), (40, 40, 48), font, spacing=12)
        noise = Image.effect_noise(_PIXELS, 7).convert("RGB")
        ImageChops.add(image, noise, offset=-128).save(path, quality=75)
    for first in range(0, num_pages, _PAGES_EACH):
        kind = kinds[first // _PAGES_EACH % len(kinds)]
        canvas = Canvas(str(folder / f"{first:05}-{kind}.pdf"), pagesize=A4)
        for number in range(first, min(first + _PAGES_EACH, num_pages)):
            if kind == "scans":
                canvas.drawImage(str(scans[number % _NUM_SCANS]), 0, 0, *A4)
            text = canvas.beginText(50, 812)
            text.setFont("Helvetica", 9, leading=14)
            text.textLines([f"page {number}", *(_lines(_NUM_SCANS + number) if kind == "text" else ())])
            canvas.drawText(text)
            canvas.showPage()
        canvas.save()


def write_reader(path: Path, page: dict[str, Any], prompt: str = "", **body: Any) -> None:
    """A reader's file with the fields of its pages and of its rows' bodies."""
    reader = {"name": path.stem, "about": "of a bench", "prompt": prompt, "page": page, "body": body}
    path.write_text(json.dumps(reader))


def _lines(seed: int) -> list[str]:
    rng = Random(seed)
    return [" ".join("".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 9))) for _ in range(14)) for _ in range(54)]
