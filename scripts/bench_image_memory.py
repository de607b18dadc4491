"""Peak memory of opening one image, in bytes a source pixel, by format and mode. Each in a process of its own.

    python scripts/bench_image_memory.py [--side 4000]
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import resource
import struct
import subprocess
import sys
from collections.abc import Callable

from PIL import Image, ImageDraw


def _save(image: Image.Image, format: str, **options: object) -> bytes:
    encoded = io.BytesIO()
    image.save(encoded, format, **options)  # type: ignore[arg-type]
    return encoded.getvalue()


def _turned() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


def _image(side: int) -> Image.Image:
    image = Image.new("RGB", (side, side), "white")
    draw = ImageDraw.Draw(image)
    for step in range(0, side, 37):
        draw.line((step, 0, side - step, side), fill=(step % 256, 90, 200), width=5)
    return image


def _icon(image: Image.Image) -> bytes:
    """One bitmap with its mask, of sides that the directory of an icon has no room for."""
    width, height = image.size
    pixels = image.convert("RGBA").tobytes("raw", "BGRA", 0, -1)
    frame = struct.pack("<IiiHHIIiiII", 40, width, 2 * height, 1, 32, 0, 0, 0, 0, 0, 0) + pixels
    return struct.pack("<HHHBBBBHHII", 0, 1, 1, 0, 0, 0, 0, 1, 32, len(frame), 22) + frame


CASES: dict[str, Callable[[Image.Image], bytes]] = {
    "PNG RGB": lambda image: _save(image, "PNG", compress_level=1),
    "PNG RGBA": lambda image: _save(image.convert("RGBA"), "PNG", compress_level=1),
    "PNG grey with alpha": lambda image: _save(image.convert("LA"), "PNG", compress_level=1),
    "PNG 16-bit grey": lambda image: _save(image.convert("I;16"), "PNG", compress_level=1),
    "PNG palette with alpha": lambda image: _save(image.convert("P"), "PNG", transparency=bytes(range(256))),
    "BMP": lambda image: _save(image, "BMP"),
    "TIFF": lambda image: _save(image, "TIFF"),
    "GIF": lambda image: _save(image, "GIF"),
    "JPEG": lambda image: _save(image, "JPEG"),
    "JPEG turned by EXIF": lambda image: _save(image, "JPEG", exif=_turned()),
    "JPEG progressive": lambda image: _save(image, "JPEG", progressive=True),
    "JPEG CMYK": lambda image: _save(image.convert("CMYK"), "JPEG"),
    "TGA": lambda image: _save(image, "TGA"),
    "ICO of a bitmap": lambda image: _icon(image),
    "JPEG 2000": lambda image: _save(image, "JPEG2000"),
    "AVIF": lambda image: _save(image, "AVIF", speed=10),
    "HEIC": lambda image: _save(image, "HEIF"),
    "WebP": lambda image: _save(image, "WEBP", method=0),
    "WebP with alpha": lambda image: _save(image.convert("RGBA"), "WEBP", method=0),
}


def _measure(name: str, side: int) -> None:
    """Makes the file in a child, so that this process's own peak is that of opening it."""
    made = subprocess.run([sys.executable, __file__, "--make", name, "--side", str(side)], stdout=subprocess.PIPE,
                          check=True).stdout  # fmt: skip
    from npu_runner.prompts.media.images import open_image

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    open_image(made)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(json.dumps({"name": name, "bytes_per_pixel": round((peak * 1024) / side**2, 1)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", type=int, default=4000, help="pixels of a side")
    parser.add_argument("--make", help=argparse.SUPPRESS)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.make:
        if arguments.make == "HEIC":
            importlib.import_module("pillow_heif").register_heif_opener()
        sys.stdout.buffer.write(CASES[arguments.make](_image(arguments.side)))
    elif arguments.measure:
        _measure(arguments.measure, arguments.side)
    else:
        found = {}
        for name in CASES:
            command = [sys.executable, __file__, "--measure", name, "--side", str(arguments.side)]
            done = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
            found[name] = done["bytes_per_pixel"]
            print(f"{name:26} {found[name]:5.1f}")
        print(json.dumps({"side": arguments.side, "bytes_per_pixel": found}))


if __name__ == "__main__":
    main()
