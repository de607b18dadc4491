"""PDFs as reportlab makes them. Holds no tests."""

from __future__ import annotations

from pathlib import Path

from reportlab.lib.pagesizes import A4
from reportlab.lib.pdfencrypt import StandardEncryption
from reportlab.pdfgen.canvas import Canvas


def pdf(path: Path, *sizes: tuple[float, float], num_pages: int = 1, password: str | None = None) -> Path:
    """A page of each size in points, or pages in A4; each says where it stands."""
    path.parent.mkdir(parents=True, exist_ok=True)
    encrypt = None if password is None else StandardEncryption(password, ownerPassword="owner")
    canvas = Canvas(str(path), encrypt=encrypt, invariant=True)
    for number, size in enumerate(sizes or [A4] * num_pages, 1):
        canvas.setPageSize(size)
        canvas.drawString(20, 20, f"{path.name}, page {number}")
        canvas.showPage()
    canvas.save()
    return path
