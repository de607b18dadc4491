"""Images that the checkpoint's own processor of transformers prepares, for families that only transformers knows.

An image goes through the processor alone, with its placeholder as the text. The result has the tokens that replace the
placeholder, and the arrays for the vision tower. The processor is made of its parts, without those for videos and
sound. Beside strategies/ this is the only module that imports transformers, and only for such a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import Tokenizer

from npu_runner.checkpoint.files import read_json
from npu_runner.errors import ConfigError, ModelError, RequestError
from npu_runner.prompts.media.image_settings import LOW_DETAIL_PIXELS
from npu_runner.prompts.media.largest_size import LargestSize
from npu_runner.prompts.media.processor_kwargs import FIELD
from npu_runner.request.limits import field_error
from npu_runner.request.prompt_inputs import ImageInput, PixelScaling

logger = logging.getLogger(__name__)

# Results of a processor that are about its text alone.
_OF_TEXT = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}
_NO_PIXELS = np.zeros((0, 0, 3), dtype=np.uint8)
# Odd sides (width, height): smaller and larger than usual tiles, wide and tall. Whether the device may scale pixels is
# decided on these, and whether several images may stand in a prompt on the first two.
_SAMPLE_SIZES = ((97, 61), (61, 173), (403, 1201), (701, 203))
_TOLERANCE = 1e-6


@dataclass(frozen=True, kw_only=True)
class ImageRules:
    """The results of trying a processor once. Workers get them, and try nothing."""

    token: tuple[int, str]
    """Id and text of the placeholder."""
    scaling: PixelScaling | None
    """The device scales pixels in this way; None: the processor scales them, and floats travel."""
    num_copies: int
    """In a prompt with several images, each is given to the processor this number of times; 1: as if it were alone."""
    why_one: str | None
    """Why a prompt may have only one image; None: it may have several."""
    control_tokens: tuple[str, ...]
    """The special tokens in place of an image, which a person must not type."""
    is_nested: bool = True
    """The processor gets a list of images for each prompt, as from a chat; else one list."""


class TransformersImages:
    """The image processor of one checkpoint folder. `rules`: those that another process has found; None: find them.

    `tokenizer`: the checkpoint's, as prompts are tokenized with it. Raises ModelError where transformers has no
    processor for the checkpoint, or where it cannot prepare one image at a time.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], tokenizer: Tokenizer, *, max_pixels: int | None = None,
                 rules: ImageRules | None = None):
        self.max_pixels = max_pixels
        self._folder = folder
        self._largest_size = LargestSize(self._measure)
        # Where positions have three axes, some networks look for these two around an image.
        ids = [config.get(f"vision_{side}_token_id") for side in ("start", "end")]
        self._around = ["" if token_id is None else tokenizer.id_to_token(token_id) or "" for token_id in ids]
        with _importing(folder):
            self._processor, self.backend = _read_processor(folder, str(config.get("model_type")))
        self.rules = rules or ImageRules(token=(-1, ""), scaling=None, num_copies=1, why_one=None, control_tokens=())
        if rules is None:
            self.rules = self._find_rules(tokenizer)
        self._digest = hashlib.blake2b(json.dumps(self.identity(), sort_keys=True).encode(), digest_size=16).digest()

    def identity(self) -> dict[str, Any]:
        """All that shapes an image, JSON-ready."""
        processor, images = self._processor, self._processor.image_processor
        own = {name: value for name, value in vars(processor).items() if isinstance(value, (bool, int, float, str))}
        settings = json.dumps([images.to_dict(), own], sort_keys=True, default=str)
        scaling = self.rules.scaling
        return {"transformers": version("transformers"), "backend": self.backend,
                **({"torchvision": version("torchvision")} if self.backend == "torchvision" else {}),
                "processor": type(processor).__mro__[1].__name__, "image_processor": type(images).__name__,
                "settings": hashlib.blake2b(settings.encode(), digest_size=16).hexdigest(),
                "max_pixels": self.max_pixels, "num_copies": self.rules.num_copies,
                "scaling": None if scaling is None else {**asdict(scaling), "names": list(scaling.names),
                                                         "mean": list(scaling.mean), "std": list(scaling.std)}}

    def prepare(self, image: Image.Image, *, max_pixels: int | None = None, is_low: bool = False,
                num_images: int = 1) -> ImageInput:
        """An upright RGB image. `max_pixels`: the request's; `num_images`: in its prompt.

        Raises RequestError where the processor refuses the image.
        """
        if num_images > 1 and self.rules.why_one is not None:
            raise RequestError(f"the prompt has {num_images} images, and this model's processor takes one: "
                               f"{self.rules.why_one}; send a request for each", "several_images")
        bounds = [self.max_pixels, max_pixels, LOW_DETAIL_PIXELS if is_low else None]
        image = _shrunk(image, min((bound for bound in bounds if bound is not None), default=None))
        try:
            return self._prepare(image, self.rules.num_copies if num_images > 1 else 1)
        except (MemoryError, RequestError):
            raise
        except Exception as error:  # code of nearly a hundred classes, fed with any image; only this row may fail
            if "allocate memory" in str(error):  # torch's own words
                raise MemoryError(str(error)) from error
            raise RequestError(
                f"the model's processor refuses the image of {image.width}x{image.height} pixels "
                f"({type(error).__name__}: {error}); send it in another size", "image_refused") from error

    def bounded(self, given: Mapping[str, Any]) -> dict[str, int]:
        """The bounds of a request's checked `mm_processor_kwargs`. Raises RequestError for one that is not served."""
        if "min_pixels" in given:
            raise field_error(f"{FIELD}.min_pixels", "transformers' processor prepares this model's images, and has no "
                              "such bound; leave it out", "unsupported_field")
        most = given.get("max_pixels")
        if most is not None and self.max_pixels is not None and most > self.max_pixels:
            raise field_error(f"{FIELD}.max_pixels", f"{most} is more than the {self.max_pixels} that the model was "
                              "loaded for (image_max_pixels); load it with more")
        return {} if most is None else {"max_pixels": most}

    def largest(self, max_tokens: int) -> ImageInput:
        """A grey image with the largest arrays that has up to `max_tokens`, among shapes and sizes that processors
        distinguish. If no size fits, the one with the fewest."""
        return self.prepare(_grey(self._largest_size.find(max_tokens)))

    def _measure(self, size: tuple[int, int]) -> tuple[int, int] | None:
        options = {} if self.rules.scaling is None else {"do_rescale": False, "do_normalize": False}
        try:
            ids, arrays = self._ids_and_arrays(_grey(size), 1, **options)
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - as in `prepare`, where it fails the image's row
            logger.debug("the processor refuses a grey image of %dx%d pixels: %r", *size, error)
            return None
        return len(ids), sum(array.size for array in arrays.values())

    def sample(self) -> tuple[dict[str, np.ndarray], ImageInput]:
        """A prompt of text and one image as transformers' model takes it, and the image as `prepare` makes it."""
        image, (_, token) = _noise(*_SAMPLE_SIZES[0]), self.rules.token
        before, after = self._around
        made = self._call([image], f"which {before}{token}{after} is it?", return_mm_token_type_ids=True)
        return made, self.prepare(image)

    # -- the processor ---------------------------------------------------------------------------------------------

    def _call(self, images: list[Image.Image], text: str, **options: Any) -> dict[str, np.ndarray]:
        kind = "pt" if self.backend == "torchvision" else "np"
        given = [images] if self.rules.is_nested else images
        made = self._processor(images=given, text=[text], return_tensors=kind, add_special_tokens=False, **options)
        arrays = {name: np.asarray(value) for name, value in made.items()}
        for name, array in arrays.items():
            if array.dtype == object:
                raise ValueError(f"{name} is no array of one shape")
        return {name: array.astype(np.float32) if array.dtype.kind == "f" else array for name, array in arrays.items()}

    def _ids_and_arrays(self, image: Image.Image, num_copies: int,
                        **options: Any) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """int32 token ids in the placeholder's place, and the tower's arrays. Raises ValueError where copies of one
        image differ."""
        made = self._call([image] * num_copies, self.rules.token[1] * num_copies, **options)
        ids = _first_of(made["input_ids"][0].astype(np.int32), num_copies)
        arrays = {name: value for name, value in made.items() if name not in _OF_TEXT}
        if num_copies > 1:
            arrays = {name: _first_of_batch(value, num_copies) for name, value in arrays.items()}
        return ids, arrays

    def _prepare(self, image: Image.Image, num_copies: int) -> ImageInput:
        scaling = self.rules.scaling
        if scaling is None:
            return self._input(*self._ids_and_arrays(image, num_copies), None)
        ids, arrays = self._ids_and_arrays(image, num_copies, do_rescale=False, do_normalize=False)
        for name in scaling.names:
            pixels = arrays[name].astype(np.uint8)
            if not np.array_equal(pixels, arrays[name]):  # no sample had such pixels
                return self._input(*self._ids_and_arrays(image, num_copies), None)
            arrays[name] = pixels
        return self._input(ids, arrays, scaling)

    def _input(self, ids: np.ndarray, arrays: dict[str, np.ndarray], scaling: PixelScaling | None) -> ImageInput:
        digest = hashlib.blake2b(self._digest + ids.tobytes(), digest_size=16)
        for name, array in sorted(arrays.items()):
            digest.update(f"{name}{array.shape}{array.dtype}".encode())
            digest.update(np.ascontiguousarray(array).data)
        grid = arrays.get("image_grid_thw", np.array([1, 0, 0])).reshape(-1, 3)[0].tolist()
        return ImageInput(digest.digest(), _NO_PIXELS, (grid[0], grid[1], grid[2]), len(ids), tower_inputs=arrays,
                          token_ids=ids, scaling=scaling)

    @property
    def merge_size(self) -> int:
        """Patches of a side that one token stands for, where positions have three axes (M-RoPE)."""
        return int(getattr(self._processor.image_processor, "merge_size", None) or 1)

    # -- its rules -------------------------------------------------------------------------------------------------

    def _find_rules(self, tokenizer: Tokenizer) -> ImageRules:
        images = [_noise(*size) for size in _SAMPLE_SIZES]
        token, is_nested = self._find_token(tokenizer, images[0])
        self.rules = replace(self.rules, token=token, is_nested=is_nested)
        try:
            alone = [self._ids_and_arrays(image, 1) for image in images]
        except Exception as error:  # as in `prepare`; here no image is served
            raise self._refusal(f"it does not prepare an image ({type(error).__name__}: {error})") from error
        if not self._writes(tokenizer, f"see {token[1]}this", images[:1], alone[:1]):
            raise self._refusal("it changes the text beside an image")
        scaling = self._find_scaling(images, [arrays for _, arrays in alone])
        num_copies, why_one = self._find_copies(tokenizer, images[:2])
        shown = {int(i) for ids, _ in alone for i in ids} | {token[0]}
        return replace(self.rules, scaling=scaling, num_copies=num_copies, why_one=why_one,
                       control_tokens=_control_tokens(tokenizer, shown))

    def _find_token(self, tokenizer: Tokenizer, image: Image.Image) -> tuple[tuple[int, str], bool]:
        """The token that the processor replaces by an image's, and `is_nested` of the rules."""
        names = ["image_token", *sorted(name for name in dir(self._processor) if name.endswith("_token"))]
        given = [getattr(value, "content", value) for name in names
                 if (value := getattr(self._processor, name, None)) is not None]
        added = [token.content for token in tokenizer.get_added_tokens_decoder().values() if "image" in token.content]
        problem: Exception | str = "its tokenizer has no token for images"
        texts = dict.fromkeys(text for text in (*given, *added) if isinstance(text, str))
        for text, is_nested in [(text, is_nested) for text in texts for is_nested in (True, False)]:
            token_id = tokenizer.token_to_id(text)
            if token_id is None:
                continue
            self.rules = replace(self.rules, is_nested=is_nested)
            try:
                made = self._call([image], text)
            except Exception as error:  # noqa: BLE001 - it has another placeholder, or prepares no image at all
                problem = problem if isinstance(problem, Exception) else error  # that of its own image token says most
                continue
            if made["input_ids"].size > 1 and len(made.keys() - _OF_TEXT):
                return (token_id, text), is_nested
        raise self._refusal(f"none of its tokens is a placeholder for an image ({problem})")

    def _find_scaling(self, images: Sequence[Image.Image],
                      expected: Sequence[dict[str, np.ndarray]]) -> PixelScaling | None:
        """The way from the processor's whole numbers to its floats on the device; None: there is none within 1e-6."""
        processor = self._processor.image_processor
        mean, std = (_channels(getattr(processor, f"image_{name}", None)) for name in ("mean", "std"))
        factor = float(processor.rescale_factor) if getattr(processor, "do_rescale", False) else 1.0
        if not getattr(processor, "do_normalize", False):
            mean, std = (0.0,), (1.0,)
        try:
            whole = [self._ids_and_arrays(image, 1, do_rescale=False, do_normalize=False)[1] for image in images]
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - not every processor has these options; then it scales by itself
            logger.debug("the processor scales pixels by itself, as it gives no whole numbers: %r", error)
            return None
        names = tuple(sorted(name for name, array in expected[0].items()
                             if array.dtype.kind == "f" and array.ndim > 1 and name in whole[0]))
        scaling = PixelScaling(names, factor, mean, std)
        for ours, theirs in zip(whole, expected, strict=True):
            if not names or ours.keys() != theirs.keys():
                return None
            for name, right in theirs.items():
                found = ours[name]
                if name in names:
                    if found.shape != right.shape or not np.array_equal(found.astype(np.uint8), found):
                        return None
                    found = _scaled(found, scaling)
                if not np.allclose(found, right, rtol=0.0, atol=_TOLERANCE if name in names else 0.0):
                    return None
        return scaling

    def _find_copies(self, tokenizer: Tokenizer, images: Sequence[Image.Image]) -> tuple[int, str | None]:
        """`num_copies` and `why_one` of the rules, found by prompts with two images of different sizes, with text
        between them and without."""
        token, why = self.rules.token[1], "another number of images changes what becomes of each"
        for num_copies in (1, 2):
            try:
                parts = [self._ids_and_arrays(image, num_copies) for image in images]
                # From two images on their number must not matter any more.
                again = [self._ids_and_arrays(image, 3) for image in images[:1] if num_copies == 2]
                if (all(self._writes(tokenizer, text, images, parts) for text in
                        (f"first {token} then {token}?", f"{token}{token}"))
                        and all(_are_same(first, second) for first, second in zip(parts, again, strict=False))):
                    return num_copies, None
            except Exception as error:  # noqa: BLE001 - the reason stands in the error of a prompt with several
                why = f"{error}"
        return 1, why

    def _writes(self, tokenizer: Tokenizer, text: str, images: Sequence[Image.Image],
                parts: Sequence[tuple[np.ndarray, Mapping[str, np.ndarray]]]) -> bool:
        """Whether the processor makes of a whole prompt these `parts`, and of the rest of its text our tokens."""
        whole, expansions = self._call(list(images), text), iter(ids for ids, _ in parts)
        ids = [part for each in tokenizer.encode(text, add_special_tokens=False).ids
               for part in (next(expansions) if each == self.rules.token[0] else [each])]
        return np.array_equal(ids, whole["input_ids"][0]) and _are_parts(whole, [arrays for _, arrays in parts])

    def _refusal(self, reason: str) -> ModelError:
        return ModelError(f"{self._folder}: {type(self._processor).__mro__[1].__name__} of transformers "
                          f"{version('transformers')} does not serve here: {reason}; take a checkpoint of another "
                          "family")


def _shrunk(image: Image.Image, max_pixels: int | None) -> Image.Image:
    """The image with at most `max_pixels`, in its shape as far as whole pixels allow."""
    if max_pixels is None or image.width * image.height <= max_pixels:
        return image
    scale = (max_pixels / (image.width * image.height)) ** 0.5
    width, height = (max(1, int(side * scale)) for side in image.size)
    size = min(width, max_pixels // height), min(height, max_pixels // width)
    return image.resize((max(1, size[0]), max(1, size[1])), resample=Image.Resampling.BICUBIC)


def _noise(width: int, height: int) -> Image.Image:
    values = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def _grey(size: tuple[int, int]) -> Image.Image:
    return Image.new("RGB", size, (128, 128, 128))


def _channels(values: Any) -> tuple[float, ...]:
    if values is None:
        return (1.0,)
    numbers = tuple(float(value) for value in (values if isinstance(values, (list, tuple)) else [values]))
    return numbers[:1] if len(set(numbers)) == 1 else numbers


def _scaled(pixels: np.ndarray, scaling: PixelScaling) -> np.ndarray:
    """The floats that the device makes of them (models/vision/scaling.py)."""
    mean, std = scaling.constants(pixels.shape)
    scaled: np.ndarray = (pixels.astype(np.float32) * np.float32(scaling.factor) - mean) / std
    return scaled


def _first_of(values: np.ndarray, num_copies: int, axis: int = 0) -> np.ndarray:
    """The first of equal parts along an axis. Raises ValueError where they are not equal."""
    if values.shape[axis] % num_copies:
        raise ValueError(f"{num_copies} copies of an image have {values.shape[axis]} rows")
    parts = np.split(values, num_copies, axis)
    if not all(np.array_equal(part, parts[0]) for part in parts):
        raise ValueError("copies of an image become different")
    return parts[0]


def _first_of_batch(values: np.ndarray, num_copies: int) -> np.ndarray:
    """The part of one image of an array of copies; all of it where it is about the whole prompt."""
    for axis in range(min(2, values.ndim)):
        if values.shape[axis] % num_copies == 0 and (axis == 0 or values.shape[0] == 1):
            return _first_of(values, num_copies, axis)
    return values


def _are_parts(whole: Mapping[str, np.ndarray], parts: Sequence[Mapping[str, np.ndarray]]) -> bool:
    """Whether a prompt's arrays are those of its images in a row, apart from padding to a common size."""
    names = whole.keys() - _OF_TEXT
    return all(names == part.keys() for part in parts) and all(
        any(_are_blocks(whole[name], [part[name] for part in parts], axis) for axis in (0, 1))
        or all(np.array_equal(part[name], whole[name]) for part in parts) for name in names)


def _are_blocks(whole: np.ndarray, parts: Sequence[np.ndarray], axis: int) -> bool:
    if any(part.ndim != whole.ndim for part in parts) or axis >= whole.ndim:
        return False
    if whole.shape[axis] != sum(part.shape[axis] for part in parts):
        return False
    start = 0
    for part in parts:
        block = np.take(whole, range(start, start + part.shape[axis]), axis)
        start += part.shape[axis]
        if any(small > large for small, large in zip(part.shape, block.shape, strict=True)):
            return False
        if not np.array_equal(block[tuple(slice(0, size) for size in part.shape)], part):
            return False
    return True


def _are_same(first: tuple[np.ndarray, Mapping[str, np.ndarray]],
              second: tuple[np.ndarray, Mapping[str, np.ndarray]]) -> bool:
    return np.array_equal(first[0], second[0]) and all(
        np.array_equal(value, second[1][name]) for name, value in first[1].items() if value.size > 1)


def _control_tokens(tokenizer: Tokenizer, token_ids: set[int]) -> tuple[str, ...]:
    """The added tokens among these ids, and those that differ from them in numbers alone (of other rows, columns)."""
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    shown = {token for token_id in token_ids if (token := tokenizer.id_to_token(token_id)) in added}
    forms = {re.sub(r"\d+", "0", token) for token in shown}
    return tuple(sorted(token for token in added if re.sub(r"\d+", "0", token) in forms))


# -- making the processor ----------------------------------------------------------------------------------------------


@contextmanager
def _importing(folder: Path) -> Iterator[None]:
    """Turns an error of transformers' own code, while a processor is made, into a ModelError."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        remedy = "; install torchvision" if "orchvision" in str(error) else ""
        raise ModelError(f"{folder}: transformers {version('transformers')} cannot make this checkpoint's processor "
                         f"({type(error).__name__}: {error}){remedy}") from error


def _read_processor(folder: Path, model_type: str) -> tuple[Any, str]:
    """The family's processor of its images and its text, and the name of its backend for images."""
    import transformers
    from transformers import AutoImageProcessor, AutoTokenizer
    from transformers.image_processing_backends import TorchvisionBackend
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    files = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")
    named = (str((read_json(folder, name) or {}).get("processor_class")) for name in files)
    kind = next((found for name in (*named, str(PROCESSOR_MAPPING_NAMES.get(model_type)))
                 if (found := getattr(transformers, name, None)) is not None), None)
    if kind is None:
        raise ModelError(f"{folder}: transformers {version('transformers')} has no processor for model_type "
                         f"{model_type!r}, so it cannot prepare images; take a checkpoint of another family")
    own: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    images = AutoImageProcessor.from_pretrained(folder, backend="pil", **own)
    parts = {"image_processor": images, "tokenizer": AutoTokenizer.from_pretrained(folder, **own)}
    made = _of_parts(kind, folder, parts)
    return made, "torchvision" if isinstance(images, TorchvisionBackend) else "pil"


def _of_parts(kind: Any, folder: Path, parts: Mapping[str, Any]) -> Any:
    class OfParts(kind):  # type: ignore[misc]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return type(argument)

    given = {name: parts.get(name) for name in kind.get_attributes()}
    known, _ = kind.get_processor_dict(folder)
    settings = {key: value for key, value in known.items()
                if key not in given and not isinstance(value, dict) and key != "processor_class"}
    return OfParts.from_args_and_dict(list(given.values()), settings)
