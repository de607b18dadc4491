"""Turns an encoded image into the resized uint8 pixels of the vision tower. Knows nothing of prompts or devices.

Transparency is laid on white, EXIF rotation is applied, 16-bit grey is scaled to 8 bit, an animation is its first
frame. An image that has no faithful 8-bit form is a RequestError.

Beside the decoder's memory, a source pixel takes at most 8 bytes in any mode. Conversion works in strips, and each step
frees the image before it.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
from PIL import Image, UnidentifiedImageError

from npu_runner.errors import RequestError
from npu_runner.prompts.media.file_kinds import image_kind, video_kind
from npu_runner.prompts.media.image_formats import FORMATS, check_pixels, missing_decoder, open_encoded
from npu_runner.prompts.media.image_settings import ImageSettings
from npu_runner.prompts.media.video_settings import VideoSettings
from npu_runner.request.limits import LIMITS, field_error
from npu_runner.request.prompt_inputs import ImageInput

_Opened = TypeVar("_Opened")
# H, W sides of an image

_REMEDY = "convert it to JPEG or PNG"
_EXIF_ORIENTATION = 0x0112
_STRIP_PIXELS = 1 << 18
_COLOURS = (1, 3, 4)  # of arrays
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def prepare_image(source: bytes | Image.Image, settings: ImageSettings, *,
                  max_source_pixels: int = LIMITS.max_source_pixels, is_low: bool = False) -> ImageInput:
    """Decode, upright, flatten and resize one image. Raises RequestError, never anything else, for a bad one.

    is_low: with low detail.
    """
    image = open_image(source, max_source_pixels=max_source_pixels, settings=settings)
    height, width = (settings.with_low_detail() if is_low else settings).fit(image.height, image.width)
    # Pillow on uint8, because that is what the checkpoint's own processor does; other resizers differ by a grey level.
    resized = image.resize((width, height), resample=Image.Resampling(settings.resample))
    return image_input(np.array(resized), settings)


def image_input(pixels_HWC: np.ndarray, settings: ImageSettings) -> ImageInput:
    """Wrap pixels that already have their final size."""
    height, width, _ = pixels_HWC.shape
    grid_thw = (1, height // settings.patch_size, width // settings.patch_size)
    digest = hashlib.blake2b(settings.digest(), digest_size=16)
    digest.update(f"{height}x{width}".encode())
    digest.update(np.ascontiguousarray(pixels_HWC).data)
    return ImageInput(digest.digest(), pixels_HWC, grid_thw, settings.num_tokens(height, width))


def open_image(source: bytes | Image.Image, *, max_source_pixels: int = LIMITS.max_source_pixels,
               settings: ImageSettings | None = None) -> Image.Image:
    """The image as upright 8-bit RGB. With `settings`, a shape the model refuses is refused before decoding. The result
    is the given PIL image if that is upright RGB, and otherwise an image without metadata, which could turn it again.

    Raises RequestError with code image_empty, image_not_recognised, image_too_large, image_aspect_ratio,
    image_truncated, image_several_pages, image_broken, image_mode or image_out_of_memory.
    """
    image = source
    if isinstance(source, (bytes, bytearray, memoryview)):
        image = _open(source, max_source_pixels)
    if not isinstance(image, Image.Image):
        raise RequestError(
            f"an image must be encoded bytes or a PIL image, not {type(source).__name__}", code="invalid_type")
    width, height = image.size
    check_pixels(width, height, max_source_pixels)
    if width < 1 or height < 1:
        raise RequestError(f"the image is {width}x{height} pixels: it has no area", code="image_empty")
    if settings is not None:
        settings.fit(height, width)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a decoder's remarks about odd metadata are of no use here
            image.load()
            check_pixels(*image.size, max_source_pixels)  # some kinds show their true size only now
            orientation = exif_orientation(image)
            is_given = image is source
            image = source = _to_rgb(image)  # the decoded image is let go before it is turned
            if orientation in _TURNS:
                image, is_given = image.transpose(_TURNS[orientation]), False
            if not is_given:
                image.info = {}  # Pillow copies EXIF and XMP with the pixels
            return image
    except RequestError:
        raise
    except MemoryError as error:
        raise RequestError(
            f"the image of {width}x{height} pixels needs more memory than there is; scale it down",
            code="image_out_of_memory") from error
    except Exception as error:  # decoders fed with hostile bytes raise anything; only this row may fail
        raise _decoding_error(error) from error


def _open(data: bytes | bytearray | memoryview, max_source_pixels: int) -> Image.Image:
    if len(data) == 0:
        raise RequestError("the image has zero bytes", code="image_empty")
    return opening(lambda: open_encoded(data, max_source_pixels), bytes(data[:32]), max_source_pixels)


def opening(open_it: Callable[[], _Opened], head: bytes, max_source_pixels: int) -> _Opened:
    """The result of `open_it`, which reads headers with Pillow. Raises RequestError for anything that it raises.
    `head`: the first 32 bytes of the file."""
    try:
        with warnings.catch_warnings(), _pillow_allows(max_source_pixels):
            warnings.simplefilter("ignore")  # Pillow's own bomb warning: our limit is checked right after
            return open_it()
    except (UnidentifiedImageError, SyntaxError) as error:
        raise _not_recognised(head) from error
    except RequestError:
        raise
    except MemoryError as error:
        raise RequestError("the image needs more memory than there is; scale it down", "image_out_of_memory") from error
    except Image.DecompressionBombError as error:
        declared = re.search(r"\d+", str(error))  # Pillow's text begins with the number of pixels
        raise RequestError(f"the image declares {declared[0] if declared else 'far more'} pixels, at most "
                           f"{max_source_pixels} are allowed (max_source_pixels); scale it down",
                           code="image_too_large") from error
    except Exception as error:  # as in open_image
        raise _decoding_error(error) from error


@contextlib.contextmanager
def _pillow_allows(num_pixels: int) -> Iterator[None]:
    """Raise Pillow's limit, which is the whole process's, while a header is read, if `num_pixels` exceeds it."""
    limit = Image.MAX_IMAGE_PIXELS
    if limit is None or num_pixels <= 2 * limit:  # it warns above the limit and refuses above twice the limit
        yield
        return
    Image.MAX_IMAGE_PIXELS = num_pixels
    try:
        yield
    finally:
        Image.MAX_IMAGE_PIXELS = limit


def _not_recognised(head: bytes) -> RequestError:
    if (video := video_kind(head)) is not None:
        return RequestError(f"the file is a video ({video}) and not an image; send it as one: video_url in a message, "
                            "--video", code="image_not_recognised")
    known, unread = image_kind(head), missing_decoder(head)
    if known is not None and unread is None:
        return RequestError(
            f"the image starts like a {known} file but its header is cut short or broken; upload it again",
            code="image_truncated")
    unreadable = {
        f"{unread}": unread is not None,
        "SVG": b"<svg" in head or b"<?xml" in head,
        "PDF, whose pages are read by the file's path and #page=1": head.startswith(b"%PDF"),
        "HTML": b"<html" in head.lower() or b"<!doctype" in head.lower(),
    }
    kind = next((f"it looks like {name}" for name, found in unreadable.items() if found), "unknown format")
    return RequestError(
        f"not an image this runner reads ({kind}); it reads {', '.join(FORMATS)}; {_REMEDY}",
        code="image_not_recognised")


def _decoding_error(error: Exception) -> RequestError:
    detail = f"{type(error).__name__}: {error}"[:200]
    message = str(error).lower()
    if "out of memory" in message or "memory alloc" in message or "not enough memory" in message:
        return RequestError(f"the image needs more memory than there is ({detail}); scale it down",
                            code="image_out_of_memory")
    if isinstance(error, EOFError) or "truncated" in message or "end of" in message:
        return RequestError(f"the image is truncated ({detail}); upload it again", code="image_truncated")
    return RequestError(f"the image cannot be decoded ({detail}); {_REMEDY}", code="image_broken")


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB" and not image.has_transparency_data:
        return image
    if image.mode == "F":
        raise RequestError(
            "the image has floating-point pixels, whose brightness is not defined; convert it to 8 bit",
            code="image_mode")
    convert = _opaque if image.has_transparency_data else lambda strip: strip.convert("RGB")
    if image.mode.startswith("I"):
        _check_grey16(image)
        convert = _grey16_to_rgb
    rgb = Image.new("RGB", image.size)
    num_rows = max(1, _STRIP_PIXELS // image.width)
    for top in range(0, image.height, num_rows):
        strip = image.crop((0, top, image.width, min(top + num_rows, image.height)))
        strip.info = image.info  # a palette's transparency lies there
        rgb.paste(convert(strip), (0, top))
    return rgb


def _opaque(strip: Image.Image) -> Image.Image:
    strip = strip.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", strip.size, "white"), strip).convert("RGB")


def _check_grey16(image: Image.Image) -> None:
    if image.mode != "I":  # all others hold 16 bits without a sign
        return
    lowest, highest = image.getextrema()
    if lowest < 0 or highest > 65535:  # type: ignore[operator]
        raise RequestError(
            f"the image has 32-bit pixels from {lowest} to {highest}; at most 16 bit grey (0 to 65535) "
            f"can be shown; convert it to 8 bit",
            code="image_mode")


def _grey16_to_rgb(strip: Image.Image) -> Image.Image:
    # Pillow's own conversion clips at 255, which turns a 16-bit scan white.
    pixels = np.asarray(strip).astype(np.uint32)
    grey = ((pixels * 255 + 32767) // 65535).astype(np.uint8)
    if isinstance(transparent := strip.info.get("transparency"), int):
        grey[pixels == transparent] = 255
    return Image.fromarray(grey).convert("RGB")


def exif_orientation(image: Image.Image) -> int | None:
    """As EXIF says; an unreadable EXIF block counts as upright."""
    try:
        orientation = image.getexif().get(_EXIF_ORIENTATION)
    except Exception:  # noqa: BLE001 - broken metadata raises anything; the image itself is sound
        return None
    return orientation if isinstance(orientation, int) else None


def largest_image(images: ImageSettings, videos: VideoSettings | None, max_tokens: int) -> ImageInput:
    """A grey image with the most tokens, up to `max_tokens`, that any image or pair of frames can get. With `videos` it
    has a pair's colour channels."""
    sizes, num_frames = [images.largest_size(max_tokens)], 1
    if videos is not None:
        sizes.append(videos.largest_frame(max_tokens))
        num_frames = images.temporal_patch_size
    height, width = max(sizes, key=lambda size: size[0] * size[1])
    return image_input(np.full((height, width, 3 * num_frames), 127, dtype=np.uint8), images)


def as_image(value: Any, where: str) -> Any:
    """A PIL image of an array or a tensor, uint8 (H, W), (H, W, C) or (C, H, W); anything else as it is. Imports no
    torch. C: 1 (grey), 3 or 4 colours.

    Where both ends could be colours, the last axis is. Raises RequestError naming `where` for other numbers or shapes.
    """
    if isinstance(value, Image.Image) or not hasattr(value, "__array__"):
        return value
    try:
        pixels = value.numpy(force=True) if hasattr(value, "detach") else np.asarray(value)  # torch's, wherever it lies
    except (TypeError, ValueError, RuntimeError) as error:  # numbers that numpy has not: bfloat16
        raise field_error(where, f"the array cannot be read ({error})", "invalid_type") from error
    if pixels.dtype != np.uint8:
        raise field_error(where, f"the array holds {pixels.dtype}; uint8 is needed, 0 to 255: scale it, then "
                          ".astype('uint8')", "invalid_type")
    if pixels.ndim == 3 and pixels.shape[-1] not in _COLOURS and pixels.shape[0] in _COLOURS:
        pixels = pixels.transpose(1, 2, 0)
    if pixels.ndim == 3 and pixels.shape[-1] == 1:
        pixels = pixels[..., 0]
    if pixels.ndim not in (2, 3) or (pixels.ndim == 3 and pixels.shape[-1] not in _COLOURS):
        raise field_error(where, f"the array has the shape {pixels.shape}; (height, width, 3) is needed",
                          "invalid_type")
    if 0 in pixels.shape:
        raise field_error(where, f"the array has the shape {pixels.shape}: no area", "image_empty")
    return Image.fromarray(np.ascontiguousarray(pixels))
