"""What an image takes while it is opened is bounded by its pixels, whatever its mode. Measured in fresh processes."""

from __future__ import annotations

import io
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from npu_runner.prompts.media import images
from npu_runner.prompts.media.images import open_image
from tests.full_set import only_full

SIDE = 2500
DRAW = f"""
import sys
from PIL import Image, ImageDraw

image = Image.new("RGB", ({SIDE}, {SIDE}), "white")
for step in range(0, {SIDE}, 37):
    ImageDraw.Draw(image).line((step, 0, {SIDE} - step, {SIDE}), fill=(step % 256, 90, 200), width=5)
exif = Image.Exif()
exif[0x0112] = 6
mode, format, options = {{
    "JPEG turned by EXIF": ("RGB", "JPEG", dict(exif=exif)), "PNG RGBA": ("RGBA", "PNG", dict(compress_level=1)),
    "PNG 16-bit grey": ("I;16", "PNG", dict(compress_level=1)), "WebP with alpha": ("RGBA", "WEBP", dict(method=0)),
    "PNG palette with alpha": ("P", "PNG", dict(transparency=bytes(range(256)))),
}}[sys.argv[1]]
image.convert(mode).save(sys.stdout.buffer, format, **options)
"""
OPEN = """
import resource, sys
from npu_runner.prompts.media.images import open_image

data = sys.stdin.buffer.read()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
open_image(data)
print(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
"""


@pytest.mark.parametrize(
    ("name", "most"),
    # 8 bytes, a strip, and the encoded file; libwebp has two canvases of its own.
    [("JPEG turned by EXIF", 10), *only_full(
        "other kinds; a turned JPEG stays", ("PNG 16-bit grey", 10), ("PNG RGBA", 10), ("PNG palette with alpha", 10),
        ("WebP with alpha", 17))],
)  # fmt: skip
def test_a_source_pixel_takes_eight_bytes_beside_the_decoders(name: str, most: float) -> None:
    image = subprocess.run([sys.executable, "-c", DRAW, name], stdout=subprocess.PIPE, check=True).stdout
    found = subprocess.run([sys.executable, "-c", OPEN], input=image, stdout=subprocess.PIPE, check=True).stdout
    assert int(found) / SIDE**2 <= most


def encoded(image: Image.Image, format: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)  # type: ignore[arg-type]
    return buffer.getvalue()


def noise(kind: str) -> Image.Image:
    random = np.random.default_rng(3)
    if kind == "I;16":
        return Image.fromarray(random.integers(0, 65536, (41, 30), dtype=np.uint16))
    return Image.fromarray(random.integers(0, 256, (41, 30, 4), dtype=np.uint8), "RGBA").convert(kind)


def on_white(image: Image.Image) -> Image.Image:
    """Pillow's own composition, of the whole image at once."""
    rgba = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")


@pytest.mark.parametrize("strip_pixels", [1, 100, 1 << 18])
def test_strips_give_what_the_whole_image_gives(strip_pixels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "_STRIP_PIXELS", strip_pixels)
    palette = noise("RGB").convert("P", palette=Image.Palette.ADAPTIVE)
    for data in (encoded(noise("RGBA")), encoded(noise("LA")), encoded(palette, transparency=bytes(range(256))),
                 encoded(palette, transparency=7), encoded(noise("L"), transparency=9),
                 encoded(noise("RGB"), transparency=noise("RGB").getpixel((0, 0)))):  # fmt: skip
        assert np.array_equal(open_image(data), on_white(Image.open(io.BytesIO(data))))
    for data in (encoded(noise("L")), encoded(noise("1")), encoded(noise("CMYK"), "TIFF"), encoded(palette)):
        assert np.array_equal(open_image(data), Image.open(io.BytesIO(data)).convert("RGB"))
    grey = np.asarray(noise("I;16"))
    expected = np.round(grey / 65535 * 255).astype(np.uint8)
    for data in (encoded(noise("I;16")), encoded(Image.fromarray(grey.astype(">u2")), "TIFF"),
                 encoded(Image.fromarray(grey.astype(np.int32)), "TIFF")):  # fmt: skip
        assert np.array_equal(open_image(data), np.repeat(expected[..., None], 3, axis=2))
