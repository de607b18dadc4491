"""PDF and TIFF files of tests, made by reportlab and Pillow or written by hand. Holds no tests."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

from PIL import Image
from reportlab.lib.pdfencrypt import StandardEncryption
from reportlab.lib.utils import ImageReader
from reportlab.pdfbase import pdfmetrics
from reportlab.pdfbase.cidfonts import UnicodeCIDFont
from reportlab.pdfgen.canvas import Canvas

A5 = (420.0, 595.0)
CJK = {"GB1": ("STSong-Light", "中文测试"), "CNS1": ("MSung-Light", "中文測試"),
       "Japan1": ("HeiseiMin-W3", "日本語テスト"), "Korea1": ("HYSMyeongJo-Medium", "한국어")}  # fmt: skip
Paint = Callable[[Canvas], None]


def pdf(*pages: Paint, size: tuple[float, float] = A5, password: str | None = None,
        encrypt: StandardEncryption | None = None) -> bytes:
    """A page for each of these."""
    file = io.BytesIO()
    if password is not None:
        encrypt = StandardEncryption(password, ownerPassword="owner", strength=128)
    canvas = Canvas(file, pagesize=size, encrypt=encrypt, invariant=1)
    for paint in pages:
        paint(canvas)
        canvas.showPage()
    canvas.save()
    return file.getvalue()


def text(words: str, x: float = 40, y: float = 500) -> Paint:
    def paint(canvas: Canvas) -> None:
        canvas.setFont("Helvetica", 24)
        canvas.drawString(x, y, words)

    return paint


def empty(canvas: Canvas) -> None:
    """A page with nothing on it."""


def colour(value: float) -> Paint:
    def paint(canvas: Canvas) -> None:
        canvas.setFillGray(value)
        canvas.rect(-10, -10, 2000, 2000, stroke=0, fill=1)

    return paint


def mixed(canvas: Canvas) -> None:
    """Text, lines, a photograph, a filled-in form field and an annotation."""
    text("Mixed contents")(canvas)
    canvas.line(10, 10, 400, 580)
    canvas.circle(200, 300, 77)
    gradient = Image.linear_gradient("L").resize((60, 90)).convert("RGB")
    canvas.drawImage(ImageReader(gradient), 50, 100, 133, 217)
    form(canvas)


def form(canvas: Canvas) -> None:
    """A text field with a value in it, and nothing else."""
    canvas.acroForm.textfield(name="name", value="filled in", x=40, y=400, width=200, height=30, borderStyle="solid")


def highlight(canvas: Canvas) -> None:
    """An annotation, and nothing else."""
    canvas.highlightAnnotation("", Rect=[40, 400, 240, 430], QuadPoints=[40, 430, 240, 430, 40, 400, 240, 400],
                               Color=[1, 0, 0])


def cjk(name: str, *, is_invisible: bool = False) -> Paint:
    """Text of a collection in a font that is not embedded; an invisible one is a layer of text over a scan."""
    font, words = CJK[name]
    pdfmetrics.registerFont(UnicodeCIDFont(font))

    def paint(canvas: Canvas) -> None:
        line: Any = canvas.beginText(40, 400)
        line.setTextRenderMode(3 if is_invisible else 0)
        line.setFont(font, 30)
        line.textLine(words)
        canvas.drawText(line)

    return paint


def by_hand(*objects: bytes) -> bytes:
    """A PDF of these objects, from number 1 on, of which the first is the catalog."""
    file, places = b"%PDF-1.7\n", []
    for number, body in enumerate(objects, start=1):
        places.append(len(file))
        file += b"%d 0 obj\n%b\nendobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    return file + b"xref\n0 %d\n0000000000 65535 f \n%btrailer<</Size %d/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF\n" % (
        len(objects) + 1, table, len(objects) + 1, len(file))


def stream(data: bytes, more: bytes = b"") -> bytes:
    return b"<</Length %d%b>>stream\n%b\nendstream" % (len(data), more, data)


def one_page(box: str, content: bytes = b"", resources: bytes = b"", *more: bytes, packed: bytes = b"") -> bytes:
    """A page with this MediaBox and content. `more`: objects from number 5 on."""
    return by_hand(
        b"<</Type/Catalog/Pages 2 0 R>>", b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
        b"<</Type/Page/Parent 2 0 R/MediaBox[%b]/Contents 4 0 R/Resources<<%b>>>>" % (box.encode(), resources),
        stream(content, packed), *more)


def tiff(*pages: Image.Image, compression: str | None = None) -> bytes:
    file = io.BytesIO()
    pages[0].save(file, "TIFF", save_all=True, append_images=pages[1:], compression=compression)
    return file.getvalue()


def shades(count: int, size: Sequence[int] = (64, 48), mode: str = "L") -> list[Image.Image]:
    """Images that differ, each with a gradient."""
    return [Image.linear_gradient("L").point(lambda value, n=n: (value + 40 * n) % 256).resize(
        (size[0] + n, size[1])).convert(mode) for n in range(count)]
