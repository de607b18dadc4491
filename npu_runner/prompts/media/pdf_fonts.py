"""Finds which Chinese, Japanese and Korean text of a PDF this host cannot render, because its font is neither embedded
nor installed. PDFium leaves such text out and reports nothing.

    python -c 'from npu_runner.prompts.media import pdf_fonts; pdf_fonts.main([])'    prints PdfFonts as JSON

A worker finds them for itself with its first PDF. Who needs them before, and imports no pypdfium2, has a child find
them.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import json
import logging
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

from npu_runner.errors import RequestError
from npu_runner.processes import commands
from npu_runner.processes.child import describe_exit

logger = logging.getLogger(__name__)
REMEDY = "apt install fonts-noto-cjk"
# Each character collection of Adobe's: the language, a font that is part of no system, a CMap, a line of text.
_COLLECTIONS = {
    "GB1": ("simplified Chinese", "STSong-Light", "UniGB-UCS2-H", "中文测试汉字"),
    "CNS1": ("traditional Chinese", "MSung-Light", "UniCNS-UCS2-H", "中文測試漢字"),
    "Japan1": ("Japanese", "HeiseiMin-W3", "UniJIS-UCS2-H", "日本語テストかな"),
    "Korea1": ("Korean", "HYSMyeongJo-Medium", "UniKS-UCS2-H", "한국어시험"),
}
_CJK = re.compile("[\u1100-\u11ff\u2e80-\u2fff\u3001-\u9fff\ua960-\ua97f\uac00-\ud7ff\uf900-\ufaff\uff66-\uffdc"
                  "\U00020000-\U0003ffff]")
_OWN_FAMILY = "Chrom"
"""PDFium's built-in fonts are of families that begin so; they have no such characters."""
_CHILD_SECONDS = 60.0
_CHILD_LOCK = threading.Lock()
_MAX_NAME_BYTES = 128


@dataclass(frozen=True, kw_only=True)
class PdfFonts:
    """`missing`: the collections of which this host renders nothing, by name."""

    pdfium: str
    """PDFium's version."""
    digest: str
    """Digest of a rendered line of each collection. Another one means that pages may have other pixels."""
    missing: tuple[str, ...]

    @property
    def renderer(self) -> dict[str, str]:
        """As a job's record has it, among the decoders."""
        return {"pdfium": self.pdfium, "pdf_fonts": self.digest}

    @property
    def languages(self) -> str:
        """The missing collections in words."""
        return ", ".join(f"{_COLLECTIONS[name][0]} ({name})" for name in self.missing)


@functools.cache  # fonts that come later are of no use to a PDFium that has started
def fonts_here() -> PdfFonts:
    """The facts of this process. Imports pypdfium2, and is called under the lock of PDFium."""
    import pypdfium2

    digest, missing = hashlib.blake2b(digest_size=16), []
    with contextlib.closing(pypdfium2.PdfDocument(_lines())) as document:
        for index, name in enumerate(_COLLECTIONS):
            page = document[index]
            image = page.render(scale=1, grayscale=True).to_pil()
            page.close()
            digest.update(image.tobytes())
            if image.getextrema() == (255, 255):
                missing.append(name)
    version = str(pypdfium2.PDFIUM_INFO.version).partition("@")[0]
    return PdfFonts(pdfium=version, digest=digest.hexdigest(), missing=tuple(missing))


def fonts_of_host() -> PdfFonts | None:
    """The facts of a process of this host that starts now; None: pypdfium2 is not installed, or the process failed,
    which is logged as a warning, once."""
    with _CHILD_LOCK:  # two threads that ask at once have one child
        return _fonts_of_child()


@functools.cache
def _fonts_of_child() -> PdfFonts | None:
    if find_spec("pypdfium2") is None:
        return None
    command = commands.module_command(__name__)
    try:
        done = subprocess.run(command, env=commands.environment(), stdin=subprocess.DEVNULL, capture_output=True,
                              timeout=_CHILD_SECONDS, check=True)
        found = json.loads(done.stdout)
        return PdfFonts(pdfium=found["pdfium"], digest=found["digest"], missing=tuple(found["missing"]))
    except subprocess.CalledProcessError as error:
        last = error.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        why = describe_exit(error.returncode) + (f": {last}" if last else "")
    except (OSError, subprocess.TimeoutExpired, ValueError, KeyError) as error:
        why = str(error)
    logger.warning("the process that finds which fonts PDFs lack on this host failed (%s). So no missing script is "
                   "named before the job, and fonts that changed since an earlier run are found with the first page "
                   "only; npu-runner doctor examines PDFium", why[-500:])
    return None


def require_fonts(raw: Any, textpage: Any, text: str) -> None:
    """Raises RequestError with code pdf_font_missing if the page has text that this host does not render. `raw`:
    pypdfium2.raw; `text`: that of the page."""
    if not fonts_here().missing or _CJK.search(text) is None:
        return
    is_rendered: dict[int, bool] = {}
    for index in range(raw.FPDFText_CountChars(textpage)):
        character = chr(raw.FPDFText_GetUnicode(textpage, index))
        if _CJK.match(character) is None:
            continue
        found = raw.FPDFText_GetTextObject(textpage, index)
        is_visible = found and raw.FPDFTextObj_GetTextRenderMode(found) != raw.FPDF_TEXTRENDERMODE_INVISIBLE
        font = raw.FPDFTextObj_GetFont(found) if is_visible else None
        address = ctypes.cast(font, ctypes.c_void_p).value if font else None
        if address is None or is_rendered.get(address):
            continue
        is_rendered[address] = bool(raw.FPDFFont_GetIsEmbedded(font)) or not _name(
            raw.FPDFFont_GetFamilyName, font).startswith(_OWN_FAMILY)
        if not is_rendered[address]:
            raise RequestError(f"its font {_name(raw.FPDFFont_GetBaseFontName, font)!r} is neither embedded nor "
                               f"installed here, so that text like {character!r} is not rendered; {REMEDY}, then run "
                               "again with --retry errors --accept-changed prompts.decoders", "pdf_font_missing")


def _name(read: Any, font: Any) -> str:
    buffer = ctypes.create_string_buffer(_MAX_NAME_BYTES)
    read(font, buffer, _MAX_NAME_BYTES)
    return buffer.value.decode("utf-8", "replace")


def _lines() -> bytes:
    """A PDF with a page of one line for each collection. It has no table of its objects: PDFium finds them."""
    objects, kids = [b"<</Type/Catalog/Pages 2 0 R>>", b""], []
    for name, (_, font, cmap, text) in _COLLECTIONS.items():
        first = len(objects) + 1
        kids.append(f"{first} 0 R")
        content = f"BT/F 24 Tf 8 12 Td<{text.encode('utf-16-be').hex()}>Tj ET"
        objects += [each.encode() for each in (
            f"<</Type/Page/Parent 2 0 R/Contents {first + 1} 0 R/Resources<</Font<</F {first + 2} 0 R>>>>>>",
            f"<</Length {len(content)}>>stream\n{content}\nendstream",
            f"<</Type/Font/Subtype/Type0/BaseFont/{font}/Encoding/{cmap}/DescendantFonts[{first + 3} 0 R]>>",
            f"<</Type/Font/Subtype/CIDFontType0/BaseFont/{font}/FontDescriptor {first + 4} 0 R/DW 1000/CIDSystemInfo"
            f"<</Registry(Adobe)/Ordering({name})/Supplement 0>>>>",
            f"<</Type/FontDescriptor/FontName/{font}/Flags 6/FontBBox[0 -200 1000 900]/ItalicAngle 0/Ascent 800"
            "/Descent -200/CapHeight 700/StemV 80>>")]
    objects[1] = f"<</Type/Pages/Kids[{' '.join(kids)}]/Count {len(kids)}/MediaBox[0 0 220 44]>>".encode()
    bodies = b"".join(b"%d 0 obj\n%b\nendobj\n" % (number, body) for number, body in enumerate(objects, start=1))
    return b"%%PDF-1.7\n%btrailer<</Size %d/Root 1 0 R>>\n" % (bodies, len(objects) + 1)


def main(arguments: Sequence[str]) -> None:
    """[FILE]: append the facts of this host to the file as JSON, or print them."""
    fonts = fonts_here()
    with open(arguments[0], "a", encoding="utf-8") if arguments else contextlib.nullcontext(sys.stdout) as file:
        print(json.dumps({**asdict(fonts), "languages": fonts.languages}), file=file)
