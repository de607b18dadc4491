"""Makes a folder of PDFs, each page an image as of a scanner: what `npu-runner read` reads in scripts/demo.sh.

usage: demo_documents.py FOLDER [--num-documents N]
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

import pypdfium2

sys.path.append(str(Path(__file__).resolve().parents[1]))

from scripts.shapes.pages import FONTS, Block, Page, set_page

_JOBS = ("Replace the filter", "Tighten valve {}", "Clean the inlet", "Order {} gaskets", "Test alarm {}")
_REMARKS = ("Pump {} runs hot.", "No leaks were found.", "Seal {} is worn.", "The door was open.")
_MONTHS = ("January", "March", "May", "July", "October")


def inspection_pages(number: int) -> list[Page]:
    """The two pages of report `number`: readings in a table, then a list of jobs."""
    rng = random.Random(number)
    font = FONTS[number % len(FONTS)]
    date = f"{rng.randint(1, 28)} {rng.choice(_MONTHS)} 2026"
    readings = tuple((f"{hour}", str(rng.randint(200, 980)), str(rng.randint(10, 99))) for hour in range(8, 11))
    jobs = tuple((job.format(rng.randint(2, 9)),) for job in rng.sample(_JOBS, 3))
    remarks = tuple((remark.format(rng.randint(2, 9)),) for remark in rng.sample(_REMARKS, 2))
    first = [Block("heading", ((f"Station {number}",),)), Block("lines", (("Inspected on",), (date + ".",))),
             Block("table", readings), Block("lines", remarks)]
    second = [Block("heading", (("To be done",),)), Block("list", jobs), Block("lines", (("Page 2 of 2",),))]
    return [set_page(blocks, font, rng) for blocks in (first, second)]


def write_document(path: Path, pages: list[Page]) -> None:
    """A PDF of one image a page; a pixel is a point."""
    document = pypdfium2.PdfDocument.new()
    for page in pages:
        width, height = page.image.size
        image = pypdfium2.PdfImage.new(document)
        image.set_bitmap(pypdfium2.PdfBitmap.from_pil(page.image))
        image.set_matrix(pypdfium2.PdfMatrix().scale(width, height))
        sheet = document.new_page(width, height)
        sheet.insert_obj(image)
        sheet.gen_content()
    document.save(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="gets documents/")
    parser.add_argument("--num-documents", type=int, default=4)
    arguments = parser.parse_args()
    folder = arguments.folder / "documents"
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(1, arguments.num_documents + 1):
        write_document(folder / f"station-{number}.pdf", inspection_pages(number))
    print(f"{arguments.num_documents} documents below {folder}")


if __name__ == "__main__":
    main()
